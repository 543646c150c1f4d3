"""1. The split. 2. The tool and the reward. 3. Against a real server: the model's tokens are trained; the
question, the examples and the tool's results are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentjet import Swarm
from agentjet.types import Task
from examples.calculator_tool.agent import (
    EXAMPLES,
    agent,
    calculator,
    held_out_tasks,
    is_right,
    training_tasks,
)
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving
from tests.tiny import make_model_info


def test_held_out_questions_are_neither_trained_on_nor_shown() -> None:
    held_out, trained = ({task.payload for task in tasks} for tasks in (held_out_tasks(), training_tasks()))
    assert (len(held_out), len(trained)) == (500, 2000)
    assert held_out.isdisjoint(trained)
    assert all(100 <= a < 1000 and 10 <= b < 100 for a, b in held_out | trained)
    shown = {tuple(map(int, pair)) for pair in re.findall(r"What is (\d+) \* (\d+)", json.dumps(EXAMPLES))}
    assert len(shown) == 2 and shown.isdisjoint(held_out | trained)
    assert held_out_tasks(10) == held_out_tasks()[:10]


@pytest.mark.parametrize("count", [0, 501])
def test_there_are_500_held_out_questions(count: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 500"):
        held_out_tasks(count)


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "347 * 28"}', "9716"),
        ('{"expression": "347*28 "}', "9716"),
        ('{"expression": "__import__(\'os\')"}', "error: give a product such as 3 * 4"),
        ('{"expression": 12}', "error: give a product such as 3 * 4"),
        ('{"expr": "3 * 4"}', 'error: give {"expression": "..."}'),
        ("[]", 'error: give {"expression": "..."}'),
        ("nonsense", 'error: give {"expression": "..."}'),
    ],
)
def test_the_calculator_multiplies_and_says_what_it_cannot_read(arguments: str, result: str) -> None:
    assert calculator(arguments) == result


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("347 * 28 = 9716", True),
        ("It is 9,716.", True),
        ("9716", True),
        ("9716 = 347 * 28", False),
        ("19716", False),
        ("347 * 28", False),
        ("", False),
    ],
)
def test_the_last_number_of_an_answer_counts(answer: str, right: bool) -> None:
    assert is_right(answer, 9716) == right


TASK = Task("347*28", task_set="products", payload=(347, 28))
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "347 * 28"}}\n</tool_call>'
ANSWER = "347 * 28 = 9716"


def uses_the_tool(prompt: str) -> str:
    """A model that has learned it: a call where a question stands last, an answer where a result does."""
    return CALL if prompt.rfind("What is") > prompt.rfind("<tool_response>") else ANSWER


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    card = make_model_info(tmp_path / "tokenizer", "qwen3", tool_format="hermes")
    job = {"batch_size": 1, "group_size": 2, "max_tokens": 512}
    with in_thread(serving(tmp_path / "data", saying(uses_the_tool), card=card, job=job)) as (served, _):
        yield served


def test_what_the_model_said_is_trained_and_what_the_tool_said_is_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.calculator_tool.agent.MAX_TOKENS", 512)  # the tiny vocabulary spells everything out
    with Swarm(served.url, TOKEN) as swarm:
        with swarm.episode(TASK.id) as episode:
            reward = agent(TASK, episode)
            episode.finish(reward)
        assert (reward.value, reward.metrics) == (1.0, {"called": 1.0, "expression": 1.0})
        first, second = swarm.episode_tree(episode.id).calls

    def said(call: object, *, trained: bool) -> str:
        pairs = zip(call.texts, call.mask, strict=True)  # type: ignore[attr-defined]
        return "".join(text for text, mask in pairs if bool(mask) == trained)

    assert said(first, trained=True) == CALL + "<|im_end|>"
    assert said(second, trained=True) == ANSWER + "<|im_end|>"
    assert (second.parent, second.kept, second.fork) == (first.call_id, len(first.tokens), "")
    added = said(second, trained=False)
    assert "<tool_response>\n9716\n</tool_response>" in added and "347" not in added
    assert "482 * 71 = 34222" in said(first, trained=False)
    assert first.orphan == second.orphan == ""


def test_a_model_that_does_not_call_earns_nothing_and_is_not_asked_again(served: Served) -> None:
    served.run.compute.script = saying(lambda prompt: ANSWER)
    with Swarm(served.url, TOKEN) as swarm, swarm.episode(TASK.id) as episode:
        reward = agent(TASK, episode)
        assert (reward.value, reward.metrics["called"]) == (0.0, 0.0)
        assert len(swarm.episode_tree(episode.id).calls) == 1
