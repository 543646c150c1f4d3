"""Progress of `train` and `evaluate`: lines on standard output."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TextIO

from agentjet.client.report import EpisodeResult
from agentjet.protocol import remaining

NUM_ERRORS_SHOWN = 3
CROSS_ENTROPY = "policy/cross_entropy"
"""Metric of a batch of demonstrations; a named policy has its name in front."""


class Progress:
    """Prints at most `num_lines` lines for `total` steps or episodes, each kind of failure once, and messages."""

    def __init__(self, title: str, total: int, *, out: TextIO | None = None, num_lines: int = 100) -> None:
        """Prints nothing without `out`."""
        self.policies: tuple[str, ...] = ()
        """The policies that the run names. Their rewards are shown, too."""
        self._title = title
        self._total = total
        self._out = out
        self._every = max(1, total // num_lines)
        self._started = time.monotonic()
        self._done = 0
        self._failures: Counter[str] = Counter()

    def step(self, metrics: Mapping[str, float], note: str = "") -> None:
        """A batch was learned."""
        names = {"reward": "reward/mean"} | {policy: f"{policy}/reward/mean" for policy in self.policies}
        parts = [f"{name} {metrics[metric]:.3f}" for name, metric in names.items() if metric in metrics]
        parts += [f"cross-entropy {value:.3f}" for name, value in metrics.items() if name.endswith(CROSS_ENTROPY)]
        # The first batch's time includes the server's idle time before this client began.
        if self._done and "perf/tokens_per_second" in metrics:
            parts.append(f"{metrics['perf/tokens_per_second']:.0f} tokens/s")
        self._advance("  ".join([*parts, *filter(None, [note])]))

    def episode(self, result: EpisodeResult, *, counts: bool = False) -> None:
        """An episode ended. `counts`: the display counts episodes, not steps."""
        if result.outcome in ("aborted", "expired"):
            self._failures[result.error] += 1
            if self._failures[result.error] == 1 and len(self._failures) <= NUM_ERRORS_SHOWN:
                where = f" ({result.where})" if result.where else ""
                self.notify(f"episode of task {result.task_id!r} {result.outcome}: {result.error}{where}")
        if counts:
            self._advance("")

    def notify(self, text: str) -> None:
        """Show a message."""
        if self._out is not None:
            print(text, file=self._out, flush=True)

    def _advance(self, text: str) -> None:
        self._done += 1
        if self._done % self._every and self._done != self._total:
            return
        failed = f"  {self._failures.total()} failed" if self._failures else ""
        left = remaining(time.monotonic() - self._started, self._done, self._total)
        rest = f"  {left}" if self._done < self._total else ""
        self.notify(f"{self._title} {self._done}/{self._total}  {text}".rstrip() + failed + rest)


def progress_for(title: str, total: int, *, wanted: bool, num_lines: int = 100) -> Progress:
    """A display on standard output; one that prints nothing unless `wanted`."""
    return Progress(title, total, out=sys.stdout if wanted else None, num_lines=num_lines)
