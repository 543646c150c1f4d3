"""Messages to tokens and back: tokenizer, chat template, grammars, and the parser of completions. Imports no torch."""

from agentjet.rendering.renderer import Renderer, template_for

__all__ = ["Renderer", "template_for"]
