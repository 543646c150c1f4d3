"""`metrics.jsonl`: one line a learned batch, for people and plots.

The journal holds the same numbers; this file is a copy.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.swarm.checkpoints import WAY_OUT

log = logging.getLogger(__name__)

DIVERGED = (
    "the policy has diverged: its weights are not finite; begin anew from an earlier checkpoint, with a lower "
    "job.optimizer.lr"
)


def has_diverged(step: Mapping[str, float]) -> bool:
    """Whether the batch with these metrics left weights that nothing can be computed with."""
    return step.get("weights/finite") == 0


class MetricsFile:
    """Appends lines; never fails the training it reports on."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def append(self, policy_version: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the batch that led to `policy_version`."""
        line = json.dumps({"step": policy_version, "time": round(self._clock(), 3), **metrics})
        try:
            self._path.touch(0o600)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error)

    def check_journal(self, policy_version: int) -> None:
        """Raises `ConfigError` where a batch beyond `policy_version`, the end of the journal, was acknowledged."""
        if (newest := self._newest()) > policy_version:
            raise ConfigError(
                f"{self._path} has policy version {newest}, but the journal beside it ends at {policy_version}: it "
                f"lost its end. {WAY_OUT}"
            )

    def _newest(self) -> int:
        """Policy version of the last whole line; 0 without one."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
        return 0


class StepTimer:
    """Where the seconds between two batches went: a call was being sampled, nothing was, or the worker learned."""

    def __init__(self, busy_seconds: Callable[[], float], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._busy_seconds = busy_seconds
        self._monotonic = monotonic
        self.roll()

    def roll(self) -> None:
        """Sampling for a batch begins now."""
        self._rolling_since, self._busy_before = self._monotonic(), self._busy_seconds()

    def learn(self) -> None:
        """Learning it begins now."""
        self._learning_since, self._busy_after = self._monotonic(), self._busy_seconds()

    def metrics(self, num_sampled_tokens: int) -> dict[str, float]:
        """`time/{sample,learn,wait}` in seconds and the batch's tokens over their sum."""
        sample = self._busy_after - self._busy_before
        wait = max(0.0, self._learning_since - self._rolling_since - sample)
        learn = self._monotonic() - self._learning_since
        total = max(1e-9, sample + wait + learn)
        return {
            "time/sample": sample,
            "time/wait": wait,
            "time/learn": learn,
            "perf/tokens_per_second": num_sampled_tokens / total,
        }
