"""1. The split: nothing held out is trained on, swapped operands included. 2. The rewards. 3. The shipped settings
load. 4. The agent against a scripted model: two turns, feedback, what it sends back. 5. The example script runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agentjet.cli.arithmetic import SETTINGS, FirstAnswer, agent, held_out_tasks, training_tasks
from agentjet.cli.arithmetic.agent import is_equation, is_right
from agentjet.client import AsyncEpisode, Episode
from agentjet.config import load_config
from agentjet.protocol import BeginRequest, BeginResponse
from agentjet.types import Task


def test_held_out_sums_are_never_trained_on_either_way_round() -> None:
    held_out = {frozenset(task.payload) for task in held_out_tasks()}
    assert len(held_out) == len(held_out_tasks()) == 500
    assert held_out.isdisjoint({frozenset(task.payload) for task in training_tasks()})
    assert len({task.id for task in training_tasks()}) == len(training_tasks())
    assert held_out_tasks(10) == held_out_tasks()[:10]


@pytest.mark.parametrize("count", [0, 501])
def test_there_are_500_held_out_sums(count: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 500"):
        held_out_tasks(count)


@pytest.mark.parametrize(
    ("answer", "formed", "right"),
    [
        ("3 + 4 = 7", True, True),
        (" 3 + 4 = 7\n", True, True),
        ("3 + 4 = 8", True, False),
        ("4 + 3 = 7", False, False),
        ("3 + 4 = 7.", False, False),
        ("3 + 4 = 1234", False, False),
        ("3 + 4 = ٧", False, False),
        ("7", False, False),
        ("", False, False),
    ],
)
def test_an_answer_is_the_equation_and_nothing_else(answer: str, formed: bool, right: bool) -> None:
    assert (is_equation(answer, 3, 4), is_right(answer, 3, 4)) == (formed, right)


def test_the_shipped_settings_load() -> None:
    config = load_config(SETTINGS, environ={})
    assert config.job.max_steps > 0
    assert config.model.name == "smollm2-135m"


@dataclass
class ScriptedModel:
    """An OpenAI-compatible server that says what its script says and keeps what it was asked."""

    script: Sequence[str]
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def episode(self, task: Task) -> Episode:
        begun = BeginResponse(
            episode_id="ep1",
            base_url=f"{self.url}/v1",
            api_key="the-key",
            model="policy",
            policy_version=0,
            lease_seconds=60,
            expires_at=0,
        )
        asynchronous = AsyncEpisode(None, begun, BeginRequest(task_id=task.id))  # type: ignore[arg-type]
        return Episode(asynchronous, drive=None)  # type: ignore[arg-type]


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel(script=[])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Authorization"] == "Bearer the-key"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model.asked.append(body)
            message = {"role": "assistant", "content": model.script[len(model.asked) - 1]}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
            payload = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    model.url = f"http://127.0.0.1:{server.server_port}"
    yield model
    server.shutdown()
    server.server_close()


TASK = Task("3+4", payload=(3, 4))


@pytest.mark.parametrize(("answer", "value"), [(" 3 + 4 = 7\n", 1.0), ("The sum is 7.", 0.0)])
def test_a_right_answer_and_anything_but_an_equation_end_the_episode(
    model: ScriptedModel, answer: str, value: float
) -> None:
    model.script = [answer]
    reward = agent(TASK, model.episode(TASK))
    assert (reward.value, reward.metrics["turns"]) == (value, 1.0)
    assert model.asked[0]["model"] == "policy"
    assert [message["role"] for message in model.asked[0]["messages"]] == ["user"]


def test_a_wrong_sum_gets_feedback_and_a_second_try_worth_less(model: ScriptedModel) -> None:
    first = " 3 + 4 = 8"
    model.script = [first, "3 + 4 = 7"]
    reward = agent(TASK, model.episode(TASK))
    assert 0 < reward.value < 1
    assert reward.metrics["turns"] == 2.0
    again = model.asked[1]["messages"]
    assert [message["role"] for message in again] == ["user", "assistant", "user"]
    assert again[1]["content"] == first  # exactly what the model said, or its tokens could not be recognised
    assert "wrong" in again[2]["content"]


def test_the_evaluation_counts_the_first_answer_only(model: ScriptedModel) -> None:
    model.script = ["3 + 4 = 8", "seven", "3 + 4 = 7", "3 + 4 = 7"]
    examiner = FirstAnswer(temperature=0.0, seed=3)
    rewards = [examiner(TASK, model.episode(TASK)) for _ in range(3)]
    assert [reward.value for reward in rewards] == [0.0, 0.0, 1.0]
    assert [reward.metrics["well_formed"] for reward in rewards] == [1.0, 0.0, 1.0]
    assert examiner.answers == {"3+4": "3 + 4 = 8"}, "what the task was asked first"
    assert {body["temperature"] for body in model.asked} == {0.0}
    assert len({body["seed"] for body in model.asked}) == 3, "greedy or not, each repeat has its own"
    again = FirstAnswer(temperature=0.0, seed=3)
    again(TASK, model.episode(TASK))
    assert model.asked[-1]["seed"] == model.asked[0]["seed"], "the same seeds in every run"


def test_the_example_is_the_same_agent() -> None:
    script = Path(__file__).parents[2] / "examples" / "arithmetic" / "agent.py"
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    assert names["agent"] is agent
    assert callable(names["main"])
