"""`RayPlacement`: the `Placement` on a Ray cluster. It asks the conductor process. Imports no Ray.

The conductor starts with the first process, and again after its death. If it dies, every process has ended: Ray ends
their actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentjet.errors import ComputeError, ConfigError, Later, install_extra
from agentjet.processes.guardian import Launch
from agentjet.processes.placement import LocalPlacement, create_log
from agentjet.processes.rpc import Peer, host_and_port
from agentjet.processes.supervisor import Supervisor

AWAY_SECONDS = 10.0
"""Pause before a cluster that went away is asked again. Its head may be restarted with the same address."""
PROBE_SECONDS = 5.0
"""Limit of a connection to Ray's head."""
STATISTICS = "RAY_USAGE_STATS_ENABLED"
"""Ray sends statistics of its use unless this variable is 0."""


def check_ray(address: str, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raises `ConfigError` if Ray is not installed. Does not import it."""
    if find("ray") is None:
        raise ConfigError(
            f"compute.address = {address!r} needs Ray: {install_extra('cluster')}. Or leave the address empty for "
            "processes of this machine"
        )


def check_address(address: str) -> None:
    """Raises `ConfigError` unless `address` is `HOST:PORT` at which something listens."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            f"compute.address = {address!r} is not an address of a Ray cluster: give HOST:PORT of its head, such as "
            "10.0.0.1:6379, or auto on one of its nodes"
        )
    if not accepts(address):
        raise ConfigError(
            f"compute.address = {address!r}: nothing listens there; `ray start --head` prints the address, and "
            "`ray status` on a node shows the cluster"
        )


def accepts(address: str) -> bool:
    try:
        socket.create_connection(host_and_port(address), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


class RayProcess:
    """A process on a node of the Ray cluster. `place` is the node and the process id."""

    def __init__(self, conductor: Peer, launch: Launch, place: str, lost: str) -> None:
        """`lost` is the reason if the conductor ends first."""
        self.place = place
        self.log_path = launch.log_path
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._conductor = conductor
        self._name = launch.name
        self._watching = asyncio.create_task(self._watch(lost))

    async def stop(self) -> None:
        if not self.ended.done():
            with contextlib.suppress(ComputeError):
                await self._conductor.ask("stop", None, self._name)
            await asyncio.wait([self.ended])

    async def _watch(self, lost: str) -> None:
        try:
            self.ended.set_result(await self._conductor.ask("ended", None, self._name))
        except ComputeError as error:
            self.ended.set_result(f"ended with the conductor ({error}; {lost})")


class RayPlacement:
    """Starts processes on the nodes of a Ray cluster."""

    def __init__(self, host: str, address: str, log_folder: Path) -> None:
        """`host` and `address` as in `compute`. The conductor logs to `conductor.log` in `log_folder`.

        Raises `ConfigError` if Ray is missing, and `OSError` for a host that is not of this machine.
        """
        check_ray(address)
        self.placement_seconds = 60.0
        """Seconds that a process waits for a node with enough free GPUs."""
        self._supervisor = Supervisor(host, LocalPlacement(list))
        """Starts the conductor, which needs no GPU."""
        self._address = address
        self._log_path = log_folder / "conductor.log"
        self._starting = asyncio.Lock()
        self._peer: Peer | None = None
        self._has_joined = False

    async def start(self, launch: Launch) -> RayProcess:
        """Start a process on a node with enough free GPUs.

        Raises `ConfigError` if the cluster was never joined, or no node can run it; `Later` while a cluster that was
        joined is away; else `ComputeError`.
        """
        conductor = await self._conductor()
        create_log(launch.log_path)
        launch = replace(launch, log_path=launch.log_path.resolve(), placement_seconds=self.placement_seconds)
        place: str = await conductor.ask("start", None, launch)
        return RayProcess(conductor, launch, place, f"see {self._log_path}")

    async def num_gpus(self) -> int | None:
        """Returns the GPUs of the cluster; None if it has none."""
        return await (await self._conductor()).ask("gpus") or None

    async def close(self) -> None:
        """End the conductor, and with it all processes. Idempotent."""
        if (peer := self._peer) is not None:
            self._peer = None
            await peer.stop()
        await self._supervisor.close()

    async def _conductor(self) -> Peer:
        """Returns the connection to the conductor; starts it if it does not run."""
        async with self._starting:
            if self._peer is not None:
                if not self._peer.died.done():
                    return self._peer
                await self._peer.stop()
            variables = {STATISTICS: os.environ.get(STATISTICS, "0")}
            command = (sys.executable, "-P", "-m", "agentjet.processes.conductor")
            peer = await self._supervisor.start(
                Launch(f"conductor {self._address}", command, self._log_path, variables)
            )
            try:
                await peer.ask("connect", None, self._address)
            except BaseException as error:  # Also if it is cancelled.
                await peer.stop()
                if self._has_joined and isinstance(error, ConfigError):
                    raise Later(
                        f"the Ray cluster is away, and is asked again every {AWAY_SECONDS:.0f} s: {error}",
                        retry_after=AWAY_SECONDS,
                    ) from None
                raise
            self._peer, self._has_joined = peer, True
            return peer
