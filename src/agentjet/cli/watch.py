"""`agentjet watch`: one screen about a running server, which its events keep up to date.

The status, health and waiting groups are read when an event arrives, at most once in `--every` seconds. The clocks of
the screen run on between two reads. A file or a pipe gets one line for each change.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli import Token, TokenFile, Url, one_line, read_token
from agentjet.errors import Later, Unreachable

if TYPE_CHECKING:
    from rich.console import Console

    from agentjet.cli.watch_screen import Snapshot
    from agentjet.client import AsyncSwarm
    from agentjet.protocol import Event, HealthView

NUM_NEWS = 6
NUM_STEPS = 50
IDLE_SECONDS = 10.0
"""Seconds without an event after which everything is read again: clients come and go without events."""
REDRAW_SECONDS = 1.0
PATIENCE = 2.0
"""Seconds of retries before a server without an answer is shown as such."""


def watch(
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two reads at least.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the screen once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON, for programs.")] = False,
) -> None:
    """Watch a server until Ctrl-C, also across restarts: does it learn, is it healthy, and what does it wait for.

    A file or a pipe gets one line for each change.
    """
    from rich.console import Console

    from agentjet.cli.watch_screen import screen
    from agentjet.client import AsyncSwarm
    from agentjet.client.connection import Retry

    given, console = read_token(token, token_file), Console(highlight=False)

    async def run() -> None:
        async with AsyncSwarm(url, given, instance_id="", retry=Retry(patience=PATIENCE)) as swarm:
            if once:
                console.print(screen(await read(swarm), console.width))
            elif as_json or not console.is_terminal:
                lines = _JsonLines() if as_json else Lines()
                await follow(swarm, every, lines.event, lines.look)
            else:
                await _live(swarm, every, console)

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


async def read(swarm: AsyncSwarm) -> Snapshot:
    """Reads everything that the screen shows. Raises `Unreachable`, `Later`."""
    from agentjet.cli.watch_screen import Snapshot

    status = await swarm.status()  # First: events after its `last_event` are changes.
    health, waiting, steps = await asyncio.gather(swarm.health(), swarm.waiting(), swarm.steps(limit=NUM_STEPS))
    return Snapshot(swarm.url, status, health, waiting, steps)


async def follow(
    swarm: AsyncSwarm, every: float, on_event: Callable[[Event], None], on_look: Callable[[Snapshot], None]
) -> None:
    """Calls `on_event` with each event from now on and `on_look` after changes and each second, without end.

    Raises the error of the first read. Later ones are shown, and the server is tried again.
    """
    look = await read(swarm)
    on_look(look)
    while True:
        begun, changed = time.monotonic(), asyncio.Event()

        async def receive(after: int, changed: asyncio.Event = changed) -> None:
            async for event in swarm.events(after):
                on_event(event)
                changed.set()

        events = asyncio.create_task(receive(look.status.last_event))
        try:
            while not events.done():
                age = time.monotonic() - begun
                if changed.is_set():  # Too early to read again: one read serves all events until then.
                    await _pause(min(REDRAW_SECONDS, max(0.0, every - age)))
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), REDRAW_SECONDS)
                age = time.monotonic() - begun
                if age >= IDLE_SECONDS or (changed.is_set() and age >= every):
                    changed.clear()
                    look, begun = await read(swarm), time.monotonic()
                    age = 0.0
                on_look(replace(look, age=age))
            await events
        except (Unreachable, Later) as error:
            on_look(replace(look, age=time.monotonic() - begun, problem=str(error)))
        finally:
            events.cancel()
            await asyncio.gather(events, return_exceptions=True)
        look = await _again(swarm, look, begun, on_look)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def _again(swarm: AsyncSwarm, look: Snapshot, begun: float, on_look: Callable[[Snapshot], None]) -> Snapshot:
    """Tries the server until it answers."""
    while True:
        await asyncio.sleep(REDRAW_SECONDS)
        try:
            found = await read(swarm)
        except (Unreachable, Later) as error:
            on_look(replace(look, age=time.monotonic() - begun, problem=str(error)))
        else:
            on_look(found)
            return found


async def _live(swarm: AsyncSwarm, every: float, console: Console) -> None:
    """Draws the screen in the terminal, and again when its size changes."""
    from rich.live import Live

    from agentjet.cli.watch_screen import screen

    news = deque[str](maxlen=NUM_NEWS)

    def on_event(event: Event) -> None:
        if line := event_line(event):
            news.append(line)

    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:

        def on_look(look: Snapshot) -> None:
            live.update(screen(replace(look, news=tuple(news)), console.width), refresh=True)

        await follow(swarm, every, on_event, on_look)


# ---- lines -----------------------------------------------------------------------------------------------------------


def event_line(event: Event) -> str:
    """A line about an event, or '' for one that does not change much, such as an episode that began or finished."""
    body, when = event.body, time.strftime("%H:%M:%S", time.localtime(event.time))
    if event.kind == "step":
        reward = body["metrics"].get("reward/mean")
        found = f"step {body['policy_version']}" + ("" if reward is None else f": reward {reward:.4g}")
    elif event.kind == "state":
        found = f"state {body['state']}" + (f": {body['reason']}" if body["reason"] else "")
    elif event.kind == "episode" and body["status"] in ("aborted", "expired"):
        found = f"{body['episode_id']} of task {body['task_id']} {body['status']}: {body['reason']}"
    elif event.kind == "group" and body["state"] == "dropped":
        found = f"group {body['group']} dropped: {body['reason']}"
    elif event.kind == "checkpoint":
        found = f"checkpoint {body['policy_version']}" + ("" if body["ok"] else f" failed: {body['error']}")
    elif event.kind == "evaluation":
        kind = "held-out score" if body.get("held_out", True) else f"score of {body['name'] or 'the evaluation'}"
        found = f"{kind} {body['score']:.4g} at version {body['policy_version']}"
    elif event.kind in ("episode", "group"):
        return ""
    else:
        found = f"{event.kind} " + ", ".join(f"{name} {body[name]}" for name in sorted(body) if name != "episodes")
    return one_line(f"{when}  {found}")


@dataclass
class Lines:
    """Prints one line for each change: of state, step, answer to "is it learning?", and of a health rule. Batches that
    could teach nothing are reported once."""

    print_line: Callable[[str], None] = field(default=lambda line: print(line, flush=True))
    _levels: dict[str, str] = field(default_factory=dict)
    _answer: str = ""
    _problem: str = ""
    _is_reported: bool = False

    def event(self, event: Event) -> None:
        if line := event_line(event):
            self.print_line(line)

    def look(self, look: Snapshot) -> None:
        from agentjet.cli.watch_screen import nothing_to_learn

        now = time.strftime("%H:%M:%S")
        if look.problem != self._problem:
            self._problem = look.problem
            self._say(now, look.problem or "the server answers again")
        if not self._answer:
            status = look.status
            self._say(now, f"{look.url}: {status.state}, step {status.policy_version}, waits for {look.waiting.text}")
        for line in self._changes(look.health):
            self._say(now, line)
        report = nothing_to_learn(look.status)
        for line in report if not self._is_reported else ():
            self._say(now, line)
        self._is_reported = bool(report)

    def _changes(self, health: HealthView) -> Iterator[str]:
        if health.learning.answer != self._answer:
            self._answer = health.learning.answer
            yield f"learning: {health.learning.text}"
        for rule in health.rules:
            before, self._levels[rule.name] = self._levels.get(rule.name, "ok"), rule.level
            if rule.level != before:
                yield f"health {rule.level}: {rule.text} ({rule.docs})"

    def _say(self, now: str, line: str) -> None:
        self.print_line(one_line(f"{now}  {line}"))


class _JsonLines:
    """Prints each event as a line of JSON."""

    def event(self, event: Event) -> None:
        print(event.model_dump_json(), flush=True)

    def look(self, look: Snapshot) -> None:
        if look.problem:
            print(f"agentjet: {one_line(look.problem)}", file=sys.stderr, flush=True)
