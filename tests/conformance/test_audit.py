"""The judge of `make conformance` is itself judged. Pinned here:

1. an agent on OpenAI's SDK, as a process, is green, whether it streams or not;
2. every kind of loss makes it red, by the words that name it: in what the client heard, in the prompts, in the record,
   in the forest;
3. a role in the model's name is a role of the episode, trained by that role's reward;
4. a client that asks too often, or reaches for another machine, is told on;
5. the page says what was found.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.errors import ComputeError
from agentjet.types import SamplingParams
from conformance.audit import problems
from conformance.child import HERE, run
from conformance.conversation import Turn
from conformance.episode import Evidence, Exercise, play
from conformance.exercises import EXERCISES
from conformance.page import Result, green, page
from conformance.policy import Policy
from tests.timeline.models import make_model

pytestmark = pytest.mark.e2e

CHAT = EXERCISES[0]
SCRIPT = str(HERE / "clients" / "openai_sdk.py")


def played(exercise: Exercise, folder: Path, way: str) -> Evidence:
    """An exercise with the SDK of this environment."""
    return asyncio.run(play(exercise, [sys.executable, SCRIPT, way], folder))


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return played(CHAT, tmp_path_factory.mktemp("chat"), "chat")


def test_openais_sdk_is_green(evidence: Evidence) -> None:
    assert problems(CHAT, evidence) == []
    assert evidence.num_timelines == 1
    assert evidence.forest is not None
    sampled = sum(len(said.completion) for said in (*evidence.said, *evidence.other))
    assert evidence.forest.num_targets == sampled


@pytest.mark.parametrize(("way", "num_timelines"), [("streaming", 1), ("votes", 2), ("structured", 1)])
def test_its_other_ways_are_green(way: str, num_timelines: int, tmp_path: Path) -> None:
    exercise = next(one for one in EXERCISES if one.command == ("openai_sdk.py", way))
    found = played(exercise, tmp_path, way)
    assert problems(exercise, found) == []
    assert found.num_timelines == num_timelines


def test_a_role_in_the_models_name_is_trained_by_its_own_reward(tmp_path: Path) -> None:
    exercise = next(one for one in EXERCISES if one.role)
    found = played(exercise, tmp_path, "chat")
    assert problems(exercise, found) == []
    lost = problems(replace(exercise, role=""), found)
    assert "call 4 is of role 'reckoner', not ''" in lost
    assert any("by the reward" in problem for problem in lost)


def test_an_answer_against_the_grammar_is_seen(tmp_path: Path) -> None:
    exercise = next(one for one in EXERCISES if one.command == ("openai_sdk.py", "structured"))
    loose = replace(exercise, turns=(CHAT.turns[0], *exercise.turns[1:]))
    assert "call 1: the grammar does not allow the scripted answer" in problems(
        loose, played(loose, tmp_path, "structured")
    )


@pytest.mark.needs("node")
def test_the_guard_of_node(tmp_path: Path) -> None:
    program = "fetch('http://203.0.113.7/').catch((error) => { console.error(error.cause.message); process.exit(1); })"
    episode = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "policy"}
    guard = str(HERE / "node" / "guard.cjs")
    ended = asyncio.run(run(["node", "--require", guard, "-e", program], episode, tmp_path))
    assert ended.code == 1 and "203.0.113.7 is not this machine" in ended.errors
    assert set(ended.reached) == {"203.0.113.7"}


def of_client(**changes: Any) -> Callable[[Evidence], Evidence]:
    return lambda evidence: replace(evidence, ended=replace(evidence.ended, **changes))


def of_forest(**changes: Callable[[Any], Any]) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        forest = evidence.forest
        assert forest is not None
        columns = {name: how(forest[name].copy()) for name, how in changes.items() if name in forest.targets}
        arrays = {name: how(getattr(forest, name).copy()) for name, how in changes.items() if name not in columns}
        return replace(evidence, forest=replace(forest.with_columns(**columns), **arrays))

    return change


def of_call(number: int, how: Callable[[dict[str, Any]], object]) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        tree = deepcopy(evidence.tree)
        how(tree["calls"][number])
        return replace(evidence, tree=tree)

    return change


def of_prompt(number: int, how: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        said = list(evidence.said)
        said[number] = replace(said[number], prompt=how(said[number].prompt))
        return replace(evidence, said=tuple(said))

    return change


def of_said(number: int, **changes: Any) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        said = list(evidence.said)
        said[number] = replace(said[number], **changes)
        return replace(evidence, said=tuple(said))

    return change


def first_changed(values: Any) -> Any:
    values[0] += 1
    return values


LOSSES: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "the client crashed": (of_client(code=1, errors="boom"), "exit code 1: boom"),
    "another answer arrived": (of_client(output="85 and 43.\n"), "heard '85 and 43.'"),
    "a file is not edited": (lambda evidence: replace(evidence, files={"a.txt": "helo"}), "a.txt holds 'helo'"),
    "it phoned home": (of_client(reached=("telemetry.example",)), "reach telemetry.example"),
    "a call is missing": (lambda evidence: replace(evidence, said=evidence.said[:-1]), "never asked for '84 and 43.'"),
    "a tool result is missing": (of_prompt(1, lambda prompt: prompt[:-9]), "call 2 adds"),
    "the tools are missing": (of_prompt(0, lambda prompt: prompt[-60:]), "call 1 was not told '<tools>'"),
    "a grammar out of nowhere": (of_said(2, grammar="x"), "call 3 was sampled under a grammar"),
    "an answer that no grammar allows": (of_said(2, is_allowed=False), "does not allow the scripted answer"),
    "a set of choices is made up": (of_forest(support=lambda values: np.zeros_like(values)), "not trained in their"),
    "a recorded token is another": (of_call(2, lambda call: first_changed(call["tokens"])), "other tokens"),
    "context is masked in": (of_call(3, lambda call: first_changed(call["mask"])), "mask does not cover"),
    "a sampled token is masked out": (of_call(1, lambda call: call["mask"].__setitem__(-1, 0)), "mask does not"),
    "a false fork": (of_call(1, lambda call: call.update(fork="edit")), "counted as 'edit'"),
    "another role": (of_call(1, lambda call: call.update(role="critic")), "call 2 is of role 'critic', not ''"),
    "a false retry": (of_call(1, lambda call: call.update(retry_of="x")), "retry or an orphan"),
    "a token trained in another context": (of_forest(tokens=first_changed), "not trained in their context"),
    "a token trained elsewhere": (of_forest(node=first_changed), "nobody sampled"),
    "another reward": (of_forest(advantage=lambda values: -values), "by the reward"),
    "a node twice": (
        of_forest(tokens=lambda v: np.append(v, v[-1]), parent=lambda v: np.append(v, v[-1])),
        "exactly once",
    ),
    "nothing learned": (lambda evidence: replace(evidence, forest=None), "nothing was learned"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_seen(loss: str, evidence: Evidence) -> None:
    lose, words = LOSSES[loss]
    editing = replace(CHAT, leaves={"a.txt": "hello"})
    found = replace(evidence, files={"a.txt": "hello"})
    assert any(words in problem for problem in problems(editing, lose(found)))


def test_a_client_that_asks_too_often_is_red(tmp_path: Path) -> None:
    short = replace(CHAT, turns=CHAT.turns[:3])
    found = problems(short, played(short, tmp_path, "chat"))
    assert any("exit code 1" in problem and "asked once more" in problem for problem in found)


def test_the_guard_refuses_other_machines_and_tells(tmp_path: Path) -> None:
    program = "import socket; socket.create_connection(('203.0.113.7', 80), 1)"
    episode = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "policy"}
    ended = asyncio.run(run([sys.executable, "-c", program], episode, tmp_path))
    assert ended.code == 1 and "is not this machine" in ended.errors
    assert set(ended.reached) == {"203.0.113.7"}


def test_the_proxy_of_a_product_refuses_and_tells(tmp_path: Path) -> None:
    program = "import urllib.request; urllib.request.urlopen('http://telemetry.example/', timeout=9)"
    episode = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "policy"}
    ended = asyncio.run(run([sys.executable, "-c", program], episode, tmp_path, product=True))
    assert ended.code == 1 and "403" in ended.errors
    assert ended.reached == ("http://telemetry.example/",)


def test_a_side_call_is_answered_whenever_it_comes(tmp_path: Path) -> None:
    model = make_model(tmp_path, "smollm2")
    first, second, side = Turn("one"), Turn("two"), Turn("A title", asked_by="Make a title")
    policy = Policy(model, [first, second, side])
    for words in ("hello", "Make a title", "again"):
        policy(model.ids(words), SamplingParams(max_tokens=9))
    assert [one.turn for one in policy.said] == [first, side, second]
    with pytest.raises(ComputeError):
        policy(model.ids("Make a title"), SamplingParams(max_tokens=9))
    assert policy.unanswered == ["Make a title"]


def test_the_page_says_what_was_found(evidence: Evidence) -> None:
    good, bad = Result(CHAT, (), 1), Result(replace(CHAT, client="other"), ("one | two",), 1)
    assert green([good, bad, replace(good, problems=("x",))]) == {"openai": False, "other": False}
    written = page([good, bad], {"openai": "9.9"})
    assert "1 of 2 clients are green" in written
    assert "| openai | 9.9 | chat |" in written and "| red | one   two |" in written
