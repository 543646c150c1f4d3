"""The gateway's cost per call: `python -m bench.gateway`.

A real gateway (HTTP on loopback, keys, renderer, trees, journal on disk) over a scripted model that costs nothing.
Agents each send a growing history, every second call is streamed, and all episodes are open at once:

* **capacity**: every agent sends its next call as soon as it is answered; the figure is requests per second.
* **overhead**: the same calls at a share of that rate, with completions of half a second. The figure is the time from
  a request's first byte to its answer's last, less that half second. It is measured as served, without waiting for the
  disk, and with cores that cannot sleep between two calls.
* **the peer**: LiteLLM's proxy, one worker, over a scripted backend, under the load of `capacity` with fewer episodes.
  It authenticates and forwards. It has one HTTP hop more (its backend), and neither tokens nor a journal.

Server, generator and backend are separate processes. Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.gatewaying import peer
from bench.gatewaying.processes import DidNotStart, awake, module, started
from bench.gatewaying.report import Load, Outcome
from bench.gatewaying.scripted import MODEL

COMPLETION_SECONDS = 0.5
"""Duration of a completion while the overhead is measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads of a run. `share` of the capacity is the rate at which the overhead is measured."""

    episodes: int = 1000
    calls: int = 10
    share: float = 0.6
    peer_episodes: int = 100


QUICK = Plan(episodes=20, calls=3, share=0.3, peer_episodes=0)


def measure(load: Load) -> Outcome:
    """Puts a load on a running server, from a separate process."""
    done = subprocess.run([*module("load"), load.to_json()], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the load generator ended with exit code {done.returncode}:\n{done.stderr}")
    return Outcome.from_json(done.stdout.strip().splitlines()[-1])


def ours(plan: Plan, folder: Path, *, rate: float = 0.0, seconds: float = 0.0, wait: bool = True) -> Outcome:
    """One measurement of a gateway with a fresh data dir."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        data_dir = Path(made) / "data"
        command = module("serve", "--data-dir", str(data_dir), "--seconds", str(seconds))
        command += [] if wait else ["--without-fsync"]
        with started(command, Path(made) / "serve.log") as url:
            token = (data_dir / "token").read_text().strip()
            return measure(Load(url, token, MODEL, plan.episodes, plan.calls, rate, seconds))


def litellm(plan: Plan, folder: Path) -> Outcome | str:
    """The peer's capacity, or why there is none."""
    if not plan.peer_episodes:
        return "left out"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as made, peer.proxy(Path(made)) as url:
            return measure(Load(url, peer.KEY, MODEL, plan.peer_episodes, plan.calls, episodes_api=False))
    except (peer.NotInstalled, DidNotStart) as error:
        return str(error)


def summarise(
    capacity: Outcome, served: Outcome, unsynced: Outcome, awoken: Outcome, peers: Outcome | str
) -> dict[str, Any]:
    """The verdict: capacity, overhead and memory, and the ratio to the peer where there was one."""
    known = peers if isinstance(peers, Outcome) else None
    return {
        "rps": round(capacity.rps, 1),
        "p50_ms": round(served.p50_ms, 2),
        "p99_ms": round(served.p99_ms, 2),
        "p50_ms_without_fsync": round(unsynced.p50_ms, 2),
        "p99_ms_without_fsync": round(unsynced.p99_ms, 2),
        "p50_ms_awake": round(awoken.p50_ms, 2),
        "p99_ms_awake": round(awoken.p99_ms, 2),
        "commit_p50_ms": round(served.commit_p50_ms, 2),
        "commit_p99_ms": round(served.commit_p99_ms, 2),
        "errors": sum(o.errors for o in (capacity, served, unsynced, awoken, *([known] if known else []))),
        "rss_mb": round(served.rss_mb, 1),
        "kb_per_episode": round(served.kb_per_episode, 1),
        "litellm_rps": round(known.rps, 1) if known else None,
        "ratio": round(capacity.rps / known.rps, 2) if known else None,
        "without_peer": "" if known else peers,
    }


def table(outcomes: dict[str, Outcome]) -> Table:
    grid = Table("", "calls", "errors", "calls/s", "p50 ms", "p99 ms", "commit p50", "server", "generator", "late p99")
    for name, o in outcomes.items():
        times = [f"{value:.1f}" for value in (o.rps, o.p50_ms, o.p99_ms, o.commit_p50_ms)]
        cores = [f"{o.server_cpu:.2f} cores" if o.server_cpu else "", f"{o.generator_cpu:.2f} cores"]
        grid.add_row(name, str(o.calls), str(o.errors), *times, *cores, f"{o.lag_p99_ms:.1f} ms")
    return grid


def run(plan: Plan, folder: Path, console: Console) -> dict[str, Any]:
    """All measurements, one after the other."""
    console.print("measuring capacity ...")
    capacity = ours(plan, folder)
    rate = plan.share * capacity.rps
    console.print(f"measuring the overhead at {rate:.0f} calls/s ...")
    served = ours(plan, folder, rate=rate, seconds=COMPLETION_SECONDS)
    console.print("the same without waiting for the disk ...")
    unsynced = ours(plan, folder, rate=rate, seconds=COMPLETION_SECONDS, wait=False)
    console.print("the same with cores kept awake ...")
    with awake():
        awoken = ours(plan, folder, rate=rate, seconds=COMPLETION_SECONDS)
    console.print("measuring the peer ...")
    peers = litellm(plan, folder)
    outcomes = {"capacity": capacity, "overhead": served, "without fsync": unsynced, "kept awake": awoken}
    if isinstance(peers, Outcome):
        outcomes["LiteLLM's capacity"] = peers
    else:
        console.print(f"no peer: {peers}")
    Console(width=120).print(table(outcomes))
    verdict = summarise(capacity, served, unsynced, awoken, peers)
    for name, outcome in outcomes.items():
        if outcome.first_error:
            console.print(f"first error of {name}: {outcome.first_error}")
    return {**verdict, "rate": round(rate, 1), "outcomes": {k: json.loads(o.to_json()) for k, o in outcomes.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = Plan()
    parser.add_argument("--episodes", type=int, default=whole.episodes, help="open at once")
    parser.add_argument("--calls", type=int, default=whole.calls, help="of each episode")
    parser.add_argument("--share", type=float, default=whole.share, help="of the capacity, for the overhead")
    parser.add_argument("--no-peer", action="store_true", help="leave LiteLLM out")
    parser.add_argument("--quick", action="store_true", help="a few calls, to see that everything works")
    parser.add_argument("--folder", type=Path, help="where the journals are written; its disk is part of the figure")
    given = parser.parse_args()
    plan = Plan(given.episodes, given.calls, given.share, 0 if given.no_peer else whole.peer_episodes)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        verdict = run(QUICK if given.quick else plan, Path(folder), Console(stderr=True))
    print(json.dumps({"bench": "gateway", **verdict, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}))
    return 0 if verdict["errors"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
