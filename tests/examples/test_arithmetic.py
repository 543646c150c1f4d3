"""The example that `agentjet demo` runs. Pinned here:

1. the split: no held-out sum is trained on, swapped operands included;
2. the rewards;
3. the shipped settings load;
4. the agent against a scripted model: two turns, feedback, the history that it sends back;
5. the picture and the report of the demo;
6. `load_example` finds the folder from any working directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentjet.cli import example, load_example
from agentjet.client import Episode, Estimate, Swarm
from agentjet.errors import ConfigError
from agentjet.protocol import EpisodeTree
from agentjet.types import Reward, Task
from examples.arithmetic.agent import FirstAnswer, agent, held_out_tasks, is_equation, is_right, training_tasks
from examples.arithmetic.report import Score, draw_rewards, label_heights, smooth, write_report
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving


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


TASK = Task("3+4", payload=(3, 4))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_thread(serving(tmp_path / "data")) as (served, _):
        yield served


def play(served: Served, *answers: str, agent: Callable[[Task, Episode], Reward] = agent) -> tuple[Reward, EpisodeTree]:
    """The reward and the calls of an agent whose model gives these answers."""
    script = iter(answers)
    served.run.compute.script = saying(lambda prompt: next(script))
    with Swarm(served.url, TOKEN) as swarm, swarm.episode(TASK.id, mode="eval") as episode:
        return agent(TASK, episode), swarm.episode_tree(episode.id)


@pytest.mark.parametrize(("answer", "value"), [(" 3 + 4 = 7\n", 1.0), ("The sum is 7.", 0.0)])
def test_a_right_answer_and_anything_but_an_equation_end_the_episode(served: Served, answer: str, value: float) -> None:
    reward, tree = play(served, answer)
    assert (reward.value, reward.metrics["turns"]) == (value, 1.0)
    assert [[message["role"] for message in call.messages] for call in tree.calls] == [["user"]]


def test_a_wrong_sum_gets_feedback_and_a_second_try_worth_less(served: Served) -> None:
    reward, tree = play(served, " 3 + 4 = 8", "3 + 4 = 7")
    assert 0 < reward.value < 1
    assert reward.metrics["turns"] == 2.0
    first, second = tree.calls
    assert (second.after, second.kept) == (first.call_id, len(first.tokens)), "it sends back exactly what was said"
    [feedback] = second.messages
    assert feedback["role"] == "user" and "wrong" in feedback["content"]


def test_the_evaluation_counts_the_first_answer_only(served: Served) -> None:
    examiner, asked = FirstAnswer(temperature=0.0, seed=3), served.run.compute.asked
    rewards = [play(served, answer, agent=examiner)[0] for answer in ("3 + 4 = 8", "seven", "3 + 4 = 7")]
    assert [reward.value for reward in rewards] == [0.0, 0.0, 1.0]
    assert [reward.metrics["well_formed"] for reward in rewards] == [1.0, 0.0, 1.0]
    assert examiner.answers == {"3+4": "3 + 4 = 8"}, "what the task was asked first"
    assert {one.params.temperature for one in asked} == {0.0}
    assert len({one.params.seed for one in asked}) == 3, "greedy or not, each repeat has its own"
    play(served, "3 + 4 = 7", agent=FirstAnswer(temperature=0.0, seed=3))
    assert asked[-1].params.seed == asked[0].params.seed, "the same seeds in every run"


def scored(success: float, answers: dict[str, str]) -> Score:
    return Score(Estimate(success, 0.0, 1.0, 1), Estimate(1.0, 0.0, 1.0, 1), answers)


HARD = held_out_tasks(1)[0]
RIGHT = f"{HARD.payload[0]} + {HARD.payload[1]} = {sum(HARD.payload)}"


def test_the_report_is_one_file_and_escapes_what_models_say(tmp_path: Path) -> None:
    before, after = scored(0.0, {HARD.id: "<script>alert(1)</script>"}), scored(1.0, {HARD.id: RIGHT})
    picture, page = tmp_path / "reward.png", tmp_path / "report.html"
    draw_rewards(picture, [0.1, 0.5, 0.9], before, after)
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = {"steps": 3, "seconds": 90.0, "timings": {"train": 60.0}, "rewards": [0.1, 0.5, 0.9]}
    write_report(page, "smollm2-135m", result, before, after, picture)
    html = page.read_text()
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "data:image/png;base64," in html
    assert "http" not in html
    assert f'<td class="right">{RIGHT}' in html


def test_smoothing_is_centred_and_keeps_the_ends() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert smooth([0.0, 0.0, 5.0, 0.0, 0.0]) == [0.0, 5 / 3, 1.0, 5 / 3, 0.0]


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.0), (0.5, 0.52), (0.52, 0.5), (0.01, 0.7)])
def test_labels_stay_apart_and_above_the_axis(first: float, second: float) -> None:
    low, high = label_heights(first, second)
    assert abs(high - low) >= 0.05 - 1e-12
    assert min(low, high) >= min(first, second) - 1e-12 or min(low, high) >= 0.025 - 1e-12
    assert (high >= low) == (second >= first)


def test_commands_find_the_example_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_example("arithmetic", "agent")
    assert loaded.held_out_tasks() == held_out_tasks()
    assert load_example("arithmetic", "demo").FirstAnswer is loaded.FirstAnswer
    with pytest.raises(ConfigError, match="the example 'chess' is missing"):
        example("chess")
