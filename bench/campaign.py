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
Prints tables, then one JSON object as the last line. Keys without prefix are those of the unseen subjects.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
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


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    console = Console(width=200)
    drawn = [] if options.unseen is None else unseen(options.unseen)
    developed = DEVELOPED[:2] if options.quick else DEVELOPED
    groups = {
        "developed": [] if options.only_unseen else list(developed),
        "unseen": drawn[:2] if options.quick else drawn,
    }
    result: dict[str, Any] = {}
    through = reached(DEVELOPED[4])
    num_breaches = len(through)
    for group, subjects in groups.items():
        truths = [Truth(planted) for planted in subjects]
        for hostile in (False, True) if group == "developed" else (False,):
            found = [
                conducted(planted, truth, hostile=hostile) for planted, truth in zip(subjects, truths, strict=True)
            ]
            if not found:
                continue
            name = f"{group}{', with a scripted model' if hostile else ''}"
            console.print(table_of(name, found))
            num_breaches += breaches(found)
            prefix = ("" if group == "unseen" else "developed_") + ("hostile_" if hostile else "")
            result |= {f"{prefix}{key}": value for key, value in summary(found).items()}
    for key in ("mended", "recovered", "wrong", "cost_ratio"):
        result.setdefault(key, None)
    identical, kills = (None, 0) if options.quick else resume_identical(DEVELOPED[4], Question("t", Budget(runs=40.0)))
    week_ok, happened = (None, {}) if options.quick else week(DEVELOPED[5])
    console.print(f"killed {kills} times: identical = {identical}; a week: {happened}")
    result |= {
        "breaches": num_breaches,
        "through": through,
        "resume_identical": identical,
        "kills": kills,
        "week_ok": week_ok,
        "week": happened,
        "lines": lines(),
        "exhaustive_cost": exhaustive_cost(),
        "unseen": options.unseen,
    }
    if options.real:
        result |= real.measured(options.real)
    print(json.dumps(result))
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unseen", type=int, default=None, help="seed of the subjects that were not developed on")
    parser.add_argument("--only-unseen", action="store_true", help="leave out the subjects that were developed on")
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="also on a tiny real model, with campaigns there")
    parser.add_argument("--quick", action="store_true", help="two subjects: does it run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
