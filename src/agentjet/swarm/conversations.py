"""`Conversations`: the model calls of live episodes, in memory and in a journal. A server has them, or its fronts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Unavailable
from agentjet.swarm.facts import load_trees
from agentjet.swarm.journal import encode_call
from agentjet.swarm.state import EpisodeRecord, Leases, Transactions
from agentjet.timeline.tree import ConversationTree
from agentjet.types import MAX_NAME, Call

MAX_NOTES = 64
"""Different notes, and different refusals, that are counted apart on one episode."""


class Conversations(Transactions):
    """Calls of episodes, with their conversation trees and their leases."""

    episodes: dict[str, EpisodeRecord]
    """Those that may be live."""
    trees: dict[str, dict[str, ConversationTree]]
    """Conversations of live episodes, by episode and role: all of an episode or none. A cache of the journal."""
    leases: Leases

    @property
    def job(self) -> JobConfig:
        raise NotImplementedError

    def episode(self, episode_id: str) -> EpisodeRecord:
        """An episode, live or not. Raises `NotFound`."""
        raise NotImplementedError

    def up_to_date(self, episode_id: str) -> EpisodeRecord:
        """An episode, ended if its time is over."""
        raise NotImplementedError

    def put_calls(self, episode: EpisodeRecord) -> None:
        """Record other counts of calls, notes and refusals of a live episode."""
        raise NotImplementedError

    def next_call_number(self) -> int | None:
        """The `seq` of the next call; None for the next one of all files."""
        return None

    def heartbeat(self, episode_id: str) -> EpisodeRecord:
        """Renew the lease of a live episode. Its silence goes on, because only calls end it.

        Raises `Conflict` when the episode has ended; the code is its status.
        """
        episode = self._live(episode_id)
        self.leases.renew(episode)
        return episode

    @contextmanager
    def calling(self, episode_id: str) -> Iterator[EpisodeRecord]:
        """Suspend the episode's lease while a call waits or is sampled, and renew it after the call.

        `max_episode_seconds` still counts. Raises `Conflict` when the episode has ended.
        """
        episode = self._live(episode_id)
        with self.leases.calling(episode):
            yield episode

    def record_call(
        self,
        call: Call,
        encoded_suffix: Sequence[bytes],
        encoded_completion: Sequence[bytes],
        body: bytes = b"",
        routes: bytes = b"",
    ) -> None:
        """Append a call to its episode's conversation, with the encoded bytes of each token. `body` is the result of
        `encode_call`, if another thread has called it; `routes` are those of its tokens.

        Raises `Conflict` when the episode has ended. Such a call is not recorded.
        """
        episode = self._live(call.episode_id)
        tree = self.tree(call.episode_id, call.role)
        if call.parent is not None and not tree.knows(call.parent):
            raise Unavailable(
                "The journal lost the call that this one continues, because the disk refused a write.",
                code="journal_unavailable",
                retry_after=1.0,
            )
        num_tokens, oldest = episode.num_tokens, episode.oldest_version
        if not call.untrained:
            num_tokens += len(call.completion)
            # A completion that continues on another replica may go back to an older version.
            oldest = min((version for version in {oldest, *call.versions} if version is not None), default=None)
        with self.transaction():
            encoded = body or encode_call(call, encoded_suffix, encoded_completion)
            self.journal.add_call(call, encoded, routes, seq=self.next_call_number())
            num_calls = episode.num_calls + 1
            self.put_calls(replace(episode, num_calls=num_calls, num_tokens=num_tokens, oldest_version=oldest))
            self.restores.append(lambda: self.trees.pop(call.episode_id, None))
            tree.add(call, encoded_suffix, encoded_completion)
        self.leases.active(episode)

    def note(self, episode_id: str, *, noted: Sequence[str] = (), refused: Sequence[str] = ()) -> None:
        """Count notes and refusals of an episode's request. An ended episode keeps its counts unchanged."""
        episode = self.up_to_date(episode_id)
        if episode.ended is not None or not (noted or refused):
            return
        with self.transaction():
            episode = replace(episode, noted=_counted(episode.noted, noted), refused=_counted(episode.refused, refused))
            self.put_calls(episode)

    def undelivered(self, episode_id: str, call_ids: Sequence[str]) -> None:
        """Record that these answers did not reach their agent. They train only if a later call sends them back.

        Ignored after the episode has ended, because its batch may be composed already.
        """
        if self.up_to_date(episode_id).status == "live":
            with self.transaction():
                self.journal.add_undelivered(call_ids)

    def tree(self, episode_id: str, role: str) -> ConversationTree:
        """The conversation of one role of an episode; kept in memory while the episode is live."""
        trees = self.trees.get(episode_id)
        if trees is None:
            trees = load_trees(self.journal, episode_id) if self.episode(episode_id).num_calls else {}
            self.keep_trees(episode_id, trees)
        return trees.setdefault(role, ConversationTree())

    def is_unread(self, episode_id: str) -> bool:
        """True if a live episode has calls that are only in the journal, as after a restart."""
        episode = self.episodes.get(episode_id)
        is_kept = episode_id in self.trees
        return episode is not None and episode.status == "live" and episode.num_calls > 0 and not is_kept

    def read_trees(self, episode_id: str) -> dict[str, ConversationTree]:
        """An episode's conversations by role. May run in another thread; it reads committed calls only."""
        with self.journal.reading() as journal:
            return load_trees(journal, episode_id)

    def keep_trees(self, episode_id: str, trees: dict[str, ConversationTree]) -> None:
        if self.episode(episode_id).status == "live":
            self.trees.setdefault(episode_id, trees)

    def _live(self, episode_id: str) -> EpisodeRecord:
        """The episode if it is live. Raises `Conflict` otherwise."""
        episode = self.up_to_date(episode_id)
        if episode.ended is None:
            return episode
        how = f"finished with reward {episode.reward}" if episode.status == "finished" else episode.status
        reason = f" ({episode.reason})" if episode.reason else ""
        raise Conflict(f"Episode {episode_id} has ended: {how}{reason}.", code=f"episode_{episode.status}")


def _counted(counts: Mapping[str, int], names: Sequence[str]) -> Mapping[str, int]:
    """The counts with one more of each name. Names beyond `MAX_NOTES` are counted as `others`."""
    counted = dict(counts)
    for name in names:
        key = name[:MAX_NAME]
        key = key if key in counted or len(counted) < MAX_NOTES else "others"
        counted[key] = counted.get(key, 0) + 1
    return counted
