"""The parts of `bench.chaos`: what is broken, what breaks it, and who counts afterwards."""
