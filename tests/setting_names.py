"""The names of all settings."""

from agentjet.config import SideCallRule
from agentjet.config.reference import sections, settings


def setting_names() -> list[str]:
    """Returns the dotted name of every setting that has a fixed one, in the order of the schema."""
    return [
        f"{prefix}.{name}"
        for prefix, section in sections()
        if section is not SideCallRule and "NAME" not in prefix
        for name, _ in settings(section)
    ]
