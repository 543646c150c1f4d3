"""One agent's schema costs no other agent anything:

1. a schema above the limit of time or memory is refused by name, again at once, and others are answered after it;
2. a small schema gives the same grammar as without a trial, and one that is wrong the same error;
3. a grammar with control tokens is compiled in the trial, too.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentjet.errors import InvalidRequest, Later
from agentjet.rendering.formats import THINK, OutputStyle
from agentjet.rendering.grammar import GrammarTrials, _tried_in_a_fork, write_grammar
from agentjet.types import Constraint

pytestmark = pytest.mark.anyio
PLAIN = OutputStyle("", None, False, {})
REASONS = OutputStyle("", THINK, False, {"<think>": 151_667, "</think>": 151_668})
LARGE = {"type": "integer", "multipleOf": 9_999_991}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("schema", "style"),
    [
        pytest.param(LARGE, PLAIN, id="one multiple"),
        pytest.param({"type": "object", "properties": {"x": LARGE}}, REASONS, id="control tokens"),
        pytest.param(
            {"allOf": [{"type": "integer", "multipleOf": n} for n in (9967, 9973)]}, PLAIN, id="product of two"
        ),
    ],
)
async def test_a_schema_above_the_limits_is_refused_by_name(schema: dict[str, Any], style: OutputStyle) -> None:
    trials = GrammarTrials()
    try:
        for _ in range(2):
            with pytest.raises(
                InvalidRequest, match=r"text\.format: .* more than .*, the limit: simplify it"
            ) as refused:
                await trials.write("evil", Constraint(schema=schema, schema_param="text.format"), [], style)
            assert (refused.value.code, refused.value.param) == ("unsupported_schema", "text.format")
        small = Constraint(schema={"type": "integer"})
        assert await trials.write("good", small, [], style) == write_grammar(small, [], style)
        with pytest.raises(InvalidRequest, match="Invalid type: strin"):
            await trials.write("good", Constraint(schema={"type": "strin"}), [], style)
    finally:
        await trials.close()


class Slow(GrammarTrials):
    """Trials whose child answers when the test says so, or ends."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[asyncio.Future[dict[str, Any]]] = []

    async def _ask(self, asked: bytes) -> dict[str, Any]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


async def test_the_grammars_of_one_owner_wait_for_each_other() -> None:
    trials = Slow()
    evil = [asyncio.create_task(trials.write("evil", Constraint(schema={"const": n}), [], PLAIN)) for n in range(3)]
    good = asyncio.create_task(trials.write("good", Constraint(schema={"const": "good"}), [], PLAIN))
    await asyncio.sleep(0)
    trials.asked[0].set_result({"grammar": "evil"})
    while len(trials.asked) < 2:
        await asyncio.sleep(0)
    trials.asked[1].set_result({"grammar": "good"})
    assert await good == "good" and not evil[1].done() and not evil[2].done()
    for n in (2, 3):
        while len(trials.asked) <= n:
            await asyncio.sleep(0)
        trials.asked[n].set_result({"grammar": f"evil {n}"})
    assert sorted(await asyncio.gather(*evil)) == ["evil", "evil 2", "evil 3"] and trials._of_owner == {}


async def test_a_grammar_waits_for_one_of_each_other_owner_at_most() -> None:
    """Also if an owner asks for more while it waits."""
    trials = Slow()

    def ask(owner: str, number: int) -> asyncio.Task[str]:
        return asyncio.create_task(trials.write(owner, Constraint(schema={"const": [owner, number]}), [], PLAIN))

    async def answer(number: int) -> None:
        while len(trials.asked) <= number:
            await asyncio.sleep(0)
        trials.asked[number].set_result({"grammar": str(number)})

    evil, first = [ask("evil", 0), ask("evil", 1)], ask("good", 0)
    await answer(0)
    await evil[0]
    evil.append(ask("evil", 2))
    await asyncio.sleep(0)
    other = ask("other", 0)
    for number in range(1, 5):
        await answer(number)
    assert await asyncio.gather(first, other, *evil) == ["1", "3", "0", "2", "4"]


@pytest.mark.parametrize("answer", [{"grammar": "g"}, {"limit": "2 s"}])
async def test_the_same_schema_is_tried_once(answer: dict[str, Any]) -> None:
    """Also for another owner, and if it was refused. The result is there while another schema is tried."""
    trials = Slow()

    def ask(owner: str, schema: dict[str, Any]) -> asyncio.Task[str]:
        return asyncio.create_task(trials.write(owner, Constraint(schema=schema), [], PLAIN))

    async with asyncio.timeout(10):
        both = [ask("one", LARGE), ask("other", LARGE)]
        while not trials.asked:
            await asyncio.sleep(0)
        trials.asked[0].set_result(answer)
        found = await asyncio.gather(*both, return_exceptions=True)
        evil = ask("evil", {"const": 1})
        while len(trials.asked) < 2:
            await asyncio.sleep(0)
        found += await asyncio.gather(ask("one", LARGE), return_exceptions=True)
        trials.asked[1].set_result({"grammar": "evil"})
        assert await evil == "evil" and len(trials.asked) == 2
    [text] = set(map(str, found))
    assert len(found) == 3 and (text == "g" or "more than 2 s to compile" in text)


def test_a_trial_that_fails_exceeds_no_limit() -> None:
    assert json.loads(_tried_in_a_fork(b"no pickle")) == {}


async def test_a_child_that_ends_is_replaced() -> None:
    trials = GrammarTrials()
    one, other = (Constraint(schema={"const": n}) for n in range(2))
    await trials.write("a", one, [], PLAIN)
    assert trials._process is not None
    trials._process.kill()
    await trials._process.wait()
    with pytest.raises(Later, match="ended"):
        await trials.write("a", other, [], PLAIN)
    assert await trials.write("a", other, [], PLAIN) == write_grammar(other, [], PLAIN)
    await trials.close()


@pytest.mark.parametrize("num_started", [1, 4, 100])
async def test_no_child_starts_once_the_trials_are_closed(num_started: int) -> None:
    """The first request may be starting the child, or waiting for its answer; another one waits for its turn."""
    trials = GrammarTrials()
    asking = [
        asyncio.create_task(trials.write(owner, Constraint(schema={"const": owner}), [], PLAIN)) for owner in "ab"
    ]
    for _ in range(num_started):
        await asyncio.sleep(0)
    await trials.close()
    assert trials._process is None
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(error, Later) for error in errors), errors
    assert trials._process is None
