"""Recipes: from the facts of a batch to columns per token, and from these to a loss.

To add a loss, an advantage, an aggregation or a correction:

1. Write the pure function in `losses` or `advantages`, and add it to the table there (`LOSSES`, `ADVANTAGES`, ...).
2. Add its name, and default clip bounds, in `config.job`.
3. Add a test on three tokens against hand arithmetic in `tests/recipes`.
"""
