"""Answers that did not arrive are not trained. Over real sockets with OpenAI's SDK:

1. A request that is repeated as a retry, or under the same Idempotency-Key, supersedes the recorded answer.
2. A retry of a request without a recorded answer supersedes nothing, not even the answer of an equal request. The next
   retry after one that was never answered repeats what that one would have repeated.
3. An answer whose client left before it was sent is undelivered. One that the agent sends back was delivered.
4. The tree of an episode shows all this, token by token.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import saying
from tests.server.serving import serving

pytestmark = pytest.mark.anyio
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
RETRY = {"x-stainless-retry-count": "1"}


async def chat(client: openai.AsyncOpenAI, messages: list[Any] = HELLO, **options: Any) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="policy", messages=messages, **options)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message


async def test_a_retry_supersedes_the_answer_that_did_not_arrive(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client = served.openai(episode)
        await chat(client)
        await chat(client, extra_headers=RETRY)
        lost, retried = (await served.view(episode)).calls
        assert [(call.orphan, call.fork) for call in (lost, retried)] == [("retry", ""), ("", "retry")]
        assert retried.retry_of == lost.call_id
        assert not any(lost.mask) and any(retried.mask)


SUPERSEDED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "a vote, and a retry of another request": ([{}, {}, {"temperature": 0.5, "extra_headers": RETRY}], ["", "", ""]),
    "idempotency keys": ([{"extra_headers": {"Idempotency-Key": key}} for key in "aba"], ["retry", "", ""]),
    "all choices": ([{"n": 3}, {"n": 3, "extra_headers": RETRY}], ["retry"] * 3 + [""] * 3),
}


@pytest.mark.parametrize("what", SUPERSEDED)
async def test_a_retry_supersedes_its_own_request_only(tmp_path: Path, what: str) -> None:
    requests, expected = SUPERSEDED[what]
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        for options in requests:
            await chat(served.openai(episode), **options)
        assert await served.orphans(episode) == expected


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ("answered lost retry", ["", ""]),
        ("answered lost-retry retry", ["retry", ""]),
        ("answered lost-retry lost-retry retry", ["retry", ""]),
        ("lost lost-retry retry answered retry", ["", "retry", ""]),
        ("answered lost lost-retry retry", ["", ""]),
        ("answered lost retry retry", ["", "retry", ""]),
    ],
)
async def test_a_retry_that_was_never_answered_changes_nothing(tmp_path: Path, tries: str, expected: list[str]) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client = served.openai(episode)
        for one in tries.split():
            headers = RETRY if one.endswith("retry") else {}
            if not one.startswith("lost"):
                await chat(client, extra_headers=headers)
                continue
            served.run.compute.may_sample.clear()
            with pytest.raises(openai.APITimeoutError):
                await chat(client, timeout=0.2, extra_headers=headers)
            await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
            served.run.compute.may_sample.set()
        assert await served.orphans(episode) == expected


async def test_a_retry_of_a_half_recorded_request_leaves_an_equal_vote_alone(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client = served.openai(episode)
        await chat(client, n=3)
        swarm = served.run.gateway.swarm
        for headers, num_calls in (({}, 4), (RETRY, 6)):  # One choice of the first try is recorded, two of its retry.
            num_asked = len(served.run.compute.asked) + num_calls - swarm.episode(episode["episode_id"]).num_calls
            served.run.compute.stuck = lambda request, piece: request >= num_asked  # noqa: B023
            asking = asyncio.create_task(chat(client, n=3, extra_headers=headers))
            await served.run.until(lambda: swarm.episode(episode["episode_id"]).num_calls == num_calls)  # noqa: B023
            asking.cancel()
            await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
        served.run.compute.stuck = lambda request, piece: False
        await chat(client, n=3, extra_headers=RETRY)
        await served.run.gateway.commits.durable()
        assert await served.orphans(episode) == [""] * 3 + ["undelivered"] * 3 + [""] * 3


async def test_a_stream_that_ends_early_is_not_heard_unless_it_is_sent_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda _: "one")) as served:
        episode = await served.begin()
        swarm = served.run.gateway.swarm
        client = served.openai(episode)
        await chat(client)
        [recorded] = swarm.tree(episode["episode_id"], "").calls
        swarm.undelivered(episode["episode_id"], [recorded.id])
        assert await served.orphans(episode) == ["undelivered"]
        await chat(client, [*HELLO, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}])
        assert await served.orphans(episode) == ["", ""]


async def test_the_tree_has_messages_tokens_masks_and_versions(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda _: "hi")) as served:
        episode = await served.begin()
        client = served.openai(episode)
        said = await chat(client)
        await chat(client, [*HELLO, said, {"role": "user", "content": "more"}])
        whole = (await served.view(episode)).model_dump()
        first, second = whole["calls"]
        assert whole["status"] == "live" and whole["num_calls"] == 2
        assert first["messages"] == HELLO and second["messages"] == [{"role": "user", "content": "more"}]
        assert second["after"] == second["parent"] == first["call_id"]
        assert "".join(first["texts"]).endswith("assistant\nhi<|im_end|>")
        assert first["response"] == {"role": "assistant", "content": "hi"}
        for call in (first, second):
            assert len({len(call[name]) for name in ("tokens", "texts", "mask", "logprobs", "versions")}) == 1
            assert [p is not None for p in call["logprobs"]] == [bool(m) for m in call["mask"]]
            assert {v for v, m in zip(call["versions"], call["mask"], strict=True) if m} == {0}
        assert second["kept"] == len(first["tokens"])
