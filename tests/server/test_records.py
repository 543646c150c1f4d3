"""Records of batches and texts of tokens.

Views of groups and batches.

1. Advantages are those that the learner's recipe gives every token of an episode, for each recipe that has them; others
   have a note.
2. Rewards by policy and by role have advantages by policy and role.
3. A group is open, complete, dropped, in the pending batch, or in a learned one.
4. A batch lists the episodes that were lost while it was filled, and the settings that changed.

Texts of tokens.

1. Tokens of any cut, also inside characters, join to the text that the bytes have, with each character once.
2. A character is at its first token; the lengths in UTF-16 find each token's text again.
3. Control tokens have names, unknown ones their id; escaped bytes are bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.errors import NotFound
from agentjet.recipes.hooks import PlugInThreads
from agentjet.recipes.registry import make_recipe
from agentjet.server.records import (
    Unfinished,
    View,
    batch,
    batches,
    control_names,
    group,
    members_with_recipe,
    token_texts,
    utf16_length,
)
from agentjet.swarm.facts import AdvantageHook, Advantages, Members
from agentjet.swarm.origin import Origin
from agentjet.types import ESCAPE, ESCAPED_BYTE
from tests.swarm.world import World

# ---- batches and groups ----------------------------------------------------------------------------------------------

OF_REWARDS = ("grpo", "dr_grpo", "rloo", "dapo", "gspo", "reinforce", "grpo_passk", "duration_aware", "awr")
OF_TOKENS = ("gigpo", "aepo", "ppo", "opo", "dr_mas", "direct_advantage", "distill")


def learned(world: World, *rewards: tuple[float, ...]) -> Advantages:
    """Fill and learn the newest batch; its advantages."""
    for number, of_group in enumerate(rewards):
        world.play(f"g{number}", *of_group)
    composed = world.swarm.batches.compose()
    found = found_in(world, composed.id)
    world.swarm.batches.learned(composed, {})
    assert found_in(world, composed.id) == found, "learning changes no reward"
    return found


def found_in(world: World, batch_id: int) -> Advantages:
    [record] = world.journal.batch_records(batch_id + 1, 1)
    return called(members_with_recipe(world.journal, record, world.journal.members_of(record.groups)))


def called(found: Members | Advantages) -> Advantages:
    return asyncio.run(AdvantageHook(PlugInThreads())(found)) if isinstance(found, Members) else found


def finished(unfinished: Unfinished[View]) -> View:
    return unfinished.finish(called(unfinished.advantages))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.mark.parametrize("recipe", OF_REWARDS)
def test_advantages_are_the_learners(tmp_path: Path, recipe: str) -> None:
    world = World(tmp_path, recipe=recipe, group_size=3)
    rewards = ((0.0, 0.5, 1.0), (1.0, 1.0, 0.25))
    for number, of_group in enumerate(rewards):
        world.play(f"g{number}", *of_group)
    batch = world.swarm.batches.compose()
    found = found_in(world, 0)
    assert found.note == ""
    training = world.training(batch)
    forest = batch.job.recipe.columns(training, {})[0]
    assert training.facts is not None
    seen = {}
    for call, advantage in zip(forest["call"].tolist(), forest["advantage"].tolist(), strict=True):
        seen.setdefault(batch.episode_ids[training.facts.call_episode[call]], set()).add(advantage)
    assert len(seen) >= 5, "a recipe may leave out an episode"
    for episode_id, values in seen.items():
        assert [*values] == pytest.approx([found.of[episode_id][""]])
    world.close()


@pytest.mark.parametrize("recipe", OF_TOKENS)
def test_recipes_of_tokens_have_a_note(world: World, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world.play("a", 0, 1), world.play("b", 0, 1)
    world.swarm.batches.compose()
    made = make_recipe(recipe if recipe != "distill" else {"name": "distill", "teacher": "somewhere"})
    job = world.swarm.job.model_copy(update={"recipe": made})
    monkeypatch.setattr(world.journal, "stored_batch", lambda _: lambda: replace(world.swarm.pending, job=job))
    found = found_in(world, 0)
    assert (found.of, found.note) == ({}, f"{recipe} computes advantages from tokens or calls, next to the weights")


def test_rewards_by_policy_and_role(tmp_path: Path) -> None:
    world = World(tmp_path, policies=("planner", "coder"), batch_size=1)
    world.journal.branch(Origin({"coder": {}, "planner": {}}), "elsewhere@0")
    for planner, coder, critic in ((0.0, 1.0, 3.0), (1.0, 1.0, 5.0)):
        episode = world.begin("g")
        world.call(episode, 7, role="planner")
        world.finish(episode, 0.5, by_role={"planner": planner, "coder": coder, "coder/critic": critic})
    batch = world.swarm.batches.compose()
    first, second = batch.episode_ids
    found = found_in(world, 0).of
    assert found[first].keys() == {"planner", "coder", "coder/critic"}
    assert found[first]["planner"] == -found[second]["planner"] < 0 and found[first]["coder"] == 0.0
    assert found[first]["coder/critic"] == -found[second]["coder/critic"] < 0
    world.close()


def test_states_of_a_group(world: World) -> None:
    first = world.begin("a")
    opened = finished(group(world.journal, 1, {first.id: 5.0}))
    assert (opened.state, opened.size, opened.batch) == ("open", 2, None)
    assert (opened.advantages_note, opened.episodes[0].expires_at) == ("the group is in no batch yet", 5.0)
    world.call(first, 7), world.finish(first, 1.0)
    world.play("a", 0.0), world.play("b", 0, 1)
    assert finished(group(world.journal, 1, {})).state == "complete"
    composed = world.swarm.batches.compose()
    waiting = finished(group(world.journal, 1, {}))
    assert (waiting.state, waiting.batch, len(waiting.episodes)) == ("batched", 0, 2)
    world.swarm.batches.learned(composed, {})
    trained = finished(group(world.journal, 2, {}))
    assert trained.batch == 0 and [one.advantage is None for one in trained.episodes] == [False, False]
    lost = world.begin("c")
    world.abort(lost, "no")
    gone = finished(group(world.journal, 3, {}))
    assert (gone.state, gone.reason) == ("dropped", "no_members")
    assert [one.episode_id for one in gone.episodes] == [lost.id]
    with pytest.raises(NotFound, match="no group 9"):
        finished(group(world.journal, 9, {}))


def test_what_was_lost_and_changed(world: World) -> None:
    early = world.begin("x")
    world.now += 1
    world.abort(early, "too early")
    world.now += 1
    learned(world, (0, 1), (1, 1))
    world.now += 1
    job: dict[str, Any] = {"temperature": 0.5, "recipe": make_recipe({"name": "grpo", "kl_coef": 0.1})}
    world.swarm.replace_job(world.swarm.job.model_copy(update=job))
    late = world.begin("y")
    world.now += 1
    world.abort(late, "late"), world.begin("z", mode="eval")
    learned(world, (0, 1), (0, 1))
    first, second = finished(batch(world.journal, 0)), finished(batch(world.journal, 1))
    assert [one.episode_id for one in first.dropped] == [early.id]
    assert [one.episode_id for one in second.dropped] == [late.id]
    assert first.job_changes == []
    changes = {change.key: (change.before, change.after) for change in second.job_changes}
    assert changes["temperature"] == (1.0, 0.5) and changes["recipe.kl_coef"] == (0.0, 0.1) and len(changes) == 2
    assert [one.id for one in batches(world.journal, None, 5).batches] == [1, 0]
    assert [one.id for one in batches(world.journal, 1, 5).batches] == [0]
    with pytest.raises(NotFound, match="no batch 7"):
        finished(batch(world.journal, 7))


def test_a_batch_of_a_recipe_that_is_gone(world: World) -> None:
    learned(world, (0, 1), (0, 1))
    world.journal.file.db.execute(
        """UPDATE batches SET job = json_set(job, '$.recipe', json('{"name": "gone.package:Recipe"}'))"""
    )
    found = found_in(world, 0)
    assert found.of == {} and "gone.package" in found.note and "install its package" in found.note


# ---- texts of tokens -------------------------------------------------------------------------------------------------

ANY_TEXT = st.one_of(st.text(), st.text(alphabet="aé€한😀👩‍👩‍👧ࠀ"))


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[start:end] for start, end in pairwise(edges)]


@given(ANY_TEXT, st.lists(st.integers(0, 200), max_size=40))
def test_tokens_join_to_the_text(text: str, places: list[int]) -> None:
    pieces = cut(text.encode(), places)
    texts = token_texts(pieces, {})
    assert "".join(texts) == text and len(texts) == len(pieces)
    encoded, at = "".join(texts).encode("utf-16-le"), 0
    for piece, found in zip(pieces, texts, strict=True):
        length = 2 * utf16_length(found)
        assert encoded[at : at + length].decode("utf-16-le") == found
        at += length
        # A token that begins no character has no text; one that begins some has just these.
        assert len(found) == sum(byte & 0xC0 != 0x80 for byte in piece)


@given(st.lists(st.binary(max_size=5), max_size=30))
def test_any_bytes_join_as_their_decoding(pieces: list[bytes]) -> None:
    escaped = [piece.replace(ESCAPE, ESCAPED_BYTE) for piece in pieces]
    assert "".join(token_texts(escaped, {})) == b"".join(pieces).decode(errors="replace")


def test_control_tokens_have_names() -> None:
    end, other = ESCAPE + (2).to_bytes(3, "big"), ESCAPE + (7).to_bytes(3, "big")
    assert token_texts([b"hi", end, other, ESCAPED_BYTE, b"\xe4", end], {2: "<|end|>"}) == [
        "hi", "<|end|>", "<7>", "�", "�", "<|end|>",
    ]  # fmt: skip
    names = {"planner": {1: "<a>"}, "coder": {1: "<b>"}}
    assert control_names(names, "coder/critic") == {1: "<b>"}
    assert control_names({"policy": {1: "<c>"}}, "any") == {1: "<c>"} and control_names({}, "") == {}
