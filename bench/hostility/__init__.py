"""Parts of `bench.hostile`."""
