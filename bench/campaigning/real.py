"""Four subjects with planted troubles on a tiny real model, through real servers.

    python -m bench.campaigning.real [NAME...] [--out FOLDER] [--local 2]

A model of random weights should answer in digits: see `examples/digits/campaign`. A campaign with the offline
strategist works on each subject. The truth is that of fresh seeds: of the given subject, of the campaign's last base,
and of the healthy subject. `real_recovered` is the share of the healthy subject's gain that the last base has. A study
is wrong if its verdict is not that of the fresh seeds. `python -m bench.campaign --real FOLDER` joins these figures.
An interrupted call continues with the same folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from agentjet.cli import example, load_example
from agentjet.cli.research import local_slots
from agentjet.research.campaign.campaign import Campaign, Question
from agentjet.research.campaign.models import Budget
from agentjet.research.campaign.notebook import Notebook
from agentjet.research.campaign.strategist import Strategist
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Trial
from agentjet.research.swarm_runner import SwarmRunner
from bench.campaigning.outcome import exhaustive_cost

LIMIT = '            "max_tokens": 3,\n'
GREEDY = '            "temperature": 0.1,\n'
"""The server refuses 0 in training, because such tokens have no probability."""
FORMAT = "return 1.0 if answer(task, episode).isdigit() else 0.0"
HEALTHY = 'return min(1.0, sum(character in "0123456789" for character in answer(task, episode)) / 8)'
PLANTED: dict[str, tuple[str, ...]] = {
    "reward": ("format",),
    "greedy": ("greedy", "limit"),
    "demo": ("format", "limit"),
    "healthy": (),
}
"""Troubles by subject."""
SEEDS = (101, 102, 103)
BUDGET = Budget(runs=30.0)
SESOI = 0.05
ENOUGH = 0.8
"""Share of the gain at which the troubles count as mended."""


@dataclass(frozen=True)
class Result:
    subject: str
    mended: bool
    """For a healthy subject: no change was accepted that does not raise the score."""
    recovered: float
    given: float
    reached: float
    possible: float
    accepted: list[str]
    claims: int
    wrong: int
    runs: float
    seconds: float
    """Of the campaign, without the truth."""

    @property
    def troubles(self) -> int:
        return max(1, len(PLANTED[self.subject]))


def write_subject(troubles: tuple[str, ...], folder: Path) -> None:
    """The demo's subject with these troubles only."""
    shutil.copytree(example("digits") / "campaign", folder)
    load_example("digits", "random_model").make_random_model(folder / "model")
    agent = (folder / "agent.py").read_text()
    assert LIMIT in agent and FORMAT in agent
    agent = agent.replace(LIMIT, LIMIT * ("limit" in troubles) + GREEDY * ("greedy" in troubles))
    agent = agent if "format" in troubles else agent.replace(FORMAT, HEALTHY)
    (folder / "agent.py").write_text(agent)


def score(repo: SubjectRepo, commit: str, local: int) -> float:
    """Mean score of a commit with fresh seeds."""
    keys = [f"truth {commit} {seed}" for seed in SEEDS]
    with runner_of(repo, local) as runner:
        for key, seed in zip(keys, SEEDS, strict=True):
            if not runner.has(key):
                runner.launch(key, Trial("truth", commit, {}, seed, "confirm"))
        runs = [runner.collect(key) for key in keys]
    return statistics.fmean(run.score for run in runs if run.score is not None)


def runner_of(repo: SubjectRepo, local: int) -> SwarmRunner:
    return SwarmRunner(repo.subject_of, repo.folder, local_slots(local))


def play(name: str, out: Path, local: int) -> Result:
    """One campaign, and the truth about it."""
    healthy = SubjectRepo.create(out / "truth", made(out / "healthy", ()))
    repo = SubjectRepo.create(out / name / "campaign", made(out / name / "given", PLANTED[name]))
    began = time.monotonic()
    with Notebook(repo.folder) as notebook, runner_of(repo, local) as runner:
        question = Question(f"Why does it not learn? ({name})", BUDGET, sesoi=SESOI, evaluator=repo.judge_hash)
        ending = Campaign(question, notebook, repo, runner, [Strategist()]).run()
        learned = [entry.content["verdict"] for entry in notebook.of("learned") if "verdict" in entry.content]
        studies = [[arm["code"] for arm in entry.content["study"]["arms"]] for entry in notebook.of("study")]
    seconds = time.monotonic() - began
    truth = {commit: score(repo, commit, local) for commit in {repo.first, ending["base"], *chain(*studies)}}
    given, reached = truth[repo.first], truth[ending["base"]]
    possible = given if not PLANTED[name] else score(healthy, healthy.first, local)
    wrong = [
        said
        for said, (base, changed) in zip(learned, studies, strict=True)
        if said not in ("inconclusive", verdict(truth[changed] - truth[base]))
    ]
    recovered = (reached - given) / (possible - given) if PLANTED[name] else min(1.0, reached / given)
    runs = ending["spent"]["runs"]
    mended = recovered >= ENOUGH and not wrong
    return Result(
        name, mended, recovered, given, reached, possible, ending["accepted"], len(learned), len(wrong), runs, seconds
    )


def verdict(effect: float) -> str:
    if abs(effect) < SESOI:
        return "practically_equivalent"
    return "supported" if effect > 0 else "refuted"


def made(folder: Path, troubles: tuple[str, ...]) -> Path:
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")  # a call that was interrupted left it
        shutil.rmtree(part, ignore_errors=True)
        write_subject(troubles, part)
        part.rename(folder)
    return folder / "subject.toml"


def measured(out: Path, names: Sequence[str] = tuple(PLANTED), local: int = 2) -> dict[str, Any]:
    """Conducts the campaigns and prints a line for each. The keys begin with `real_`."""
    results = []
    for name in names:
        result = play(name, out, local)
        results.append(result)
        print(
            f"{name:8} mended {result.mended!s:5} recovered {result.recovered:5.2f} given {result.given:.3f} reached "
            f"{result.reached:.3f} of {result.possible:.3f}, {result.wrong} of {result.claims} claims wrong, "
            f"{result.runs:.1f} runs, {result.seconds:.0f} s: {', '.join(result.accepted) or '-'}",
            flush=True,
        )
    troubles = sum(result.troubles for result in results)
    return {
        "real_mended": sum(result.troubles * result.mended for result in results) / troubles,
        "real_recovered": statistics.fmean(min(1.0, result.recovered) for result in results),
        "real_wrong": sum(result.wrong for result in results) / max(1, sum(result.claims for result in results)),
        "real_cost_ratio": statistics.fmean(result.runs for result in results) / exhaustive_cost(),
        "real_troubles": troubles,
        "real_claims": sum(result.claims for result in results),
        "real_subjects": len(results),
        "real_minutes": [round(result.seconds / 60, 1) for result in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", default=[*PLANTED])
    parser.add_argument("--out", type=Path, default=Path("campaigns-real"))
    parser.add_argument("--local", type=int, default=2)
    arguments = parser.parse_args()
    print(json.dumps(measured(arguments.out, arguments.names, arguments.local)))


if __name__ == "__main__":
    main()
