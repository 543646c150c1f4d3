"""The data dir of a long run, for the locks and `bench.face`: 500 steps and 10,000 episodes, written by the journal
alone, and one episode of 10,000 tokens. Its server starts at the checkpoint of the newest step.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from agentjet.compute.checkpoint import seal
from agentjet.config import JobConfig
from agentjet.swarm import Batch, EpisodeRecord, Journal
from agentjet.swarm.journal import encode_call
from agentjet.swarm.state import JobSettings, Outcome, State, new_episode_id
from agentjet.types import Call, CheckpointStamp, Message, NewContext

GROUPS, GROUP_SIZE = 5, 4
SETS = ("math", "code", "search")
CLIENTS = ("train-0", "train-1")
SECONDS_PER_STEP = 40.0
KEPT_BATCHES = 10  # Newest batches whose calls the journal has
WORDS = (" the", " sum", " of", " 17", " and", " carry", "\n", " so", ",", " 2", " is", " then", " é", " look", " row")
METRICS = (
    "reward/std", "policy/entropy", "policy/mismatch_kl", "policy/clip_fraction", "policy/loss", "optim/grad_norm",
    "optim/lr", "groups/zero_variance", "completion/truncated", "completion/tokens", "episode/num_turns",
    "forest/tree_token_ratio", "forest/tokens", "batch/staleness_max", "batch/episodes", "time/sample", "time/learn",
    "time/wait", "time/publish", "reward/math/mean", "reward/code/mean", "reward/search/mean", "batch/share/math",
    "batch/share/code", "batch/share/search", "episodes/aborted", "episodes/expired", "groups/dropped",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class History:
    """A written data dir."""

    data_dir: Path
    steps: int
    long_episode: str  # The episode with `long_tokens` sampled tokens


def job() -> JobConfig:
    return JobConfig(batch_size=GROUPS, group_size=GROUP_SIZE, checkpoint_every=0, max_steps=0, lease_seconds=600)


def write(data_dir: Path, *, steps: int = 500, long_tokens: int = 10_000, now: float) -> History:
    """Writes the run, which ended at `now`. One episode in 50 was aborted."""
    folder = data_dir / "runs" / "default"
    folder.mkdir(parents=True)
    draw, journal = random.Random(0), Journal.open(folder / "journal.sqlite")
    db = journal.file.db
    db.execute("PRAGMA synchronous = OFF")
    settings, outcomes = job(), Counter[Outcome]()
    seq, group_id, long_episode = 0, 0, ""
    db.execute("BEGIN")
    for batch_id in range(steps):
        began = now - (steps - batch_id) * SECONDS_PER_STEP
        batch: list[tuple[str, ...]] = []
        for _ in range(GROUPS):
            group_id += 1
            members = []
            for _ in range(GROUP_SIZE):
                seq += 1
                tokens = long_tokens if batch_id == steps - 1 and not long_episode else draw.randrange(40, 400)
                episode = _episode(draw, seq, group_id, batch_id, steps, began + seq % 20, tokens)
                members.append(episode.id)
                outcomes.update(episode.counted_as)
                journal.code_version_began(episode)
                journal.code_version_ended(episode)
                journal.put_episode(episode)
                if batch_id >= steps - KEPT_BATCHES:
                    _add_calls(journal, draw, episode)
                if tokens == long_tokens:
                    long_episode = episode.id
            batch.append(tuple(members))
        if batch_id % 5 == 0:
            seq += 1
            lost = _lost(draw, seq, batch_id, began)
            outcomes.update(lost.counted_as)
            journal.code_version_began(lost)
            journal.code_version_ended(lost)
            journal.put_episode(lost)
        composed = began + SECONDS_PER_STEP * 0.8
        journal.add_batch(Batch(batch_id, tuple(batch), settings, composed))
        metrics = _metrics(draw, batch_id, steps)
        journal.add_step(batch_id, metrics)
        journal.add_event("step", composed, {"policy_version": batch_id + 1, "metrics": metrics})
    for outcome, number in outcomes.items():
        journal.count("outcome", outcome, number)
    journal.put_state(State(steps, base_version=steps, durable_version=steps - KEPT_BATCHES, offered_version=steps))
    journal.put_job_settings(JobSettings(1, settings, settings))
    checkpoint = folder / "checkpoints" / f"step_{steps:06d}"
    checkpoint.mkdir(parents=True)
    digest = seal(checkpoint, {"policy_version": steps, "operation": 0, "weights": "long", "dtype": "float32"})
    journal.put_checkpoint(CheckpointStamp(steps, digest))
    db.execute("COMMIT")
    journal.close()
    return History(data_dir, steps, long_episode)


def _episode(
    draw: random.Random, seq: int, group_id: int, batch_id: int, steps: int, begun: float, tokens: int
) -> EpisodeRecord:
    task_set, task = SETS[group_id % len(SETS)], f"task-{group_id % 400}"
    return EpisodeRecord(
        id=new_episode_id(begun),
        seq=seq,
        client_id=CLIENTS[group_id % len(CLIENTS)],
        task_id=task,
        task_set=task_set,
        group=f"{task_set}/{task}",
        group_id=group_id,
        mode="train",
        policy_version=batch_id,
        begun=begun,
        status="finished",
        ended=begun + 9.0,
        reward=float(draw.random() < 0.2 + 0.6 * batch_id / steps),
        metrics={"turns": 2.0},
        num_calls=2,
        num_tokens=tokens,
        trained_in=batch_id,
        oldest_version=batch_id,
        code_version=f"v{1 + 3 * batch_id // steps}",
    )


def _lost(draw: random.Random, seq: int, batch_id: int, begun: float) -> EpisodeRecord:
    reason = draw.choice(["Timeout: the tool did not answer in 60 s", "JSONDecodeError: line 1", "KeyError: 'sum'"])
    return EpisodeRecord(
        new_episode_id(begun), seq, CLIENTS[0], f"task-{seq % 400}", "code", f"code/task-{seq % 400}", None, "train",
        batch_id, begun, "aborted", begun + 20.0, reason=reason, num_calls=1, num_tokens=80, code_version="v1",
    )  # fmt: skip


def _add_calls(journal: Journal, draw: random.Random, episode: EpisodeRecord) -> None:
    """Two calls, the second with what the environment said; the first samples all but 20 of the tokens."""
    parent: Call | None = None
    for number, sampled in enumerate((max(1, episode.num_tokens - 20), 20)):
        context = [draw.choice(WORDS) for _ in range(60)]
        answer = [draw.choice(WORDS) for _ in range(sampled)]
        call = Call(
            id=f"{episode.id}.{number}",
            episode_id=episode.id,
            role="",
            parent=None if parent is None else parent.id,
            kept=0 if parent is None else len(parent.suffix) + len(parent.completion),
            suffix=tuple(draw.randrange(150_000) for _ in context),
            completion=tuple(draw.randrange(150_000) for _ in answer),
            logprobs=tuple(-draw.expovariate(1.5) for _ in answer),
            versions=(episode.policy_version,) * sampled,
            temperature=1.0,
            finish_reason="stop",
            response=Message("assistant", "".join(answer)),
            prompt_key="",
            created=episode.begun + number,
            ask=NewContext((Message("user", "".join(context)),), None if parent is None else parent.id),
        )
        journal.add_call(
            call, encode_call(call, [word.encode() for word in context], [word.encode() for word in answer])
        )
        parent = call


def _metrics(draw: random.Random, batch_id: int, steps: int) -> dict[str, float]:
    mean = 0.2 + 0.6 * batch_id / steps + draw.gauss(0, 0.05)
    waves = {name: 1 + math.sin(batch_id / 20 + i) + draw.random() / 5 for i, name in enumerate(METRICS)}
    return {"reward/mean": mean, **waves, "time/sample": 20.0, "time/learn": 8.0, "time/wait": 6.0}
