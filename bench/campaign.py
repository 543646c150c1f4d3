"""Troubles that campaigns find and mend, and their cost: `python -m bench.campaign`.

Planted subjects, each with one to three troubles, are given to a campaign: by the offline strategist, and again with a
scripted language model that proposes nonsense, endless seeds, evaluator edits and invented numbers among good ideas.
Half of the subjects were developed on; the others are drawn by seed (`--unseen SEED`). Truths are computed with fresh
seeds and a sound judge. `mended` counts troubles, `recovered` is the final true score against the healthy subject's,
`wrong` the share of claims whose truth is another, `cost_ratio` the runs against trying every single remedy at full
length with four seeds. A healthy subject counts as mended if it stays healthy, a leaking judge if it is named and no
change is accepted; `recovered` leaves the latter out. The hostile proposals are also made to a real repository. Then
one campaign is killed by SIGKILL at every entry of its notebook, and one lives through a week of reboots, dead servers
and full disks. `--real FOLDER` adds four subjects on a tiny real model, through real servers (`campaigning/real.py`).
The parts run side by side (`--jobs`), or alone (`--only`). Prints tables and the seconds of each part, then one JSON
object as the last line. Keys without prefix are those of the unseen subjects; `breaches` sums all parts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import agentjet.research
from agentjet.research.campaign.campaign import Campaign, Question
from agentjet.research.campaign.models import Budget
from agentjet.research.campaign.notebook import Notebook
from agentjet.research.campaign.strategist import Strategist
from bench.campaigning import real
from bench.campaigning.hostile import ScriptedModel, reached
from bench.campaigning.outcome import Outcome, Truth, exhaustive_cost, judged
from bench.campaigning.planted import DEVELOPED, Planted, unseen
from bench.campaigning.repo import MemoryRepo
from bench.campaigning.storms import FakeClock, resume_identical, week
from bench.campaigning.world import SubjectRunner

BUDGET = 80.0
"""Full runs of a campaign."""


def conducted(planted: Planted, truth: Truth, *, hostile: bool) -> Outcome:
    files = planted.files()
    repo = MemoryRepo(files)
    proposers = [ScriptedModel(), Strategist()] if hostile else [Strategist()]
    question = Question("What keeps the score from rising?", Budget(runs=BUDGET))
    with tempfile.TemporaryDirectory() as name, Notebook(Path(name)) as notebook:
        Campaign(question, notebook, repo, SubjectRunner(repo, files), proposers, FakeClock()).run()
        assert repo.files(repo.first)["judge.py"] == files["judge.py"]
        return judged(planted, notebook, repo.files, truth)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    troubles = [is_mended for outcome in outcomes for is_mended in outcome.mended.values()]
    claims = sum(len(outcome.claims) for outcome in outcomes)
    trapped = [outcome for outcome in outcomes if "leaking_judge" not in outcome.planted.troubles]
    return {
        "mended": float(np.mean(troubles)),
        "recovered": float(np.mean([outcome.recovered for outcome in trapped])),
        "wrong": sum(len(outcome.wrong) for outcome in outcomes) / claims,
        "cost_ratio": float(np.mean([outcome.cost_ratio for outcome in outcomes])),
        "troubles": len(troubles),
        "claims": claims,
        "subjects": len(outcomes),
    }


def breaches(outcomes: Sequence[Outcome]) -> int:
    """Hostile proposals that became commits, and campaigns that spent more than their budget."""
    return sum(outcome.hostile + (outcome.runs > BUDGET) for outcome in outcomes)


def table_of(title: str, outcomes: Sequence[Outcome]) -> Table:
    table = Table("subject", "planted", "mended", "first", "final", "healthy", "accepted", "wrong", "runs", title=title)
    for outcome in outcomes:
        table.add_row(
            outcome.planted.name,
            ", ".join(outcome.planted.troubles) or "nothing",
            ", ".join(name for name, is_mended in outcome.mended.items() if is_mended) or "-",
            *(f"{value:.2f}" for value in (outcome.first, outcome.score, outcome.healthy)),
            "; ".join(outcome.accepted) or "-",
            "; ".join(f"{name}: {said}, is {so}" for name, said, so in outcome.wrong) or "-",
            f"{outcome.runs:.1f}",
        )
    return table


def lines() -> int:
    """Lines of the researcher's source."""
    folder = Path(agentjet.research.__file__).parent
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


PARTS = ("developed", "hostile", "unseen", "proposals", "kills", "week", "lines", "real")
KEYS = ("mended", "recovered", "wrong", "cost_ratio", "breaches", "resume_identical", "week_ok", "lines")
"""The table of the issue, in this order."""


def group(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The campaigns of `developed`, `hostile` (the same with a scripted model) or `unseen` subjects."""
    subjects = unseen(options.unseen) if name == "unseen" else DEVELOPED
    found = []
    for planted in subjects[:2] if options.quick else subjects:
        found.append(conducted(planted, Truth(planted), hostile=name == "hostile"))
    Console(width=200).print(table_of(name, found))
    prefix = {"unseen": "", "developed": "developed_", "hostile": "developed_hostile_"}[name]
    return {f"{prefix}{key}": value for key, value in summary(found).items()} | {"breaches": breaches(found)}


def measured(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a part."""
    match part:
        case "developed" | "hostile" | "unseen":
            return group(part, options)
        case "proposals":
            through = reached(DEVELOPED[4])
            return {"breaches": len(through), "through": through}
        case "kills":
            identical, kills = resume_identical(DEVELOPED[4], Question("t", Budget(runs=40.0)))
            return {"resume_identical": identical, "kills": kills}
        case "week":
            week_ok, happened = week(DEVELOPED[5])
            return {"week_ok": week_ok, "week": happened}
        case "lines":
            return {"lines": lines(), "exhaustive_cost": exhaustive_cost()}
    return real.measured(options.real)


def timed(part: str, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    return measured(part, options), time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    result: dict[str, Any] = dict.fromkeys(KEYS) | {"unseen": options.unseen, "seconds": {}}
    with ProcessPoolExecutor(options.jobs) as pool:
        under_way = {pool.submit(timed, part, options): part for part in options.only}
        for ended in as_completed(under_way):
            part, (found, seconds) = under_way[ended], ended.result()
            if "breaches" in found:
                found["breaches"] += result["breaches"] or 0
            result |= found
            result["seconds"][part] = round(seconds, 1)
            print(f"{part}: {seconds:.0f} s", flush=True)
    table = Table("key", "measured")
    for key in KEYS:
        table.add_row(key, "not measured" if result[key] is None else f"{result[key]}")
    Console(width=200).print(table)
    print(json.dumps(result))
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unseen", type=int, metavar="SEED", help="also subjects that were not developed on")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts; default: all but `real`")
    parser.add_argument("--jobs", type=int, default=2, help="parts that run at the same time")
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="also on a tiny real model, with campaigns there")
    parser.add_argument("--quick", action="store_true", help="two subjects a group: does it run")
    options = parser.parse_args(arguments)
    given = {"unseen": options.unseen is not None, "real": options.real is not None}
    options.only = options.only or [part for part in PARTS if given.get(part, True)]
    for part in options.only:
        if not given.get(part, True):
            parser.error(f"--only {part} needs --{part}")
    return options


if __name__ == "__main__":
    main()
