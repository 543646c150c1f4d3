"""The import paths of version 0.2 for plug-ins: `agentjet.recipes.shelf.NAME` is the chapter with the recipe NAME."""

import sys
from importlib import import_module

from agentjet.recipes.registry import BUILT_IN

sys.modules.update({f"{__name__}.{name}": import_module(f"{__package__}.{place}") for name, place in BUILT_IN.items()})
