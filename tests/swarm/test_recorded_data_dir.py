"""A journal that an earlier AgentJet wrote: it opens, it is read as it was, and the run goes on with it.

It has the earlier schema, and its tables lack the columns that this schema got later.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.protocol import BeginRequest, EpisodeQuery, FinishRequest
from agentjet.swarm import Journal, SwarmState
from agentjet.swarm.episodes import Queries
from agentjet.swarm.facts import load_trees
from agentjet.swarm.journal_file import migration
from agentjet.types import SOLE_POLICY
from tests.locks.data_dirs import EARLIER
from tests.locks.data_dirs import unpack as locked_data_dir
from tests.recorded_data_dir import TURNS, unpack


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal.open(unpack(tmp_path) / "journal.sqlite")) as journal:
        yield journal


@pytest.fixture
def swarm(journal: Journal) -> SwarmState:
    job = json.loads(journal.file.meta("job_settings", ""))
    began = journal.unsettled_episodes()[0].begun
    settings = journal.job_settings()
    assert settings is not None and job["revision"] == settings.revision
    return SwarmState(journal, settings.given, clock=lambda: began + 60)


def test_a_viewer_reads_all_of_it(tmp_path: Path) -> None:
    with closing(Journal.open_read_only(unpack(tmp_path) / "journal.sqlite")) as journal:
        queries = Queries.recorded(journal, lambda: 0.0)
        assert queries.store.policy_version == 3 and [step["reward/mean"] for step in queries.recent_steps] == [0.5] * 3
        [evaluation] = queries.journal.evaluations()
        assert (evaluation.score, evaluation.name, evaluation.held_out, evaluation.best) == (0.25, "", True, True)
        episodes = journal.find_episodes(EpisodeQuery(limit=100)).episodes
        assert len(episodes) == 18 == len({episode.id for episode in episodes})
        for episode in episodes:
            assert episode.reward_text == ""
            assert [call.role for call, *_ in queries.journal.calls(episode.id)] == ["", "", "judge"]
            assert sorted(load_trees(journal, episode.id)) == ["", "judge"] and not queries.journal.orphans(episode.id)


def test_the_pending_batch_is_learned_and_the_open_group_completed(swarm: SwarmState) -> None:
    pending, [live] = swarm.pending, swarm.live()
    assert pending is not None and pending.id == 3
    [trained] = swarm.batches.training_batches(pending).values()
    assert trained.facts.call_rewards.tolist() == [*TURNS[""], *TURNS["judge"]] * 4
    swarm.batches.learned(pending, {"policy/loss": 0.0})
    request = FinishRequest(reward=0.0, by_turn=TURNS, text="expected 30")
    done = swarm.finish(live.id, request)
    assert swarm.finish(live.id, request) == done and done.reward_text == "expected 30"
    calls = {call.id: call for call, *_ in swarm.queries.journal.calls(live.id)}
    assert [(calls[call].role, reward) for call, reward in done.call_rewards.items()] == [
        ("", 1.0),
        ("", 0.5),
        ("judge", 0.25),
    ]
    assert swarm.queries.num_groups("complete") == 1 and swarm.policy_version == 4


def test_batches_since_the_checkpoint_are_replayed(swarm: SwarmState) -> None:
    for batch in swarm.batches.from_version(2):
        training = swarm.batches.training_batches(batch)[SOLE_POLICY]
        assert training.forest.num_targets == 6 * 12 and len(training.facts.call_rewards) == 12


def test_its_retention_goes_on(swarm: SwarmState, journal: Journal) -> None:
    swarm.transcript_bytes = 10**6
    swarm.batches.checkpointed(2)
    for rows in swarm.unneeded():
        swarm.prune(rows)
    with_calls = {row[0] for row in journal.file.db.execute("SELECT DISTINCT episode_id FROM calls")}
    needed = {e for batch in swarm.batches.from_version(2) for e in batch.episode_ids}
    kept = {row[0] for row in journal.file.db.execute("SELECT episode_id FROM transcripts")}
    unsettled = {episode.id for episode in journal.unsettled_episodes()}
    assert with_calls == needed | kept | unsettled and len(with_calls) < 18
    assert swarm.begin(BeginRequest(task_id="next", mode="eval")).seq == 19


TABLES = ("episodes", "groups", "batches", "calls", "counts", "code_versions")


def contents(journal: Journal) -> dict[str, list[dict[str, Any]]]:
    """The rows of the tables that a migration changes, by column."""
    found = {}
    for table in TABLES:
        rows = journal.file.db.execute(f"SELECT * FROM {table}")
        names = [column for column, *_ in rows.description]
        found[table] = sorted((dict(sorted(zip(names, row, strict=True))) for row in rows), key=repr)
    return found


@pytest.mark.parametrize("name", [EARLIER, "small", "rolled", "branched"])
def test_a_reader_sees_the_rows_that_a_migration_writes(name: str, tmp_path: Path) -> None:
    for path in locked_data_dir(name, tmp_path).glob("runs/*/journal.sqlite"):
        before = path.read_bytes()
        with closing(Journal.open_read_only(path)) as journal:
            seen = contents(journal)
            assert path.read_bytes() == before
        with closing(Journal.open(path)) as journal:
            assert contents(journal) == seen
        with closing(Journal.open_read_only(path)) as journal:
            assert contents(journal) == seen, "it is of the present schema now"


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = unpack(tmp_path) / "journal.sqlite"
    with closing(Journal.open_read_only(path)) as journal:
        before = contents(journal)
    for number in range(1, len(list(migration(sqlite3.connect(path))))):
        with monkeypatch.context() as patch:
            patch.setattr(
                "agentjet.swarm.journal_file.migration",
                lambda db, number=number: [*list(migration(db))[:number], "SELECT no_such_function()"],
            )
            with pytest.raises(ConfigError, match="no_such_function"):
                Journal.open(path)
    with closing(Journal.open_read_only(path)) as journal:
        assert contents(journal) == before
    with closing(Journal.open(path)) as journal:
        assert contents(journal) == before
