"""Topics of published studies in miniature: each goes from one line to a report, and is compared with a whole grid.

`cases/published/topics.toml` has the topics, with the folder of the subject that is trained, and the levels of a grid.
`measure` trains every level with `SEEDS` fresh seeds and keeps score and seconds of each run in NAME.json. `conduct`
runs the line as a user would, `agentjet research start`, and reads the claims and their verdicts from the campaign's
notebook.

A verdict *agrees* if the grid does not exclude it: the interval of the claim's contrast, over the seeds of the grid,
holds a value for which the verdict is right. *Inconclusive* agrees only if the grid excludes less than two of the other
verdicts. The claims of an anomaly are those about the remedy of the planted cause, also beside other remedies; without
any, nothing agrees.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentjet.cli import load_example
from agentjet.cli.serve import ChildServer
from agentjet.cli.trial_servers import SharedServerSlot
from agentjet.research.campaign.strategist import table
from agentjet.research.campaign.subject_repo import SubjectRepo, read_subject
from agentjet.research.journal import Notebook
from agentjet.research.models import Hypothesis, Outcome, Study, Subject, Trial, Verdict
from agentjet.research.statistics import welch
from agentjet.research.swarm_runner import SwarmRunner
from bench.machine import CASES, ROOT

FOLDER = CASES / "published"
SEEDS = tuple(range(1001, 1009))
"""Seeds of the grid. Those of studies are hashes, and not among them."""
LEVEL = 0.05
"""Chance that an interval of the grid misses the true contrast."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    **{str(width): {"hidden_size": width, "intermediate_size": 2 * width} for width in (16, 32, 64, 128)},
    "untied": {"tie_word_embeddings": False, "initializer_range": 0.3},
}
"""Random models by name. Adapters cannot move the logits of one whose embeddings are small."""


def topics(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns these topics, or all."""
    every = tomllib.loads((FOLDER / "topics.toml").read_text(encoding="utf-8"))["topic"]
    named = {topic["name"]: topic for topic in every}
    return [named[name] for name in names] or every


def write_subjects(folder: Path) -> None:
    """Writes the subjects and their models to a new folder."""
    shutil.copytree(FOLDER, folder)
    for name, shape in MODELS.items():
        load_example("digits", "random_model").make_random_model(folder / "models" / name, **shape)


# ---- the grid --------------------------------------------------------------------------------------------------------


def measure(topic: Mapping[str, Any]) -> None:
    """Trains every level with the seeds of the grid, and writes the file.

    A server of its own has the runs of a level. The levels are trained side by side, so that other work on the machine
    affects their seconds alike.
    """
    with TemporaryDirectory() as made, ExitStack() as stack:
        place = Path(made)
        write_subjects(place / "subjects")
        runners: dict[str, SwarmRunner] = {}
        for level, edits in topic["levels"].items():
            folder = place / level
            repo = SubjectRepo.create(folder / "repo", write_level(place, level, topic["subject"], edits))
            subject = repo.subject(repo.first)
            server = stack.enter_context(started(subject, folder / "server"))
            slot = SharedServerSlot(server.url, (server.data_dir / "admin-token").read_text().strip(), print)
            job = {name: value for name, value in subject.settings.items() if name.startswith("job.")}
            runners[level] = stack.enter_context(SwarmRunner(replace(subject, settings=job), folder / "grid", [slot]))

        def run(runner: SwarmRunner) -> list[Outcome]:
            for seed in SEEDS:
                runner.launch(str(seed), Trial("grid", "base", {}, seed, "confirm"))
            return [runner.collect(str(seed)) for seed in SEEDS]

        with ThreadPoolExecutor() as pool:
            runs = dict(zip(runners, pool.map(run, runners.values()), strict=True))
    write_grid(topic, runs)


@contextmanager
def started(subject: Subject, folder: Path) -> Iterator[ChildServer]:
    """A server with the settings of a subject. Its trials are runs there, which start at once."""
    given = {"model.threads": 1, **subject.settings, "model.name": subject.model}
    overrides = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    with ChildServer(None, overrides, folder, is_one_of_many=True) as server:
        server.connect().close()
        yield server


def write_level(place: Path, level: str, subject: str, edits: Sequence[Sequence[str]]) -> Path:
    """Writes the subject at a level. Returns its subject.toml."""
    folder = place / level / subject
    shutil.copytree(place / "subjects" / subject, folder)
    (folder.parent / "models").symlink_to(place / "subjects" / "models")
    for name, before, after in edits:
        text = (folder / name).read_text(encoding="utf-8")
        assert before in text, f"{name} of {subject} has no {before!r}"
        (folder / name).write_text(text.replace(before, after), encoding="utf-8")
    return folder / "subject.toml"


def write_grid(topic: Mapping[str, Any], runs: Mapping[str, Sequence[Outcome]]) -> None:
    def rounded(run: Outcome) -> dict[str, float]:
        assert run.score is not None, run.note
        return {"score": round(run.score, 4), "seconds": round(math.exp(run.measured("seconds") or math.nan), 2)}

    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    content = {
        "topic": topic["line"],
        "command": f"python -m bench.topics --grids {topic['name']}",
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "levels": {
            level: {str(seed): rounded(run) for seed, run in zip(SEEDS, found, strict=True)}
            for level, found in runs.items()
        },
    }
    text = re.sub(r"\{\s+(.*),\s+(.*)\s+\}", r"{\1, \2}", json.dumps(content, indent=1))  # A run is a line.
    (FOLDER / f"{topic['name']}.json").write_text(f"{text}\n", encoding="utf-8")


# ---- the line --------------------------------------------------------------------------------------------------------


def conducted(names: Sequence[str], out: Path | None) -> dict[str, Any]:
    """Conducts the topics, and prints a line for each."""
    with TemporaryDirectory() as made:
        folder = Path(made) if out is None else out.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "subjects").exists():
            write_subjects(folder / "subjects")
        agreed = {}
        for topic in topics(names):
            found = conduct(topic, folder / topic["name"], folder / "subjects")
            if not topic.get("beside"):
                agreed[topic["name"]] = found["agrees"]
            print(f"{topic['name']}: {json.dumps(found)}", flush=True)
    return {"published": sum(agreed.values()), "of": len(agreed), "disagree": [n for n, a in agreed.items() if not a]}


def conduct(topic: Mapping[str, Any], out: Path, subjects: Path) -> dict[str, Any]:
    """Runs the line of a topic to its report. Returns its claims beside the grid. `subjects` are those of
    `write_subjects`.
    """
    command = ["research", "start", "--topic", topic["line"], "--subject", f"{topic['subject']}/subject.toml"]
    command += ["--budget", topic["budget"], "--out", str(out), "--yes", *topic.get("options", ())]
    began = time.monotonic()
    with ExitStack() as stack:
        if topic.get("shared"):
            subject = read_subject(subjects / topic["subject"] / "subject.toml")
            server = stack.enter_context(started(subject, out.with_suffix(".server")))
            command += ["--server", server.url, "--admin-token-file", str(server.data_dir / "admin-token")] * 2
        log = stack.enter_context(out.with_suffix(".log").open("ab"))
        log.write(f"agentjet {shlex.join(command)}\n".encode())
        log.flush()
        done = subprocess.run([sys.executable, "-m", "agentjet.cli", *command], cwd=subjects, stdout=log, stderr=log)
    is_done = done.returncode == 0 and (out / "report.md").exists()
    found = {"exit": done.returncode, "minutes": round((time.monotonic() - began) / 60, 1)}
    if not is_done:
        return {**found, "agrees": False, "claims": []}
    claims = read_claims(topic, out)
    with Notebook(out, writer=False) as notebook:
        spent = notebook.known("ended").content["spent"]["runs"]
    agrees = bool(claims) and all(claim["agrees"] for claim in claims)
    return {**found, "runs": round(spent, 1), "agrees": agrees, "claims": claims}


def read_claims(topic: Mapping[str, Any], out: Path) -> list[dict[str, Any]]:
    """Returns the claims of a campaign, each with the interval of the grid and whether they agree."""
    grid = json.loads((FOLDER / f"{topic['name']}.json").read_text(encoding="utf-8"))["levels"]
    with Notebook(out, writer=False) as notebook:
        studies = [Study.from_json(entry.content["study"]) for entry in notebook.of("study")]
        learned = [entry.content for entry in notebook.of("learned") if "verdict" in entry.content]
    if "cause" in topic:
        named = {remedy.name for remedy in table()[1] if remedy.cause == topic["cause"]}
        found = [
            (study, study.hypotheses[0], one["finding"]["verdict"])
            for study, one in zip(studies, learned, strict=False)
            if named & {*one["name"].split(" + ")}
        ]
        levels = [grid["given"], grid[topic["cure"]]]
    else:
        verdicts = {one["hypothesis"]: one["verdict"] for one in learned[0]["findings"]}
        found = [(studies[0], claim, verdicts[claim.id]) for claim in studies[0].hypotheses]
        levels = [*grid.values()]
    return [compared(study, claim, verdict, levels) for study, claim, verdict in found]


def compared(
    study: Study, claim: Hypothesis, verdict: Verdict, levels: Sequence[Mapping[str, Mapping[str, float]]]
) -> dict[str, Any]:
    """Compares a verdict with the grid, whose `levels` are in the order of the study's arms."""
    samples = {
        arm.name: [run["score"] if claim.metric == "score" else math.log(run["seconds"]) for run in level.values()]
        for arm, level in zip(study.arms, levels, strict=True)
    }
    contrast = claim.contrast
    grid = welch(*(samples[arm] for arm in contrast), weights=[*contrast.values()])
    (low, high), matters = grid.interval(LEVEL), claim.sesoi or study.sesoi
    right = [
        name
        for name, is_possible in {
            "supported": high > matters,
            "refuted": low < -matters,
            "practically_equivalent": low < matters and high > -matters,
        }.items()
        if is_possible
    ]
    return {
        "claim": claim.claim,
        "verdict": verdict,
        "grid": [round(value, 3) for value in (grid.estimate, low, high)],
        "right": right,
        "agrees": verdict in right or (verdict == "inconclusive" and len(right) > 1),
    }
