"""The names of all settings."""

from agentjet.cli.main import parameters
from agentjet.config import SideCallRule
from agentjet.config.loader import sections, settings
from agentjet.recipes import registry


def setting_names() -> list[str]:
    """Returns the dotted name of every setting that has a fixed one, in the order of the schema."""
    return [
        f"{prefix}.{name}"
        for prefix, section in sections()
        if section is not SideCallRule and "NAME" not in prefix
        for name, _ in settings(section)
    ]


def recipe_parameters() -> set[str]:
    """Returns the dotted names of the parameters of all built-in recipes."""
    return {f"job.recipe.{name}" for recipe in registry.built_in() for name, *_ in parameters(registry.find(recipe))}
