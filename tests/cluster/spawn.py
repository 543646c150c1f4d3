"""Ranks of this machine that call one function together, without the gateway."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

HOST = "127.0.0.1"
PRELOADED = ("agentjet.compute.rank",)
"""Modules that the process from which all ranks are forked imports once: a rank alone would take five seconds of it."""


def spawn(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(group, *arguments)` on new ranks, on CPUs, one thread each; returns their results by rank.

    Raises `RuntimeError` if a rank fails. The function must be importable.
    """
    from agentjet.compute.group import Rendezvous

    rendezvous = Rendezvous(HOST)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ends, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, rank, num_ranks, rendezvous.address, function, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        return [_result(rank, end) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(rank: int, end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError as error:
        raise RuntimeError(f"rank {rank} failed: see its output") from error


def _run(
    end: Connection, rank: int, num_ranks: int, address: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    from agentjet.compute.group import RankGroup, join
    from agentjet.compute.rank import make_deterministic

    torch.set_num_threads(1)
    make_deterministic()
    join(rank, num_ranks, address, None, HOST)
    end.send(function(RankGroup(rank, num_ranks, torch.device("cpu")), *arguments))
    end.close()
