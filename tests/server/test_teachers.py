"""Teachers that the server asks, over real sockets.

Contexts: the targets of a batch in the context that only the teacher sees, against a rendering from scratch.

Endpoints: grades reach the forest; bad endpoints are refused, or delay the batch; grades are stored with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.compute.protocol import Capabilities
from agentjet.errors import ConfigError
from agentjet.front.calls import CallRequest
from agentjet.protocol import BeginRequest, FinishRequest
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.recipe import Attempt, Need, Teaching
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, ancestors
from agentjet.types import Conversation, Message
from tests.fakes import Running, ScriptedCompute, running
from tests.tiny import tokenizer

pytestmark = pytest.mark.anyio


class Graded(Grpo):
    """GRPO whose batches also get the grades of a teacher."""

    teacher: tuple[str, ...] = ()
    teacher_model: str = "m"
    top_k: int = 0
    text: str | None = ""
    has_context: bool = False

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"teacher"}

    @property
    def teaching(self) -> Teaching:
        return Teaching(self.teacher or ("policy",), self.teacher_model, self.top_k, has_context=self.has_context)

    def teacher_context(self, attempt: Attempt, others: Sequence[Attempt]) -> str | None:
        if self.text != "FACTS":
            return self.text
        one = attempt
        return None if one.reward else f"{one.task_id} {one.text} {one.answer} {len(others)} {others[0].reward:g}"


def can_teach(compute: ScriptedCompute) -> None:
    compute.declared = Capabilities(teachers=True)


def recipe(**parameters: Any) -> dict[str, Any]:
    return {"name": f"{__name__}:Graded", **parameters}


# ---- contexts --------------------------------------------------------------------------------------------------------


async def two_turns(run: Running, task: str, reward: float, *, text: str = "", lead: str = "hello") -> str:
    """An episode of two turns. Its second prompt has a system message in some tests."""
    begun = await run.gateway.begin(BeginRequest(task_id=task, client_id="c", wait=5))
    first = await run.say(begun.id, lead)
    messages = (Message("user", lead), first.response, Message("user", "again"))
    async for _ in run.gateway.calls.answer(begun.id, "", CallRequest(Conversation(messages))):
        pass
    await run.gateway.finish(begun.id, FinishRequest(reward=reward, text=text))
    return begun.id


def path_to(forest: Forest, target: int) -> list[int]:
    node = int(forest.node[target])
    return forest.tokens[np.append(ancestors(forest, node), node)].tolist()


async def learned(run: Running) -> TrainingBatch:
    await run.until(lambda: run.gateway.swarm.policy_version == 1)
    return run.compute.loaded[0]


async def test_without_a_text_the_teacher_sees_the_sampled_tokens(tmp_path: Path) -> None:
    async with running(tmp_path / "d", prepare=can_teach, job={"recipe": recipe(has_context=True)}) as run:
        for i in range(4):
            await two_turns(run, f"t{i // 2}", float(i % 2))
        batch = await learned(run)
    assert batch.taught is not None
    assert batch.taught["target"].tolist() == list(range(batch.forest.num_targets))
    for name in ("tokens", "parent", "end", "depth", "node"):
        assert np.array_equal(getattr(batch.taught, name), getattr(batch.forest, name)), name
    for name in ("logprob", "version", "temperature", "sequence", "call", "support"):
        assert np.array_equal(batch.taught[name], batch.forest[name]), name


async def test_a_text_stands_below_the_first_message_and_sampled_answers_keep_their_tokens(tmp_path: Path) -> None:
    """The answer has tokens that the tokenizer would not choose for its text."""
    made = tokenizer()
    odd = [made.token_to_id(one) for one in ("h", "e", "l", "l", "o")]
    assert made.encode("hello").ids != odd

    def script(prompt: Sequence[int], params: Any) -> list[int]:
        return [*odd, made.token_to_id("<|im_end|>")]

    async with running(
        tmp_path / "d", script, prepare=can_teach, job={"recipe": recipe(has_context=True, text="a hint")}
    ) as run:
        for i in range(4):
            await two_turns(run, f"t{i // 2}", float(i % 2))
        batch = await learned(run)
        renderer = run.gateway.hosted.renderers["policy"]
        metrics = run.gateway.swarm.last_step
    taught = batch.taught
    assert taught is not None and metrics["teacher/graded"] == 1 and metrics["teacher/unrendered"] == 0
    first = Conversation((Message("user", "hello\n\na hint"),))
    prompt = list(renderer.tokenize(renderer.render(first)))
    whole = Conversation((*first.messages, Message("assistant", "hello"), Message("user", "again")))
    second = renderer.tokenize(renderer.render(whole))
    answer = [*odd, made.token_to_id("<|im_end|>")]
    for target in range(taught.num_targets):
        number = int(taught["target"][target])
        seen, sampled = path_to(taught, target), path_to(batch.forest, number)
        assert seen[-1] == sampled[-1]
        assert taught["call"][target] == batch.forest["call"][number]
        at = number % 12  # Two answers of six tokens each in an episode.
        if at < 6:
            assert seen == [*prompt, *answer[: at + 1]]
        else:
            rest = seen[len(prompt) :]
            assert rest[:6] == answer, "the earlier answer as it was sampled"
            assert renderer.encode_tokens(seen[: -(at - 5)]) == renderer.encode_tokens(second)


async def test_attempts_have_the_facts_of_their_episodes_and_none_is_not_graded(tmp_path: Path) -> None:
    async with running(
        tmp_path / "d", prepare=can_teach, job={"recipe": recipe(has_context=True, text="FACTS")}
    ) as run:
        for i in range(4):
            await two_turns(run, f"t{i // 2}", float(i % 2), text="why not")
        batch = await learned(run)
        shown = run.gateway.hosted.renderers["policy"].show
        text = run.gateway.hosted.renderers["policy"].text(path_to(batch.taught, 0))
        metrics = run.gateway.swarm.last_step
    assert "hello\n\nt0 why not hi 1 1" in text
    facts = batch.facts
    calls = set(batch.taught["call"].tolist())
    assert {facts.rewards[facts.call_episode[call]] for call in calls} == {0.0}
    assert metrics["teacher/graded"] == 0.5


async def test_a_call_without_a_message_of_the_user_is_not_graded(tmp_path: Path, caplog: Any) -> None:
    async with running(
        tmp_path / "d", prepare=can_teach, job={"recipe": recipe(has_context=True, text="x" * 9)}
    ) as run:
        for i in range(4):
            begun = await run.gateway.begin(BeginRequest(task_id=f"t{i // 2}", client_id="c", wait=5))
            await run.say(begun.id)
            raw = CallRequest(Conversation((), prompt="raw"))
            async for _ in run.gateway.calls.answer(begun.id, "other", raw):
                pass
            await run.gateway.finish(begun.id, FinishRequest(reward=i % 2))
        batch = await learned(run)
        metrics = run.gateway.swarm.last_step
    assert metrics["teacher/unrendered"] == 4 and metrics["teacher/graded"] == 0.5
    assert set(batch.taught["call"].tolist()) == {0, 2, 4, 6}
    assert caplog.text.count("no message of the user") == 1


async def test_a_text_that_is_too_long_is_not_graded(tmp_path: Path) -> None:
    async with running(
        tmp_path / "d", prepare=can_teach, job={"recipe": recipe(has_context=True, text="z" * 2048)}
    ) as run:
        await run.batch()
        batch, metrics = run.compute.loaded[0], run.gateway.swarm.last_step
    assert batch.taught.num_targets == 0 and metrics["teacher/unrendered"] == 4 and metrics["teacher/graded"] == 0


async def test_a_wrong_text_stops_the_run(tmp_path: Path) -> None:
    job = {"recipe": f"{__name__}:Wrong"}
    async with running(tmp_path / "d", prepare=can_teach, job=job) as run:
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert "`teacher_context` returned int instead of a text or None" in run.gateway.phase.reason


class Wrong(Graded):
    has_context: bool = True

    def teacher_context(self, attempt: Attempt, others: Sequence[Attempt]) -> Any:
        return 3


async def test_a_template_that_leaves_the_text_out_is_refused_at_the_start(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.tiny import make_model_info

    card = replace(make_model_info(tmp_path / "tokenizer"), chat_template="{{ messages | length }}<|im_start|>")
    async with running(
        tmp_path / "d", prepare=can_teach, job={"recipe": recipe(has_context=True)}, card=card, wait_ready=False
    ) as run:
        with pytest.raises(ConfigError, match=r"cannot show the teacher a text .*\(it leaves the text out\)"):
            await run.gateway.engine.wait_until_up()
