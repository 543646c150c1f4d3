"""What `bench.merge` measures: workloads, the three ways to lay a batch out, and the gateway's own work per call."""
