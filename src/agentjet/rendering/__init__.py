"""Messages to tokens and back: chat templates, tokenizers, tool-call and reasoning parsers. Imports no torch."""

from agentjet.rendering.chat_template import template_for
from agentjet.rendering.renderer import Renderer
from agentjet.rendering.vocabulary import TextStream

__all__ = ["Renderer", "TextStream", "template_for"]
