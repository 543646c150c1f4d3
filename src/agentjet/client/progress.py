"""Progress of `train` and `evaluate` on standard output: a bar on a terminal, one line a step elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TextIO

from agentjet.client.report import EpisodeResult

NUM_ERRORS_SHOWN = 3
SAME_WAIT_SECONDS = 60.0


class Progress:
    """Shows nothing; the base of the displays. Counts failures, so that each kind is shown once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.policies: tuple[str, ...] = ()
        """The policies that the run names. Their rewards are shown, too."""
        self.done = 0
        self.failures: Counter[str] = Counter()

    def step(self, metrics: Mapping[str, float]) -> None:
        """A batch was learned."""
        self.done += 1
        reward = metrics.get("reward/mean")
        # The first batch's time includes the server's idle time before this client began.
        speed = metrics.get("perf/tokens_per_second") if self.done > 1 else None
        parts = [] if reward is None else [f"reward {reward:.3f}"]
        means = {policy: metrics.get(f"{policy}/reward/mean") for policy in self.policies}
        parts += [f"{policy} {mean:.3f}" for policy, mean in means.items() if mean is not None]
        parts += [] if speed is None else [f"{speed:.0f} tokens/s"]
        self._show("  ".join(parts))

    def episode(self, result: EpisodeResult, *, counts: bool = False) -> None:
        """An episode ended. `counts`: the display counts episodes, not steps."""
        if result.outcome in ("aborted", "expired"):
            self.failures[result.error] += 1
            if self.failures[result.error] == 1 and len(self.failures) <= NUM_ERRORS_SHOWN:
                where = f" ({result.where})" if result.where else ""
                self._note(f"episode of task {result.task_id!r} {result.outcome}: {result.error}{where}")
        if counts:
            self.done += 1
            self._show("")

    def waits(self, reason: str) -> None:
        """The server begins no episode of this run because it waits for `reason`; empty: the wait is over."""

    def notify(self, text: str) -> None:
        """Show a message."""
        self._note(text)

    def _show(self, text: str) -> None:
        pass

    def _note(self, text: str) -> None:
        pass

    def _with_failures(self, text: str) -> str:
        failed = self.failures.total()
        return f"{text}  {failed} failed" if failed else text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Lines(Progress):
    """For logs: one line a step, at most `num_lines` in all."""

    def __init__(
        self, title: str, total: int, *, out: TextIO, num_lines: int = 100, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(total)
        self._title = title
        self._out = out
        self._every = max(1, total // num_lines)
        self._clock = clock
        self._started = clock()
        self._last_wait = ("", 0.0)
        """The reason shown last, with its numbers masked, and the time."""

    def _show(self, text: str) -> None:
        if self.done % self._every and self.done != self.total:
            return
        left = (self._clock() - self._started) / self.done * (self.total - self.done)
        line = self._with_failures(f"{self._title} {self.done}/{self.total}  {text}".rstrip())
        self._note(f"{line}  {_minutes(left)} left" if left else line)

    def waits(self, reason: str) -> None:
        """Shows a line if the reason changed, apart from numbers that count down; the same reason once a minute."""
        kind, now = re.sub(r"\d+", "#", reason), self._clock()
        if reason and (kind != self._last_wait[0] or now - self._last_wait[1] >= SAME_WAIT_SECONDS):
            self._last_wait = (kind, now)
            self._note(f"waiting for {reason}")

    def _note(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Bar(Progress):
    """For a terminal: a rich progress bar."""

    def __init__(self, title: str, total: int) -> None:
        super().__init__(total)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            # One step takes seconds: the speed is averaged over the whole run, not over the last half minute.
            TimeRemainingColumn(elapsed_when_finished=False),
            speed_estimate_period=1800,
        )
        self._task = self._bar.add_task(title, total=total, text="")
        self._text = ""

    def _show(self, text: str) -> None:
        self._text = self._with_failures(text)
        self._bar.update(self._task, completed=self.done, text=self._text)

    def waits(self, reason: str) -> None:
        """Shows the reason in place of the metrics, until there are new ones or the wait is over."""
        self._bar.update(self._task, text=f"waiting for {reason}" if reason else self._text)

    def _note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def progress_for(title: str, total: int, *, wanted: bool, num_lines: int = 100) -> Progress:
    """A display for standard output; one that shows nothing unless `wanted`."""
    if not wanted:
        return Progress(total)
    if sys.stdout.isatty():
        return Bar(title, total)
    return Lines(title, total, out=sys.stdout, num_lines=num_lines)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
