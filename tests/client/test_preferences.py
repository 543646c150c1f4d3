"""Preferences from the client to the learner: lines of data sets, groups and rewards in the journal, refusals.

1. The forms of TRL are read; a wrong line is refused by its name and key.
2. A pair is one group whose reward no mean counts. A labelled answer has a mismatched one in its batch.
3. A replay of the journal gives the learner the same rewards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.client.demonstrations import read_demonstrations
from agentjet.errors import ConfigError, InvalidRequest
from tests.client.test_real_server import client
from tests.fakes import running
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

SYSTEM, ASKED = {"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3"}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "chosen": "hello", "rejected": "no"}


def labelled(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "completion": f"it is {number}", "label": number % 2 == 0}


DPO = {"name": "dpo", "beta": 0.3}
SHOWN = [{**ASKED}, answer("5"), {"role": "user", "content": "and 1 more?"}]
PAIRS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": [ASKED], "chosen": "5", "rejected": "6"}, [ASKED]),
    ({"prompt": "2 + 3", "chosen": [answer("5")], "rejected": answer("6")}, [ASKED]),
    ({"chosen": [SYSTEM, ASKED, answer("5")], "rejected": [SYSTEM, ASKED, answer("6")]}, [SYSTEM, ASKED]),
    ({"prompt": "2 + 3", "chosen": [ASKED, answer("5")], "rejected": [ASKED, answer("6")]}, [ASKED]),
    ({"messages": SHOWN, "chosen": "5", "rejected": "6"}, [SHOWN[0], {**SHOWN[1], "weight": 0}, SHOWN[2]]),
]


@pytest.mark.parametrize(("line", "prompt"), PAIRS)
def test_the_forms_of_a_pair(tmp_path: Path, line: dict[str, Any], prompt: list[dict[str, Any]]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({**line, "margin": 2}))
    [(chosen, rejected)], ignored = read_demonstrations(file, "dpo")
    assert ignored == {"margin"}
    assert (chosen.messages, rejected.messages) == ([*prompt, answer("5")], [*prompt, answer("6")])
    assert (chosen.reward, rejected.reward, chosen.group, rejected.group) == (1, 0, "p.jsonl:1", "p.jsonl:1")


def test_a_labelled_answer_has_that_of_another_prompt(tmp_path: Path) -> None:
    file = tmp_path / "k.jsonl"
    file.write_text("\n".join(json.dumps(labelled(number)) for number in (1, 1, 2)))
    examples, _ = read_demonstrations(file, "kto")
    shown = [
        [(one.messages[0]["content"], one.messages[1]["content"], one.reward) for one in example]
        for example in examples
    ]
    assert shown == [
        [("1?", "it is 1", 0), ("1?", "it is 2", None)],
        [("1?", "it is 1", 0), ("1?", "it is 2", None)],
        [("2?", "it is 2", 1), ("2?", "it is 1", None)],
    ]
    file.write_text("\n".join(json.dumps(labelled(1)) for _ in range(2)))
    with pytest.raises(ConfigError, match=r"k.jsonl:1: kto compares .* two prompts or more"):
        read_demonstrations(file, "kto")


WRONG: list[tuple[str, dict[str, Any] | None, str]] = [
    ("dpo", {"messages": [ASKED], "chosen": "5"}, "w.jsonl:1: it lacks rejected: a preference is an object"),
    ("dpo", {"chosen": "5", "rejected": "6"}, "w.jsonl:1: there is no prompt"),
    ("dpo", {"messages": [ASKED], "chosen": "5", "rejected": "5"}, "chosen and rejected are equal"),
    ("dpo", {"messages": [ASKED], "chosen": 5, "rejected": "6"}, "w.jsonl:1: chosen is text, a message or"),
    ("dpo", {"messages": [], "chosen": "5", "rejected": "6"}, "w.jsonl:1: messages is text, a message or"),
    ("dpo", {"chosen": [ASKED, answer("5")], "rejected": [SYSTEM, answer("6")]}, "do not begin with the same prompt"),
    ("kto", {"messages": [ASKED], "completion": "5"}, "w.jsonl:1: it lacks label: an answer is an object"),
    ("kto", {"messages": [ASKED], "completion": "5", "label": "yes"}, "label = 'yes'"),
    ("kto", {"completion": "5", "label": True}, "w.jsonl:1: there is no prompt"),
    ("kto", {"messages": [ASKED], "completion": "5", "label": True}, "give two lines or more"),
    ("dpo", None, "w.jsonl:1: a preference is an object with chosen and rejected"),
    ("sft", pair(1), r"w.jsonl:1: .* need the recipe dpo \(--recipe dpo\)"),
    ("sft", labelled(1), r"need the recipe kto"),
]


@pytest.mark.parametrize(("recipe", "line", "why"), WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, recipe: str, line: dict[str, Any] | None, why: str) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=why):
        read_demonstrations(file, recipe)


async def test_pairs_are_groups_without_a_reward_of_their_own(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, client(served) as swarm:
        report = await swarm.sft([pair(n) for n in range(3)], batch_size=2, recipe=DPO, progress=False)
        assert (report.num_demonstrations, report.num_answers, len(report.steps)) == (3, 6, 2)
        assert not any("reward" in name or name.startswith("groups/zero") for name in report.steps[0].metrics)
        journal = served.run.gateway.swarm.journal
        assert [len(group) for batch in journal.batches(0) for group in batch.groups] == [2, 2, 2]
        assert {(batch.job.recipe.name, batch.job.recipe.beta) for batch in journal.batches(0)} == {("dpo", 0.3)}
        training = served.run.gateway.swarm.batches.training_batches(journal.batches(0)[0])
        [facts] = [one.facts for one in training.values()]
        assert facts is not None and sorted(facts.rewards.tolist()) == [0, 0, 1, 1]
        assert (await swarm.job()).job["recipe"]["name"] == "grpo", "the run keeps its recipe"
        assert [one.reward for one in (await swarm.episodes()).episodes] == [None] * 6
        learned, weights = served.run.compute.learned, served.run.compute.weights
        assert learned == [0, 1]
    async with running(tmp_path / "d") as run:
        await run.until(lambda: run.compute.version == 2)
        assert run.compute.weights == weights


async def test_labelled_answers_in_a_batch(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, client(served) as swarm:
        report = await swarm.sft([labelled(n) for n in range(4)], batch_size=4, recipe="kto", progress=False)
        assert len(report.steps) == 1 and report.num_answers == 8
        swarm_state = served.run.gateway.swarm
        training = swarm_state.batches.training_batches(swarm_state.journal.batches(0)[0])
        [facts] = [one.facts for one in training.values()]
        assert facts is not None
        assert sorted(np.nan_to_num(facts.rewards, nan=-1).tolist()) == [-1, -1, -1, -1, 0, 0, 1, 1]


async def test_what_a_recipe_cannot_learn_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, client(served) as swarm:
        conversation = {"messages": [ASKED, answer("5")]}
        bodies = [
            ({"recipe": "dpo"}, "one: the recipe dpo compares answers"),
            ({"recipe": "kto"}, "no demonstration has a reward"),
            ({"recipe": "grpo"}, "use sft, dpo or kto"),
            ({"recipe": {"name": "dpo", "beta": -1}}, "beta: Input should be greater than 0"),
            ({"recipe": {"name": "dpo", "bete": 1}}, "did you mean 'beta'"),
        ]
        for body, why in bodies:
            sent = {"demonstrations": [{"task_id": "one", **conversation}], **body}
            refused = await served.http.post("/swarm/v1/sft", json=sent)
            assert refused.status_code in (400, 422) and why in refused.json()["detail"], refused.text
        with pytest.raises(InvalidRequest, match="demonstration-1:rejected: no answer to learn"):
            await swarm.sft([{**pair(1), "rejected": {"role": "user", "content": "no"}}], recipe="dpo")
        assert served.run.compute.learned == []


async def test_pairs_of_one_of_several_policies(tmp_path: Path) -> None:
    policies: dict[str, Any] = {"planner": {}, "coder": {}}
    async with serving(tmp_path / "d", policies=policies) as served, client(served) as swarm:
        report = await swarm.sft([pair(1)], policy="coder", recipe="dpo", progress=False)
        assert not any("reward" in name for name in report.steps[0].metrics)
        state = served.run.gateway.swarm
        training = state.batches.training_batches(state.journal.batches(0)[0])
        facts = training["coder"].facts
        assert facts is not None and facts.rewards.tolist() == [1, 0] and facts.roles == ("coder",)
