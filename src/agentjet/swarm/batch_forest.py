"""The forest of a batch and the batch's metrics. Reads the journal and changes nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from agentjet.recipes.advantages import ADVANTAGES
from agentjet.swarm.groups import all_equal
from agentjet.swarm.journal import Journal
from agentjet.swarm.records import Batch, Episode
from agentjet.timeline.forest import Forest, Row, build_forest
from agentjet.timeline.forks import OrphanReason, orphans
from agentjet.timeline.identity import context_digest
from agentjet.timeline.support import unpack_sets
from agentjet.timeline.tree import ConversationTree
from agentjet.types import Call

log = logging.getLogger(__name__)


def load_trees(journal: Journal, episode_id: str) -> dict[str, ConversationTree]:
    """An episode's conversations by agent role, in the order the roles first spoke."""
    trees: dict[str, ConversationTree] = {}
    for call, encoded_suffix, encoded_completion in journal.calls(episode_id):
        trees.setdefault(call.role, ConversationTree()).add(call, encoded_suffix, encoded_completion)
    return trees


def find_orphans(journal: Journal, episode_id: str, trees: Mapping[str, ConversationTree]) -> dict[str, OrphanReason]:
    """The calls of an episode that are not trained, with the reason, over all its roles."""
    return orphans([call for tree in trees.values() for call in tree.calls], journal.undelivered(episode_id))


def build(journal: Journal, batch: Batch, episodes: Mapping[str, Episode]) -> tuple[Forest, dict[str, float]]:
    """Returns the forest with one row per call with sampled tokens, and metrics of the trees.

    A sequence is what one episode and one role produced. Orphans are left out. So is a call whose tokens differ from
    the sampled ones; these are counted as `forest/drift`, which is 0 unless the journal is damaged.
    """
    rows: list[Row] = []
    shape = Counter(dict.fromkeys(("timelines", "orphans", "orphan_tokens", "side_calls", "drift", "truncated"), 0))
    num_sequences = 0
    unnamed: list[str] = []
    for group in batch.groups:
        members = [episodes[episode_id] for episode_id in group]
        spoken = [_trained_sequences(journal, episode, shape) for episode in members]
        named = {role for member in members for role in member.by_role}
        for i, sequences in enumerate(spoken):
            unnamed += [
                f"{role!r} of {members[i].id}" for role in sequences if role in named - members[i].by_role.keys()
            ]
            for role, (tree, calls) in sequences.items():
                advantage = role_advantages(batch, members, role, [role in roles for roles in spoken])[i]
                rows += [_row(tree, call, advantage, num_sequences) for call in calls]
                num_sequences += 1
    means = {
        "episode/timelines": shape.pop("timelines") / len(batch.episode_ids),
        "completion/truncated": shape.pop("truncated") / max(1, len(rows)),
    }
    if unnamed:
        means["reward/roles_left_out"] = float(len(unnamed))
        log.warning(
            "batch %d: %d roles have no reward of their own, such as %s, in groups in which other episodes name one "
            "for the same role. They are left out, because the episode's reward may have another scale: give by_role "
            "in every episode, or in none",
            batch.id,
            len(unnamed),
            unnamed[0],
        )
    return build_forest(rows), {**means, **{f"forest/{n}": float(c) for n, c in shape.items()}}


def _trained_sequences(
    journal: Journal, episode: Episode, shape: Counter[str]
) -> dict[str, tuple[ConversationTree, list[Call]]]:
    """An episode's conversations and their trained calls by agent role. Roles without trained calls are left out."""
    trees = load_trees(journal, episode.id)
    unheard = find_orphans(journal, episode.id, trees)
    calls = {role: _trained_calls(tree, unheard, shape) for role, tree in trees.items()}
    return {role: (tree, calls[role]) for role, tree in trees.items() if calls[role]}


def _trained_calls(tree: ConversationTree, unheard: Container[str], shape: Counter[str]) -> list[Call]:
    """The calls of a tree whose sampled tokens are trained. The others are counted in `shape`."""
    trained = []
    for call in tree.calls:
        if call.fork:
            shape[f"forks_{call.fork}"] += 1
        if call.untrained:
            shape["side_calls"] += 1
        elif call.id in unheard:
            shape["orphans"] += 1
            shape["orphan_tokens"] += len(call.completion)
        elif call.context and call.context != context_digest(tree.tokens(call.id)):
            shape["drift"] += 1
            log.error(
                "the tokens of call %s of episode %s differ from the sampled ones: the call is not trained",
                call.id,
                call.episode_id,
            )
        elif call.completion:
            trained.append(call)
            shape["truncated"] += call.finish_reason == "length"
    shape["timelines"] += sum(call.id not in unheard for call in tree.leaves())
    return trained


def role_advantages(batch: Batch, members: Sequence[Episode], role: str, spoke: Sequence[bool]) -> list[float]:
    """The advantages [G] of a group's members for one agent role.

    If any member names a reward for the role, those that name one are compared by it. If none does, all are compared by
    the episode's reward. With `algorithm.by_role` only members in which the role spoke are compared (Dr. MAS,
    github.com/langfengQ/DrMAS), each once, however often the role was called, where Dr. MAS counts calls. A member that
    is not compared has advantage 0, and so has one that is compared with no other.
    """
    algorithm = batch.job.algorithm
    named_G = np.asarray([role in member.by_role for member in members])
    counts_G = np.asarray(spoke) if algorithm.by_role else np.ones(len(members), bool)
    if named_G.any():
        counts_G &= named_G
    rewards_G = np.asarray([member.by_role.get(role, member.reward) for member in members], np.float64)
    advantages_G = np.zeros(len(members))
    if counts_G.any():
        advantages_G[counts_G] = ADVANTAGES[algorithm.advantage](rewards_G[counts_G])
    return [float(advantage) for advantage in advantages_G]


def _row(tree: ConversationTree, call: Call, advantage: float, sequence: int) -> Row:
    return Row(
        tokens=np.asarray(tree.tokens(call.id), np.int32),
        logprobs=np.asarray(call.logprobs, np.float32),
        versions=np.asarray(call.versions, np.int32),
        advantage=advantage,
        temperature=call.temperature,
        sequence=sequence,
        support=unpack_sets(call.support, len(call.completion)) if call.support else (),
    )


def forest_metrics(batch: Batch, forest: Forest) -> dict[str, float]:
    return {
        "forest/tree_token_ratio": forest.tree_token_ratio,
        "forest/tokens": float(forest.num_nodes),
        "batch/staleness_max": float(batch.id - int(forest.version.min(initial=batch.id))),
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
        "batch/unscorable": float(sum(episode.unscorable for episode in members)),
        "batch/sampled_tokens": float(num_tokens),
    }
    by_set: dict[str, list[float]] = {}
    by_code: dict[str, list[float]] = {}
    by_name: dict[str, list[float]] = {}
    for episode in members:
        for name, by in ((episode.task_set, by_set), (episode.code_version, by_code)):
            if name and episode.reward is not None:
                by.setdefault(name, []).append(episode.reward)
        for name, value in episode.metrics.items():
            by_name.setdefault(name, []).append(value)
    metrics |= {f"reward/{task_set}/mean": fmean(values) for task_set, values in by_set.items()}
    metrics |= {f"code/{version}/reward_mean": fmean(values) for version, values in by_code.items()}
    metrics |= {f"agent/{name}": fmean(values) for name, values in by_name.items()}
    return metrics


def share_metrics(batch: Batch, episodes: Mapping[str, Episode]) -> dict[str, float]:
    """Shares of the named task sets in the batch's groups, and the share of groups without variance in a reward."""
    groups = Counter(episodes[group[0]].task_set for group in batch.groups)
    shares = {f"batch/share/{name}": count / len(batch.groups) for name, count in sorted(groups.items()) if name}
    equal = sum(all_equal([episodes[member] for member in group]) for group in batch.groups)
    return {"groups/zero_variance": equal / len(batch.groups), **shares}


def loss_metrics(dropped_groups: Mapping[str, int], lost_episodes: Mapping[str, int]) -> dict[str, float]:
    """Groups dropped while the batch was filled, by reason, and episodes that ended without a reward."""
    reasons = {reason: float(count) for reason, count in dropped_groups.items() if reason != "no_members"}
    return {
        "groups/dropped": sum(reasons.values()),
        **{f"groups/dropped_{reason}": count for reason, count in reasons.items()},
        "episodes/aborted": float(lost_episodes.get("aborted", 0)),
        "episodes/expired": float(lost_episodes.get("expired", 0)),
        **{
            f"episodes/{how}": float(lost_episodes[how])
            for how in ("surplus", "stale", "in_doubt", "not_needed", "replaced")
            if how in lost_episodes
        },
    }
