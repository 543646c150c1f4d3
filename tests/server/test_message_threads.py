"""Message threads of Anthropic's SDK, which ask the server to store the history.

Pinned here: a thread is refused with the error that makes the SDK continue without one. So its tool runner works
unchanged, on one timeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.fakes import saying
from tests.server.serving import serving
from tests.server.test_messages import HELLO, assert_one_timeline, calls_of
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio


@anthropic.beta_async_tool
async def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def reply(prompt: str) -> str:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
    return "It is 3." if "<tool_response>\n3\n</tool_response>" in prompt else call


async def test_the_tool_runner_sends_its_history_itself(tmp_path: Path) -> None:
    card = make_model_info(tmp_path / "qwen", "qwen3", tool_format="hermes")
    async with serving(tmp_path / "d", saying(reply), card=card, job={"max_tokens": 300}) as served:
        episode = await served.begin()
        client = served.anthropic(episode)
        runner = client.beta.messages.tool_runner(model="policy", max_tokens=300, messages=HELLO, tools=[add])
        answer = await runner.until_done()
        assert answer.content[0].text == "It is 3."
        assert len(calls_of(served, episode)) == 2
        assert_one_timeline(served, episode)
        thread: Any = {"type": "create"}
        with pytest.raises(anthropic.BadRequestError, match="thread is not supported") as refused:
            await client.beta.messages.create(model="policy", max_tokens=9, messages=HELLO, thread=thread)
        body: Any = refused.value.body
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
