"""Almost valid requests, and almost valid keys, in every dialect.

1. An invalid request gets a 4xx in the shape of its dialect, never an internal error.
2. The message names the wrong key.
3. A key that is cut, combined from two keys, or expired opens nothing in any position.

Some hundred cases; `--hypothesis-profile=thorough` makes thousands.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic.types
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from tests.server.target import Target, serving_target
from tests.tiny import make_model_info


class GeneratedLogprob(BaseModel):
    """What vLLM says of a token; its SDK is the engine."""

    token_id: int
    logprob: float
    top_logprobs: list[Any]


class GeneratedChoice(BaseModel):
    index: int
    finish_reason: str
    token_ids: list[int]
    logprobs: dict[str, list[GeneratedLogprob]]


class Generated(BaseModel):
    request_id: str
    choices: list[GeneratedChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int]


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
ARGUMENTS = '{"a": 1}'
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stop": ["x"],
        "seed": 3,
        "logprobs": True,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "policy",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}],
            },
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "max_tokens": 8,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "metadata": {"user_id": "me"},
    },
    "/v1/completions": {
        "model": "policy",
        "prompt": "hello",
        "max_tokens": 8,
        "temperature": 0.5,
        "n": 1,
        "stop": ["x"],
        "seed": 3,
        "logprobs": 0,
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 16,
        "temperature": 0.5,
        "metadata": {"a": "b"},
    },
    "/inference/v1/generate": {
        "model": "policy",
        "token_ids": [5, 6, 7],
        "sampling_params": {
            "max_tokens": 8,
            "temperature": 0.5,
            "stop": ["x"],
            "stop_token_ids": [3],
            "seed": 3,
            "logprobs": 1,
            "skip_special_tokens": False,
        },
        "return_token_ids": True,
        "cache_salt": "x",
    },
}
COUNT = ("max_tokens", "stop_sequences", "temperature", "top_k", "metadata")
VALID["/v1/messages/count_tokens"] = {k: v for k, v in VALID["/v1/messages"].items() if k not in COUNT}

ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/messages": anthropic.types.Message,
    "/v1/messages/count_tokens": anthropic.types.MessageTokensCount,
    "/v1/completions": Completion,
    "/v1/responses": Response,
    "/inference/v1/generate": Generated,
}
"""The types of the providers' SDKs."""

CASES = max(150, 4 * settings.default.max_examples)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("malformed")
    card = make_model_info(folder / "qwen", "qwen3", tool_format="hermes")
    with serving_target(folder / "data", card=card, job={"max_tokens": 8}) as target:
        target.refresh()
        yield target


def routes(target: Target) -> list[str]:
    """The routes that take a request of an agent, without those with the key in the path."""
    paths = target.app.openapi()["paths"]
    return [path for path, ways in paths.items() if path.startswith(("/v1/", "/inference/")) and "post" in ways]


def ask(target: Target, path: str, content: bytes, *, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key or target.episode['api_key']}", "Content-Type": "application/json"}
    return target.post(f"http://127.0.0.1{path}", headers, content)


def refusal(path: str, answer: httpx.Response) -> str:
    """Checks the shape of an error. Returns its message, and the wrong key if the shape has a place for it."""
    body = answer.json()
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and error.keys() == {"type", "message", "details"}
        return str(error["message"])
    assert body.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    return f"{error['param']} {error['message']}"


def test_every_route_has_a_valid_request(target: Target) -> None:
    """Its answer is valid for the provider's SDK."""
    for path in routes(target):
        answer = ask(target, path, json.dumps(VALID[path]).encode())
        assert answer.status_code == 200, (path, answer.text)
        ANSWERS[path].model_validate(answer.json())


def test_schemas_that_nest_too_deep(target: Target) -> None:
    """Python's parser accepts them; rendering and other parsers would not."""
    schema = deep(200, "schema")
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for path, more in (
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}),
        ("/v1/chat/completions", {"response_format": named}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": schema}]}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
    ):
        answer = ask(target, path, json.dumps({**VALID[path], **more}).encode())
        assert answer.status_code == 400 and next(iter(more)) in refusal(path, answer)


@pytest.mark.parametrize("depth", [201, 5_000, 40_000])
def test_nesting_beyond_the_limit_has_its_own_code(target: Target, depth: int) -> None:
    """Also where Python's parser gives up before levels are counted."""
    for path in ("/v1/chat/completions", f"/swarm/v1/episodes/{target.episode['episode_id']}/finish"):
        for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            answer = ask(target, path, nested.encode())
            assert answer.status_code == 400, answer.text
            assert "nested_too_deep" in answer.text and "200 levels" in answer.text, answer.text


def deep(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"properties": {"a": value}} if kind == "schema" else {"a": value}
    return value


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.sampled_from([-1, 0, 2**31, 2**63, 10**400, float("nan"), float("inf"), 1e308, -0.0]),
    st.sampled_from(["", "\ud800", "\x00", "<|im_end|>", "x" * 3000, "\U000f0000", "null", "{", "1"]),
    st.sampled_from([[], {}, [[]], [{}], [None], {"": None}, {"type": None}, {"type": "x"}, {"type": []}]),
    st.builds(
        deep, st.sampled_from([3, 60, 120, 190, 250, 330, 480, 900, 3000]), st.sampled_from(["list", "dict", "schema"])
    ),
)
NAMES = st.sampled_from(["", "x", "type", "temprature", "__class__", "messages.0", "\ud800", "self", "content"])


@dataclass(frozen=True)
class Spoiled:
    """A request with one change below the top-level key `place`."""

    content: bytes
    place: str


@st.composite
def spoiled(draw: st.DrawFn, path: str) -> Spoiled:
    body = copy.deepcopy(VALID[path])
    at: Any = body
    steps: list[Any] = []
    while isinstance(at, dict | list) and at and (not steps or draw(st.integers(0, 3))):
        step = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        steps.append(step)
        at = at[step]
    parent = body
    for step in steps[:-1]:
        parent = parent[step]
    how = draw(st.sampled_from(["replace", "replace", "remove", "repeat", "add"]))
    place = str(steps[0])
    if how == "replace":
        parent[steps[-1]] = draw(WRONG)
    elif how == "remove":
        del parent[steps[-1]]
    elif isinstance(parent, list):
        parent.insert(steps[-1], draw(WRONG) if how == "add" else copy.deepcopy(at))
    else:
        name = draw(NAMES)
        parent[name] = draw(WRONG) if how == "add" else copy.deepcopy(at)
        place = place if len(steps) > 1 else name
    return Spoiled(written(body, draw(st.booleans())), place)


def written(body: Any, ascii_only: bool) -> bytes:
    """Writes almost-JSON: NaN, nesting that Python's encoder refuses, unpaired surrogates."""
    try:
        return json.dumps(body, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    except RecursionError:
        return (
            json.dumps(_marked(body), ensure_ascii=ascii_only)
            .encode(errors="surrogatepass")
            .replace(b'"TOO DEEP"', b"[" * 3000 + b"]" * 3000)
        )


def _marked(value: Any, depth: int = 0) -> Any:
    if depth > 20:
        return "TOO DEEP"
    if isinstance(value, dict):
        return {name: _marked(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, depth + 1) for item in value]
    return value


@pytest.mark.parametrize("path", VALID)
def test_a_request_with_something_wrong_in_it(target: Target, path: str) -> None:
    if path not in routes(target):
        pytest.skip(f"{path} is not spoken here")

    @settings(max_examples=CASES, **QUIET)  # type: ignore[arg-type]
    @given(request=spoiled(path))
    def run(request: Spoiled) -> None:
        answer = ask(target, path, request.content)
        target.seen[path, answer.status_code] += 1
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        if answer.status_code == 200:
            return
        said = refusal(path, answer)
        is_named = repr(request.place)[1:-1] in said
        assert is_named or any(words in said for words in ("JSON", "context length", "too long")), (request, said)

    run()
    counted = {status: count for (where, status), count in target.seen.items() if where == path}
    assert counted.get(400, 0) > CASES // 4, counted


@pytest.mark.parametrize("path", VALID)
@given(data=st.data())
@settings(max_examples=max(40, CASES // 8), **QUIET)  # type: ignore[arg-type]
def test_bytes_that_are_no_json(target: Target, path: str, data: st.DataObject) -> None:
    if path not in routes(target):
        pytest.skip(f"{path} is not spoken here")
    valid = json.dumps(VALID[path]).encode()
    start = data.draw(st.integers(0, len(valid) - 1))
    made = valid[:start] + data.draw(st.binary(max_size=4)) + valid[data.draw(st.integers(start, len(valid))) :]
    answer = ask(target, path, made)
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        refusal(path, answer)


@st.composite
def false_keys(draw: st.DrawFn, mine: str, other: str, expired: str) -> str:
    """Keys similar to the right one: cut, changed in one character, signed for another episode, or expired."""
    kind = draw(st.sampled_from(["cut", "changed", "joined", "expired", "repeated"]))
    if kind == "cut":
        return mine[: draw(st.integers(1, len(mine) - 1))]
    if kind == "changed":
        at = draw(st.integers(0, len(mine) - 1))
        return mine[:at] + draw(st.sampled_from([c for c in "ABab01-_.=~" if c != mine[at]])) + mine[at + 1 :]
    if kind == "joined":
        (head, _, _), (_, _, signature) = mine.rpartition("."), other.rpartition(".")
        return f"{head}.{signature}"
    return expired if kind == "expired" else mine * draw(st.integers(2, 20))


@pytest.mark.parametrize("where", ["bearer", "x-api-key", "path"])
def test_false_keys(target: Target, where: str) -> None:
    keys, now = target.served.keys, target.served.run.clock.now
    mine, other = target.episode["api_key"], keys.sign("ep999999", now)
    expired = keys.sign(target.episode["episode_id"], now - 1e6)
    assert len({mine, other, expired}) == 3

    @settings(max_examples=CASES // 4, **QUIET)  # type: ignore[arg-type]
    @given(key=false_keys(mine, other, expired), path=st.sampled_from(routes(target)))
    def run(key: str, path: str) -> None:
        content = json.dumps(VALID[path]).encode()
        headers = {"Content-Type": "application/json"}
        if where == "bearer":
            headers["Authorization"] = f"Bearer {key}"
        elif where == "x-api-key":
            headers["x-api-key"] = key
        url = f"http://127.0.0.1/k/{key}{path}" if where == "path" else f"http://127.0.0.1{path}"
        answer = target.post(url, headers, content)
        assert answer.status_code == 401, (key, answer.status_code, answer.text)
        assert "key" in refusal(path, answer)

    calls = len(target.served.run.compute.asked)
    run()
    assert len(target.served.run.compute.asked) == calls


def test_another_episodes_key_speaks_for_that_episode(target: Target) -> None:
    """The key names its episode; nothing in a request can name another."""
    gateway = target.served.run.gateway
    key = target.served.keys.sign("ep999999", target.served.run.clock.now)
    for path in routes(target):
        answer = ask(target, path, json.dumps(VALID[path]).encode(), key=key)
        assert answer.status_code == 404 and "ep999999" in refusal(path, answer), answer.text
    assert gateway.swarm.episode(target.episode["episode_id"]).status == "live"
