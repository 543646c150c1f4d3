"""Every dialect, asked with the provider's SDK over a real socket: dialect × fact.

1. A streamed answer is the plain one, with real usage, and really streams.
2. A turn that comes back is the turn that was sampled: the next call continues its tokens, in any dialect.
3. Every parameter reaches the sampler, or is refused by its name; neutral values are accepted.
4. A disconnect cancels the sampling, and nothing of the call is recorded; a stream that breaks ends with an error.
5. Errors have the shape of their dialect, and a status that shows whether a retry can succeed.
6. A form of the answer becomes the same grammar in every dialect.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agentjet.protocol import AbortRequest
from tests.fakes import saying
from tests.server.refusals import NEUTRAL, REFUSED
from tests.server.serving import TOKEN, Served, serving
from tests.server.speaking import (
    CHAT,
    COMPLETIONS,
    FUNCTION,
    GENERATE,
    HELLO,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    SPEECHES,
    WITH_TOOLS,
    Speech,
    assert_one_timeline,
    calls_of,
    tool_card,
)
from tests.tiny import tokenizer

pytestmark = pytest.mark.anyio
TWO_CALLS = (
    "<think>\nhm\n</think>\n\nLet me see."
    '\n<tool_call>\n{"name": "add", "arguments": {"a":  1, "b": "é"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "add", "arguments": {"a":  2}}\n</tool_call>'
)
MIXED = TWO_CALLS.replace("</tool_call>\n", "</tool_call>\nAnd \n") + "\n\nWait."
"""Text between and after the calls."""
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


def dialects(*speeches: Speech) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dialect", speeches, ids=str)


def key_of(episode: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {episode['api_key']}", "Content-Type": "application/json"}


@dialects(*SPEECHES)
@pytest.mark.parametrize("said", ["grüße 🙂 to you", "", TWO_CALLS, MIXED, "<think>\ncut off"])
async def test_a_streamed_answer_is_the_plain_one(tmp_path: Path, dialect: Speech, said: str) -> None:
    job = {"max_tokens": 300}
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card(tmp_path), job=job) as served:
        episode = await served.begin()
        more = {"tools": list(dialect.tools)} if dialect.tools else {}
        plain, streamed = [await dialect.ask(served, episode, stream=stream, **more) for stream in (False, True)]
        assert plain == streamed
        first, second = calls_of(served, episode)
        [asked, _] = served.run.compute.asked
        assert plain.usage == (len(asked.prompt), len(first.completion)) and first.completion == second.completion
        if said in (TWO_CALLS, MIXED) and dialect.tools:
            text = "Let me see." if said == TWO_CALLS else "Let me see.\n\nAnd \n\n\nWait."
            assert (plain.text, plain.reasoning, plain.end) == (text, "hm", "calls")
            assert plain.calls == (("add", {"a": 1, "b": "é"}), ("add", {"a": 2}))
        elif "<think>" not in said or dialect in (COMPLETIONS, GENERATE):
            assert (plain.text, plain.end) == (said, "stop")
        prefix = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", MESSAGES: "msg_", RESPONSES: "resp_", GENERATE: ""}[dialect]
        assert plain.raw.id == prefix + first.id and plain.raw.model == "tiny"


@dialects(*SPEECHES)
async def test_it_really_streams(tmp_path: Path, dialect: Speech) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "one two three four")) as served:
        body = dialect.body(stream=True, **{dialect.length: 50})
        episode = await served.begin()
        async with served.http.stream("POST", dialect.path, json=body, headers=key_of(episode)) as response:
            events = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        assert response.headers["cache-control"] == "no-store"
        [call] = calls_of(served, episode)
        assert len(events) >= len(call.completion) > 10, "an event for each token"


@dialects(*WITH_TOOLS)
@STREAMED
@pytest.mark.parametrize("said", [TWO_CALLS, MIXED], ids=["calls", "mixed"])
async def test_a_turn_that_comes_back_is_recognised(tmp_path: Path, dialect: Speech, stream: bool, said: str) -> None:
    def reply(prompt: str) -> str:
        return said if "<tool_response>" not in prompt else "<think>\nso\n</think>\n\nIt is 3."

    async with serving(tmp_path / "d", saying(reply), card=tool_card(tmp_path), job={"max_tokens": 300}) as served:
        episode = await served.begin()
        tools = list(dialect.tools)
        answer = await dialect.ask(served, episode, stream=stream, tools=tools)
        history = [*HELLO, *answer.turn]
        last = await dialect.ask(served, episode, stream=stream, tools=tools, **{dialect.history: history})
        assert (last.end, last.text) == ("stop", "It is 3.")
        assert_one_timeline(served, episode)
        told = tokenizer("qwen3").decode(list(served.run.compute.asked[1].prompt), skip_special_tokens=False)
        assert told.count("<tool_response>") == 2


@pytest.mark.parametrize("other", [CHAT, RESPONSES], ids=str)
async def test_another_dialect_continues_the_same_timeline(tmp_path: Path, other: Speech) -> None:
    said = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    async with serving(tmp_path / "d", saying(lambda prompt: said), card=tool_card(tmp_path)) as served:
        episode = await served.begin()
        answer = await MESSAGES.ask(served, episode, tools=list(MESSAGES.tools))
        [use] = [block for block in answer.raw.content if block.type == "tool_use"]
        call = {"id": use.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        turn: list[Any] = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": use.id, "content": "2"},
        ]
        if other is RESPONSES:
            turn = [
                {"type": "function_call", "call_id": use.id, "name": "add", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": use.id, "output": "2"},
            ]
        await other.ask(served, episode, tools=list(other.tools), **{other.history: [*HELLO, *turn]})
        assert_one_timeline(served, episode)


@dialects(*SPEECHES)
async def test_what_is_asked_for_reaches_the_sampler(tmp_path: Path, dialect: Speech) -> None:
    async with serving(tmp_path / "d", job={"temperature": 0.7, "max_tokens": 40}) as served:
        episode = await served.begin(mode="eval")
        extra = {} if dialect is RESPONSES else {"top_k": 5}
        await dialect.ask(served, episode, temperature=0, top_p=0.5, **{dialect.length: 3}, **extra)
        await dialect.ask(served, episode)
        explicit, default = (asked.params for asked in served.run.compute.asked)
        assert (explicit.temperature, explicit.top_p, explicit.max_tokens) == (0, 0.5, 3)
        assert explicit.top_k == extra.get("top_k", 0)
        assert (default.temperature, default.top_p, default.top_k) == (0.7, 1.0, 0)


@dialects(CHAT, COMPLETIONS, MESSAGES)
@STREAMED
async def test_stop_strings(tmp_path: Path, dialect: Speech, stream: bool) -> None:
    script = saying(lambda prompt: "one; two END three")
    async with serving(tmp_path / "d", script, job={"max_tokens": 64}) as served:
        episode = await served.begin()
        answer = await dialect.ask(served, episode, stream=stream, **{dialect.stop: ["END", "never"]})
        assert (answer.text, answer.end) == ("one; two ", "stop")
        assert not served.run.compute.asked[0].finished, "the rest is not sampled"
        [call] = calls_of(served, episode)
        assert tokenizer().decode(list(call.completion)) == "one; two END"
        if dialect is MESSAGES:
            assert (answer.raw.stop_reason, answer.raw.stop_sequence) == ("stop_sequence", "END")


@dialects(*SPEECHES)
@STREAMED
async def test_a_length_and_a_full_context(tmp_path: Path, dialect: Speech, stream: bool) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "x" * 3000), job={"max_tokens": 1000}) as served:
        episode = await served.begin()
        short = await dialect.ask(served, episode, stream=stream, **{dialect.length: 1})
        assert (short.end, short.usage[1]) == ("length", 1)
        full = await dialect.ask(served, episode, stream=stream, **{dialect.length: 5000})
        assert full.end == "length" and sum(full.usage) == 2048
        if dialect is MESSAGES:
            reasons = (short.raw.stop_reason, full.raw.stop_reason)
            assert reasons == ("max_tokens", "model_context_window_exceeded")
        if dialect is RESPONSES:
            assert short.raw.incomplete_details.reason == "max_output_tokens"
            assert short.raw.output[0].status == "incomplete"


@dialects(*SPEECHES)
@STREAMED
async def test_a_disconnect_cancels_the_sampling(tmp_path: Path, dialect: Speech, stream: bool) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        served.run.compute.may_sample.clear()
        call = asyncio.create_task(dialect.ask(served, episode, stream=stream))
        await served.run.until(lambda: len(served.run.compute.asked) == 1)
        call.cancel()
        await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
        served.run.compute.may_sample.set()
        assert not served.run.compute.asked[0].finished and not calls_of(served, episode)


@dialects(*SPEECHES)
async def test_a_stream_that_breaks_says_so(tmp_path: Path, dialect: Speech) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "x" * 30)) as served:
        served.run.compute.stuck = lambda request, piece: piece == 10
        body = dialect.body(stream=True, **{dialect.length: 50})
        headers, events = key_of(await served.begin()), list[Any]()
        async with served.http.stream("POST", dialect.path, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                served.run.compute.die()
                events += [json.loads(line[6:])] if line.startswith("data: {") else []
        assert "worker died" in events[-1]["error"]["message"], events[-1]
        if dialect is RESPONSES:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert (events[-1]["type"], events[-1]["code"]) == ("error", "worker_died")


@dialects(*SPEECHES)
async def test_a_stream_that_breaks_raises_in_the_sdk(tmp_path: Path, dialect: Speech) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "x" * 30)) as served:
        served.run.compute.stuck = lambda request, piece: piece == 10
        asking = asyncio.create_task(dialect.ask(served, await served.begin(), stream=True))
        await served.run.until(lambda: len(served.run.compute.asked) == 1)
        await asyncio.sleep(0.1)
        served.run.compute.die()
        with pytest.raises((openai.APIError, anthropic.APIError), match="worker died"):
            await asking


@dialects(*SPEECHES)
async def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, dialect: Speech) -> None:
    card = {"card": tool_card(tmp_path)} if dialect is RESPONSES else {}
    async with serving(tmp_path / "d", **card) as served:
        headers = key_of(await served.begin())
        for body, param in REFUSED[dialect.path]:
            content = json.dumps({"model": "policy", **dialect.asked, **body})
            response = await served.http.post(dialect.path, content=content, headers=headers)
            assert response.status_code == 400, (body, response.text)
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error", (body, error)
            if dialect is MESSAGES:
                assert param in error["message"] and error["details"]["error_code"], (body, error)
            else:
                assert error["param"] == param and error["code"] and error["message"], (body, error)
        assert served.run.compute.asked == []


@dialects(*SPEECHES)
async def test_neutral_values_are_accepted(tmp_path: Path, dialect: Speech) -> None:
    async with serving(tmp_path / "d", card=tool_card(tmp_path)) as served:
        answer = await dialect.ask(served, await served.begin(), **NEUTRAL[dialect.path])
        assert answer.text == "hi"


@dialects(*SPEECHES)
async def test_keys(tmp_path: Path, dialect: Speech) -> None:
    async with serving(tmp_path / "d") as served:
        mine, other = await served.begin(), await served.begin(mode="eval")
        key = mine["api_key"]

        async def ask(path: str = "", **headers: str) -> tuple[int, str]:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            body = {"model": "policy", **dialect.asked}
            async with httpx.AsyncClient(verify=False, base_url=served.url, headers=sent) as http:
                response = await http.post(path + dialect.path, json=body)
            error = response.json().get("error") or {}
            return response.status_code, error.get("code") or error.get("details", {}).get("error_code", "")

        assert await ask(authorization=f"Bearer {key}") == await ask(x_api_key=key) == await ask(f"/k/{key}")
        assert await ask(x_api_key=key) == (200, "")
        assert await ask() == (401, "key_missing")
        assert await ask(authorization="Bearer sk-something") == (401, "key_invalid")
        assert await ask(x_api_key=key[:-2] + "xx") == (401, "key_invalid")
        assert await ask(authorization=f"Bearer {TOKEN}") == (403, "episode_key_needed")
        await served.run.gateway.abort(other["episode_id"], AbortRequest())
        assert await ask(x_api_key=other["api_key"]) == (409, "episode_aborted")
        served.run.clock.advance(1800)
        assert await ask(x_api_key=key) == (401, "key_expired")


ERRORS = {
    "large": (413, "invalid_request_error", "request_too_large"),
    "model": (404, "not_found_error", "not_found_error"),
    "long": (400, "invalid_request_error", "invalid_request_error"),
    "cache": (400, "invalid_request_error", "invalid_request_error"),
    "busy": (429, "rate_limit_error", "rate_limit_error"),
    "stopped": (503, "server_error", "overloaded_error"),
}
"""Status, and the type of the error in the APIs of OpenAI and Anthropic."""


@dialects(*SPEECHES)
async def test_errors_have_the_shape_of_their_dialect(tmp_path: Path, dialect: Speech) -> None:
    server, compute_calls = {"max_calls_per_episode": 1, "max_body_mb": 1}, 0
    async with serving(tmp_path / "d", server=server) as served:
        headers = key_of(await served.begin())

        async def ask(what: str, **body: Any) -> Any:
            asked = {"model": "policy", **dialect.asked, **body}
            response = await served.http.post(dialect.path, json=asked, headers=headers)
            status, openais, anthropics = ERRORS[what]
            error = response.json()["error"]
            kind = anthropics if dialect is MESSAGES else openais
            assert (response.status_code, error["type"]) == (status, kind), (what, response.text)
            assert (int(response.headers.get("Retry-After", 0)) > 0) == (status in (429, 503))
            assert response.headers["x-should-retry"] == str(status in (429, 503)).lower()
            return error

        await ask("large", user="x" * 2**21)
        assert "'tiny'" in (await ask("model", model="gpt-4o"))["message"]
        text = "prompt" if dialect is COMPLETIONS else dialect.history
        long: Any = "x" * 5000 if text != "messages" else [{"role": "user", "content": "x" * 5000}]
        long = GENERATE.asked["token_ids"] * 5000 if dialect is GENERATE else long
        message = (await ask("long", **{text: long}))["message"]
        said = "prompt is too long: " if dialect is MESSAGES else "maximum context length is 2048 tokens"
        assert said in message
        served.run.compute.cache_tokens = 3
        assert "sampler.cache_tokens" in (await ask("cache"))["message"]
        served.run.compute.cache_tokens = 10_000
        served.run.compute.may_sample.clear()
        compute_calls = len(served.run.compute.asked)
        body = {"model": "policy", **dialect.asked}
        first = asyncio.create_task(served.http.post(dialect.path, json=body, headers=headers))
        await served.run.until(lambda: len(served.run.compute.asked) > compute_calls)
        await ask("busy")
        served.run.compute.may_sample.set()
        assert (await first).status_code == 200
        await served.run.gateway.engine.stop()
        await ask("stopped")


STRICT = {**SCHEMA, "additionalProperties": False, "required": ["a"]}
FORMS: dict[str, dict[Speech, dict[str, Any]]] = {
    "any tool": {
        CHAT: {"tool_choice": "required"},
        MESSAGES: {"tool_choice": {"type": "any"}},
        RESPONSES: {"tool_choice": "required"},
    },
    "one tool": {
        CHAT: {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        MESSAGES: {"tool_choice": {"type": "tool", "name": "add"}},
        RESPONSES: {"tool_choice": {"type": "function", "name": "add"}},
    },
    "one call": {
        CHAT: {"tool_choice": "required", "parallel_tool_calls": False},
        MESSAGES: {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        RESPONSES: {"tool_choice": "required", "parallel_tool_calls": False},
    },
    "at most one call": {
        CHAT: {"parallel_tool_calls": False},
        MESSAGES: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        RESPONSES: {"parallel_tool_calls": False},
    },
    "strict": {
        CHAT: {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": STRICT, "strict": True}}]},
        MESSAGES: {"tools": [{"name": "add", "description": "Adds.", "input_schema": STRICT, "strict": True}]},
        RESPONSES: {"tools": [{"type": "function", **FUNCTION, "parameters": STRICT, "strict": True}]},
    },
    "schema": {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": STRICT}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": STRICT}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": STRICT}}},
    },
    "object": {
        CHAT: {"response_format": {"type": "json_object"}},
        RESPONSES: {"text": {"format": {"type": "json_object"}}},
    },
    "none": {
        CHAT: {"tool_choice": "none"},
        MESSAGES: {"tool_choice": {"type": "none"}},
        RESPONSES: {"tool_choice": "none"},
    },
}
"""Requests for the same form of answer in every dialect."""


@pytest.mark.parametrize("form", FORMS)
async def test_a_form_of_the_answer_is_the_same_in_every_dialect(tmp_path: Path, form: str) -> None:
    async with serving(tmp_path / "d", card=tool_card(tmp_path)) as served:
        episode = await served.begin()
        for dialect, body in FORMS[form].items():
            await dialect.ask(served, episode, **{"tools": list(dialect.tools), **body})
        await CHAT.ask(served, episode, **({} if form == "none" else {"tools": list(CHAT.tools)}))
        *formed, plain = served.run.compute.asked
        assert len({asked.params.grammar for asked in formed}) == 1
        assert bool(formed[0].params.grammar) == (form != "none") and not plain.params.grammar
        assert len({asked.prompt for asked in formed}) == 1
        assert (formed[0].prompt == plain.prompt) == (form != "strict"), "a strict schema is another prompt"


def served_texts(served: Served, name: str = "qwen3") -> list[str]:
    """Returns the prompts of the policy as text."""
    return [tokenizer(name).decode(list(asked.prompt), skip_special_tokens=False) for asked in served.run.compute.asked]


@pytest.mark.parametrize("depth", [300, 400, 900])
async def test_a_history_may_be_nested_as_deep_as_the_context_is_long(tmp_path: Path, depth: int) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    function = {"name": "add", "arguments": arguments}
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {"INVALID_JSON": arguments}}
    histories: dict[Speech, list[Any]] = {
        CHAT: [
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        MESSAGES: [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
        ],
        RESPONSES: [
            {"type": "function_call", "call_id": "c", **function},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    }
    script = saying(lambda prompt: "so")
    async with serving(tmp_path / "d", script, card=tool_card(tmp_path), job={"max_tokens": 20}) as served:
        episode = await served.begin()
        for dialect, turn in histories.items():
            await dialect.ask(served, episode, **{dialect.history: [*HELLO, *turn]}, **{dialect.length: 20})
        first, *others = served_texts(served)
        assert arguments in first and others == [first, first]
