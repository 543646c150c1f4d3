"""Which chat template and tool format a model is used with. Torch-free; the worker asks it when it loads a model."""

from __future__ import annotations

from pathlib import Path

from agentjet.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"


def template_for(model_name: str, own_template: str) -> tuple[str, str]:
    """The chat template (Jinja source) and the tool format of a model, from the template in its folder.

    SmolLM2's own template ignores tools; ours writes the same and knows them. Every other model keeps its own.
    Raises `ConfigError` for a model without a template.
    """
    if _is_smollm2(model_name, own_template):
        return (TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8"), "hermes"
    if not own_template.strip():
        raise ConfigError(
            f"model {model_name!r} has no chat template: train a chat model, or add chat_template.jinja to it"
        )
    return own_template, _tool_format(own_template)


def _is_smollm2(model_name: str, own_template: str) -> bool:
    if not own_template.strip():
        return Path(model_name).name.lower() == "smollm2-135m"
    return "AI assistant named SmolLM, trained by Hugging Face" in own_template and "tools" not in own_template


def _tool_format(template: str) -> str:
    """How a template writes tool calls; empty when it takes no tools or writes them in a way we do not know."""
    if "tools" not in template:
        return ""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return "mistral"
    return "llama3" if '"parameters": ' in template else ""
