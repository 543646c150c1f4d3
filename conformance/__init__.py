"""Agents written with the clients that people really use, each trained through an episode: `make conformance`."""
