"""Recipes: the algorithms of runs, from the facts of a batch to columns per token, and from these to a loss.

* `recipe.Recipe` has the hooks. `policy_gradient.PolicyGradient` is the base of GRPO and its relatives.
* `shelf/NAME.py` is the built-in recipe NAME. A new file there is a new recipe; `tests/recipes/` has its numbers.
* `registry` finds recipes by name: the shelf, then the entry points of installed packages, then import paths.

Configuration imports this package in every process, so `recipe` and `registry` import no NumPy, and no module imports
torch outside functions.
"""
