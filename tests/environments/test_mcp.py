"""The kind `mcp` with a real server on standard input and output.

1. Tasks, ids and splits are those of the file, the same each time.
2. The model calls tools until it answers; the reward comes from the answer. Both turns are trained.
3. A tool's error is text for the model; a server that ends, or hangs, aborts the episode.
4. Each episode has a new server, unless `shared` is set.
5. Wrong settings are an error before the run.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentjet import environments
from agentjet.client import AsyncSwarm, EvalReport, Retry
from agentjet.client.rollout import AgentFailing
from agentjet.environments import Environment
from agentjet.errors import ConfigError
from tests.fakes import recent_episodes, saying
from tests.needs import need
from tests.server.serving import ADMIN, Served, serving
from tests.tiny import make_model_info

need("mcp")
pytestmark = pytest.mark.anyio
SHOP = Path(__file__).with_name("shop_server.py")
ROWS: list[dict[str, Any]] = [
    {"id": "lamp", "question": "call price {'item': 'lamp'}", "answer": "28 dollars", "split": "train"},
    {"question": "call price {'item': 'chair'}", "expected": ["36 dollars", "35 dollars"], "split": "held_out"},
]


def load(folder: Path, rows: list[Any] = ROWS, *, arguments: str = "", **settings: Any) -> Environment:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"task_file": folder / "tasks.jsonl", "held_out": 0.0, "processes": 1, "max_turns": 3} | settings
    return environments.load(f"mcp:python {SHOP}{arguments}", **settings)


def obeying(prompt: str) -> str:
    """Makes the calls that a question asks for, then answers with the last result."""
    user = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.S)
    asked = [text for text in user if "<tool_response>" not in text][-1]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.S)
    calls = re.findall(r"call (\w+) (\{.*?\})", asked)
    if len(results) >= len(calls):
        return str(results[-1])
    name, arguments = calls[len(results)]
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments.replace(chr(39), chr(34))}}}\n</tool_call>'


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[tuple[AsyncSwarm, Served]]:
    card = make_model_info(folder / "tokenizer", "qwen3", tool_format="hermes")
    job = {"batch_size": 1, "group_size": 2, "max_tokens": 512}
    retry = Retry(patience=5.0)
    async with (
        serving(folder / "data", saying(obeying), card=card, job=job) as served,
        AsyncSwarm(served.url, ADMIN, retry=retry) as client,
    ):
        yield client, served


async def played(folder: Path, *questions: str, answer: str = "?", **settings: Any) -> EvalReport:
    """Plays questions one after the other."""
    rows = [{"id": str(place), "question": question, "answer": answer} for place, question in enumerate(questions)]
    with load(folder, rows, **settings) as shop:
        async with swarm(folder) as (client, _):
            return await client.evaluate(shop.agent, shop.tasks, concurrency=1, progress=False)


def texts(report: EvalReport) -> list[str]:
    return [result.error or result.reward_text for result in report.results]


def test_tasks_have_ids_and_splits_that_stay(tmp_path: Path) -> None:
    with load(tmp_path) as first, load(tmp_path, ROWS[::-1]) as second:
        assert [task.id for task in first.tasks] == ["lamp"] and len(first.held_out) == 1
        assert (first.tasks, first.held_out) == (second.tasks, second.held_out)
        assert first.tasks[0].payload == ROWS[0]


async def test_tools_are_called_and_the_episode_is_trained(tmp_path: Path) -> None:
    with load(tmp_path, processes=2, strict=True, tool_choice="required") as shop:
        async with swarm(tmp_path) as (client, served):
            evaluated = await client.evaluate(shop.agent, shop.held_out, progress=False)
            report = await client.train(shop.agent, shop.tasks, steps=1, concurrency=2, progress=False)
            episode = recent_episodes(served.run.gateway.swarm, 1, status="finished")[0]
            first, second = (await client.episode_tree(episode.id)).calls
            grammars = [str(asked.params.grammar) for asked in served.run.compute.asked]
    assert (evaluated.mean_reward, evaluated.mean_metric("calls")) == (1.0, 1.0)
    assert (report.num_aborted, report.rewards) == (0, (1.0,))
    assert (episode.reward_text, episode.metrics["answered"]) == ("expected 28 dollars", 1.0)
    assert (second.parent, first.orphan, second.orphan) == (first.call_id, "", "")
    assert first.messages[0]["content"] == "Use the shop." and "required" in grammars[0]


async def test_results_as_the_model_reads_them(tmp_path: Path) -> None:
    """The reward function of a file sees them."""
    (tmp_path / "reward.py").write_text(
        "def score(row, played):\n"
        "    from agentjet.types import Reward\n"
        "    text = ' | '.join(call.result for call in played.calls)\n"
        "    return Reward(len(played.calls) / 2, metrics={'own': 1}, text=text)\n"
    )
    questions = [
        "call price {'item': 'nothing'} call count {}",
        "call picture {} call long {'number': 3000}",
        "call nonsense {} call price {'wrong': 1}",
    ]
    report = await played(
        tmp_path,
        *questions,
        reward=f"{tmp_path / 'reward.py'}:score",
        result_characters=100,
        variables={"SHOP": "set"},
        max_tokens=300,
    )
    assert (report.mean_reward, report.mean_metric("own")) == (1.0, 1.0)
    first, second, third = texts(report)
    assert "there is no such item | 1 calls, variable set, key False" in first
    assert second.startswith("[image of type image/png: it cannot be shown] | xxx") and "[cut: 3000 " in second
    assert "nonsense" in third and "item" in third.partition(" | ")[2]
    assert report.mean_metric("call_errors") == 1.0


@pytest.mark.parametrize(("shared", "counted"), [(False, [1, 1]), (True, [1, 2])])
async def test_a_server_for_each_episode_or_for_all(tmp_path: Path, shared: bool, counted: list[int]) -> None:
    (tmp_path / "reward.py").write_text("def score(row, played): return int(played.answer[0])")
    question = "call price {'item': 'a'} call count {}"
    report = await played(tmp_path, question, question, reward=f"{tmp_path / 'reward.py'}:score", shared=shared)
    assert [result.reward for result in report.results] == counted


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("crash", "the tool 'crash': Connection closed; it printed last: the shop burns"),
        ("hang", "the tool 'hang': no answer within tool_seconds = 4"),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
async def test_a_server_that_fails_aborts_and_the_next_episode_works(
    tmp_path: Path, name: str, error: str, shared: bool
) -> None:
    sound = "call price {'item': 'lamp'}"
    questions = [sound, f"call {name} {{}}", sound]
    report = await played(tmp_path, *questions, answer="28 dollars", shared=shared, tool_seconds=4)
    assert [result.outcome for result in report.results].count("finished") == 2
    assert any(error in text for text in report.errors) and report.mean_reward == 1.0


def is_listening(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


async def test_a_server_at_a_url(tmp_path: Path) -> None:
    """Streamable HTTP. The server serves all episodes, and is not ended with them."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROWS[0] | {"split": "train"}))
    settings = {"task_file": tmp_path / "tasks.jsonl", "processes": 1, "tool_seconds": 10}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SHOP, f"--port={port}"], stderr=subprocess.DEVNULL)
    try:
        with anyio.fail_after(30):
            while not is_listening(port):
                await anyio.sleep(0.1)
        with environments.load(f"mcp:http://127.0.0.1:{port}/mcp", **settings) as shop:
            async with swarm(tmp_path) as (client, _):
                report = await client.evaluate(shop.agent, shop.tasks, repeats=2, concurrency=1, progress=False)
        assert (report.mean_reward, report.mean_metric("calls"), process.poll()) == (1.0, 1.0, None)
        with pytest.raises(ConfigError, match="its start: Not Found"):
            environments.load(f"mcp:http://127.0.0.1:{port}/wrong", **settings)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ConfigError, match="its start: All connection attempts failed"):
        environments.load(f"mcp:http://127.0.0.1:{port}/mcp", **settings)


@pytest.mark.parametrize(
    ("returned", "error"),
    [("None", "return a number or a Reward"), ("float('nan')", "nan"), ("1 / 0", "ZeroDiv")],
)
async def test_an_episode_without_a_score_is_aborted(tmp_path: Path, returned: str, error: str) -> None:
    (tmp_path / "reward.py").write_text(f"def score(row, played): return {returned}")
    with pytest.raises(AgentFailing, match=error):
        await played(tmp_path, "call count {}", reward=f"{tmp_path / 'reward.py'}:score")


@pytest.mark.parametrize(
    ("reward", "answer", "value"),
    [
        ("exact", " 28 DOLLARS", 1.0),
        ("exact", "28", 0.0),
        ("contains", "28", 1.0),
        ("contains", "8", 0.0),
        ("contains", ["x", "dollars"], 1.0),
    ],
)
def test_matches(reward: str, answer: Any, value: float) -> None:
    from agentjet.environments.kinds.mcp import MATCHES, ToolConversation

    assert MATCHES[reward]({"answer": answer}, ToolConversation("28 dollars", (), ())).value == value


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"rows": [{"answer": "x"}]}, r'line 1: .* has no question: give \{"question"'),
        ({"rows": ["text"]}, "has no question"),
        ({"rows": [{"question": "x"}]}, "has no answer, which reward = 'exact' needs"),
        ({"rows": [ROWS[0], ROWS[0]]}, "task 1 of .* has the id 'lamp', as another task"),
        ({"rows": [ROWS[0] | {"split": "dev"}]}, "split = 'dev': give train or held_out"),
        ({"rows": [ROWS[0] | {"split": ["train"]}]}, r"line 1: split = \['train'\]: give train or held_out"),
        ({"rows": [ROWS[0] | {"id": ["lamp"]}]}, r"line 1: id = \['lamp'\]: give a text"),
        ({"rows": [ROWS[0] | {"question": 5}]}, "line 1: question = 5: give a text"),
        ({"rows": [ROWS[0] | {"messages": "hello"}]}, "line 1: messages = 'hello': give a list such as"),
        ({"rows": [ROWS[0] | {"messages": [1]}]}, r"line 1: messages = \[1\]: give a list such as"),
        ({"rows": [ROWS[0] | {"answer": {"x": 1}}]}, "line 1: .* has no answer, .* a list of texts, as answer"),
        ({"rows": []}, "has no tasks"),
        ({"task_file": "nowhere.jsonl"}, "nowhere.jsonl: No such file"),
        ({"task_file": ""}, "task_file is missing"),
        ({"reward": "judge"}, "reward = judge: expected exact, contains, or FILE.py:FUNCTION"),
        ({"reward": "nowhere.py:score"}, "reward = nowhere.py: No such file"),
        ({"tools": ["prise"]}, "tools = 'prise': did you mean 'price'"),
        ({"tool_choice": "never"}, "tool_choice = 'never'"),
        ({"arguments": " --broken"}, "its start: Connection closed; it printed last: the shop is closed"),
        ({"arguments": " --silent", "tool_seconds": 1}, "its start: no answer within tool_seconds = 1"),
        ({"arguments": " 'open"}, "No closing quotation"),
    ],
)
def test_wrong_settings_are_errors_before_the_run(tmp_path: Path, changed: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load(tmp_path, **changed)


@pytest.mark.parametrize(("target", "error"), [("", "the target is empty"), ("no-such-program", "No such file")])
def test_a_target_that_cannot_be_started(tmp_path: Path, target: str, error: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(ConfigError, match=error):
        environments.load(f"mcp:{target}", task_file=tmp_path / "tasks.jsonl")
