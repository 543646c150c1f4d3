"""The parts of `bench.merge`: workloads, the three layouts of a batch, and the gateway's own work per call."""
