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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentjet.cli import load_example
from agentjet.cli.serve import ChildServer
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Outcome, Subject, Trial
from agentjet.research.swarm_runner import SharedServerSlot, SwarmRunner
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
            server = stack.enter_context(ChildServer(None, overrides(subject), folder / "server", is_one_of_many=True))
            server.connect().close()
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


def overrides(subject: Subject) -> list[str]:
    given = {"model.threads": 1, **subject.settings, "model.name": subject.model}
    return [f"{name}={json.dumps(value)}" for name, value in given.items()]


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
    text = json.dumps(content, indent=1)
    (FOLDER / f"{topic['name']}.json").write_text(f"{text}\n", encoding="utf-8")
