"""Copies the steps of a run to trackers: TensorBoard, Weights & Biases, MLflow, Trackio, files, or a class of yours.

A `Follower` reads the steps from a `Source` and writes them to a `Tracker`, each step once. It runs in a separate
process, so a tracker that is slow, down or wrong cannot delay training.
"""

from agentjet.trackers.follower import Follower, Source
from agentjet.trackers.sinks import FORMS, Run, Sink, TrackedStep, Tracker, open_tracker

__all__ = ["FORMS", "Follower", "Run", "Sink", "Source", "TrackedStep", "Tracker", "open_tracker"]
