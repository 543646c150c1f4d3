"""Studies with known answers, on a world fast enough to compute them."""
