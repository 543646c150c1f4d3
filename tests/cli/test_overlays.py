"""The colours of `agentjet episodes show --overlay`. `tests.locks` has the texts and the marks of all overlays."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from agentjet.cli.episodes import NEGATIVE, NOTE, POSITIVE, VERSIONS, Overlay, advantage_bar, episode_lines, overlaid
from agentjet.protocol import CallView, EpisodeTree


def call(**more: Any) -> CallView:
    """A call with one token of context and four sampled ones."""
    fields = {
        "call_id": "c1", "role": "", "parent": None, "kept": 0, "fork": "", "retry_of": None, "orphan": "",
        "after": None, "messages": [], "tools": [], "response": {}, "tokens": [1, 2, 3, 4, 5],
        "texts": ["Q", "sure", "rare", "odd\x1b", "!"], "mask": [0, 1, 1, 1, 1],
        "logprobs": [None, 0.0, math.log(0.004), math.log(0.07), math.log(0.6)], "versions": [None, 7, 7, 8, 8],
        "temperature": 1.0, "finish_reason": "stop", "created": 0.0, **more,
    }  # fmt: skip
    return CallView.model_validate(fields)


@pytest.mark.parametrize(
    ("overlay", "advantage", "more", "text", "styles"),
    [
        ("logprob", None, {}, "Qsurerare⟨0.4%⟩odd\\x1b⟨7%⟩!",
         [NOTE, "color(25)", "color(226) underline", NOTE, "color(220) underline", NOTE, "color(103)"]),
        ("version", None, {}, "Q⟨v7⟩surerare⟨v8⟩odd\\x1b!",
         [NOTE, "bold", VERSIONS[3], VERSIONS[3], "bold", VERSIONS[0], VERSIONS[0]]),
        ("version", None, {"texts": []}, "<1>⟨v7⟩<2><3>⟨v8⟩<4><5>",
         [NOTE, "bold", VERSIONS[3], VERSIONS[3], "bold", VERSIONS[0], VERSIONS[0]]),
        ("advantage", 1.2, {}, "Qsurerareodd\\x1b!", [NOTE] + [POSITIVE] * 4),
        ("advantage", -0.5, {}, "Qsurerareodd\\x1b!", [NOTE] + [NEGATIVE] * 4),
        ("advantage", None, {}, "Qsurerareodd\\x1b!", [NOTE]),
        ("advantage", 1.2, {"orphan": "retry"}, "Qsurerareodd\\x1b!", [NOTE] + ["strike dim"] * 4),
    ],
)  # fmt: skip
def test_styles_of_tokens(
    overlay: Overlay, advantage: float | None, more: dict[str, Any], text: str, styles: list[str]
) -> None:
    shown = overlaid(call(**more), overlay, advantage)
    assert shown.plain == text
    assert [str(span.style) for span in shown.spans] == styles


def test_bars() -> None:
    bars = {1.5: "+1.5 ▇▇▇▇▇▇", -30.0: "-30 " + "░" * 12, 0.0: "+0", None: "unknown"}
    assert {advantage: advantage_bar(advantage) for advantage in bars} == {k: f"advantage {v}" for k, v in bars.items()}


def test_the_advantage_of_a_call_is_that_of_its_role_then_of_its_policy_then_of_the_episode() -> None:
    roles = {"planner": 1.0, "planner/critic": -2.0, "planner/other": 1.0, "coder": None}
    tree = EpisodeTree(
        episode_id="e", status="finished", mode="train", task_id="t", task_set="", group="g", client_id="c",
        policy_version=0, num_calls=4, calls=[call(call_id=role, role=role) for role in roles],
    )  # fmt: skip
    member = SimpleNamespace(episode_id="e", advantage=None, advantages={"planner": 1.0, "planner/critic": -2.0})
    group: Any = SimpleNamespace(episodes=[member], advantages_note="the batch is gone")
    bars = [line.plain for line in episode_lines(tree, "advantage", group) if line.plain.startswith("advantage ")][1:]
    expected = [advantage_bar(advantage) for advantage in roles.values()]
    assert bars == [*expected[:3], f"{expected[3]}: the batch is gone"]
