"""Messages to tokens and back: tokenizer, chat template, grammars, and the parser of completions. Imports no torch."""

from agentjet.rendering.chat_template import check_tool_format, template_for
from agentjet.rendering.renderer import Renderer

__all__ = ["Renderer", "check_tool_format", "template_for"]
