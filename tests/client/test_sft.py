"""Demonstrations from the client to the learner, over the real application and a scripted worker.

1. Batches are learned in order, as versions without a reward; nothing is sampled.
2. The tokens are those of an agent's calls: prompts from the tree, answers with their end tokens.
3. A wrong demonstration is refused with its name before anything is learned.
4. A repeated request learns once. A kill between the journal and the worker loses nothing.
5. Training episodes that a batch makes too old are dropped as `stale`; recipe `sft` refuses them.
6. `agentjet sft` reads files as data sets have them, and those of `agentjet episodes export`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.main import app
from agentjet.client.demonstrations import read_demonstrations
from agentjet.client.training import _learned
from agentjet.config import JobConfig
from agentjet.errors import ConfigError, Conflict, InvalidRequest, Later
from agentjet.protocol import BeginRequest, Event, SftRequest
from agentjet.protocol.base import NO_EFFECT
from agentjet.swarm.batches import Answered
from agentjet.types import ModelInfo
from tests.client.test_real_server import client
from tests.fakes import running
from tests.server.serving import serving
from tests.swarm.world import World
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def asked(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_the_digest_of_a_request_is_that_of_its_json() -> None:
    """Journals have it. Large requests are digested in pieces, so that no other thread waits for the whole."""
    given = [{"task_id": "t", **asked("é", "1")}, {"task_id": "u", **asked("b", "2")}]
    large = SftRequest.model_validate({"demonstrations": given, "policy": "p", "lr": 0.5})
    begin = BeginRequest(task_id="t", wait=3.0, instance_id="i")
    for request, without in ((large, set[str]()), (begin, NO_EFFECT)):
        whole = request.model_dump_json(exclude=without)
        assert request.digest() == hashlib.sha256(whole.encode()).hexdigest() == request.digest()
    assert begin.digest() == BeginRequest(task_id="t").digest() != BeginRequest(task_id="u").digest()


USING_TOOLS = {
    "messages": [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1 and 1"},
        {"role": "assistant", "content": None, "tool_calls": [ADD]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "weight": 0},
        {"role": "user", "content": "and so?"},
        {"role": "assistant", "content": "two again"},
    ],
    "tools": TOOLS,
}


def card(folder: Path) -> ModelInfo:
    """A model with tools."""
    return make_model_info(folder / "llama3", "llama3", tool_format="llama3")


async def test_demonstrations_are_learned_as_versions(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", card=card(tmp_path)) as served, client(served) as swarm:
        given = [asked(f"what is {number}?", f"it is {number}") for number in range(3)]
        report = await swarm.sft([*given, USING_TOOLS], epochs=2, batch_size=3, progress=False)
        assert [step.policy_version for step in report.steps] == [1, 2, 3, 4]
        assert (report.num_demonstrations, report.num_answers) == (4, 5)
        assert served.run.compute.learned == [0, 1, 2, 3] and served.run.compute.asked == []
        for step in report.steps:
            assert "reward/mean" not in step.metrics and "groups/zero_variance" not in step.metrics
            assert step.metrics["forest/drift"] == 0
        status = await swarm.status()
        assert status.episodes["trained"] == 8 and status.episodes["waiting"] == 0
        await served.run.batch()
        assert served.run.gateway.swarm.policy_version == 5
        listed = (await swarm.episodes(limit=20)).episodes
        [tree] = [await swarm.episode_tree(one.episode_id) for one in listed if one.task_id == "demonstration-4"][:1]
        assert tree.reward is None and tree.status == "finished"
        first, second, third = tree.calls
        assert first.response["tool_calls"][0]["name"] == "add" and second.orphan == "side"
        assert third.kept == len(first.tokens) + len(second.tokens), "later turns keep the tokens of earlier ones"
        learned = "".join(text for text, mask in zip(third.texts, third.mask, strict=True) if mask)
        assert learned.startswith("two again") and learned != "two again", "the end token is learned"
        assert third.logprobs == [None] * len(third.tokens)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "hello"}]}, "demonstration-2: no answer to learn"),
    ({"messages": [{"role": "assistant", "content": "hello"}]}, r"messages\.0: an answer without a question"),
    ({"messages": [*asked("a", "b")["messages"], {"role": "robot", "content": ""}]}, r"messages\.2\.role"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [ADD]}]}, "add tools"),
    ({**USING_TOOLS, "tools": [{"type": "function", "function": {"name": "sub"}}]}, "calls 'add', and .* offers sub"),
    ({"messages": [{"role": "user", "content": "a", "wait": 1}]}, r"'messages\.0\.wait' is not a known key"),
    (
        {"messages": [{**message, "weight": 2} for message in asked("a", "b")["messages"]]},
        "1 to learn the answer, or 0",
    ),
    ({**asked("a", '{"name": "add", "parameters": {}}'), "tools": TOOLS}, "would be read as"),
    (asked("long " * 4000, "b"), "context"),
]


async def test_a_wrong_demonstration_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", card=card(tmp_path)) as served, client(served) as swarm:
        for wrong, why in WRONG:
            with pytest.raises(InvalidRequest, match=why):
                await swarm.sft([asked("a", "b"), wrong], batch_size=1, progress=False)
        with pytest.raises(InvalidRequest, match="policy = 'other'"):
            await swarm.sft([asked("a", "b")], policy="other", progress=False)
        with pytest.raises(ValueError, match="lr = 0"):
            await swarm.sft([asked("a", "b")], lr=0, progress=False)
        assert served.run.compute.learned == [] and (await swarm.status()).episodes["finished"] == 0


async def test_a_repeated_request_and_a_kill(tmp_path: Path) -> None:
    body = {"demonstrations": [{"task_id": "one", **asked("a", "b")}], "client_id": "me", "lr": 1e-3}
    async with serving(tmp_path / "d") as served:
        await served.run.batch()
        served.run.compute.may_learn.clear()
        key = {"Idempotency-Key": "k"}
        answers = [await served.http.post("/swarm/v1/sft", json=body, headers=key) for _ in range(2)]
        assert [answer.json()["batch"] for answer in answers] == [1, 1], answers[0].text
        busy = await served.http.post("/swarm/v1/sft", json=body)
        assert (busy.status_code, busy.json()["code"]) == (429, "not_sampling")
        served.run.compute.die()
        await served.run.until(lambda: served.run.compute.starts == 2)
        served.run.compute.may_learn.set()
        await served.run.until(lambda: served.run.gateway.swarm.policy_version == 2)
        assert served.run.compute.learned == [0, 1], "the new worker learned both again"
        weights = served.run.compute.weights
        journal = served.run.gateway.swarm.journal
        assert [(batch.job.recipe.name, batch.job.optimizer_of("policy").lr) for batch in journal.batches(0)][1] == (
            "sft",
            1e-3,
        )
    async with running(tmp_path / "d") as run:
        await run.until(lambda: run.compute.learned[-1:] == [1] or run.compute.version == 2)
        assert run.compute.weights == weights


async def test_training_episodes_beside_demonstrations(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, client(served) as swarm:
        await served.run.episode(1.0)
        await swarm.sft([asked("a", "b")], progress=False)
        assert (await swarm.status()).dropped == {"stale": 1}
    async with serving(tmp_path / "e", job={"recipe": "sft", "group_size": 1}) as served:
        with pytest.raises(Conflict, match=r"agentjet sft or swarm\.sft"):
            await served.run.gateway.begin(BeginRequest(task_id="t"))
        await served.run.gateway.begin(BeginRequest(task_id="t", mode="eval"))


async def test_an_engine_that_failed_ends_the_wait(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, client(served) as swarm:
        served.run.compute.may_learn.clear()
        await served.run.fill_batch()
        waiting = asyncio.create_task(swarm.sft([asked("a", "b")], progress=False))
        served.run.compute.fail_learn.append(ConfigError("broken"))
        served.run.compute.may_learn.set()
        with pytest.raises(Conflict, match=r"engine (failed|is failed): "):
            await waiting


async def test_an_earlier_batch_of_the_same_number_was_given_up() -> None:
    async def events() -> AsyncIterator[Event]:
        yield Event(seq=1, time=0.0, kind="batch", body={"batch": 4, "reason": "out of memory"})
        yield Event(seq=3, time=0.0, kind="step", body={"policy_version": 5, "metrics": {}})

    assert (await _learned(4, 2, events())).policy_version == 5
    with pytest.raises(Conflict, match="given up"):
        await _learned(4, 0, events())


def test_a_complete_batch_is_learned_before_demonstrations(make_world: Callable[..., World]) -> None:
    world, answered = make_world(batch_size=1), [Answered("one", ())]
    request = SftRequest.model_validate({"demonstrations": [{"task_id": "one", **asked("a", "b")}]})
    world.play("g", 0.0, 1.0)
    with pytest.raises(Later) as refused:
        next(world.swarm.demonstrate(request, answered, "policy"))
    assert refused.value.code == "not_sampling"
    world.swarm.batches.learned(world.swarm.batches.compose(), {})
    *_, committed = world.swarm.demonstrate(request, answered, "policy")
    assert committed is not None and committed.batch == 1


def test_each_demonstration_is_recorded_in_a_slice_of_its_own(make_world: Callable[..., World]) -> None:
    """Nothing else begins a batch between two of them."""
    world = make_world(batch_size=1)
    evaluated = world.begin("e", mode="eval")
    call = world.call(evaluated, 7, 8)
    world.abort(evaluated)
    answered = [Answered(f"t{n}", ((replace(call, id=f"c{n}"), [b"a"] * 2, [b"b"] * 2),)) for n in range(4)]
    request = SftRequest.model_validate({"demonstrations": [{"task_id": "one", **asked("a", "b")}]})
    slices = world.swarm.demonstrate(request, answered, "policy")
    assert next(slices) is None and world.swarm.pending is not None
    with pytest.raises(Later, match="is learning a batch"):
        world.begin("g")
    *between, committed = slices
    assert between == [None] * 4 and committed is not None and committed.batch == 0
    assert len(world.training(world.swarm.pending).facts.call_turn) == 4


async def test_one_of_several_policies_learns(tmp_path: Path) -> None:
    policies: dict[str, Any] = {"planner": {}, "coder": {}}
    async with serving(tmp_path / "d", policies=policies) as served, client(served) as swarm:
        with pytest.raises(InvalidRequest, match="name one of the policies of this run: planner, coder"):
            await swarm.sft([asked("a", "b")], progress=False)
        report = await swarm.sft([asked("a", "b")], policy="coder", lr=1e-2, progress=False)
        [batch] = served.run.gateway.swarm.journal.batches(0)
        assert [batch.job.optimizer_of(name).lr for name in policies] == [JobConfig().optimizer.lr, 1e-2]
        assert report.steps[0].metrics["coder/forest/tokens"] > 0 == report.steps[0].metrics["planner/forest/tokens"]
        assert [
            call.role for call in (await swarm.episode_tree((await swarm.episodes()).episodes[0].episode_id)).calls
        ] == ["coder"]


def test_files_of_demonstrations(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    exported = {**USING_TOOLS, "tools": json.dumps(TOOLS), "reward": 1.0}
    file.write_text(f"{json.dumps(asked('a', 'b'))}\n\n{json.dumps(exported)}\n")
    found, ignored = read_demonstrations(file)
    assert [one.task_id for (one,) in found] == ["d.jsonl:1", "d.jsonl:3"] and ignored == {"reward"}
    assert found[1][0].tools == TOOLS
    assert found[1][0].messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    file.write_text(json.dumps(asked("a\u2028", "b"), ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    assert read_demonstrations(file)[0][0][0].messages[0]["content"] == "a\u2028"
    for text, why in (
        (f"\n{json.dumps(asked('a', chr(0xD800)))}", r"d.jsonl:2: '\\ud800' is half of a character"),
        ("", "no demonstrations"),
        ("{", "d.jsonl line 1, column 2"),
        ('{"prompt": "a"}', 'd.jsonl:1: a demonstration is an object with messages, such as {"messages"'),
        ('{"messages": ["a"]}', "every message is an object"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_demonstrations(file)
    for content, why in (
        (b'\n{"a": "\xe9"}', "d.jsonl line 2, byte 8: the line is not UTF-8"),
        (b"[" * 100_000, "maximum recursion depth"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            read_demonstrations(file)
    assert "sft" in {command.callback.__name__ for command in app.registered_commands if command.callback}


DEEP = "[" * 100_000
CALL = '{"function": {"name": "add", "arguments": %s}}'
ASSISTANT = '{"role": "assistant", "content": "5", "tool_calls": [%s]}'
LINE = '{"messages": [{"role": "user", "content": %s}, ' + ASSISTANT + '], "tools": %s}'


@pytest.mark.parametrize("depth", [500, 900, 980, 5_000])
@pytest.mark.parametrize("place", range(4))
def test_a_file_that_is_nested_too_deeply_is_one_sentence(tmp_path: Path, place: int, depth: int) -> None:
    deep = "[" * depth + "1" + "]" * depth
    parts = ['"2 + 3"', CALL % "{}", "[]", "0"]
    parts[place] = [deep, CALL % deep, json.dumps(deep), deep][place]
    file = tmp_path / "deep.jsonl"
    file.write_text(LINE % tuple(parts[:3]) if place < 3 else deep)
    with contextlib.suppress(ConfigError):
        read_demonstrations(file)
    file.write_text(LINE % ('"2"', "", json.dumps(DEEP)))
    with pytest.raises(ConfigError, match="tools is text that is not JSON"):
        read_demonstrations(file)
