"""What is wrong before anything is learned: settings, tasks and weights that are not what the study thinks."""

from __future__ import annotations

import numpy as np

from agentjet.research.diagnosis.case import Case, Rule
from agentjet.research.diagnosis.signs import Told, last

MISMATCH = 0.01
"""Divergence per token between the policy that sampled and the one that learns: rounding makes a thousandth of it."""


def not_taken_up(case: Case) -> Told | None:
    answer = case.settings
    if answer is None:
        return None
    wrong = {name: value for name, value in case.trial.setting.items() if answer.get(name) != value}
    said = "; ".join(
        f"{name} = {value!r} was asked for, and the server had {answer.get(name)!r}" for name, value in wrong.items()
    )
    return Told(said, {"settings not taken up": float(len(wrong))}) if wrong else None


def asked_server(case: Case, sign: Told) -> Told:
    return Told("the server was asked for the settings it had in effect")


def shared_tasks(case: Case) -> Told | None:
    counts = case.ask("tasks")
    if counts is None or not counts["shared"]:
        return None
    said = f"{counts['shared']:.0f} of the {counts['held_out']:.0f} held-out tasks are also trained on"
    return Told(said, {name: counts[name] for name in ("shared", "held_out", "train")})


def compared_tasks(case: Case, sign: Told) -> Told:
    return Told("the tasks of training and of evaluation were compared")


def diverging_sampler(case: Case) -> Told | None:
    reported = last(case.signals["policy/mismatch_kl"])
    reported = reported[np.isfinite(reported)]
    if not len(reported) or np.median(reported) < MISMATCH:
        return None
    level = float(np.median(reported))
    return Told(f"sampler and learner differ by {level:.3g} nats a token", {"policy/mismatch_kl": level})


def unchanged_sampler(case: Case, sign: Told) -> Told | None:
    counts = case.ask("weights")
    if counts is None or counts["sampler"] >= counts["learner"] / 2:
        return None
    said = (
        f"hashes of the weights, before and after each of the last {counts['steps']:.0f} steps: "
        f"the learner's changed in {counts['learner']:.0f}, the sampler's in {counts['sampler']:.0f}"
    )
    return Told(said, {f"weights/{name}": counts[name] for name in ("steps", "learner", "sampler")})


IGNORED = Rule(
    "ignored_setting",
    not_taken_up,
    asked_server,
    "the run is not of the setting it stands for: whatever was compared, it was not this. Mend the name or the value",
    asks=("settings", ""),
)
LEAK = Rule(
    "leak",
    shared_tasks,
    compared_tasks,
    "the score says how well tasks were remembered, not how well they are solved. Hold other tasks out",
    asks=("tasks", "shared"),
)
STALE = Rule(
    "stale_weights",
    diverging_sampler,
    unchanged_sampler,
    "what is rewarded was said by a policy of long ago: the run measures the transport of weights, not the setting",
    asks=("weights", "sampler"),
)
