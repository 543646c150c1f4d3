"""Parts of `bench.capacity`: a workload, measured costs, and a simulation that uses them."""
