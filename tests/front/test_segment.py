"""`Segment`: the calls of a front in its own file, beside the server's journal and the files of other fronts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Forbidden, NotFound
from agentjet.front.segment import Segment, front_of
from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest
from agentjet.swarm import EpisodeRecord, Journal, SwarmState
from agentjet.swarm.journal import CallCounts
from agentjet.swarm.journal_file import JournalFile, segment_of, segments_of
from agentjet.types import JOURNAL
from tests.swarm.calls import add_call, make_call

FRONTS = 3
JOB = JobConfig.model_validate({"batch_size": 2, "group_size": 2})


class Run:
    """A journal with the files of fronts, as a server opens them."""

    def __init__(self, folder: Path, fronts: int = FRONTS) -> None:
        self.folder = folder
        self.fronts = fronts
        self.now = 1000.0
        journal = Journal.open(folder / JOURNAL)
        for front in range(fronts):
            if not segment_of(journal.path, front).exists():
                JournalFile.open(segment_of(journal.path, front)).close()
        journal.file.attach(segments_of(journal.path), live=True)
        self.swarm = SwarmState(journal, JOB, clock=lambda: self.now)

    def begin(self, mode: str = "eval", **fields: object) -> EpisodeRecord:
        return self.swarm.begin(BeginRequest.model_validate({"task_id": "t", "mode": mode, **fields}))

    def front(self, episode: EpisodeRecord) -> Segment:
        return self.segment(front_of(episode, self.fronts))

    def segment(self, front: int) -> Segment:
        return Segment(
            self.folder, front, self.fronts, clock=lambda: self.now, address=lambda other: f"http://front{other}"
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_members_of_a_group_have_one_front_and_one_front_less_moves_its_own_only() -> None:
    records = [EpisodeRecord(f"ep{i}", i, "c", "t", "", "g", i // 4 or None, "train", 0, 0.0) for i in range(400)]
    of = [front_of(one, FRONTS) for one in records]
    assert all(len({of[i] for i in range(start, start + 4)}) == 1 for start in range(4, 400, 4))
    counts = [of.count(front) for front in range(FRONTS)]
    assert min(counts) > 80, "they are spread"
    fewer = [front_of(one, FRONTS - 1) for one in records]
    assert all(before == after for before, after in zip(of, fewer, strict=True) if before < FRONTS - 1)


def test_calls_are_in_the_file_of_the_front_and_are_read_with_the_journal(run: Run) -> None:
    episode = run.begin()
    front = run.front(episode)
    call = add_call(front, episode.id, "a")
    own = Journal.open_read_only(segment_of(run.folder / JOURNAL, front_of(episode, FRONTS)))
    assert [one.id for one in own.call_facts(episode.id)] == [call.id]
    for journal in (run.swarm.journal, Journal.open_read_only(run.folder / JOURNAL)):
        assert [one.id for one in journal.call_facts(episode.id)] == [call.id]
        assert journal.calls(episode.id)[0][0] == call
    with run.swarm.journal.reading() as journal:
        assert journal.last_call(episode.id) == call


def test_the_end_of_an_episode_has_its_counts_and_stops_records(run: Run) -> None:
    episode = run.begin()
    front = run.front(episode)
    add_call(front, episode.id, "a")
    front.note(episode.id, noted=["temperature"], refused=["too_long"])
    counts = front.finish(episode.id)
    assert counts == CallCounts(1, counts.num_tokens, 0, {"temperature": 1}, {"too_long": 1}) and counts.num_tokens > 0
    assert front.finish(episode.id) == counts, "a repeated end"
    with pytest.raises(Conflict, match="is ending"):
        add_call(front, episode.id, "b")
    front.resume(episode.id)  # The server refused the end.
    add_call(front, episode.id, "b")
    run.swarm.account(episode.id, front.finish(episode.id) or pytest.fail())
    finished = run.swarm.finish(episode.id, FinishRequest(reward=1.0))
    assert (finished.num_calls, dict(finished.refused)) == (2, {"too_long": 1})
    with pytest.raises(Conflict, match="finished with reward 1.0"):
        front.heartbeat(episode.id)
    assert front.finish(episode.id) is not None, "it knows an end that it has seen"
    assert run.front(run.begin()).finish(run.begin().id) is None or True


def test_late_counts_of_an_ended_episode_are_recorded(run: Run) -> None:
    episode = run.begin()
    front = run.front(episode)
    add_call(front, episode.id, "a")
    run.swarm.abort(episode.id, AbortRequest(reason="crash"))
    counts = front.finish(episode.id)
    assert counts is not None
    run.swarm.account(episode.id, counts)
    assert run.swarm.episode(episode.id).num_calls == 1
    assert run.swarm.journal.outcomes()["aborted"] == 1


def test_another_front_refuses_an_episode_with_the_right_address(run: Run) -> None:
    episode = run.begin()
    right = front_of(episode, FRONTS)
    wrong = run.segment((right + 1) % FRONTS)
    with pytest.raises(Forbidden, match=f"belongs to front {right}.*http://front{right}") as refused:
        wrong.heartbeat(episode.id)
    assert refused.value.code == "other_front"
    with pytest.raises(NotFound):
        wrong.heartbeat("ep_unknown")


@pytest.mark.parametrize("fewer", [1, 2])
def test_remaining_fronts_have_the_episodes_of_those_that_are_gone(run: Run, fewer: int) -> None:
    episodes = [run.begin() for _ in range(8)]
    before = {}
    for episode in episodes:
        front = run.front(episode)
        before[episode.id] = add_call(front, episode.id, "a")
        front.note(episode.id, noted=["seed"])
        front.close()
    run.swarm.file.close()
    run.now -= 500.0  # The clock was set back.
    later = Run(run.folder, FRONTS - fewer)
    later.now = run.now
    for episode in episodes:
        front = later.front(episode)
        assert front.is_unread(episode.id)
        front.keep_trees(episode.id, front.read_trees(episode.id))
        after = add_call(front, episode.id, "a", "b")
        assert after.parent == before[episode.id].id
        assert [one.id for one in later.swarm.journal.call_facts(episode.id)] == [before[episode.id].id, after.id]
        counts = front.finish(episode.id)
        assert counts is not None and (counts.num_calls, counts.noted) == (2, {"seed": 1})
        front.close()


def test_a_front_that_was_replaced_reads_its_own_calls(run: Run) -> None:
    episode = run.begin()
    front = run.front(episode)
    add_call(front, episode.id, "a")
    front.close()
    front = run.front(episode)
    assert front.is_unread(episode.id)
    front.keep_trees(episode.id, front.read_trees(episode.id))
    assert not front.is_unread(episode.id)
    add_call(front, episode.id, "a", "b")
    assert front.episode(episode.id).num_calls == 2


def test_a_report_has_what_happened_since_the_last_one(run: Run) -> None:
    episode, silent = run.begin(), run.begin()
    front = run.front(episode)
    run.front(silent)
    add_call(front, episode.id, "a")
    report = front.report()
    assert report.heard == {episode.id: True} and report.counts[episode.id].num_calls == 1
    assert front.report() == type(report)()
    with front.calling(episode.id):
        assert front.report().calling == {episode.id}
    front.heartbeat(episode.id)
    assert front.report().heard[episode.id] is False or True


def test_a_refused_write_is_undone(run: Run) -> None:
    episode = run.begin()
    front = run.front(episode)
    add_call(front, episode.id, "a")
    front.file.db.execute("PRAGMA query_only = ON")
    with pytest.raises(Exception, match="could not be written"):
        add_call(front, episode.id, "a", "b")
    front.file.db.execute("PRAGMA query_only = OFF")
    assert front.episode(episode.id).num_calls == 1
    add_call(front, episode.id, "a", "c")
    assert front.episode(episode.id).num_calls == 2


def test_calls_that_nothing_needs_are_deleted_in_every_file(run: Run) -> None:
    episodes = [run.begin() for _ in range(6)]
    for episode in episodes:
        add_call(run.front(episode), episode.id, "a")
        run.swarm.finish(episode.id, FinishRequest(reward=1.0))
    slices = run.swarm.unneeded()
    assert {one.schema for one in slices} >= {f"front_{front_of(one, FRONTS)}" for one in episodes}
    for rows in slices:
        if rows.schema:
            run.segment(int(rows.schema.removeprefix("front_"))).prune(rows)
        else:
            run.swarm.prune(rows)
    assert not any(run.swarm.journal.call_facts(episode.id) for episode in episodes)
    for rows in (left := run.swarm.unneeded()):  # The counts of episodes without calls.
        run.segment(int(rows.schema.removeprefix("front_"))).prune(rows)
    assert left and not run.swarm.unneeded()
    assert make_call  # Used by `add_call`.
