"""The parts of `python -m bench.scale`."""
