"""1. The rewards of the protocols against numbers worked out by hand.
2. Each protocol trains two batches on a real server.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from agentjet.types import Task
from examples.teams.agent_r import REVISION, Step, is_pair, messages, splice
from examples.teams.asking import score
from examples.teams.cory import is_pioneer
from examples.teams.curiosity import Memory, cosine
from examples.teams.malt import above_siblings, pairs, values
from examples.teams.mmoa_rag import f1, is_too_long, selected, selector_penalty
from examples.teams.optima import total
from examples.teams.spo import shares
from examples.teams.train import PROTOCOLS, train
from tests.tiny import make_model, overrides


def test_cory_exchanges_roles_every_five_steps() -> None:
    assert "".join("P" if is_pioneer(0, step) else "O" for step in range(12)) == "PPPPPOOOOOPP"
    assert all(is_pioneer(0, step) != is_pioneer(1, step) for step in range(12))


def test_malts_values_are_means_of_leaves() -> None:
    leaves = np.array([[[1, 1, 0], [1, 0, 0], [0, 0, 0]]], float)
    assert values(leaves, 1)[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert values(leaves, 0).tolist() == pytest.approx([1 / 3])
    assert above_siblings(values(leaves, 1)) == pytest.approx([1 / 3, 0, -1 / 3])
    assert above_siblings(values(leaves, 0)) == [0.0], "a node without siblings"
    assert list(pairs(values(leaves, 1)[0])) == [(0, 1), (0, 2)] and list(pairs(np.array([0.5, 0.5]))) == []


def test_optimas_reward() -> None:
    assert total(0.8, 120, (1.2, 2.0)) == pytest.approx(1.06)
    assert total(0.8, 30, (1.2, 2.0)) == pytest.approx(0.30)
    assert total(0.0, 900, (0.1, 0.2)) == pytest.approx(-0.6 + 1)


def test_mmoa_rags_rewards() -> None:
    assert f1("new york city", "new york") == pytest.approx(0.8) and f1("", "new york") == 0.0
    texts = ("Document0,Document4", "Document0,Document0", "Document10", "Doc1", "")
    assert [selector_penalty(text, 10) for text in texts] == [0, -1, -1, -1, 0]
    assert selected("Document0,Document4", 10) == [0, 4] and selected("Doc1", 10) == []
    assert not is_too_long(["a"] * 4) and is_too_long(["a"] * 5) and is_too_long(["a" * 301])


def test_spos_rewards() -> None:
    better = {("0", "1"): 0.7, ("0", "2"): 0.6, ("1", "2"): 0.5}

    def soft(a: str, b: str) -> float:
        return better[a, b] if (a, b) in better else 1 - better[b, a]

    assert shares("012", soft) == pytest.approx([0.65, 0.4, 0.45])
    assert shares("321", lambda a, b: float(a > b)) == pytest.approx([1, 0.5, 0])
    assert shares("012", lambda a, b: float((int(b) - int(a)) % 3 == 1)) == pytest.approx([0.5] * 3), "a cycle"
    assert shares("0", soft) == [0.5]
    assert shares("01", lambda a, b: 1.0) == [0.5, 0.5], "a judge that prefers the first of two"


def test_curiosity_pays_for_new_inputs() -> None:
    x = Counter(a=1, b=1)
    memory = Memory()
    assert memory.similarity(Counter(a=1)) == 0.0 and memory.similarity(Counter(b=1)) == 0.0
    assert memory.similarity(x) == pytest.approx(0.707107)
    assert cosine(x, Counter()) == 0.0


def test_agent_rs_splice() -> None:
    good, bad = ([Step("o", action) for action in names.split()] for names in ("g0 a1 a2 a3", "g0 a1 b2 b3"))
    spliced = splice(good, bad, lambda step: step.action == "b2")
    assert [step.action for step in spliced.steps] == ["g0", "a1", "b2", REVISION, "a2", "a3"]
    assert spliced.learned == (False, False, False, True, True, True)
    assert messages(spliced)[4:8] == [
        {"role": "user", "content": "o"},
        {"role": "assistant", "content": "b2", "weight": 0},
        {"role": "user", "content": "ok."},
        {"role": "assistant", "content": REVISION},
    ]
    whole = splice(good, bad, lambda step: False)
    assert [step.action for step in whole.steps] == ["g0", "a1", "b2", "b3", REVISION, "a2", "a3"]
    assert is_pair(0.9, 0.1) and not is_pair(0.9, 0.8) and not is_pair(0.4, 0.0)


def test_a_wrong_answer_is_scored_by_its_digits() -> None:
    task = Task("t", payload=[3, 4])
    assert [score(text, task) for text in ("It is 7.", "12", "a1", "")] == [1.0, 0.5, 0.25, 0.0]


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_protocol_trains(protocol: str, tmp_path: Path) -> None:
    sets = overrides(make_model(tmp_path / "model"))
    report = train(protocol, tmp_path / "team", 2, sets)
    assert len(report.steps) == 2 and not report.num_aborted
