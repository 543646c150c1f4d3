"""`MemoryRepo`: the commits of a subject in memory, for fast worlds. Patches are applied by git."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from agentjet.research.campaign.models import Intervention
from agentjet.research.models import Refused
from agentjet.research.records import canonical
from bench.campaigning.world import flat

LOCKED = ("judge.py", "held_out.jsonl")
ARM_KEYS = ("agent", "tasks", "reward", "settings")


class MemoryRepo:
    """A `SubjectRepo` in memory."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._user = dict(files)
        self._commits: dict[str, dict[str, str]] = {}
        self.first = self._add({name: text for name, text in files.items() if name != "held_out.jsonl"})
        self.changed: list[str] = []

    def _add(self, files: dict[str, str]) -> str:
        commit = hashlib.sha256(canonical(files).encode()).hexdigest()[:40]
        self._commits[commit] = files
        return commit

    def commit(self, base: str, intervention: Intervention) -> str:
        files = dict(self._commits[base])
        if intervention.patch:
            files = patched(files, intervention.patch)
        if intervention.changes:
            head, _, rest = files["subject.toml"].partition("[settings]\n")
            settings = {**flat(tomllib.loads(f"[settings]\n{rest}")["settings"]), **intervention.changes}
            shown = "".join(f"{name} = {canonical(value)}\n" for name, value in sorted(settings.items()))
            files["subject.toml"] = f"{head}[settings]\n{shown}"
        before, after = (tomllib.loads(each["subject.toml"]) for each in (self._commits[self.first], files))
        for name in {*before, *after} - {*ARM_KEYS}:
            if before.get(name) != after.get(name):
                raise Refused(f"subject.toml: {name} is the judge's, and stays {before.get(name)!r}")
        for name in LOCKED:
            if files.get(name) != self._commits[self.first].get(name):
                raise Refused(f"{name}: the judge's files are fixed")
        if files == self._commits[base]:
            raise Refused("it changes nothing")
        for name, text in files.items():
            if name.endswith(".py"):
                try:
                    compile(text, name, "exec")
                except SyntaxError as error:
                    raise Refused(f"{name} line {error.lineno}: {error.msg}") from None
        return self._add(files)

    def files(self, commit: str) -> Mapping[str, str]:
        return self._commits[commit]

    def judge_source(self) -> str:
        return self._user["judge.py"]

    def changed_outside(self) -> list[str]:
        return self.changed


def patched(files: Mapping[str, str], patch: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as name:
        for file, text in files.items():
            (Path(name) / file).write_text(text, encoding="utf-8")
        done = subprocess.run(
            ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", "-"],
            cwd=name,
            input=patch,
            text=True,
            capture_output=True,
        )
        if done.returncode:
            raise Refused(f"the patch does not apply: {done.stderr.strip()[:200]}")
        return {path.name: path.read_text(encoding="utf-8") for path in Path(name).iterdir() if path.is_file()}
