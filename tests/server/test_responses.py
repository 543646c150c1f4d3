"""OpenAI's Responses API, requested with OpenAI's SDK over a real socket.

Pinned here:
1. an answer repeats its request, and its events have the documented shapes;
2. turns that come back as items, by reference or by `previous_response_id`, keep their sampled tokens;
3. an answer belongs to its episode and role.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter

from agentjet.types import Call, ModelInfo
from tests.fakes import Script, saying
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

ADD: FunctionToolParam = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {}}},
    "strict": None,
}
CALLS = (
    "<think>\nhm\n</think>\n\nLet me see. "
    '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a":  2}}\n</tool_call>'
)


def turns(*texts: str) -> Script:
    """Samples one text after the other."""
    left = iter(texts)
    return saying(lambda prompt: next(left))


def calls(served: Served, episode: dict[str, Any]) -> tuple[Call, ...]:
    return served.run.gateway.swarm.tree(episode["episode_id"], "").calls


def continues(served: Served, episode: dict[str, Any]) -> bool:
    """True if the prompt of every later call begins with all tokens of the previous call."""
    tree = served.run.gateway.swarm.tree(episode["episode_id"], "")
    asked = [asked.prompt for asked in served.run.compute.asked]
    return all(
        later.ask.after == call.id and prompt[: tree.num_tokens(call.id)] == tree.tokens(call.id)
        for call, later, prompt in zip(tree.calls, tree.calls[1:], asked[1:], strict=False)
    )


async def test_a_plain_answer(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "hello äöü")) as served:
        episode = await served.begin()
        answer = await served.openai(episode).responses.create(
            model=episode["model"], input="hello", instructions="Be kind.", metadata={"a": "b"}, temperature=0.7
        )
        Response.model_validate(answer.model_dump())
        assert (answer.status, answer.output_text, answer.temperature) == ("completed", "hello äöü", 0.7)
        [call] = calls(served, episode)
        assert answer.id == f"resp_{call.id}" and [item.id for item in answer.output] == [f"msg_{call.id}"]
        assert [(m.role, m.content) for m in call.ask.messages] == [("system", "Be kind."), ("user", "hello")]
        [asked] = served.run.compute.asked
        assert answer.usage is not None and answer.usage.input_tokens == len(asked.prompt)
        assert answer.usage.output_tokens == len(call.completion)
        assert (answer.instructions, answer.metadata, answer.tools) == ("Be kind.", {"a": "b"}, [])


async def test_the_events_are_in_order_and_of_the_documented_shapes(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", saying(lambda p: CALLS), card=card, job={"max_tokens": 200}) as served:
        client = served.openai(await served.begin())
        stream = await client.responses.create(model="policy", input="hello", tools=[ADD], stream=True)
        events = [event.model_dump(warnings=False) async for event in stream]
    shapes = TypeAdapter[Any](ResponseStreamEvent)
    for event in events:
        shapes.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if not (kinds and kinds[-1] == kind):
            kinds.append(kind)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    items = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [items[index] for index in range(4)] == events[-1]["response"]["output"]
    for kind, key in (("output_text", "text"), ("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        for index in items:
            here = [event for event in events if event.get("output_index") == index]
            joined = "".join(event["delta"] for event in here if event["type"] == f"response.{kind}.delta")
            done = [event[key] for event in here if event["type"] == f"response.{kind}.done"]
            assert done in ([], [joined])


def dumped(items: Sequence[Any], *, drop: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Output items as SDKs send them back."""
    return [
        {name: value for name, value in item.model_dump(exclude_unset=True).items() if name not in drop}
        for item in items
    ]


HOW = ["whole", "no ids", "references", "previous", "interleaved", "sealed"]


@pytest.mark.parametrize("how", HOW)
async def test_turns_that_come_back_are_what_was_sampled(tmp_path: Path, card: ModelInfo, how: str) -> None:
    said = turns(CALLS, "<think>\nso\n</think>\n\n3", "done")
    job = {"max_tokens": 200, "history": "as_sampled"}
    async with serving(tmp_path / "d", said, card=card, job=job) as served:
        episode = await served.begin()
        client = served.openai(episode)
        history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        previous: str | None = None
        for results in (["1", "2"], [], []):
            answer = await client.responses.create(
                model="policy",
                input=history,
                instructions="Be kind.",
                tools=[ADD],
                include=["reasoning.encrypted_content"],
                previous_response_id=previous if how == "previous" else openai.omit,
            )
            functions = [item for item in answer.output if item.type == "function_call"]
            outputs = [
                {"type": "function_call_output", "call_id": item.call_id, "output": result}
                for item, result in zip(functions, results, strict=True)
            ]
            more = outputs or [{"role": "user", "content": "and now?"}]
            if how == "previous":
                previous, history = answer.id, more
                continue
            if how == "references":
                back: list[Any] = [{"type": "item_reference", "id": item.id} for item in answer.output]
            elif how == "sealed":
                back = dumped(answer.output, drop=["content"])
                for item in back:
                    item |= {"content": answer.output_text} if item["type"] == "message" else {}
            else:
                back = dumped(answer.output, drop=["id"] if how == "no ids" else [])
            if how == "interleaved" and outputs:
                back[-1:-1] = outputs[:1]
                more = outputs[1:]
            history = [*history, *back, *more]
        assert continues(served, episode)
        _, second, third = calls(served, episode)
        assert [message.role for message in second.ask.messages] == ["tool", "tool"]
        assert [message.content for message in third.ask.messages] == ["and now?"]
        assert (second.fork, third.fork) == ("", "")


async def test_instructions_are_not_inherited(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client = served.openai(episode)
        first = await client.responses.create(model="policy", input="hello", instructions="Be kind.")
        second = await client.responses.create(
            model="policy", input="again", instructions="Be brief.", previous_response_id=first.id
        )
        await client.responses.create(model="policy", input="and again", previous_response_id=second.id)
        system: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
        own = await client.responses.create(model="policy", input=system)
        await client.responses.create(model="policy", input="again", previous_response_id=own.id)
        asked = [[m.content for m in tree_messages(served, episode, call)] for call in calls(served, episode)]
        assert asked == [
            ["Be kind.", "hello"],
            ["Be brief.", "hello", "hi", "again"],
            ["hello", "hi", "again", "hi", "and again"],
            ["Be kind.", "hello"],
            ["Be kind.", "hello", "hi", "again"],
        ]


async def test_what_was_said_is_known_after_a_restart(tmp_path: Path) -> None:
    """Instructions are kept with their request; raw prompts continue where they ended."""
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client = served.openai(episode)
        first = await client.responses.create(model="policy", input="hello", instructions="Be kind.")
        await client.completions.create(model="policy@raw", prompt="hello", max_tokens=1)
    async with serving(tmp_path / "d") as served:
        key = served.keys.sign(episode["episode_id"], served.run.clock())
        client = served.openai({"base_url": f"{served.url}/v1", "api_key": key})
        await client.responses.create(model="policy", input="again", previous_response_id=first.id)
        await client.completions.create(model="policy@raw", prompt="helloh")
        [_, later] = calls(served, episode)
        assert [m.content for m in tree_messages(served, episode, later)] == ["hello", "hi", "again"]
        one, two = served.run.gateway.swarm.tree(episode["episode_id"], "raw").calls
        assert (two.parent, two.suffix, two.ask.after) == (one.id, (), one.id)


def tree_messages(served: Served, episode: dict[str, Any], call: Call) -> Sequence[Any]:
    conversation, _ = served.run.gateway.swarm.tree(episode["episode_id"], "").exchange(call.id)
    return conversation.messages


async def test_an_answer_of_another_episode_or_role_is_not_known(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client, other = served.openai(episode), served.openai(await served.begin(mode="eval"))
        mine = await client.responses.create(model="policy", input="hello")
        raw = await client.completions.create(model="policy", prompt="hello")
        reference: list[Any] = [{"type": "item_reference", "id": mine.output[0].id}]
        for asker, asked, param in (
            (other, {"input": "x", "previous_response_id": mine.id}, "previous_response_id"),
            (client, {"input": "x", "previous_response_id": mine.id, "model": "policy@b"}, "previous_response_id"),
            (client, {"input": "x", "previous_response_id": raw.id.replace("cmpl", "resp")}, "previous_response_id"),
            (other, {"input": reference}, "input.0.id"),
            (client, {"input": [{"type": "item_reference", "id": "nonsense"}]}, "input.0.id"),
            (client, {"input": [{"id": mine.id.replace("resp", "fc") + "_0"}]}, "input.0.id"),
        ):
            with pytest.raises(openai.NotFoundError) as refusal:
                await asker.responses.create(**{"model": "policy", **asked})  # type: ignore[arg-type]
            assert refusal.value.param == param


async def test_two_answers_in_a_row_stay_two(tmp_path: Path, card: ModelInfo) -> None:
    async with serving(tmp_path / "d", turns("one", "two", "three"), card=card) as served:
        episode = await served.begin()
        client = served.openai(episode)
        history: list[Any] = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            answer = await client.responses.create(model="policy", input=history)
            history += dumped(answer.output)
        await client.responses.create(model="policy", input=history)
        [*_, last] = calls(served, episode)
        assert [m.content for m in tree_messages(served, episode, last)] == ["hello", "one", "two"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_answer_could_repeat_is_refused(tmp_path: Path, stream: bool) -> None:
    """The response repeats much of its request, so all of that must be text and JSON."""
    deep = "[" * 500 + "]" * 500
    async with serving(tmp_path / "d") as served:
        headers = {"Authorization": f"Bearer {(await served.begin())['api_key']}", "Content-Type": "application/json"}
        for spoiled, param in (
            (r'"metadata": {"a": "\ud800"}', "metadata.a"),
            (r'"user": "\ud800"', "user"),
            (r'"previous_response_id": "\ud800"', "previous_response_id"),
            (
                '"tool_choice": "none", "tools": [{"type": "function", "name": "f", "parameters": {"x": NaN}}]',
                "tools.0",
            ),
            (f'"tools": [{{"type": "function", "name": "f", "parameters": {{"x": {deep}}}}}]', "tools"),
            (r'"text": {"format": {"type": "text", "schema": {"a": "\udc00"}}}', "text.format"),
            (r'"tool_choice": {"type": "\udc00"}', "tool_choice"),
        ):
            content = f'{{"model": "policy", "input": "x", "stream": {str(stream).lower()}, {spoiled}}}'
            response = await served.http.post("/v1/responses", content=content, headers=headers)
            assert response.status_code == 400, (spoiled, response.text)
            assert response.json()["error"]["param"].startswith(param), (spoiled, response.text)


async def test_a_response_cannot_be_fetched_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        client = served.openai(await served.begin())
        answer = await client.responses.create(model="policy", input="x")
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.responses.retrieve(answer.id)
