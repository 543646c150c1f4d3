"""`CodingAgent`: a proposer that is a command, such as Claude Code, Codex CLI or mini-swe-agent.

The command works in a scratch folder: `subject/` has the files of the base, `campaign/` the newest run and the
notebook. It reads its task from standard input, and edits files in `subject/`. The difference is the patch of one
intervention; `hypothesis.json` gives its reasons. Landlock blocks the rest of the disk; held-out tasks are not there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from agentjet.client.command import CapturedProcess
from agentjet.errors import ConfigError
from agentjet.research import fence
from agentjet.research.campaign.models import Intervention, ProposerAway, View
from agentjet.research.campaign.subject_repo import git, read_folder, write_files
from agentjet.research.records import shortened

REASONS = ("name", "why", "predicts", "refutes")
LONGEST_REASONS = 2**20
"""Bytes of `hypothesis.json`."""
TASK = """Question: {topic}
The agent in subject/ is trained by reinforcement learning and judged elsewhere by other code. Read campaign/run.json
(curves, signals, transcripts), campaign/notebook.json and campaign/judge.txt. Edit the files in subject/ so that the
trained agent scores higher: one change, as a testable hypothesis. Model, held-out tasks, evaluator and lengths in
subject.toml are fixed: a change of them is refused. Then write hypothesis.json with the keys name, why, predicts and
refutes. Give no results: they come from runs. If nothing is worth a try, change no file.
"""


@dataclass
class CodingAgent:
    """A `Proposer`."""

    command: tuple[str, ...]
    readable: tuple[Path, ...] = ()
    """Paths that it may read, besides its folder, the system's programs and the files in the command."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the command, such as the key of its model."""
    seconds: float = 1800.0
    name: str = "coding agent"

    def __post_init__(self) -> None:
        if not fence.version():
            raise ConfigError("--agent-cli: this kernel cannot restrict a command (Landlock, Linux 5.13); omit it")

    def propose(self, view: View, most: int) -> Sequence[Intervention | str]:
        """Returns one proposal, a text with the reason why it cannot be used, or nothing if no file was changed."""
        with TemporaryDirectory(prefix="agentjet-coding-agent-") as name:
            folder = Path(name).resolve()
            files = {path: text.encode() for path, text in view.files.items()}
            write_files(files, folder / "a")
            write_files(files, folder / "work" / "subject")
            write_files(facts(view), folder / "work" / "campaign")
            self._run(folder, TASK.format(topic=view.topic))
            if odd := odd_file(folder / "work" / "subject"):
                return [f"the coding agent left {odd!r}, which is not a regular file"]
            try:
                read_folder(folder / "work" / "subject", folder / "model")  # Checks its size before git reads it.
            except ConfigError as error:
                return [str(error)]
            (folder / "work" / "subject").rename(folder / "b")
            patch = git(
                folder, "diff", "--no-index", "--no-prefix", "--no-color", "--no-ext-diff", "a", "b", codes=(0, 1)
            ).decode("utf-8", "replace")
            if not patch:
                return []
            try:
                given = {"kind": "agent", "patch": patch, **reasons(folder / "work" / "hypothesis.json")}
                return [Intervention.from_json(given)]
            except ConfigError as error:
                return [str(error)]

    def _run(self, folder: Path, task: str) -> None:
        """Raises `ProposerAway` for a command that fails or takes too long."""
        work, home = folder / "work", folder / "work" / "home"
        home.mkdir()
        named = [Path(shutil.which(word) or word).resolve() for word in self.command]
        readable = [path for path in (*self.readable, *named) if path.is_file() or path in self.readable]
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
        with TemporaryFile() as given:
            given.write(task.encode())
            given.seek(0)
            fenced = fence.fenced(self.command, work, readable)
            command = CapturedProcess(fenced, merged=True, cwd=work, env={**own, **self.environment}, stdin=given)
        try:
            status = command.wait(self.seconds)
        finally:
            command.signal(signal.SIGKILL)  # and its children
        if status is None:
            command.wait()
        how = f"did not end within {self.seconds:g} s" if status is None else status and f"ended with status {status}"
        if how := command.excess or how:
            end = shortened(command.text().strip(), 500)
            raise ProposerAway(f"--agent-cli: {self.command[0]} {how}: {end}")


def facts(view: View) -> dict[str, bytes]:
    """Files about the campaign for the command."""
    entries = [[e.number, e.kind, list(e.because), e.content] for e in view.notebook]
    return {
        "run.json": json.dumps(view.observation.to_json(), indent=1).encode(),
        "notebook.json": json.dumps(entries, indent=1).encode(),
        "judge.txt": view.judge_source.encode(),
    }


def odd_file(folder: Path) -> str:
    """Name of a file that is missing, a link or a device, or "". Removes caches of Python."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return path.name
    for cache in [*folder.rglob("__pycache__")]:
        shutil.rmtree(cache, ignore_errors=True)
    return ""


def reasons(file: Path) -> dict[str, str]:
    """Name and reasons of the command's change; defaults if it gave none."""
    try:
        is_plain = file.is_file() and not file.is_symlink() and file.stat().st_size <= LONGEST_REASONS
        given = json.loads(file.read_text(encoding="utf-8")) if is_plain else {}
    except (OSError, ValueError, RecursionError):
        given = {}
    given = given if isinstance(given, dict) else {}
    found = {key: str(given.get(key, ""))[:2000] for key in REASONS}
    return {**found, "name": found["name"][:80] or "a patch of the coding agent"}
