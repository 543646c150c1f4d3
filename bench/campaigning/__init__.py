"""Planted subjects in NumPy, and the campaigns that must mend them: `python -m bench.campaign`."""
