"""Topics of published studies in miniature: each goes from one line to a report, and is compared with a whole grid.

`cases/published/topics.toml` has the topics, with the folder of the subject that is trained, and the levels of a grid.
`measure` trains every level with `SEEDS` fresh seeds and keeps score and seconds of each run in NAME.json. `conduct`
runs the line as a user would, `agentjet research start`, and reads the claims and their verdicts from the campaign's
notebook.

A verdict *agrees* if the grid does not exclude it: the interval of the claim's contrast, over the seeds of the grid,
holds a value for which the verdict is right. *Inconclusive* agrees only if the grid excludes less than two of the other
verdicts. An anomaly agrees if the grid's score of the accepted change is that of the level without the planted cause.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentjet.cli import load_example
from agentjet.cli.research import local_slots
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Outcome, Trial
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
    every = tomllib.loads((FOLDER / "topics.toml").read_text(encoding="utf-8"))["topic"]
    return [topic for topic in every if not names or topic["name"] in names]


def write_subjects(folder: Path) -> None:
    """Writes the subjects and their models to a new folder."""
    shutil.copytree(FOLDER, folder)
    for name, shape in MODELS.items():
        load_example("digits", "random_model").make_random_model(folder / "models" / name, **shape)


# ---- the grid --------------------------------------------------------------------------------------------------------


def measure(topic: Mapping[str, Any]) -> None:
    """Trains every level with the seeds of the grid, and writes the file."""
    with TemporaryDirectory() as made:
        place = Path(made)
        write_subjects(place / "subjects")
        runs = {level: [] for level in topic["levels"]}
        subjects = {level: place / level / topic["subject"] for level in runs}
        for level, of_level in topic["levels"].items():
            write_level(place, subjects[level], of_level.get("edit"))
        repos = {level: SubjectRepo.create(place / level / "repo", subjects[level] / "subject.toml") for level in runs}

        def setting(level: str) -> dict[str, Any]:
            given = topic["levels"][level].get("set", {})
            return {key: str(place / "subjects" / value) if key == "model" else value for key, value in given.items()}

        with SwarmRunner(
            lambda trial: repos[trial.arm].subject(repos[trial.arm].first).varied(trial.setting),
            place / "grid",
            local_slots(2),
        ) as runner:
            for seed in SEEDS:  # All levels alternate, so that other work on the machine affects them alike.
                for level in runs:
                    runner.launch(f"{level} {seed}", Trial("grid", level, setting(level), seed, "confirm"))
            for seed in SEEDS:
                for level, found in runs.items():
                    found.append(runner.collect(f"{level} {seed}"))
    write_grid(topic, runs)


def write_level(place: Path, subject: Path, edit: Sequence[str] | None) -> None:
    shutil.copytree(place / "subjects" / subject.name, subject)
    (subject.parent / "models").symlink_to(place / "subjects" / "models")
    if edit is not None:
        before, after = edit
        source = (subject / "agent.py").read_text(encoding="utf-8")
        assert before in source, f"agent.py of {subject.name} has no {before!r}"
        (subject / "agent.py").write_text(source.replace(before, after), encoding="utf-8")


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
    text = json.dumps(content, indent=1)
    (FOLDER / f"{topic['name']}.json").write_text(f"{text}\n", encoding="utf-8")
