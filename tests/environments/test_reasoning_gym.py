"""reasoning-gym, the real package: tasks and splits, scores and metrics, every data set, and bad input."""

from __future__ import annotations

from typing import Any

import pytest

from agentjet import environments
from agentjet.environments import EnvironmentTask
from agentjet.environments.kinds.reasoning_gym import ReasoningGym
from agentjet.errors import ConfigError
from agentjet.types import Reward
from tests.needs import need

need("reasoning-gym")


class Answering:
    """A model that always gives the same answer."""

    def __init__(self, answer: str) -> None:
        self.answer, self.messages = answer, list[dict[str, Any]]()

    def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.messages = messages
        return {"role": "assistant", "content": self.answer}


def play(kind: ReasoningGym, task: EnvironmentTask, answer: str) -> Reward:
    return kind.play(task, Answering(answer))  # type: ignore[arg-type]


def test_questions_of_both_splits_differ_and_stay_the_same() -> None:
    kind = ReasoningGym(target="spell_backward", num_tasks=20, held_out=0.25)
    listed = kind.listed()
    assert listed == kind.listed() and [task.split for task in listed] == ["train"] * 15 + ["held_out"] * 5
    assert listed[0].id == "train-0-0" and listed[-1].id == "held_out-1000003-4"
    model = Answering("")
    questions = []
    for task in listed:
        kind.play(task, model)  # type: ignore[arg-type]
        questions.append(model.messages[-1]["content"])
    assert len({*questions}) == 20 and "<answer>" in model.messages[0]["content"]


def test_the_score_is_that_of_the_library() -> None:
    kind = ReasoningGym(target="spell_backward", config={"min_word_len": 4, "max_word_len": 4})
    task = kind.listed()[0]
    model = Answering("")
    nothing = kind.play(task, model)  # type: ignore[arg-type]
    assert (nothing.value, nothing.metrics) == (0.0, {"correct": 0.0, "has_answer": 0.0})
    word = model.messages[-1]["content"].split(": ")[-1].split()[0]
    right = play(kind, task, f"I think. <answer>{word[::-1]}</answer>")
    assert (right.value, right.by_turn, right.metrics["correct"]) == (1.0, (1.0,), 1.0)
    assert right.text == f"answer {word[::-1]!r}: {word[::-1]!r}"
    bare = ReasoningGym(target="spell_backward", config=kind.config, prompt="none")
    assert play(bare, task, f" {word[::-1]}\n").value == 1.0


def test_an_answer_that_the_scorer_cannot_read_is_wrong() -> None:
    kind = ReasoningGym(target="prime_factorization")
    reward = play(kind, kind.listed()[0], "<answer>no number</answer>")
    assert reward.value == 0.0 and "answer 'no number' cannot be read: ValueError" in reward.text


def test_data_sets_list_tasks_and_score() -> None:
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 100
    for name in ["boxnet", "rubiks_cube", *sorted({*DATASETS} - {"composite"})[::12]]:
        kind = ReasoningGym(target=name, num_tasks=2, held_out=0.5)
        for task in kind.listed():
            assert 0 <= play(kind, task, "<answer>7</answer>").value <= 1, name


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("spel_backward", {}, "reasoning_gym has no data set 'spel_backward'; did you mean 'spell_backward'?"),
        ("", {}, "reasoning_gym has no data set ''; there are .*spell_backward"),
        (
            "spell_backward",
            {"config": {"length": 3}},
            "spell_backward refuses it: .*unexpected keyword argument 'length'",
        ),
        ("spell_backward", {"prompt": "rude"}, "prompt = 'rude': Input should be 'default'"),
        ("composite", {}, "composite refuses it: Must specify at least one dataset"),
    ],
)
def test_wrong_settings_are_named_before_the_first_episode(name: str, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        environments.load(f"reasoning_gym:{name}", **settings)
