"""Models with formats of their own, asked in three dialects with the providers' SDKs.

1. A streamed answer is the plain one: reasoning, text and calls.
2. A turn that comes back is the turn that was sampled.
3. A call is sent while the next one is sampled.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.rendering import template_for
from agentjet.rendering.formats import REASONING_FORMATS, TOOL_FORMATS, ParsedCall, write_calls
from agentjet.types import ModelInfo
from tests import tiny
from tests.fakes import saying
from tests.server.serving import serving
from tests.server.speaking import HELLO, WITH_TOOLS, Speech, assert_one_timeline

pytestmark = pytest.mark.anyio
REASONING = {block.name: block for block in REASONING_FORMATS}
MODELS = {
    "gemma4": "<|channel>thought",
    "glm4_5": "<think>",
    "command_r7b": "<|START_THINKING|>",
    "mistral_v13": "[THINK]",
}
"""Templates, and their blocks of reasoning."""
ENDS = {"glm4_5": "<|user|>"}
"""Tokens that end an answer, and begin the next message."""
CALLS = (("add", {"a": 1}), ("add", {"a": 2}))


def card(folder: Path, name: str) -> ModelInfo:
    info = tiny.make_model_info(folder / name, name)
    template, tool_format = template_for(name, info.chat_template)
    return replace(info, chat_template=template, tool_format=tool_format)


def said(info: ModelInfo, name: str, *, calls: bool) -> str:
    """Returns an answer of the model with a thought, and with two calls and their end token, or a text."""
    reasoning = REASONING[MODELS.get(name, "<|channel|>analysis<|message|>")]
    thought = f"{reasoning.opening}Hm.{reasoning.closing}"
    written = [ParsedCall(called, json.dumps(arguments)) for called, arguments in CALLS]
    before, after = reasoning.answer
    form = TOOL_FORMATS[info.tool_format]
    if reasoning.channels and calls:
        return f"{thought}<|start|>assistant{write_calls(form, written[:1])}"
    if calls:
        return thought + write_calls(form, written) + "".join(form.ends[:1])
    return f"{thought}{before}It is 3.{after}{ENDS.get(name, '')}"


@pytest.mark.parametrize("dialect", WITH_TOOLS, ids=str)
@pytest.mark.parametrize("name", [*MODELS, "gpt_oss"])
@pytest.mark.parametrize("keeps", [False, True], ids=["template", "as_sampled"])
async def test_an_answer_is_read_streamed_and_recognised(
    tmp_path: Path, name: str, dialect: Speech, keeps: bool
) -> None:
    info, job = card(tmp_path, name), {"max_tokens": 300, "history": "as_sampled" if keeps else "template"}
    answers = itertools.cycle([said(info, name, calls=True), said(info, name, calls=False)])
    script = saying(lambda prompt: next(answers), name)
    async with serving(tmp_path / "d", script, card=info, job=job) as served:
        tools, turns = list(dialect.tools), []
        for stream in (False, True):
            served.run.compute.asked.clear()
            episode = await served.begin()
            first = await dialect.ask(served, episode, stream=stream, tools=tools)
            assert (first.text, first.reasoning, first.end) == ("", "Hm.", "calls")
            assert first.calls == CALLS[: 1 if name == "gpt_oss" else 2], "harmony ends a turn with a call"
            history = [*HELLO, *first.turn]
            last = await dialect.ask(served, episode, stream=stream, tools=tools, **{dialect.history: history})
            assert (last.text, last.reasoning, last.end) == ("It is 3.", "Hm.", "stop")
            if keeps and name != "gpt_oss":  # Its template replaces the token that ends an answer.
                history = [*history, *last.turn, *HELLO]
                await dialect.ask(served, episode, stream=stream, tools=tools, **{dialect.history: history})
                next(answers)
            assert_one_timeline(served, episode)
            turns.append([first, last])
        assert turns[0] == turns[1]


@pytest.mark.parametrize("dialect", WITH_TOOLS, ids=str)
@pytest.mark.parametrize("name", MODELS)
async def test_a_call_is_sent_while_the_next_one_is_sampled(tmp_path: Path, name: str, dialect: Speech) -> None:
    info = card(tmp_path, name)
    answer = said(info, name, calls=True)
    num = len(tiny.tokenizer(name).encode(answer, add_special_tokens=False).ids)
    async with serving(tmp_path / "d", saying(lambda prompt: answer, name), card=info) as served:
        served.run.compute.stuck = lambda request, piece: piece == num - 4
        episode, sent = await served.begin(), ""
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        body = {"model": "policy", **dialect.asked, "stream": True, dialect.length: 300, "tools": list(dialect.tools)}
        async with served.http.stream("POST", dialect.path, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                sent += line
                if re.search(r'a\\": ?1', sent):
                    break
        assert '"add"' in sent and not re.search(r'a\\": ?2', sent)
        assert not served.run.compute.asked[0].finished
