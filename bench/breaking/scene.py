"""A run's processes together, and how they are brought back when something died."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.breaking.client import ClientSettings
from bench.breaking.plan import Fault
from bench.breaking.victims import PATIENCE, Client, GivenUp, Server, ServerEnded, path_of
from bench.breaking.wire import Wire

MAX_UNEXPECTED = 5


@dataclass(slots=True)
class Tally:
    """The counts of a run."""

    faults: Counter[str] = field(default_factory=Counter)  # That happened, by kind
    moments: set[tuple[str, str]] = field(default_factory=set)
    """Transitions, and moments of them, at which the gateway died."""
    torn: Counter[str] = field(default_factory=Counter)
    missed: list[Fault] = field(default_factory=list)  # Faults whose moment did not come
    unexpected: list[str] = field(default_factory=list)  # Servers that ended without being killed
    gateway_s: list[float] = field(default_factory=list)  # From the death of a gateway to the first answer of the next
    worker_s: list[float] = field(default_factory=list)
    """From the death of a worker to the state in which the next one samples."""
    hung_s: list[float] = field(default_factory=list)  # The same of a worker that was stopped


class Scene:
    """Server, clients and the wire between them."""

    def __init__(self, folder: Path, server: Server, wire: Wire, dice: random.Random, clients: list[Client]) -> None:
        self.folder = folder
        self.server = server
        self.wire = wire
        self.dice = dice
        self.clients = clients
        self.tally = Tally()
        self._lives = Counter[int]()
        self._respawning: set[asyncio.Task[None]] = set()

    def books(self, run: str) -> Path:
        """Folder of the books of a run's clients."""
        return self.folder / "books" / run

    def live_clients(self) -> list[Client]:
        return [client for client in self.clients if client.is_running]

    async def bring_back(self) -> None:
        """Start a server that just died, and wait until it answers."""
        died = time.monotonic()
        await self.server.start()
        await self.server.up()
        self.tally.gateway_s.append(time.monotonic() - died)

    async def steady(self, *, sampling: bool) -> None:
        """Wait until the server answers, or samples; one that ended by itself is noted, and started again as its
        supervisor would.

        Raises `GivenUp`.
        """
        while True:
            try:
                await (self.server.sampling() if sampling else self.server.up())
                return
            except ServerEnded as ended:
                await self.server.dead(PATIENCE)
                self.tally.unexpected.append(f"exit code {ended}\n{self.server.log_tail()}")
                if len(self.tally.unexpected) > MAX_UNEXPECTED:
                    raise GivenUp(f"the server ends again and again\n{self.server.log_tail()}") from None
                await self.server.start()

    def tear_wal(self) -> None:
        """Damages the last commit of the dead server, which it had not reported."""
        journal = next(fact["journal"] for fact in reversed(self.server.said) if fact.get("killed") == "gateway")
        how = tear(Path(f"{journal}-wal"), self.folder / "wal-before", self.dice)
        self.tally.torn[how] += 1

    async def replace_client(self, client: Client, after: float, *, same_name: bool) -> None:
        """Kill a client; another one comes in its place, in the background, under the same name or a new one."""
        await client.kill()
        number = self.clients.index(client)
        self._lives[number] += 1
        life = f"{number}-{self._lives[number]}"
        client.settings = replace(
            client.settings,
            client_id=client.settings.client_id if same_name else f"client-{life}",
            book=str(Path(client.settings.book).with_name(f"{life}.jsonl")),
            seed=f"{client.settings.seed.split('/')[0]}/{life}",
        )
        respawn = asyncio.create_task(self._respawn(client, after))
        self._respawning.add(respawn)
        respawn.add_done_callback(self._respawning.discard)

    async def _respawn(self, client: Client, after: float) -> None:
        await asyncio.sleep(after)
        await client.start()

    async def settle_clients(self) -> None:
        """Wait for those on their way."""
        await asyncio.gather(*self._respawning)

    async def close(self) -> None:
        for respawn in list(self._respawning):
            respawn.cancel()
        await asyncio.gather(*self._respawning, return_exceptions=True)
        for client in self.clients:
            await client.kill()
        await self.server.close()
        await self.wire.close()


def make_clients(
    folder: Path,
    number: int,
    wire: Wire,
    server: Server,
    *,
    seed: int,
    group_size: int,
    lease: float,
    max_retries: int = 2,
) -> list[Client]:
    """Clients of the runs in turn.

    Their SDK repeats a request `max_retries` times; that of the first more often than by default, so that it outlives a
    restart.
    """
    for run in server.runs:
        (folder / "books" / run).mkdir(parents=True)
    runs = [list(server.runs)[i % len(server.runs)] for i in range(number)]
    return [
        Client(
            folder,
            ClientSettings(
                f"http://127.0.0.1:{wire.port}{path_of(run)}",
                server.token(run),
                client_id=f"client-{i}",
                book=str(folder / "books" / run / f"{i}-0.jsonl"),
                seed=f"{seed}.{i}",
                group_size=group_size,
                lease_seconds=lease,
                max_retries=max_retries if i else max(6, max_retries),
            ),
        )
        for i, run in enumerate(runs)
    ]


# ---- a torn tail: SQLite's write-ahead log after a power cut in the middle of a commit -------------------------------
# Only the last commit is torn, which was not yet reported: the part in which the log differs from its earlier copy.


def tear(wal: Path, before: Path, dice: random.Random) -> str:
    """Damage the log beyond what was acknowledged; returns how. The old log is at `before`, which is removed."""
    new, old = wal.read_bytes(), before.read_bytes()
    before.unlink()
    first, last = _difference(new, old)
    at = dice.randrange(first, last)
    how = dice.choice(("cut off", "zeros", "noise", "old pages"))
    if how == "cut off":
        torn = new[:at]
    elif how == "zeros":
        torn = new[:at] + bytes(last - at) + new[last:]
    elif how == "noise":
        torn = new[:at] + dice.randbytes(last - at) + new[last:]
    else:  # Some pages reached the disk, one in the middle did not.
        stop = min(last, at + 4096)
        torn = new[:at] + old.ljust(len(new), b"\0")[at:stop] + new[stop:]
    wal.write_bytes(torn)
    return how


def _difference(new: bytes, old: bytes) -> tuple[int, int]:
    """Where the new log differs from the old: from the first byte to after the last."""
    old = old.ljust(len(new), b"\0")[: len(new)]
    differing = [i for i in range(0, len(new), 4096) if new[i : i + 4096] != old[i : i + 4096]]
    assert differing, "a commit wrote nothing"
    first, last = differing[0], min(len(new), differing[-1] + 4096)
    while new[first] == old[first]:
        first += 1
    return first, last
