"""`python -m conformance [CLIENT ...]`: runs the exercises, writes `docs/compatibility.md`, prints the results.

Only a run of all clients writes the page. The last line of the output is JSON, in which a client that did not run is
false. The client that evaluates and trains nothing has a separate key. The exit code is 0 if all that ran are green.
Without Node the clients from npm do not run, without Python 3.12 OpenHands does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from conformance import evaluation, page
from conformance.audit import problems
from conformance.child import HERE, OPENHANDS, PYTHON, command, is_node
from conformance.episode import Exercise, play
from conformance.exercises import EXERCISES
from conformance.isolation import leave_the_network
from conformance.page import Result
from conformance.product_exercises import OF_NODE

PAGE = HERE.parent / "docs" / "compatibility.md"


Evaluated = tuple[str, ...] | None
"""The problems of the evaluation; None if it did not run."""


async def check(exercise: Exercise, room: asyncio.Semaphore) -> Result:
    """Run an exercise and print how it went."""
    async with room:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            evidence = await play(exercise, command(*exercise.command), Path(folder))
    found, forks = tuple(problems(exercise, evidence)), (call["fork"] for call in evidence.tree["calls"])
    result = Result(exercise, found, evidence.num_timelines, tuple(filter(None, forks)))
    print(
        f"{'red  ' if result.problems else 'green'} {exercise.client}: {exercise.dialect}, {exercise.name}", flush=True
    )
    for problem in result.problems:
        print(f"      {problem}", flush=True)
    return result


async def check_evaluation(room: asyncio.Semaphore) -> tuple[str, ...]:
    """Run the client that evaluates and print how it went; what is wrong, nothing when it is green."""
    async with room:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            found = tuple(await evaluation.evaluate(Path(folder)))
    print(f"{'red  ' if found else 'green'} {evaluation.CLIENT}: completions, an evaluation", flush=True)
    for problem in found:
        print(f"      {problem}", flush=True)
    return found


async def check_all(exercises: list[Exercise], with_evaluation: bool) -> tuple[list[Result], Evaluated]:
    """As many side by side as there are cores: a client's time goes into its imports."""
    room = asyncio.Semaphore(os.cpu_count() or 1)
    evaluated = asyncio.create_task(check_evaluation(room)) if with_evaluation else None
    results = await asyncio.gather(*(check(exercise, room) for exercise in exercises))
    return results, await evaluated if evaluated else None


def missing(exercise: Exercise) -> str:
    """The interpreter that the client needs and this machine lacks, or ""."""
    script = exercise.command[0]
    if (is_node(script) or exercise.client in OF_NODE) and not shutil.which("node"):
        return "Node"
    if exercise.is_product and not script.endswith(".sh") and not OPENHANDS.exists():
        return "Python 3.12"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys(exercise.client for exercise in EXERCISES), evaluation.CLIENT]
    parser.add_argument("client", nargs="*", help=f"all of them when none is named: {', '.join(names)}")
    wanted = parser.parse_args().client
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no client {unknown.pop()!r}; there are {', '.join(names)}")
    if not PYTHON.exists():
        parser.error("the clients are not installed: run `make conformance`")
    chosen = [one for one in EXERCISES if not wanted or one.client in wanted]
    possible = [one for one in chosen if not missing(one)]
    for name, lack in dict.fromkeys((one.client, missing(one)) for one in chosen if missing(one)):
        print(f"      {name} does not run: there is no {lack} here", flush=True)
    if not (in_namespace := leave_the_network()):
        print("      there is no namespace to be had: native programs are held back by a proxy only", flush=True)
    results, evaluated = asyncio.run(check_all(possible, not wanted or evaluation.CLIENT in wanted))
    if not wanted and possible == chosen:
        written = page.page(results, page.versions(), evaluated, in_namespace=in_namespace)
        PAGE.write_text(written, encoding="utf-8")
    ran = page.green(results)
    clients = {one.client: ran.get(one.client, False) for one in chosen}
    found: dict[str, Any] = {"green": sum(clients.values()), "total": len(clients), "clients": clients}
    if evaluated is not None:
        found["evaluated"] = {evaluation.CLIENT: not evaluated}
    print(json.dumps(found))
    return 0 if all(ran.values()) and not evaluated else 1


if __name__ == "__main__":
    sys.exit(main())
