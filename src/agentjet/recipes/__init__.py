"""Recipes: the algorithms of runs, from the facts of a batch to columns per token, and from these to a loss.

* `recipe.Recipe` has the hooks, and `hooks` calls them. `policy_gradient.PolicyGradient` is the base of GRPO and its
  relatives, with the losses and corrections of `losses`. `critic.Critic` is the base of recipes with values.
* The built-in recipes stand in chapters: `baselines`, `rewards`, `turns` (advantages), `clipping` (ratios), `critic`
  (values), `sampling` (rollouts), `imitation` and `offline`. A new one is a class in the chapter of its family, and its
  name in `registry.CHAPTERS`; `tests/recipes/` has its numbers.
* `check` runs the hooks of a recipe on small batches, for its author.
* `registry` finds recipes by name: the chapters, then the entry points of installed packages, then import paths.

Configuration imports this package in every process, so `recipe` and `registry` import no NumPy, and no module imports
torch outside functions.
"""
