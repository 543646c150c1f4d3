"""Causes each kind of fault and measures the seconds until the server, worker or client works again.

Every function returns whether the fault happened: some moments (an abort, a refill) occur by chance only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from bench.breaking.plan import RUNS, WIRE, Fault
from bench.breaking.scene import Scene
from bench.breaking.victims import ServerEnded

MOMENT_SECONDS = 25.0  # The longest wait for a moment
HANG_UPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6) * 4
"""Seconds into a call for several completions: when some are recorded and others not depends on the machine."""
HANG_UP_SECONDS = 1.5
POISON = 2  # A batch is skipped after so many workers failed on it (`gateway.engine.MAX_CRASHES`)


async def inject(scene: Scene, fault: Fault) -> bool:
    """Bring it about, and bring back what it killed."""
    kind = fault.kind
    # Some gateways die while their worker is still loading.
    await scene.steady(sampling=not kind.startswith("gateway") or scene.dice.random() < 0.7)
    if kind in ("gateway killed at a transition", "gateway killed, WAL tail torn"):
        return await _at_transition(scene, fault)
    if kind == "gateway killed at a random time":
        return await _gateway(scene, fault)
    if kind in ("worker killed", "worker hangs"):
        return await _worker(scene, fault)
    if kind == "worker killed twice by one batch":
        return await _poison(scene)
    if kind == "client killed":
        return await _client(scene, fault)
    if kind in WIRE:
        return await meet(scene, fault, MOMENT_SECONDS)
    if kind == "disk":
        return await _disk(scene, fault)
    if kind == "agent hangs":
        return await _hang(scene, fault)
    assert kind == "clock jumps", kind
    return await scene.server.order("clock", seconds=fault.amount)


async def _at_transition(scene: Scene, fault: Fault) -> bool:
    server, facts = scene.server, len(scene.server.said)
    if not await _sprung(scene, fault):
        await server.order("trap")
        if server.is_running:
            return False
        await server.dead(MOMENT_SECONDS)
    if not any(fact.get("killed") == "gateway" for fact in server.said[facts:]):
        raise ServerEnded(server.process.returncode)
    if fault.kind == "gateway killed, WAL tail torn":
        scene.tear_wal()
    else:
        scene.tally.moments.add((fault.at, fault.when))
    await scene.bring_back()
    return True


async def _sprung(scene: Scene, fault: Fault) -> bool:
    """Set the trap, and provoke what does not come by itself; whether the gateway died of it."""
    server = scene.server
    tears = fault.kind == "gateway killed, WAL tail torn"
    await server.order("trap", at=fault.at, when=fault.when, skip=fault.skip, tears=tears)
    if fault.at == "remove_batches":
        await server.order("worker", verb="learn newest", times=POISON, run=scene.dice.choice(list(RUNS)))
        if await server.dead(2 * MOMENT_SECONDS):
            scene.tally.faults["worker killed"] += POISON
            return True
        await server.order("worker")
        return False
    if fault.at != "add_undelivered":
        return await server.dead(MOMENT_SECONDS)
    for delay in HANG_UPS:
        order = scene.wire.order(Fault("hung up", "chat", amount=delay))
        is_dead = await server.dead(HANG_UP_SECONDS)
        scene.wire.cancel(order)
        if is_dead:
            return True
    return False


async def _gateway(scene: Scene, fault: Fault) -> bool:
    await asyncio.sleep(fault.amount)
    await scene.server.kill()
    await scene.bring_back()
    return True


async def _worker(scene: Scene, fault: Fault) -> bool:
    server, facts = scene.server, len(scene.server.said)
    killed = time.monotonic()
    if fault.at == "any":
        await asyncio.sleep(fault.amount)
        killed = time.monotonic()
        if not _kill_worker(scene):
            return False
    else:
        await server.order("worker", verb=fault.at, delay=fault.amount, hangs=fault.kind == "worker hangs")
        if fault.at == "start" and _kill_worker(scene):  # One starts because another one died.
            scene.tally.faults[fault.kind] += 1
        if not await server.until(lambda: bool(_hits(scene, facts)), MOMENT_SECONDS):
            await server.order("worker")
            return False
        hit = _hits(scene, facts)[-1]
        facts, killed = hit, server.said[hit]["time"]
    statuses = await server.sampling(facts)
    seconds = scene.tally.worker_s if fault.kind == "worker killed" else scene.tally.hung_s
    seconds.append(time.monotonic() - killed)
    # Or the next such fault is the second that the same batch meets, or one too many without anything learned.
    await server.learned(statuses)
    return True


def _kill_worker(scene: Scene) -> bool:
    """Returns whether there was a worker to kill."""
    pid = scene.server.worker_pid
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _hits(scene: Scene, since: int) -> list[int]:
    """Workers that were killed by order: their places among the facts, after the first `since` facts."""
    said = scene.server.said
    return [place for place in range(since, len(said)) if said[place].get("killed") == "worker"]


async def _poison(scene: Scene) -> bool:
    """The same batch takes two workers with it: the gateway sets it aside, counted, and trains on."""
    server, facts = scene.server, len(scene.server.said)
    await server.order("worker", verb="learn newest", times=POISON, run=scene.dice.choice(list(RUNS)))
    if not await server.until(lambda: len(_hits(scene, facts)) >= POISON, 2 * MOMENT_SECONDS):
        await server.order("worker")
        return False
    await server.learned(await server.sampling(_hits(scene, facts)[-1]))
    scene.tally.faults["worker killed"] += POISON - 1
    return True


async def _client(scene: Scene, fault: Fault) -> bool:
    await asyncio.sleep(fault.amount)
    live = scene.live_clients()
    if not live:
        return False
    same_name = scene.dice.random() < 0.5
    await scene.replace_client(scene.dice.choice(live), after=fault.amount, same_name=same_name)
    return True


async def meet(scene: Scene, fault: Fault, within: float) -> bool:
    """The next request of a kind meets a fault of the wire. False if none came `within` seconds."""
    order = scene.wire.order(fault)
    try:
        await asyncio.wait_for(order.done.wait(), within)
    except TimeoutError:
        scene.wire.cancel(order)
        return False
    return True


async def _disk(scene: Scene, fault: Fault) -> bool:
    """Until it has room again, or, for a checkpoint, until one was refused."""
    server, facts = scene.server, len(scene.server.said)
    if fault.at == "checkpoint full":
        await server.order("refuse a save")
    else:
        await server.order(fault.at, seconds=fault.amount)
    return await server.until(lambda: any(fact.get("disk") == fault.at for fact in server.said[facts:]), MOMENT_SECONDS)


async def _hang(scene: Scene, fault: Fault) -> bool:
    live = scene.live_clients()
    if not live:
        return False
    client = scene.dice.choice(live)
    before = client.num_hung()
    await client.tell(f"hang {fault.at}")
    return await scene.server.until(lambda: client.num_hung() > before, MOMENT_SECONDS)
