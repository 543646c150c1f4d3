"""Finds recipes by name.

A name is one of `CHAPTERS`, an entry point `agentjet.recipes` of an installed package, or an import path
`package.module:Class`. So an installed wheel adds its recipes, and a folder on `PYTHONPATH` adds them by import path.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeGuard, TypeVar

from agentjet.errors import RecipeError, did_you_mean, failure
from agentjet.recipes import hooks
from agentjet.recipes.recipe import Component, Recipe

CHAPTERS = {
    "baselines": "dr_grpo dr_mas grpo grpo_passk hapo_tlga max_rl opo pkpo rae reinforce reinforce_pp "
    "reinforce_pp_baseline rloo",
    "clipping": "adaptive_entropy adaptive_kl aepo cispo clip_cov dapo dppo entropy_bonus etr gmpo gspo gspo_token "
    "hapo kl_cov loop sapo top_entropy",
    "critic": "archer digirl ppo vapo",
    "distillation": "distill distill_top_k kdrl opsd sdft sdpo",
    "imitation": "digirl_curriculum rft sft",
    "offline": "awr direct_advantage dpo dro oapl",
    "rewards": "alp craft_gui duration_aware gdpo hc_grpo rapo single_stream",
    "sampling": "dart pass_rate rapo_pruning scaling_inter staged task_temperature",
    "turns": "dense_turn_credit gigpo graph_gpo mars stepwise_grpo stratified_grpo",
}
"""The names of the built-in recipes, by the module of this package that defines them."""
BUILT_IN = {name: chapter for chapter, names in CHAPTERS.items() for name in names.split()}
GROUP = "agentjet.recipes"
DEFAULT = "grpo"
MOST_VALIDATED = 256
_validated: dict[tuple[type[Recipe], str], Recipe] = {}
"""Recipes of plug-ins by class and parameters. So validators run where a job is set, and not again in the event loop
when the journal is read."""
Part = TypeVar("Part", bound=Component)


def built_in() -> list[str]:
    """Returns the names of the built-in recipes."""
    return sorted(BUILT_IN)


def installed() -> dict[str, EntryPoint]:
    """Returns the entry points of installed packages by name, without those of built-in names."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def default_recipe() -> Recipe:
    return make_recipe(DEFAULT)


def make_recipe(value: object) -> Recipe:
    """Returns the recipe of a setting: a name, or a table with `name` and parameters. Raises `ValueError`."""
    if isinstance(value, Recipe):
        return value
    given = as_table(value, "recipe")
    name = given.get("name") or DEFAULT
    kind, parameters = find(name), {**given, "name": name}
    if hooks.is_plug_in(kind) or any(map(_may_be_plug_in, parameters.values())):
        return _plug_in(kind, parameters)
    return kind.model_validate(parameters)


def _may_be_plug_in(part: object) -> bool:
    """True for a part that is chosen by its import path, such as a loss."""
    name = part.get("name") if isinstance(part, Mapping) else part
    return isinstance(name, str) and ":" in name


def _plug_in(kind: type[Recipe], parameters: Mapping[str, Any]) -> Recipe:
    """Returns a recipe that may run code of a plug-in, perhaps one that was made before. Raises `ValueError`."""
    key = _key(kind, parameters)
    if key is not None and key in _validated:
        return _validated[key]
    try:
        recipe, dumped = hooks.VALIDATORS.call(f"validators of {kind.__name__}", partial(_made, kind, parameters))
    except (ValueError, MemoryError, KeyboardInterrupt):
        raise
    except RecipeError as error:
        raise ValueError(str(error)) from None
    except BaseException as error:  # Boundary: the validators are not ours, and may call `sys.exit`.
        raise ValueError(failure(error)) from error
    for found in (key, _key(kind, dumped)):
        if found is not None:
            _validated[found] = recipe
    while len(_validated) > MOST_VALIDATED:
        _validated.pop(next(iter(_validated)))
    return recipe


def _made(kind: type[Recipe], parameters: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    with hooks.running(str(parameters["name"]), "validators"):
        recipe = kind.model_validate(parameters)
        return recipe, recipe.model_dump(mode="json")


def _key(kind: type[Recipe], parameters: Mapping[str, Any]) -> tuple[type[Recipe], str] | None:
    """Returns None for parameters that are not JSON."""
    try:
        return kind, json.dumps(parameters, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def as_table(value: object, setting: str) -> Mapping[str, Any]:
    """Returns the parameters of a part that is given by name or as a table. Raises `ValueError`."""
    given = {"name": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("name", ""), str):
        raise ValueError(f'give a name, such as {setting} = "gspo", or a section with name and parameters')
    return given


@cache
def find(name: str) -> type[Recipe]:
    """Returns the class of a recipe. Raises `ValueError` with the nearest name if there is none."""
    if ":" in name:
        return load(name, Recipe)
    if name in BUILT_IN:
        chapter = importlib.import_module(f"{__package__}.{BUILT_IN[name]}")
        kinds = [kind for kind in vars(chapter).values() if _is_defined_in(kind, chapter, Recipe)]
        return next(kind for kind in kinds if kind.model_fields["name"].default == name)
    others = installed()
    if name in others:
        return load(others[name].value, Recipe)
    known = [*built_in(), *others]
    way_out = did_you_mean(name, known, f"there are {', '.join(known)}, and 'package.module:Class'")
    raise ValueError(f"there is no recipe {name!r}; {way_out}")


def load(path: str, base: type[Part]) -> type[Part]:
    """Returns the class of an import path `package.module:Class`. Raises `ValueError` if it is not a `base`."""
    name, _, attribute = path.partition(":")
    try:
        module = _imported(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):  # Not a module that the file itself imports.
            raise ValueError(
                f"{path!r} cannot be imported: there is no module {error.name!r}: install its package for the server, "
                "or put its folder on PYTHONPATH"
            ) from None
        raise _broken(path, error) from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except RecipeError as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from None
    except BaseException as error:  # Boundary: the module is not ours, and may call `sys.exit`.
        raise _broken(path, error) from error
    found = getattr(module, attribute, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    where = getattr(module, "__file__", None) or name
    usable = [key for key, value in vars(module).items() if _is_defined_in(value, module, base)]
    way_out = f"{where} has {', '.join(usable) or 'none'}"
    if found is None:
        raise ValueError(f"{path!r}: there is no class {attribute!r} in {where}. Of a {base.__name__} {way_out}")
    raise ValueError(f"{path!r} is not a subclass of {base.__module__}.{base.__name__}. Of these {way_out}")


def _imported(name: str) -> Any:
    """Returns a module. Raises `RecipeError` if its import takes too long."""
    if "__main__" in name.split("."):  # Its import runs a program.
        raise ValueError("it is the program of a package: name the module that has the class")
    return hooks.IMPORTS.call(f"import {name}", partial(importlib.import_module, name))


def _broken(path: str, error: BaseException) -> ValueError:
    return ValueError(f"{path!r} cannot be imported: {failure(error)}")


def _is_defined_in(value: object, module: Any, base: type[Part]) -> TypeGuard[type[Part]]:
    return isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
