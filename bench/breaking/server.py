"""`agentjet serve` under the control of a bench: `python -m bench.breaking.server SETTINGS FOLDER`.

Everything is the product's code except for the objects of `hooks`. Orders arrive as lines of JSON on standard input.
Facts leave the same way on standard output, between the server's own lines. The process ends when the bench does.

Every forest that will be learned is kept in FOLDER by run, so that an undisturbed worker can learn the same ones later.
A forest that is built again from the journal must have the same bytes; a difference is reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentjet.cli import server_process
from agentjet.compute import Compute
from agentjet.compute.backend import ProcessCompute
from agentjet.compute.protocol import body_digest
from agentjet.config import ServeConfig
from agentjet.errors import AgentJetError
from agentjet.fronts.supervision import FrontProcesses
from agentjet.server import runs
from agentjet.server.gateway import Gateway
from agentjet.swarm import Batch, Journal
from agentjet.timeline.batch import TrainingBatch
from bench.breaking.hooks import Disk, JumpingClock, MortalCompute, Trap, die
from bench.scaling.kills import Kills


def say(**fact: Any) -> None:
    """One line for the bench, out before anything else happens."""
    os.write(1, (json.dumps({"chaos": fact}) + "\n").encode())


class Orders:
    """Carries out what the bench orders, in the event loop, between two of the gateway's own turns."""

    def __init__(self, compute: ProcessCompute, fronts: FrontProcesses | None, clock: JumpingClock) -> None:
        self._traps: list[Trap] = []
        self._disk = Disk(say)
        self._verbs: dict[str, Callable[..., None]] = {
            "trap": self._arm,
            "journal full": self._disk.full,
            "writes refused": self._disk.refuse,
            "clock": clock.jump,
        }
        if isinstance(compute, MortalCompute):
            compute.say = say
            self._verbs |= {"worker": compute.arm, "refuse a save": compute.refuse_a_save}
        else:
            self._verbs["kill"] = Kills(compute, fronts, say).order
        self._begun = b""
        asyncio.get_running_loop().add_reader(0, self._read)

    def add(self, journal: Journal, folder: Path) -> None:
        """Adds the journal of a run."""
        self._traps.append(Trap(journal, folder, say))
        self._disk.journals.append(journal)

    def _arm(self, **how: Any) -> None:
        """Whichever run gets there first."""
        for trap in self._traps:
            trap.arm(**how)

    def _read(self) -> None:
        read = os.read(0, 65536)
        if not read:
            die()  # The bench is gone.
        *lines, self._begun = (self._begun + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            self._verbs[order["verb"]](**order["how"])
            say(heard=order["number"])


class ForestKeeper:
    """Writes down what is about to be learned, once a batch, and compares when it is made again."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        training = gateway.engine.training
        self._build = training._forests
        self._folder = folder
        self._run = gateway.run
        training._forests = self._keeping  # type: ignore[method-assign]

    async def _keeping(self, batch: Batch) -> dict[str, TrainingBatch]:
        training = await self._build(batch)
        await asyncio.to_thread(self._keep, batch, training)
        return training

    def _keep(self, batch: Batch, training: dict[str, TrainingBatch]) -> None:
        kept = {
            "members": list(batch.episode_ids),
            "job": batch.job.model_dump_json(),
            "batches": training,
        }
        path = self._folder / f"{batch.id:06d}.pickle"
        if path.exists():
            known = pickle.loads(path.read_bytes())
            if known["members"] == kept["members"] and body_digest(known) != body_digest(kept):
                say(drifted=batch.id, run=self._run)
        whole = path.with_suffix(".part")
        whole.write_bytes(pickle.dumps(kept))
        whole.replace(path)


def main() -> int:
    config = ServeConfig.model_validate_json(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    jumping = JumpingClock(folder / "clock")

    orders: list[Orders] = []

    def make_gateway(config: ServeConfig, compute: Compute, **named: Any) -> Gateway:
        """The first one is that of the default run."""
        assert isinstance(compute, ProcessCompute)
        gateway = Gateway(config, compute, **named)
        if not orders:
            orders.append(Orders(compute, named["fronts"], jumping))
            say(gateway=os.getpid())
        ForestKeeper(gateway, folder / "forests" / gateway.run)
        orders[0].add(gateway.swarm.journal, folder)
        return gateway

    put_in_place: list[tuple[Any, str, Any]] = [
        (runs, "Gateway", make_gateway),
        (server_process, "steady_clock", lambda: jumping),
    ]
    if config.compute.backend == "embedded":
        put_in_place.append((server_process, "ProcessCompute", MortalCompute))
    for module, name, instead in put_in_place:
        assert hasattr(module, name), f"{module.__name__} has no {name} to take the place of"
        setattr(module, name, instead)
    try:
        server_process.run(config)
    except AgentJetError as error:
        print(f"agentjet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
