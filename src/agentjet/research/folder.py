"""`StudyFolder`: the files of one study. The plan is read by people, `study.json` by the researcher."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.research.files import write_whole
from agentjet.research.journal import read_book
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

    def check_new(self) -> None:
        """Raises `ConfigError` where a study's data lie."""
        if read_book(self.journal).study is not None:
            raise ConfigError(f"{self.path} holds a study that was begun: give another folder")

    def write(self, study: Study, plan: str) -> None:
        """Raises `ConfigError` where another study's data lie."""
        self.check_new()
        self.path.mkdir(parents=True, exist_ok=True)
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
