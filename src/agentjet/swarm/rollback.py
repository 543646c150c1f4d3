"""Going back to an earlier policy version. The server is stopped; the caller provides the checkpoint.

Policy versions only rise. The version after a rollback is a number that was never used: it has the weights of the
earlier version, and no batch leads to it. So a number always names the same weights, and staleness, caches and
names of checkpoints stay right. The episodes of the undone batches are dropped as `rolled_back`, together with those
that waited to train; their groups count in the next batch that is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from agentjet.errors import CheckpointError
from agentjet.swarm.endings import Endings
from agentjet.swarm.journal import Journal
from agentjet.swarm.ledger import Ledger

KIND = "rollback"
REASON = "rolled_back"
WORDS = "rolled back: the policy went back to an earlier version"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The effects of a rollback; also the body of its event."""

    to: int
    """The version whose weights the policy has again."""
    policy_version: int
    """The version that these weights are from here on."""
    batches: int
    """Learned batches that were undone."""
    trained: int
    """Episodes of these batches, now dropped."""
    waiting: int
    """Finished episodes that had waited to train, now dropped."""
    live: int
    """Episodes that were aborted."""


def check(journal: Journal, version: int) -> None:
    """Raises `CheckpointError` unless the present weights descend from that earlier version."""
    now = journal.policy_version()
    if version >= now:
        raise CheckpointError(f"policy version {version} is not before the present one, {now}: name an earlier one")
    for done in journal.events_of(KIND):
        if done.body["to"] < version < done.body["policy_version"]:
            raise CheckpointError(
                f"policy version {version} was undone by the rollback to version {done.body['to']}: the present "
                "weights do not descend from it; begin a new data dir from it with `agentjet checkpoints branch`"
            )


def carry_out(ledger: Ledger, endings: Endings, to: int, now: float) -> Rollback:
    """Undo the batches from `to` on, inside a transaction. See `check`."""
    journal, version = ledger.journal, ledger.policy_version + 1
    assert journal.in_transaction, "a rollback happens as a whole"
    if ledger.pending is not None:
        journal.remove_batch(ledger.pending.id)
    batches, trained = journal.undo_batches(to, REASON, version)
    journal.set_base_version(version)
    ledger.load()
    live, waiting = ledger.live(), ledger.counts()["waiting"]
    for episode in live:
        endings.lose(replace(episode, status="aborted", ended=now, reason=WORDS))
    endings.clear(list(ledger.groups.values()), REASON, WORDS, now)
    done = Rollback(to, version, batches, trained, waiting, len(live))
    body: Mapping[str, int] = asdict(done)
    ledger.emit(KIND, body)
    return done
