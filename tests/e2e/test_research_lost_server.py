"""A server that dies for good ends a study's run in a sentence, costs the study nothing, and is gone on with.

In a file of its own: it waits for as long as clients wait for a server that went away.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.research.journal import StudyFolder, read_log
from agentjet.research.models import Subject
from agentjet.research.report import StudyView
from tests.e2e.researching import LONG, Researcher, server_options, study_of
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def test_a_server_of_others_that_dies_for_good_costs_nothing(subject: Subject, tmp_path: Path) -> None:
    folder, model = tmp_path / "study", Path(subject.model)
    StudyFolder(folder).write(study_of(subject), "")
    with Server(model, tmp_path / "server") as server:
        first = Researcher(folder, *server_options(server))
        first.until(lambda: bool(read_log(folder / "study.sqlite").outcomes) and first.is_training())
        server.kill()
        assert first.process.wait(LONG) == 2, first.log
    said = f"--server {server.url}: no answer from {server.url}"
    assert said in first.log and f"Continue with: agentjet research run {folder}" in first.log
    ended = {name: [outcome.end for outcome in of] for name, of in read_log(folder / "study.sqlite").outcomes.items()}
    assert ended and {end for ends in ended.values() for end in ends} == {"completed"}, first.log
    with Server(model, tmp_path / "server") as server:
        second = Researcher(folder, *server_options(server))
        assert second.process.wait(LONG) == 0, second.log
    log = read_log(folder / "study.sqlite")
    assert len(log.trials) == 8 and set(log.attempts.values()) == {1}, second.log
    assert {outcome.end for [outcome] in log.outcomes.values()} == {"completed"}
    assert StudyView(log).spending.total == 8.0
