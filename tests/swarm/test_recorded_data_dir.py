"""A journal that an earlier AgentJet wrote: it opens, it is read as it was, and the run goes on with it.

The rows of its calls lack the columns that were added since. Turns are then read from the calls themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentjet.protocol import BeginRequest, EpisodeQuery, FinishRequest
from agentjet.swarm import Journal, SwarmState
from agentjet.swarm.journal import ADDED_COLUMNS
from agentjet.swarm.queries import Queries
from agentjet.types import SOLE_POLICY
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


def test_the_added_columns_are_null_for_a_reader_and_for_a_writer(tmp_path: Path) -> None:
    path = unpack(tmp_path) / "journal.sqlite"
    for open_journal in (Journal.open_read_only, Journal.open):
        with closing(open_journal(path)) as journal:
            for table, columns in ADDED_COLUMNS.items():
                rows = journal.file.db.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
                assert {value for row in rows for value in row} <= {None}, table


def test_a_viewer_reads_all_of_it(tmp_path: Path) -> None:
    with closing(Journal.open_read_only(unpack(tmp_path) / "journal.sqlite")) as journal:
        queries = Queries.recorded(journal, lambda: 0.0)
        assert queries.policy_version == 3 and [step["reward/mean"] for step in queries.recent_steps] == [0.5] * 3
        [evaluation] = queries.evaluations()
        assert (evaluation.score, evaluation.name, evaluation.held_out, evaluation.best) == (0.25, "", True, True)
        episodes = journal.find_episodes(EpisodeQuery(limit=100)).episodes
        assert len(episodes) == 18 == len({episode.id for episode in episodes})
        for episode in episodes:
            assert episode.reward_text == ""
            assert [call.role for call in queries.calls(episode.id)] == ["", "", "judge"]
            assert sorted(queries.trees(episode.id)) == ["", "judge"] and not queries.orphans(episode.id)


def test_the_pending_batch_is_learned_and_the_open_group_completed(swarm: SwarmState) -> None:
    pending, [live] = swarm.pending, swarm.queries.live()
    assert pending is not None and pending.id == 3
    [trained] = swarm.batches.training_batches(pending).values()
    assert trained.facts.call_rewards.tolist() == [*TURNS[""], *TURNS["judge"]] * 4
    swarm.batches.learned(pending, {"policy/loss": 0.0})
    request = FinishRequest(reward=0.0, by_turn=TURNS, text="expected 30")
    done = swarm.finish(live.id, request)
    assert swarm.finish(live.id, request) == done and done.reward_text == "expected 30"
    calls = {call.id: call for call in swarm.queries.calls(live.id)}
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
    swarm.store.transcript_bytes = 10**6
    swarm.batches.checkpointed(2)
    for rows in swarm.store.unneeded():
        swarm.store.prune(rows)
    with_calls = {row[0] for row in journal.file.db.execute("SELECT DISTINCT episode_id FROM calls")}
    needed = {e for batch in swarm.batches.from_version(2) for e in batch.episode_ids}
    kept = {row[0] for row in journal.file.db.execute("SELECT episode_id FROM transcripts")}
    unsettled = {episode.id for episode in journal.unsettled_episodes()}
    assert with_calls == needed | kept | unsettled and len(with_calls) < 18
    assert swarm.begin(BeginRequest(task_id="next", mode="eval")).seq == 19
