"""Pins batches: on disk before learned, advantages by group and role, learned once, replayed to the same bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentjet.compute.protocol import body_digest
from agentjet.errors import CheckpointError
from agentjet.swarm import Batch, facts
from agentjet.swarm.journal import pack_sets
from agentjet.timeline.forest import EVERYTHING, Forest, encode_set
from agentjet.timeline.tree import context_hash
from agentjet.types import SOLE_POLICY, Call, CheckpointStamp, Message, NewContext, ToolCall
from tests.swarm.world import World

Make = Callable[..., World]


def advance(world: World, steps: int = 1) -> list[tuple[Batch, Forest]]:
    learned = []
    for _ in range(steps):
        for group in range(world.job.batch_size):
            world.play(f"v{world.swarm.policy_version}g{group}", 0, 1)
        batch = world.swarm.batches.compose()
        learned.append((batch, world.forest(batch)))
        world.swarm.batches.learned(batch, {"policy/entropy": 0.5})
    return learned


def same(a: Forest, b: Forest) -> bool:
    return body_digest(a) == body_digest(b)


def test_a_batch_is_on_disk_before_it_is_learned(world: World) -> None:
    groups = [world.play("a", 0, 1), world.play("b", 1, 0)]
    batch = world.swarm.batches.compose()
    assert (batch.id, batch.groups) == (0, tuple((first.id, second.id) for first, second in groups))
    forest = world.forest(batch)
    world.reopen()
    assert world.swarm.pending == batch and not world.swarm.batches.ready()
    assert world.swarm.batches.resume(None) == [batch]
    assert same(world.forest(batch), forest)


def test_groups_train_in_the_order_they_were_completed(world: World) -> None:
    slow = world.begin("slow")
    world.now += 1
    fast = world.play("fast", 0, 1)
    world.now += 1
    world.call(slow, 5)
    world.finish(slow, 1.0)
    [slower] = world.play("slow", 0)
    assert world.swarm.batches.compose().groups == ((fast[0].id, fast[1].id), (slow.id, slower.id))


def test_the_forest_holds_every_call_once_with_its_advantage(make_world: Make) -> None:
    world = make_world(batch_size=1, recipe="dr_grpo")
    good, bad = world.begin(), world.begin()
    first = world.call(good, 7, 8)
    world.call(good, 9, parent=first, kept=4)
    world.call(bad, 7)
    world.finish(good, 1.0)
    world.finish(bad, 0.0)
    forest = world.forest(world.swarm.batches.compose())
    assert forest.tokens.tolist() == [1, 2, 7, 8, 3, 9]  # both share 1 2 7
    assert forest.num_row_tokens == 4 + 6 + 3 and forest.num_sequences == 2
    found = zip(
        forest.tokens[forest.node].tolist(), forest["advantage"].tolist(), forest["sequence"].tolist(), strict=True
    )
    assert sorted(found) == [(7, -0.5, 1), (7, 0.5, 0), (8, 0.5, 0), (9, 0.5, 0)]


def test_the_sets_that_tokens_were_chosen_among_reach_the_forest_after_a_restart(make_world: Make) -> None:
    world = make_world(batch_size=1)
    free, bound = world.begin(), world.begin()
    few, alone = (encode_set(np.isin(np.arange(300), members)) for members in ([7, 8, 9], [8]))
    world.call(free, 7, 8)
    world.call(bound, 9, 7, 8, support=pack_sets([EVERYTHING, few, alone]))
    world.finish(free, 0.0)
    world.finish(bound, 1.0)
    batch = world.swarm.batches.compose()
    world.reopen()
    forest = world.forest(batch)
    chosen_among = [forest.sets[number] if number >= 0 else EVERYTHING for number in forest["support"]]
    sampled = dict(zip(zip(forest["sequence"], forest.tokens[forest.node], strict=True), chosen_among, strict=True))
    assert sampled == {(0, 7): EVERYTHING, (0, 8): EVERYTHING, (1, 9): EVERYTHING, (1, 7): few, (1, 8): alone}


def test_roles_are_compared_by_their_own_reward(make_world: Make) -> None:
    world = make_world(batch_size=1, recipe="dr_grpo")
    for reward, critic in ((1.0, 0.0), (0.0, 0.5)):
        episode = world.begin()
        world.call(episode, 7, role="planner")
        world.call(episode, 8, role="critic")
        world.finish(episode, reward, by_role={"critic": critic})
    forest = world.forest(world.swarm.batches.compose())
    found = zip(
        forest.tokens[forest.node].tolist(), forest["advantage"].tolist(), forest["sequence"].tolist(), strict=True
    )
    assert sorted(found) == [(7, -0.5, 2), (7, 0.5, 0), (8, -0.25, 1), (8, 0.25, 3)]


SOLVER, VERIFIER, SILENT = (1.0, 0.0, 1.0, 0.0), (0.9, 0.1, 0.1, None), (None, None, None, 0.5)
"""Rewards by episode of a group; None where the role was not called."""


def advantages_by_role(world: World) -> dict[str, list[float]]:
    """Four episodes of up to three roles, one sampled token each, in the batch's order."""
    for rewards in zip(SOLVER, VERIFIER, SILENT, strict=True):
        by_role = {role: r for role, r in zip(("solver", "verifier", "once"), rewards, strict=True) if r is not None}
        episode = world.begin()
        for number, role in enumerate(by_role):
            world.call(episode, {"solver": 11, "verifier": 12, "once": 13}[role], role=role, suffix=(1, number))
        world.finish(episode, sum(by_role.values()) / len(by_role), by_role=by_role)
    forest = world.forest(world.swarm.batches.compose())
    told: dict[str, list[float]] = {"solver": [], "verifier": [], "once": []}
    for node, advantage in zip(forest.node, forest["advantage"], strict=True):
        told[{11: "solver", 12: "verifier", 13: "once"}[int(forest.tokens[node])]].append(float(advantage))
    return told


def test_roles_are_compared_over_the_episodes_in_which_they_spoke(make_world: Make) -> None:
    """Dr. MAS's own numbers: agent-wise statistics, and nothing to learn from what one episode alone did."""
    world = make_world(batch_size=1, group_size=4, recipe={"by_role": True})
    told = advantages_by_role(world)
    assert sorted(told["solver"]) == pytest.approx([-0.866024, -0.866024, 0.866024, 0.866024], abs=1e-6)
    assert sorted(told["verifier"]) == pytest.approx([-0.577349, -0.577349, 1.154698], abs=1e-6)
    assert told["once"] == [0.0]


def test_roles_are_compared_over_all_episodes_by_default(make_world: Make) -> None:
    """Over all that name a reward for the role: an episode in which the verifier did not speak has none."""
    world = make_world(batch_size=1, group_size=4, recipe="dr_grpo")
    mean = (0.9 + 0.1 + 0.1) / 3
    told = advantages_by_role(world)
    assert sorted(told["verifier"]) == pytest.approx([0.1 - mean, 0.1 - mean, 0.9 - mean], abs=1e-6)


@pytest.mark.parametrize("by_role", [False, True])
def test_an_episode_that_names_no_reward_of_a_role_is_not_compared_with_those_that_do(
    make_world: Make, caplog: pytest.LogCaptureFixture, by_role: bool
) -> None:
    """Its own reward, 100, is on another scale."""
    world = make_world(batch_size=1, group_size=3, recipe={"name": "dr_grpo", "by_role": by_role})
    for number, critic in enumerate(({"critic": 0.0}, {"critic": 1.0}, {})):
        episode = world.begin()
        world.call(episode, 7, role="critic", suffix=(1, number))
        world.finish(episode, 100.0, by_role=critic)
    batch = world.swarm.batches.compose()
    forest = world.forest(batch)
    assert sorted(forest["advantage"].tolist()) == [-0.5, 0.0, 0.5]
    assert f"1 roles have no reward, such as 'critic' of {episode.id}" in caplog.text
    assert world.swarm.batches.learned(batch, {})["reward/roles_left_out"] == 1


def test_learning_counts_versions_and_says_what_it_learned_from(make_world: Make) -> None:
    world = make_world(batch_size=1)
    a = world.begin(task_set="x")
    world.abort(world.begin(task_set="x"))
    world.abort(world.begin(task_set="x"), "not needed: the client's run has its steps")
    world.abort(world.begin("other", mode="eval"))
    b = world.begin(task_set="x")
    first = world.call(a, 7, 8)
    world.call(a, 9, parent=first, kept=4)
    world.call(b, 7)
    world.finish(a, 1.0, metrics={"tools": 2.0})
    world.finish(b, 0.0, metrics={"tools": 4.0})
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {"optim/lr": 1e-5})
    assert world.swarm.policy_version == 1 and world.swarm.last_step == metrics
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/max": 1.0,
        "groups/at_best": 0.0,
        "reward/x/mean": 0.5,
        "batch/share/x": 1.0,
        "episode/num_turns": 1.5,
        "completion/tokens": pytest.approx(4 / 3),
        "batch/episodes": 2.0,
        "batch/unscorable": 0.0,
        "batch/sampled_tokens": 4.0,
        "batch/staleness_max": 0.0,
        "agent/tools": 3.0,
        "episode/timelines": 1.0,
        "completion/truncated": 0.0,
        "groups/zero_variance": 0.0,
        "forest/orphans": 0.0,
        "forest/orphan_tokens": 0.0,
        "forest/side_calls": 0.0,
        "forest/drift": 0.0,
        "forest/tokens": 6.0,
        "forest/tree_token_ratio": 13 / 6,
        "groups/dropped": 0,
        "episodes/aborted": 1.0,
        "episodes/expired": 0.0,
        "episodes/not_needed": 1.0,
        "optim/lr": 1e-5,
    }
    assert world.swarm.episode(a.id).trained_in == 0
    assert world.journal.events()[-1].body == {"policy_version": 1, "metrics": metrics}


def test_equal_groups_and_answers_that_were_cut_off_are_counted(make_world: Make) -> None:
    world = make_world(batch_size=2)
    for group, rewards in (("equal", (1.0, 1.0)), ("mixed", (0.0, 1.0))):
        for reward in rewards:
            episode = world.begin(group)
            world.call(episode, 7, finish_reason="length" if reward == 0.0 else "stop")
            world.finish(episode, reward)
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["groups/zero_variance"], metrics["completion/truncated"]) == (0.5, 0.25)
    assert (metrics["groups/at_best"], metrics["reward/max"]) == (0.5, 1.0)
    assert "tools/offered" not in metrics and "batch/omitted" not in metrics


def test_calls_that_set_what_the_job_sets_are_counted(make_world: Make) -> None:
    world = make_world(batch_size=1, group_size=4, temperature=1.0, max_tokens=3)
    own = ({"temperature": 0.5}, {"finish_reason": "length"}, {}, {})
    for number, changes in enumerate(own):
        episode = world.begin("g")
        world.call(episode, 7, 8, **changes)
        world.finish(episode, float(number))
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["overridden/temperature"], metrics["overridden/max_tokens"]) == (0.25, 0.25)
    assert metrics["overridden/limit"] == 2.0


@pytest.mark.parametrize(
    ("policies", "contexts", "full", "own"),
    [((), {SOLE_POLICY: 4}, 0.5, 0.25), (("a", "b"), {"a": 4, "b": 9}, 0.25, 0.5), ((), {}, 0.0, 0.75)],
)
def test_a_full_context_and_an_agents_own_limit_are_counted_apart(
    make_world: Make, policies: tuple[str, ...], contexts: dict[str, int], full: float, own: float
) -> None:
    """An answer of three tokens ends at the job's limit."""
    world = make_world(batch_size=1, group_size=4, max_tokens=3, policies=policies)
    world.swarm.record_models({}, contexts)
    for number, tokens in enumerate(((7, 8), (7, 8), (7,), (7, 8, 9))):  # The prompt has two tokens.
        episode = world.begin("g")
        world.call(episode, *tokens, finish_reason="length", role=policies[number % 2] if policies else "")
        world.finish(episode, float(number))
    batch = world.swarm.batches.compose()
    world.swarm.batches.training_batches(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["completion/truncated"], metrics.get("completion/context_full", 0.0)) == (1.0, full)
    assert metrics["overridden/max_tokens"] == own


def test_calls_that_offer_tools_and_omitted_images_are_counted(make_world: Make) -> None:
    world = make_world(batch_size=1, group_size=2)
    offer = NewContext(tools=({"type": "function", "function": {"name": "add", "parameters": {}}},))
    for number in range(2):
        episode = world.begin("g")
        first = world.call(episode, 7, ask=offer, response=Message("assistant", "7"))
        used = Message("assistant", tool_calls=(ToolCall("c", "add", "{}"),)) if number else Message("assistant", "8")
        world.call(episode, 8, parent=first, kept=3, ask=NewContext(after=first.id), response=used)
        world.swarm.note(episode.id, noted=["image omitted"] * number)
        world.finish(episode, float(number))
    batch = world.swarm.batches.compose()
    world.forest(batch)
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["tools/offered"], metrics["tools/called"], metrics["batch/omitted"]) == (4.0, 1.0, 1.0)


@pytest.mark.parametrize(("members_a_slice", "num_slices"), [(1, 8), (3, 3), (8, 1), (16, 1)])
def test_each_group_of_a_learned_batch_has_a_slice_and_its_members_share_slices(
    members_a_slice: int, num_slices: int, make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe may compare the rewards of thousands of turns."""
    monkeypatch.setattr("agentjet.swarm.batches.MEMBERS_A_SLICE", members_a_slice)
    world, transactions = make_world(group_size=4), list[str]()
    for group in "ab":
        world.play(group, 0.0, 1.0, 0.0, 1.0)
    batch = world.swarm.batches.compose()
    world.journal.file.db.set_trace_callback(lambda query: transactions.append(query) if query == "COMMIT" else None)
    first, second, *recorded = world.swarm.batches.learned_in_slices(batch, {})
    assert (first, second) == ({}, {}) and recorded[0]["groups/zero_variance"] == 0.0
    assert len(recorded) == len(transactions) == 1 + num_slices
    assert all(world.journal.known_episode(member).trained_in == 0 for member in batch.episode_ids)


def test_a_replay_sees_the_same_bytes_and_changes_nothing(world: World) -> None:
    learned = advance(world, steps=3)
    world.reopen()
    before = (world.journal.outcomes(), world.journal.events(), world.swarm.last_step)
    replayed = world.swarm.batches.resume(CheckpointStamp(1, "d"))
    assert replayed == [batch for batch, _ in learned[1:]]
    for batch, (_, forest) in zip(replayed, learned[1:], strict=True):
        assert same(world.forest(batch), forest)
        assert world.swarm.batches.learned(batch, {"policy/entropy": 9.9})["policy/entropy"] == 0.5
    assert (world.journal.outcomes(), world.journal.events(), world.swarm.last_step) == before
    assert world.swarm.policy_version == 3


def test_a_batch_keeps_the_settings_it_was_composed_with(make_world: Make) -> None:
    world = make_world(batch_size=1)
    world.play("a", 0, 1)
    batch = world.swarm.batches.compose()
    world.job = world.job.model_copy(update={"batch_size": 5})
    world.reopen()
    assert world.swarm.batches.resume(None)[0].job == batch.job != world.swarm.job


def test_a_durable_checkpoint_lets_tokens_go_but_no_facts(world: World) -> None:
    (first, _), *_ = advance(world, steps=3)
    lost, evaluated, live = world.begin(), world.begin(mode="eval"), world.begin()
    for episode in (lost, evaluated, live):
        world.call(episode, 5)
    world.abort(lost)
    world.finish(evaluated, 1.0)
    kept = world.swarm.episode(first.episode_ids[0])
    world.swarm.batches.checkpointed(2)
    world.prune()
    assert world.journal.calls(kept.id) == world.journal.calls(lost.id) == world.journal.calls(evaluated.id) == []
    assert len(world.journal.calls(live.id)) == 1
    assert world.swarm.episode(kept.id) == kept and kept.num_tokens == 2
    assert [batch.id for batch in world.swarm.batches.from_version(2)] == [2]
    assert world.forest(world.swarm.batches.from_version(2)[0]).num_targets == 8
    for too_early in (lambda: world.swarm.batches.from_version(1), lambda: world.forest(first)):
        with pytest.raises(CheckpointError, match="checkpoint of version 2"):
            too_early()


def test_checkpoints_only_move_forward(world: World) -> None:
    advance(world, steps=2)
    world.swarm.batches.checkpointed(2)
    world.swarm.batches.checkpointed(1)
    assert world.swarm.state.durable_version == 2


def test_tokens_logprobs_and_messages_survive_exactly(world: World) -> None:
    episode = world.begin()
    call = world.call(episode, 7, 8, 2**31 - 1)
    world.reopen()
    [(found, suffix, completion)] = world.journal.calls(episode.id)
    assert found == call
    assert (suffix, b"".join(completion).decode()) == ((b"p", b"p"), "é7é8é2147483647")
    tree = world.swarm.tree(episode.id, "")
    assert tree.tokens(call.id) == (1, 2, 7, 8, 2**31 - 1)
    assert np.array_equal(found.logprobs, call.logprobs)


def test_what_nobody_heard_is_counted_and_not_trained(make_world: Make) -> None:
    world = make_world(batch_size=1)
    good, bad = world.begin(), world.begin()
    lost = world.call(good, 7)
    world.call(good, 8, retry_of=lost.id, fork="retry")
    silent = world.call(bad, 9)
    world.call(bad, 5)
    world.swarm.undelivered(bad.id, [silent.id])
    assert world.swarm.queries.journal.orphans(good.id) == {lost.id: "retry"}
    world.reopen()
    world.finish(good, 1.0)
    world.finish(bad, 0.0)
    world.swarm.undelivered(good.id, [lost.id])  # too late to change what is trained
    batch = world.swarm.batches.compose()
    forest = world.forest(batch)
    assert sorted(forest.tokens[forest.node].tolist()) == [5, 8]
    metrics = world.swarm.batches.learned(batch, {})
    assert (metrics["forest/orphans"], metrics["forest/orphan_tokens"], metrics["forest/forks_retry"]) == (2, 2, 1)
    assert metrics["episode/timelines"] == 1.0 and metrics["forest/drift"] == 0


def test_a_batch_that_nobody_heard_is_learned_as_nothing(make_world: Make) -> None:
    world = make_world(batch_size=1)
    for reward in (0.0, 1.0):
        episode = world.begin()
        world.swarm.undelivered(episode.id, [world.call(episode, 7).id])
        world.finish(episode, reward)
    forest = world.forest(world.swarm.batches.compose())
    assert (forest.num_nodes, forest.num_targets, forest.num_sequences) == (0, 0, 0)


def test_tokens_that_are_not_as_they_were_sampled_are_left_out(make_world: Make) -> None:
    world = make_world(batch_size=1)
    episodes = [world.begin(), world.begin()]
    for episode, reward in zip(episodes, (0.0, 1.0), strict=True):
        world.call(episode, 7, context=context_hash([1, 2, 7]).digest())
        world.finish(episode, reward)
    damage = "UPDATE calls SET body = json_set(body, '$[0].suffix', json('[1, 3]')) WHERE episode_id = ?"
    world.journal.file.db.execute(damage, (episodes[0].id,))
    batch = world.swarm.batches.compose()
    forest = world.forest(batch)
    assert forest.tokens.tolist() == [1, 2, 7]
    assert world.swarm.batches.learned(batch, {})["forest/drift"] == 1


def test_a_batch_is_built_with_the_calls_of_one_episode_in_memory(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the garbage collector visits the tokens of all at once, and holds the event loop meanwhile."""
    world = make_world(batch_size=8)
    for number in range(8):
        world.play(f"g{number}", 0.0, 1.0)
    batch, rows, alive = world.swarm.batches.compose(), facts.call_rows, []

    def counting(*args: Any) -> list[Any]:
        alive.append(sum(isinstance(known, Call) for known in gc.get_objects()))
        assert gc.isenabled()
        return rows(*args)

    before = sum(isinstance(known, Call) for known in gc.get_objects())
    monkeypatch.setattr(facts, "call_rows", counting)
    world.training(batch)
    assert len(alive) == 16 and max(alive) - before <= 2
