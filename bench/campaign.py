"""Troubles that campaigns find and mend, and their cost: `python -m bench.campaign`.

Four subjects with planted troubles train a tiny real model through real servers. A model of random weights should
answer in digits: see `examples/digits/campaign`. A campaign with the offline strategist works on each subject. The
truth is that of fresh seeds: of the given subject, of the campaign's last base, and of the healthy subject.

`mended` counts troubles, `recovered` is the share of the healthy subject's gain that the last base has, `wrong` the
share of studies whose verdict is not that of the fresh seeds, `cost_ratio` the runs against trying every single remedy
at full length with four seeds. Four figures are tests of campaigns: `breaches` (hostile proposals that became
commits), `resume_identical` (SIGKILL at entries of the notebook), `week_ok` (servers that are away or lose runs), and
`fortnight_ok` (the same on eight servers, with full disks, an upgrade, messages of people and a reopened end).

Three options measure other things instead, without a model:

* `--unseen SEED...`: the same figures for twelve planted subjects of each seed in a world of NumPy that executes the
  subject's files (`campaigns/planted.py`, `cases/planted.toml`);
* `--honest SEED`: `false_statements` of campaigns on forty healthy subjects in that world (`campaigns/healthy.py`);
* `--hostile [TEXT...]`: `fatal`, `escaped`, `leaked` of the hostile answers in `campaigns/attacks.py`, or only of those
  whose names have one of the texts (`campaigns/hostile.py`).

Prints a line for each subject, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import agentjet.research
from agentjet.cli import example, load_example
from agentjet.cli.trial_servers import local_slots
from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Strategist, table
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.journal import Notebook
from agentjet.research.models import Trial
from agentjet.research.swarm_runner import SwarmRunner
from bench.campaigns import healthy, hostile, planted
from bench.machine import bounded, report, tests_pass

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
ENOUGH = 0.8  # Share of the gain at which the troubles count as mended


def write_subject(folder: Path, troubles: tuple[str, ...]) -> Path:
    """The demo's subject with these troubles only."""
    shutil.copytree(example("digits") / "campaign", folder)
    load_example("digits", "random_model").make_random_model(folder / "model")
    agent = (folder / "agent.py").read_text()
    assert LIMIT in agent and FORMAT in agent
    agent = agent.replace(LIMIT, LIMIT * ("limit" in troubles) + GREEDY * ("greedy" in troubles))
    agent = agent if "format" in troubles else agent.replace(FORMAT, HEALTHY)
    (folder / "agent.py").write_text(agent)
    return folder / "subject.toml"


def score(repo: SubjectRepo, commit: str, local: int) -> float:
    """Mean score of a commit with fresh seeds."""
    with SwarmRunner(repo.subject_of, repo.folder, local_slots(local)) as runner:
        for seed in SEEDS:
            runner.launch(f"truth {commit} {seed}", Trial("truth", commit, {}, seed, "confirm"))
        runs = [runner.collect(f"truth {commit} {seed}") for seed in SEEDS]
    return statistics.fmean(run.score for run in runs if run.score is not None)


def play(name: str, healthy: SubjectRepo, out: Path, local: int) -> dict[str, Any]:
    """One campaign, and the truth about it. `seconds` are those of the campaign. A healthy subject is mended if no
    change was accepted that does not raise the score.
    """
    repo = SubjectRepo.create(out / name / "campaign", write_subject(out / name / "given", PLANTED[name]))
    began = time.monotonic()
    with Notebook(repo.folder) as notebook, SwarmRunner(repo.subject_of, repo.folder, local_slots(local)) as runner:
        question = Question(f"Why does it not learn? ({name})", BUDGET, sesoi=SESOI, **repo.rules)
        ending = Campaign(question, notebook, repo, runner, [Strategist()]).run()
        learned = [entry.content["verdict"] for entry in notebook.of("learned") if "verdict" in entry.content]
        studies = [[arm["code"] for arm in entry.content["study"]["arms"]] for entry in notebook.of("study")]
    seconds = time.monotonic() - began
    truth = {commit: score(repo, commit, local) for commit in {repo.first, ending["base"], *chain(*studies)}}
    given, reached = truth[repo.first], truth[ending["base"]]
    possible = given if not PLANTED[name] else score(healthy, healthy.first, local)
    pairs = zip(learned, studies, strict=True)
    effects = [(said, verdict(truth[changed] - truth[base])) for said, (base, changed) in pairs]
    wrong = sum(said not in ("inconclusive", so) for said, so in effects)
    recovered = (reached - given) / (possible - given) if PLANTED[name] else min(1.0, reached / given)
    return {
        "mended": recovered >= ENOUGH and not wrong,
        "recovered": recovered,
        "given": given,
        "reached": reached,
        "possible": possible,
        "accepted": ending["accepted"],
        "claims": len(learned),
        "wrong": wrong,
        "runs": ending["spent"]["runs"],
        "seconds": seconds,
        "troubles": max(1, len(PLANTED[name])),
    }


def verdict(effect: float) -> str:
    if abs(effect) < SESOI:
        return "practically_equivalent"
    return "supported" if effect > 0 else "refuted"


AT_LEAST = {"mended": 0.7, "recovered": 0.8, "resume_identical": 1, "week_ok": 1, "fortnight_ok": 1}
AT_MOST = {"wrong": 0.05, "cost_ratio": 0.4, "breaches": 0, "lines": 5000}


def measured(out: Path, names: list[str], local: int) -> dict[str, Any]:
    """Conducts the campaigns, and prints a line for each."""
    healthy = SubjectRepo.create(out / "truth", write_subject(out / "whole", ()))
    results = {}
    for name in names:
        results[name] = play(name, healthy, out, local)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    sums = {key: sum(one[key] for one in results.values()) for key in ("troubles", "claims", "wrong")}
    remedies = 4.0 * (len({row.name for row in table()[1]}) + 1)  # Each at full length, with four seeds
    return {
        "mended": sum(one["troubles"] * one["mended"] for one in results.values()) / sums["troubles"],
        "recovered": statistics.fmean(min(1.0, one["recovered"]) for one in results.values()),
        "wrong": sums["wrong"] / max(1, sums["claims"]),
        "cost_ratio": statistics.fmean(one["runs"] for one in results.values()) / remedies,
        "troubles": sums["troubles"],
        "claims": sums["claims"],
        "subjects": len(results),
        "minutes": [round(one["seconds"] / 60, 1) for one in results.values()],
    }


def tested() -> dict[str, Any]:
    """The figures that are tests, and the lines of the researcher's source."""
    file = "tests/research/campaign/test_campaign.py"
    sources = Path(agentjet.research.__file__).parent.rglob("*.py")
    return {
        "breaches": 0 if tests_pass(file, "-k", "hostile") else None,
        "resume_identical": tests_pass(file, "-k", "killed"),
        "week_ok": tests_pass(file, "-k", "away or week or lost_run"),
        "fortnight_ok": tests_pass("tests/research/campaign/test_inbox.py", "-k", "fortnight"),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources),
    }


# ---- without a model -------------------------------------------------------------------------------------------------

UNSEEN_AT_LEAST = {"mended": 0.85, "recovered": 0.9}
NONE = dict.fromkeys(("false_statements", "fatal", "escaped", "leaked"), 0.0)
HEALTHY_SUBJECTS = 40


def in_folder(measure: Callable[[Any, Path], Any], case: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="agentjet-bench-") as folder:
        return measure(case, Path(folder))


def unseen(seeds: Sequence[int], jobs: int) -> dict[str, Any]:
    """Figures of the subjects that these seeds draw."""
    found: list[planted.Judged] = []
    with ProcessPoolExecutor(jobs) as pool:
        subjects = [subject for seed in seeds for subject in planted.drawn(seed)]
        for judged in pool.map(partial(in_folder, planted.conducted), subjects):
            found.append(judged)
            print(judged.line(), flush=True)
    return planted.summary(found)


def honest(seed: int, jobs: int) -> dict[str, Any]:
    """Number of false statements, by subject the distinct ones."""
    false = 0
    with ProcessPoolExecutor(jobs) as pool:
        subjects = [healthy.healthy(seed, number) for number in range(HEALTHY_SUBJECTS)]
        results = pool.map(partial(in_folder, healthy.conducted), subjects)
        for subject, said in zip(subjects, results, strict=True):
            false += len(said)
            print(f"{subject.name}: {subject.about}: {said or 'nothing false'}", flush=True)
    return {"false_statements": false, "subjects": HEALTHY_SUBJECTS, "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PLANTED, "tests"], default=[*PLANTED, "tests"])
    parser.add_argument("--local", type=int, default=2, help="servers at the same time")
    parser.add_argument("--unseen", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--honest", type=int, metavar="SEED")
    parser.add_argument("--hostile", nargs="*", metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of these three")
    given = parser.parse_args()
    if given.unseen:
        found = unseen(given.unseen, given.jobs)
        report("campaign", found, bounded(found, UNSEEN_AT_LEAST, AT_MOST))
        return
    if given.honest is not None:
        found = honest(given.honest, given.jobs)
        report("campaign", found, bounded(found, {}, NONE))
        return
    if given.hostile is not None:
        with tempfile.TemporaryDirectory(prefix="agentjet-hostile-") as made:
            Path(made).chmod(0o755)  # arms and coding agents are other users
            found = hostile.summary(hostile.measured(Path(made), given.hostile, given.jobs))
        report("campaign", found, bounded(found, {}, NONE))
        return
    names = [name for name in given.only if name != "tests"]
    with tempfile.TemporaryDirectory() as made:
        found = measured(Path(made), names, given.local) if names else {}
    found |= tested() if "tests" in given.only else {}
    report("campaign", found, bounded(found, AT_LEAST, AT_MOST))


if __name__ == "__main__":
    main()
