"""`Segment`: the calls of a front in its own file, beside the server's journal and the files of other fronts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentjet import database
from agentjet.errors import ConfigError, Conflict, Forbidden, Later, NotFound
from agentjet.front.segment import Segment, front_of
from agentjet.protocol import AbortRequest, FinishRequest
from agentjet.swarm import EpisodeRecord, Journal
from agentjet.swarm.journal_file import JournalFile, create_segment, segment_of, segments_of
from agentjet.swarm.state import CallCounts
from agentjet.types import Call
from tests.swarm.world import World, refused_commits

FRONTS = 3


class Run(World):
    """A run whose calls fronts have."""

    fronts = FRONTS

    def __init__(self, folder: Path) -> None:
        self.segments: dict[int, Segment] = {}
        super().__init__(folder)

    def open_journal(self) -> Journal:
        journal = super().open_journal()
        try:
            journal.file.open_segments(self.fronts)
        except BaseException:
            journal.close()
            raise
        return journal

    def front(self, episode: EpisodeRecord) -> Segment:
        return self.segment(front_of(episode, self.fronts))

    def segment(self, front: int) -> Segment:
        """The one process that has a front's file."""
        if front not in self.segments:
            self.segments[front] = Segment(
                self.path.parent,
                front,
                self.fronts,
                clock=lambda: self.now,
                address=lambda other: f"http://front{other}",
            )
        return self.segments[front]

    def close(self) -> None:
        while self.segments:
            self.segments.popitem()[1].close()
        super().close()

    def speak(self, front: Segment, episode: EpisodeRecord, parent: Call | None = None) -> Call:
        """A call on a front."""
        return self.call(episode, 7, 8, parent=parent, kept=3 if parent else 0, to=front)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as run:
        yield run


def test_the_members_of_a_group_have_one_front_and_one_front_less_moves_its_own_only() -> None:
    records = [EpisodeRecord(f"ep{i}", i, "c", "t", "", "g", i // 4 or None, "train", 0, 0.0) for i in range(400)]
    of = [front_of(one, FRONTS) for one in records]
    assert all(len({of[i] for i in range(start, start + 4)}) == 1 for start in range(4, 400, 4))
    counts = [of.count(front) for front in range(FRONTS)]
    assert min(counts) > 80, "they are spread"
    fewer = [front_of(one, FRONTS - 1) for one in records]
    assert all(before == after for before, after in zip(of, fewer, strict=True) if before < FRONTS - 1)


def test_calls_are_in_the_file_of_the_front_and_are_read_with_the_journal(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    call = run.speak(front, episode)
    own = Journal.open_read_only(segment_of(run.path, front_of(episode, FRONTS)))
    assert [one.id for one in own.call_facts(episode.id)] == [call.id]
    for journal in (run.swarm.journal, Journal.open_read_only(run.path)):
        assert [one.id for one in journal.call_facts(episode.id)] == [call.id]
        assert journal.calls(episode.id)[0][0] == call
    with run.swarm.journal.reading() as journal:
        assert journal.last_call(episode.id) == call


def test_a_damaged_file_of_a_front_is_named(run: Run) -> None:
    run.close()
    segment_of(run.path, 1).write_bytes(b"not a database" * 300)
    with pytest.raises(ConfigError, match="front-1"):
        JournalFile.open_read_only(run.path)
    with pytest.raises(ConfigError, match=r"front-1\.sqlite cannot be read as the calls of a front .*-wal"):
        JournalFile.open(run.path).attach(segments_of(run.path), live=True)
    segment_of(run.path, 1).unlink()


@pytest.mark.parametrize(
    ("state", "fronts"), [("live", FRONTS), ("finished", FRONTS), ("finished", 1), ("finished", 0), ("pending", FRONTS)]
)
def test_a_missing_file_of_a_front_is_named_while_its_calls_may_be_learned(
    run: Run, state: str, fronts: int, caplog: pytest.LogCaptureFixture
) -> None:
    episodes = [run.begin(group) for group in ("a", "a", "b", "b")]
    for episode in episodes:
        run.speak(run.front(episode), episode)
        run.swarm.account(episode.id, run.front(episode).report().counts[episode.id])
    for episode in episodes[: {"live": 0, "finished": 1, "pending": 4}[state]]:
        run.finish(episode, float(episode.seq))
    path = segment_of(run.path, front_of(episodes[0], FRONTS))
    run.close()
    files = [one.rename(one.with_name(f"moved-{one.name}")) for one in sorted(path.parent.glob(f"{path.name}*"))]
    run.fronts = fronts
    for _ in range(2):  # A refused start creates no file that the next one would read.
        said = rf"lacks \S+/{path.name}, with calls of 2 episodes that may .*Put each file.*touch \S+/front"
        with pytest.raises(ConfigError, match=said):
            run.open()
    for file in files:
        file.rename(file.with_name(file.name.removeprefix("moved-")))
    run.reopen()
    assert "lack calls" not in caplog.text
    assert all(run.swarm.journal.call_facts(episode.id) for episode in episodes)
    run.close()
    for file in sorted(path.parent.glob(f"{path.name}*")):
        file.unlink()
    path.touch(0o644)  # The way out in the error.
    caplog.clear()
    run.reopen()
    assert "lack calls of 2 episodes" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600
    run.reopen()
    assert not run.swarm.journal.call_facts(episodes[0].id)


def test_several_missing_files_of_fronts_are_listed(run: Run) -> None:
    episode = run.begin()
    run.speak(run.front(episode), episode)
    run.swarm.account(episode.id, run.front(episode).report().counts[episode.id])
    run.close()
    paths = [str(path) for path in segments_of(run.path)]
    for path in paths:
        Path(path).unlink()
    with pytest.raises(ConfigError) as refused:
        run.open()
    assert f"lacks {', '.join(paths)}, with calls of 1 episode that may" in str(refused.value)
    assert str(refused.value).endswith(f"touch {' '.join(paths)}")


@pytest.mark.parametrize("num_calls", [0, 1])
def test_a_missing_file_of_a_front_that_nothing_needs_is_not_missed(run: Run, num_calls: int) -> None:
    episode = run.begin("", mode="eval")
    if num_calls:
        run.speak(run.front(episode), episode)
        run.swarm.account(episode.id, run.front(episode).finish(episode.id) or pytest.fail())
    run.finish(episode, 1.0)
    run.close()
    for path in segments_of(run.path):
        path.unlink()
    run.fronts = 0
    run.reopen()
    assert not segments_of(run.path)


def test_a_front_that_cannot_read_a_file_releases_its_own(run: Run) -> None:
    """It tries again for a while, and its error names the damaged file."""
    segment_of(run.path, 1).write_bytes(b"not a database" * 300)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"front-1\.sqlite cannot be read as the calls of a front"):
            run.segment(2)


def test_the_end_of_an_episode_has_its_counts_and_stops_records(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    run.speak(front, episode)
    front.note(episode.id, noted=["temperature"], refused=["too_long"])
    counts = front.finish(episode.id)
    assert counts == CallCounts(1, counts.num_tokens, 0, {"temperature": 1}, {"too_long": 1}) and counts.num_tokens > 0
    assert front.finish(episode.id) == counts, "a repeated end"
    with pytest.raises(Conflict, match="is ending"):
        run.speak(front, episode)
    front.resume(episode.id)  # The server refused the end.
    run.speak(front, episode)
    run.swarm.account(episode.id, front.finish(episode.id) or pytest.fail())
    finished = run.swarm.finish(episode.id, FinishRequest(reward=1.0))
    assert (finished.num_calls, dict(finished.refused)) == (2, {"too_long": 1})
    with pytest.raises(Conflict, match=r"finished with reward 1\.0"):
        front.heartbeat(episode.id)
    assert front.finish(episode.id) == CallCounts(2, finished.num_tokens, 0, finished.noted, finished.refused)


def test_late_counts_of_an_ended_episode_are_recorded(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    run.speak(front, episode)
    run.swarm.abort(episode.id, AbortRequest(reason="crash"))
    counts = front.finish(episode.id)
    assert counts is not None
    run.swarm.account(episode.id, counts)
    assert run.swarm.episode(episode.id).num_calls == 1
    assert run.swarm.journal.outcomes()["aborted"] == 1


def test_another_front_refuses_an_episode_with_the_right_address(run: Run) -> None:
    episode = run.begin("", mode="eval")
    right = front_of(episode, FRONTS)
    wrong = run.segment((right + 1) % FRONTS)
    with pytest.raises(Forbidden, match=f"belongs to front {right}.*http://front{right}") as refused:
        wrong.heartbeat(episode.id)
    assert refused.value.code == "other_front"
    with pytest.raises(NotFound):
        wrong.heartbeat("ep_unknown")


@pytest.mark.parametrize("fewer", [1, 2])
def test_remaining_fronts_have_the_episodes_of_those_that_are_gone(run: Run, fewer: int) -> None:
    episodes = [run.begin("", mode="eval") for _ in range(8)]
    before = {}
    for episode in episodes:
        front = run.front(episode)
        before[episode.id] = run.speak(front, episode)
        front.note(episode.id, noted=["seed"])
    run.now -= 500.0  # The clock was set back.
    run.fronts -= fewer
    run.reopen()
    for episode in episodes:
        front = run.front(episode)
        assert front.is_unread(episode.id)
        front.keep_trees(episode.id, front.read_trees(episode.id))
        after = run.speak(front, episode, before[episode.id])
        assert after.parent == before[episode.id].id
        assert [one.id for one in run.swarm.journal.call_facts(episode.id)] == [before[episode.id].id, after.id]
        counts = front.finish(episode.id)
        assert counts is not None and (counts.num_calls, counts.noted) == (2, {"seed": 1})


def test_a_server_that_replaces_all_fronts_goes_on_after_their_calls(run: Run) -> None:
    episode = run.begin()
    first = run.speak(run.front(episode), episode)
    run.fronts = 0
    run.reopen()
    assert run.swarm.episode(episode.id).num_calls == 1, "the front had not reported the call"
    second = run.call(episode, 7, 8, parent=first, kept=3)
    run.swarm.trees.clear()
    assert run.swarm.tree(episode.id, "").calls == (first, second)


def test_a_finish_sees_calls_that_a_front_recorded_after_an_open_transaction_began(run: Run) -> None:
    run.swarm.defer_commits(lambda: None)
    episode = run.begin()
    run.swarm.commit()
    other = run.begin(group="another")
    call = run.speak(run.front(episode), episode)
    assert run.finish(episode, 1.0, by_turn={"": [0.5]}).call_rewards == {call.id: 0.5}
    run.abort(other)


def test_a_front_that_was_replaced_reads_its_own_calls(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    run.speak(front, episode)
    run.reopen()
    front = run.front(episode)
    assert front.is_unread(episode.id)
    front.keep_trees(episode.id, front.read_trees(episode.id))
    assert not front.is_unread(episode.id)
    run.speak(front, episode)
    assert front.episode(episode.id).num_calls == 2


def test_a_report_has_what_happened_since_the_last_one(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    run.speak(front, episode)
    report = front.report()
    assert report.heard == {episode.id: True} and report.counts[episode.id].num_calls == 1
    assert front.report() == type(report)()
    with front.calling(episode.id):
        assert front.report().calling == {episode.id}
    front.heartbeat(episode.id)
    assert front.report().heard == {episode.id: False}


def test_a_refused_write_is_undone(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    run.speak(front, episode)
    front.file.db.execute("PRAGMA query_only = ON")
    with pytest.raises(Exception, match="could not be written"):
        run.speak(front, episode)
    front.file.db.execute("PRAGMA query_only = OFF")
    assert front.episode(episode.id).num_calls == 1
    run.speak(front, episode)
    assert front.episode(episode.id).num_calls == 2


def test_counts_that_were_reported_before_the_disk_refused_them_are_corrected(run: Run) -> None:
    episode = run.begin("", mode="eval")
    front = run.front(episode)
    front.defer_commits(lambda: None)
    run.speak(front, episode)
    front.commit()
    run.speak(front, episode)
    assert front.report().counts[episode.id].num_calls == 2
    with refused_commits(front.journal), pytest.raises(Later):
        front.commit()
    assert front.report().counts[episode.id].num_calls == 1


def test_calls_that_nothing_needs_are_deleted_in_every_file(run: Run) -> None:
    episodes = [run.begin("", mode="eval") for _ in range(6)]
    for episode in episodes:
        run.speak(run.front(episode), episode)
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


def test_a_file_that_a_killed_server_had_begun_is_completed(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    (path := segment_of(journal, 0)).parent.mkdir()
    with closing(database.connect(path)) as begun:
        begun.execute("PRAGMA journal_mode = WAL")
    create_segment(path)
    JournalFile.open_read_only(path).close()
