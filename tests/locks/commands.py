"""The commands that list or show, and their output over the recorded data dirs.

Other commands have a reason why they have no recorded output.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.errors import AgentJetError
from tests.locks.answers import Answers, normalised
from tests.locks.data_dirs import Source
from tests.server.serving import ADMIN

OF_EACH_RUN = (
    "status",
    "status --json",
    "watch --once",
    "checkpoints list",
    "episodes list",
    "episodes list --limit 3 --json",
    "episodes list --limit 3 --sort reward --min-reward 0.5 --status finished",
    "track --once --to jsonl:OUT/steps.jsonl --cursors OUT",
)
OF_SMALL = (
    "job show",
    "job show --json",
    "cluster status",
    "cluster status --json",
    "checkpoints list --json",
    "episodes list --limit 3 --sort oldest",
    "episodes list --limit 3 --sort=-num_tokens --mode train --task-set math",
    "episodes list --limit 3 --task 12+30 --group math/12+30 --client trainer-a --code-version v1",
    "episodes list --limit 3 --batch 1 --min-version 1 --max-version 1 --max-reward 1",
    "episodes list --status not_needed --limit 3",
    "episodes list --status aborted --reason Timeout",
    "episodes list --text € --limit 3",
    "episodes list --task none",
    "episodes list --before none",
    "episodes show none",
    "episodes export OUT/all.jsonl --status all",
    "episodes export OUT/good.jsonl --mode train --min-reward 1",
    "runs list",
    "runs list --json",
)
"""Of the default run of `small` only."""
OF_FOLDERS = (
    "compare small rolled",
    "compare rolled branched --json",
    "compare earlier/data small/runs/team rolled/runs/default branched",
    "compare small/runs/ended rolled",
    "compare small",
    "track small --to csv:OUT/small.csv --cursors OUT",
    "track rolled --to jsonl:OUT/rolled.jsonl --cursors OUT",
    "track earlier/data --to jsonl:OUT/earlier.jsonl --cursors OUT",
    "track branched --run none --to jsonl:OUT/none.jsonl --cursors OUT",
)
OF_NOTHING = ("recipes", "recipes show grpo", "recipes show dense_turn_credit", "recipes show none")
OVERLAYS = ("logprob", "version", "advantage")
REASONS = {
    "serve": "runs a server: e2e tests",
    "demo": "trains: e2e tests",
    "run": "trains: tests/cli/test_run.py",
    "sft": "trains: tests/client/test_sft.py",
    "env": "shows environments, not runs: tests/cli/test_env.py",
    "eval": "evaluates: tests/client/test_evaluation.py",
    "look": "serves: its routes are in test_reading",
    "open": "prints a link that is valid once: tests/cli/test_look.py",
    "export": "writes a model: tests/cli/test_commands.py",
    "merge": "writes a model: tests/compute/test_merging.py",
    "doctor": "shows this machine: tests/cli/test_doctor.py",
    "job set": "changes a run: tests/cli/test_job.py",
    "recipes check": "shows times: tests/recipes/test_check.py",
    "runs create": "changes a server: tests/client/test_runs.py",
    "runs end": "changes a server: tests/client/test_runs.py",
    "episodes begin": "changes a run: tests/cli/test_feedback.py",
    "episodes finish": "changes a run: tests/cli/test_feedback.py",
    "episodes abort": "changes a run: tests/cli/test_feedback.py",
    "checkpoints create": "changes a run: tests/cli/test_checkpoints.py",
    "checkpoints tag": "changes a run: tests/cli/test_checkpoints.py",
    "checkpoints untag": "changes a run: tests/cli/test_checkpoints.py",
    "checkpoints rollback": "changes a run: tests/cli/test_checkpoints.py",
    "checkpoints branch": "changes a run: tests/cli/test_checkpoints.py",
    "cluster install": "installs packages: tests/cluster",
    "cluster scale": "changes a run: tests/server/test_cluster.py",
    "token show": "shows a secret: tests/cli/test_token.py",
    "token rotate": "changes a secret: tests/cli/test_token.py",
    "research": "reads studies, not runs: tests/cli/test_research.py",
}
"""By the beginning of a command."""


def commands(group: typer.core.TyperGroup, path: str = "") -> Iterator[str]:
    """The names of all commands."""
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            if command.invoke_without_command:
                yield f"{path}{name}"
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}"


@contextmanager
def terminal() -> Iterator[None]:
    """Context of a terminal of 100 columns in UTC."""
    kept = dict(os.environ)
    os.environ.update({"TZ": "UTC", "COLUMNS": "100", "NO_COLOR": "1"})
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
        time.tzset()


def output(command: str, place: Path, names: Mapping[str, str], **environment: str) -> str:
    """The output of a command in the folder `place`, with errors as `main` prints them, and the files it wrote.

    `OUT` is a folder for files.
    """
    out = place / "out"
    arguments = [part.replace("OUT", str(out)) for part in shlex.split(command)]
    working = Path.cwd()
    os.chdir(place)
    try:
        result = CliRunner(env=environment).invoke(app, arguments)
    finally:
        os.chdir(working)
    text = result.output
    if isinstance(result.exception, AgentJetError):
        text += f"agentjet: {result.exception}\n"
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    for path in sorted(out.iterdir()):
        if path.is_file() and path.suffix in (".csv", ".jsonl") and path.name in command:
            text += f"--- {path.name}\n{path.read_text()}"
    return normalised(text, names)


def outputs(wanted: Iterable[str], place: Path, names: Mapping[str, str], **environment: str) -> Answers:
    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "out").mkdir()
    with terminal():
        return {f"agentjet {command}": output(command, place, names, **environment) for command in wanted}


def outputs_of_server(source: Source, run: str, episodes: Iterable[str]) -> Answers:
    """The output of the commands over a run of a server; `episodes` are shown."""
    shown = [f"episodes show {one}" for one in episodes]
    overlaid = [f"{command} --overlay {overlay}" for command in shown[:1] for overlay in OVERLAYS]
    wanted = [*OF_EACH_RUN, *shown, *overlaid, *(f"{command} --json" for command in shown[:1])]
    wanted += OF_SMALL if source.name == "small" and not run else ()
    url = f"{source.url}/runs/{run}" if run else source.url
    found = outputs(wanted, source.data_dir.parent, source.names, AGENTJET_URL=url, AGENTJET_TOKEN=ADMIN)
    return {f"{run} {command}".strip(): text for command, text in found.items()}
