"""The parts of `bench.recipes`: a tabular world, a served model, costs of steps."""
