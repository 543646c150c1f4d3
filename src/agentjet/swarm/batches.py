"""From a batch's episodes to its forest and its metrics. Reads the journal, changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from agentjet.algorithms.advantages import ADVANTAGES
from agentjet.swarm.journal import Journal
from agentjet.swarm.records import Batch, Episode
from agentjet.timeline.forest import Forest, Row, build_forest
from agentjet.timeline.tree import ConversationTree
from agentjet.types import Call


def load_trees(journal: Journal, episode_id: str) -> dict[str, ConversationTree]:
    """An episode's conversations by agent role, in the order the roles first spoke."""
    trees: dict[str, ConversationTree] = {}
    for call, encoded_suffix, encoded_completion in journal.calls(episode_id):
        trees.setdefault(call.role, ConversationTree()).add(call, encoded_suffix, encoded_completion)
    return trees


def build(journal: Journal, batch: Batch, episodes: Mapping[str, Episode]) -> Forest:
    """One row per call with sampled tokens, merged. A sequence is what one episode and one role produced."""
    rows: list[Row] = []
    num_sequences = 0
    for group in batch.groups:
        members = [episodes[episode_id] for episode_id in group]
        for i, episode in enumerate(members):
            for role, tree in load_trees(journal, episode.id).items():
                advantage = role_advantages(batch, members, role)[i]
                fresh = [_row(tree, call, advantage, num_sequences) for call in tree.calls if call.completion]
                rows += fresh
                num_sequences += bool(fresh)
    return build_forest(rows)


def role_advantages(batch: Batch, members: Sequence[Episode], role: str) -> list[float]:
    """The advantages [G] of a group's members for one agent role, by the role's own reward where one was given.

    Every finished member counts in the comparison, also one in which the role did not speak.
    """
    rewards_G = np.asarray([member.by_role.get(role, member.reward) for member in members], np.float64)
    advantages: list[float] = ADVANTAGES[batch.job.algorithm.advantage](rewards_G).tolist()
    return advantages


def _row(tree: ConversationTree, call: Call, advantage: float, sequence: int) -> Row:
    return Row(
        tokens=np.asarray(tree.tokens(call.id), np.int32),
        logprobs=np.asarray(call.logprobs, np.float32),
        versions=np.asarray(call.versions, np.int32),
        advantage=advantage,
        temperature=call.temperature,
        sequence=sequence,
    )


def forest_metrics(batch: Batch, forest: Forest) -> dict[str, float]:
    return {
        "forest/tree_token_ratio": forest.tree_token_ratio,
        "forest/tokens": float(forest.num_nodes),
        "batch/staleness_max": float(batch.id - int(forest.version.min())),
    }


def episode_metrics(members: Sequence[Episode]) -> dict[str, float]:
    """Means over a batch's episodes; `agent/...` are the metrics that clients sent with their rewards."""
    rewards = [episode.reward for episode in members if episode.reward is not None]
    num_tokens = sum(episode.num_tokens for episode in members)
    num_calls = sum(episode.num_calls for episode in members)
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "episode/num_turns": num_calls / len(members),
        "completion/tokens": num_tokens / max(1, num_calls),
        "batch/episodes": float(len(members)),
        "batch/sampled_tokens": float(num_tokens),
    }
    by_set: dict[str, list[float]] = {}
    by_name: dict[str, list[float]] = {}
    for episode in members:
        if episode.task_set and episode.reward is not None:
            by_set.setdefault(episode.task_set, []).append(episode.reward)
        for name, value in episode.metrics.items():
            by_name.setdefault(name, []).append(value)
    metrics |= {f"reward/{task_set}/mean": fmean(values) for task_set, values in by_set.items()}
    metrics |= {f"agent/{name}": fmean(values) for name, values in by_name.items()}
    return metrics


def loss_metrics(dropped_groups: Mapping[str, int], lost_episodes: Mapping[str, int]) -> dict[str, float]:
    """What was lost while the batch was being filled: groups dropped, by reason, and episodes without a reward."""
    reasons = {reason: float(count) for reason, count in dropped_groups.items() if reason != "no_members"}
    return {
        "groups/dropped": sum(reasons.values()),
        **{f"groups/dropped_{reason}": count for reason, count in reasons.items()},
        "episodes/aborted": float(lost_episodes.get("aborted", 0)),
        "episodes/expired": float(lost_episodes.get("expired", 0)),
    }
