"""`StudyFolder`: the files of one study. The plan is read by people, `study.json` by the researcher."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.files import write_whole
from agentjet.research.journal import Book, annex_path, read_book
from agentjet.research.models import Study


@dataclass(frozen=True)
class StudyFolder:
    """`study.json` and `plan.md`, then `journal.jsonl`, `steer.jsonl`, the runner's folders, and the report."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def steering(self) -> Path:
        return self.path / "steer.jsonl"

    def books(self) -> list[Book]:
        """What is in the journal of the study, and in that of each annex. Raises `ConfigError`."""
        annexes = takewhile(Path.exists, (annex_path(self.journal, number) for number in count(1)))
        return [read_book(path) for path in (self.journal, *annexes)]

    def check_new(self) -> None:
        """Raises `ConfigError` where a plan, or a study's data, lie."""
        if read_book(self.journal).study is not None:
            raise ConfigError(f"{self.path} holds a study that was begun: give another folder")
        if (self.path / "study.json").exists():
            raise ConfigError(f"{self.path} holds a plan already: give another folder (--out), or delete that one")

    def make(self) -> None:
        """Raises `ConfigError` where no folder can be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.path}: {error.strerror}; name a folder that can be made") from None

    def write(self, study: Study, plan: str) -> None:
        """Raises `ConfigError` where another study lies."""
        self.check_new()
        self.make()
        (self.path / "plan.md").write_text(plan, encoding="utf-8")
        write_whole(self.path / "study.json", json.dumps(study.to_json(), indent=2, ensure_ascii=False) + "\n")

    def study(self) -> Study:
        """Raises `ConfigError`."""
        file = self.path / "study.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigError(
                f"{self.path} holds no study.json: name the folder of a study, or plan one with `agentjet research new`"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{file} is no JSON: {error}") from None
        return Study.from_json(content)
