"""The parts of `bench.policies`: long runs, adapters in one worker, isolation, a team."""
