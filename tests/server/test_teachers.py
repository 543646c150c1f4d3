"""Teachers that the server asks, over real sockets.

Contexts: the targets of a batch in the context that only the teacher sees, against a rendering from scratch.

Endpoints: grades reach the forest; bad endpoints are refused, or delay the batch; grades are stored with the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.errors import ConfigError, InvalidRequest, RecipeError
from agentjet.front.calls import CallRequest
from agentjet.protocol import BeginRequest, FinishRequest, JobBody
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.recipe import Attempt, Need, Teaching
from agentjet.server import endpoints
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, ancestors
from agentjet.types import Conversation, Message
from tests.fakes import Running, job_body, running
from tests.tiny import make_model_info, tokenizer

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


def recipe(**parameters: Any) -> dict[str, Any]:
    return {"name": f"{__name__}:Graded", **parameters}


def context(**parameters: Any) -> dict[str, Any]:
    """Settings of a run whose teacher sees another context."""
    return {"job": {"recipe": recipe(has_context=True, **parameters)}}


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
    async with running(tmp_path / "d", **context()) as run:
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

    async with running(tmp_path / "d", script, **context(text="a hint")) as run:
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
    async with running(tmp_path / "d", **context(text="FACTS")) as run:
        for i in range(4):
            await two_turns(run, f"t{i // 2}", float(i % 2), text="why not")
        batch = await learned(run)
        text = run.gateway.hosted.renderers["policy"].text(path_to(batch.taught, 0))
        metrics = run.gateway.swarm.last_step
    assert "hello\n\nt0 why not hi 1 1" in text
    facts = batch.facts
    calls = set(batch.taught["call"].tolist())
    assert {facts.rewards[facts.call_episode[call]] for call in calls} == {0.0}
    assert metrics["teacher/graded"] == 0.5


async def test_a_call_without_a_message_of_the_user_is_not_graded(tmp_path: Path, caplog: Any) -> None:
    async with running(tmp_path / "d", **context(text="hint")) as run:
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
    async with running(tmp_path / "d", **context(text="z" * 2048)) as run:
        await run.batch()
        batch, metrics = run.compute.loaded[0], run.gateway.swarm.last_step
    assert batch.taught.num_targets == 0 and metrics["teacher/unrendered"] == 4 and metrics["teacher/graded"] == 0


async def test_a_wrong_text_stops_the_run(tmp_path: Path) -> None:
    job = {"recipe": f"{__name__}:Wrong"}
    async with running(tmp_path / "d", job=job) as run:
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert "`teacher_context` returned 3 instead of a text, or None" in run.gateway.phase.reason


class Wrong(Graded):
    has_context: bool = True

    def teacher_context(self, attempt: Attempt, others: Sequence[Attempt]) -> Any:
        return 3


async def test_a_template_that_leaves_the_text_out_is_refused_at_the_start(tmp_path: Path) -> None:
    card = replace(make_model_info(tmp_path / "tokenizer"), chat_template="{{ messages | length }}<|im_start|>")
    async with running(tmp_path / "d", **context(), card=card, wait_ready=False) as run:
        with pytest.raises(ConfigError, match=r"cannot show the teacher a text .*\(it leaves the text out\)"):
            await run.gateway.engine.wait_until_up()


class Moving(Graded):
    """Declares a parameter again, so without its bounds."""

    reference_mix: float = 2.0
    reference_every: int = 1
    kl_coef: float = 0.1


@pytest.mark.parametrize(
    ("job", "refusal", "reason"),
    [
        ({"recipe": recipe(has_context=True, top_k=10**6)}, ConfigError, "top_k = 1000000: .* tokens: lower it"),
        ({"recipe": f"{__name__}:Moving"}, RecipeError, "`mix` is 2.0 instead of a share above 0, at most 1"),
    ],
)
async def test_what_no_batch_can_use_is_refused_at_the_start(
    tmp_path: Path, job: dict[str, Any], refusal: type[Exception], reason: str
) -> None:
    async with running(tmp_path / "d", job=job, wait_ready=False) as run:
        with pytest.raises(refusal, match=reason):
            await run.gateway.engine.wait_until_up()


# ---- endpoints -------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """An endpoint on a real socket. The log-probability of a token is -token / 1000, and the likeliest tokens are the
    next ones. It answers as vLLM, or as SGLang with `echo`.
    """

    forms: tuple[str, ...] = ("prompt_logprobs", "echo")
    with_ids: bool = False
    """Answers `return_tokens_as_token_ids`."""
    change: Callable[[dict[str, Any], list[int]], Any] = lambda answer, prompt: answer
    """The body of an answer to a prompt, or its bytes."""
    status: int = 200
    models: tuple[str, ...] = ("m",)
    context: int | None = None
    most: int = 20
    """Likely tokens that it gives."""
    key: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    """Of whole requests for grades, without probes."""
    requests: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear it, and requests wait."""
    port: int = 0
    server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.open.set()
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[16:]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else None
        self.requests += 1
        await self.open.wait()
        status, answer = self.answer(head, body)
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    def answer(self, head: str, body: Any) -> tuple[int, Any]:
        if self.key and f"Bearer {self.key}" not in head:
            return 401, {"error": f"wrong key: {head[head.find('Bearer') :].strip()}"}
        if self.status != 200:
            return self.status, {"error": "out of order"}
        if body is None:
            named = [{"id": name, "max_model_len": self.context} for name in self.models]
            return 200, {"data": named}
        prompt: list[int] = body["prompt"]
        form = "echo" if body.get("echo") else "prompt_logprobs"
        assert form == "echo" or "prompt_logprobs" in body
        if form not in self.forms:
            return 400, {"error": f"{form} is not supported"}
        if self.context is not None and len(prompt) + 1 > self.context:
            return 400, {"error": f"This model's maximum context length is {self.context} tokens."}
        if not is_probe(prompt):
            self.prompts.append(prompt)
        made = self.as_echo(body, prompt) if form == "echo" else self.as_vllm(body, prompt)
        return 200, self.change({"model": body["model"], "choices": [made]}, prompt)

    def likely(self, token: int, num: int) -> list[int]:
        return [(token + i) % VOCABULARY for i in range(1, min(num, self.most) + 1)]

    def as_vllm(self, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        given: list[Any] = [None]
        for token in prompt[1:]:
            one = {str(token): {"logprob": grade(token), "rank": 9, "decoded_token": shown(token)}}
            for other in self.likely(token, body["prompt_logprobs"]):
                one[str(other)] = {"logprob": grade(other), "rank": 1, "decoded_token": shown(other)}
            given.append(one)
        return {"text": "x", "prompt_logprobs": given}

    def as_echo(self, body: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
        is_id = self.with_ids and body.get("return_tokens_as_token_ids")
        name = (lambda token: f"token_id:{token}") if is_id else shown
        tops = [{name(one): grade(one) for one in (token, *self.likely(token, body["logprobs"]))} for token in prompt]
        logprobs = [None, *map(grade, prompt[1:])]
        tokens, values = [*map(name, prompt), "!"], [*logprobs, -0.1]
        return {"logprobs": {"tokens": tokens, "token_logprobs": values, "top_logprobs": [None, *tops[1:], {}]}}


def is_probe(prompt: Sequence[int]) -> bool:
    return prompt[0] == prompt[1]


def grade(token: int) -> float:
    return -(token + 1) / 1000


def shown(token: int) -> str:
    return tokenizer().decode([token], skip_special_tokens=False)


VOCABULARY = tokenizer().get_vocab_size()


@asynccontextmanager
async def endpoint(**parameters: Any) -> AsyncIterator[Fake]:
    fake = Fake(**parameters)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PAUSES", (0.01,))


def of(*fakes: Fake, **parameters: Any) -> dict[str, Any]:
    return {"recipe": recipe(teacher=[fake.url for fake in fakes], **parameters)}


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
async def test_an_endpoint_grades_each_target_once(tmp_path: Path, form: str) -> None:
    async with endpoint(forms=(form,)) as fake, running(tmp_path / "d", job=of(fake)) as run:
        for i in range(4):
            await two_turns(run, f"t{i // 2}", float(i % 2), lead=f"hello {i}")
        forest, metrics = (await learned(run)).forest, run.gateway.swarm.last_step
        await run.until(lambda: "teacher/graded" in run.gateway.swarm.last_step)
        metrics = run.gateway.swarm.last_step
    assert forest["teacher"].dtype == np.float32
    assert forest["teacher"] == pytest.approx([grade(int(token)) for token in forest.tokens[forest.node]])
    assert len(fake.prompts) == 4, "one request for each path: the first turn is on the path of the second"
    assert metrics["teacher/graded"] == 1 and "teacher/seconds" in metrics


@pytest.mark.parametrize("fake", [{}, {"forms": ("echo",), "with_ids": True}], ids=["vllm", "echo"])
async def test_the_likeliest_tokens_of_an_endpoint(tmp_path: Path, fake: dict[str, Any]) -> None:
    async with endpoint(**fake) as one, running(tmp_path / "d", job=of(one, top_k=3)) as run:
        await run.batch()
        forest = run.compute.loaded[0].forest
    assert (forest["top_ids"].dtype, forest["teacher_top"].dtype) == (np.int32, np.float32)
    assert forest["top_ids"].shape == forest["teacher_top"].shape == (forest.num_targets, 3)
    for token, ids, values in zip(forest.tokens[forest.node], forest["top_ids"], forest["teacher_top"], strict=True):
        likely = sorted([int(token), *one.likely(int(token), 3)], key=grade, reverse=True)[:3]
        assert ids.tolist() == likely and values == pytest.approx([grade(other) for other in likely])


async def test_an_endpoint_grades_the_context_that_only_it_sees(tmp_path: Path) -> None:
    async with endpoint() as fake, running(tmp_path / "d", job=of(fake, has_context=True, text="hint")) as run:
        await run.batch()
        batch = run.compute.loaded[0]
        text = run.gateway.hosted.renderers["policy"].text(fake.prompts[0])
    assert "hello\n\nhint" in text and batch.taught is None
    tokens = batch.forest.tokens[batch.forest.node]
    assert batch.forest["teacher"] == pytest.approx([grade(int(token)) for token in tokens])


async def test_tokens_of_another_distribution_are_not_graded(tmp_path: Path) -> None:
    async with endpoint(context=40) as fake, running(tmp_path / "d", job=of(fake)) as run:
        for i, request in enumerate([{}, {"temperature": 0.5}, {"top_p": 0.5}, {}]):
            await run.episode(float(i % 2), task=f"t{i // 2}", text="hello" + " long" * (9 * (i == 3)), **request)
        forest = (await learned(run)).forest
        await run.until(lambda: "teacher/graded" in run.gateway.swarm.last_step)
        share = run.gateway.swarm.last_step["teacher/graded"]
    is_graded = {int(call): bool(np.isfinite(forest["teacher"][forest["call"] == call]).all()) for call in range(4)}
    assert is_graded == {0: True, 1: False, 2: False, 3: False} and share == 0.25
    assert all(len(prompt) < 40 for prompt in fake.prompts)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such model": ({"models": ("a", "b")}, {}, r"it has no model 'm'; set teacher_model to one of \['a', 'b'\]"),
    "no log-probabilities": (
        {"change": lambda answer, prompt: {"model": "m", "choices": [{"text": "x"}]}},
        {},
        r"does not return log-probabilities .*prompt_logprobs: its answer lacks them .*echo: its answer lacks them",
    ),
    "no form": ({"forms": ()}, {}, r"HTTP 400 .*prompt_logprobs is not supported"),
    "few likely tokens": ({"most": 1}, {"top_k": 3}, r"not return the 3 likeliest tokens .*2 likely tokens with ids"),
    "likely texts": ({"forms": ("echo",)}, {"top_k": 2}, r"echo: 0 likely tokens with ids instead of 2"),
    "another model": (
        {"change": lambda answer, prompt: {**answer, "model": "z"}},
        {},
        r"it answers as the model 'z' instead of 'm': correct teacher_model",
    ),
    "a key": ({"key": "secret"}, {}, r"it answers HTTP 401 .*set AGENTJET_TEACHER_KEY in the server's environment"),
    "forbidden": ({"status": 403}, {}, r"HTTP 403 .*AGENTJET_TEACHER_KEY"),
    "another vocabulary": (
        {"change": lambda answer, prompt: with_another_text(answer)},
        {},
        r"its token \d+ is 'zzz', and that of 'tiny' is '.+': it has another tokenizer",
    ),
    "other tokens": (
        {"change": lambda answer, prompt: with_one_more(answer)},
        {},
        r"log-probabilities of \d+ tokens for a prompt of \d+: an endpoint must use token ids unchanged",
    ),
    "no name": ({}, {"teacher_model": ""}, r"an endpoint needs the name of its model: set job.recipe.teacher_model"),
    "hot": ({}, {"job": {"temperature": 0.7}}, r"job.temperature = 0.7 with job.recipe.teacher = 'http.*set job"),
}


def with_another_text(answer: dict[str, Any]) -> dict[str, Any]:
    one = next(iter(answer["choices"][0]["prompt_logprobs"][-1].values()))
    one["decoded_token"] = "zzz"
    return answer


def with_one_more(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["prompt_logprobs"].append({})
    return answer


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wrong_endpoint_is_refused_before_the_first_episode(tmp_path: Path, case: str) -> None:
    parameters, settings, reason = REFUSED[case]
    job, settings = settings.get("job", {}), {name: value for name, value in settings.items() if name != "job"}
    async with endpoint(**parameters) as fake, running(tmp_path / "d") as other:
        with pytest.raises(InvalidRequest, match=reason):  # A job that is changed.
            body = job_body(other.gateway)
            await other.gateway.replace_job(
                JobBody(revision=body.revision, job={**body.job, **job, **of(fake, **settings)})
            )
        run = running(tmp_path / "e", job={**job, **of(fake, **settings)}, wait_ready=False)
        async with run as started:
            with pytest.raises(ConfigError, match=reason):
                await started.gateway.engine.wait_until_up()


async def test_the_key_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("AGENTJET_TEACHER_KEY", "sesame-open")
    async with endpoint(key="sesame-open") as fake, running(tmp_path / "d", job=of(fake)) as run:
        await run.batch()
        assert "sesame-open" not in caplog.text + json.dumps(job_body(run.gateway).job)
    assert fake.prompts
    async with endpoint(key="another") as fake:
        run = running(tmp_path / "e", job=of(fake), wait_ready=False)
        async with run as started:
            with pytest.raises(ConfigError, match=r"HTTP 401 .*Bearer …") as caught:
                await started.gateway.engine.wait_until_up()
    assert "sesame-open" not in caplog.text + str(caught.value), "the endpoint repeats the key"


BROKEN: dict[str, tuple[Callable[[dict[str, Any], list[int]], Any], str]] = {
    "garbage": (lambda answer, prompt: b"<html>busy</html>", "its answer is not a JSON object: '<html>busy</html>'"),
    "nan": (lambda answer, prompt: with_logprob(answer, math.nan), "the log-probability of token 1 is nan"),
    "null": (lambda answer, prompt: with_logprob(answer, None), "the log-probability of token 1 is None"),
    "above 0": (lambda answer, prompt: with_logprob(answer, 2.0), "the log-probability of token 1 is 2.0"),
}


def with_logprob(answer: dict[str, Any], value: Any) -> dict[str, Any]:
    next(iter(answer["choices"][0]["prompt_logprobs"][1].values()))["logprob"] = value
    return answer


@pytest.mark.parametrize("case", [*BROKEN, "dead", "slow", "500"])
async def test_a_teacher_that_does_not_answer_delays_the_batch(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints, evaluations and a stop work meanwhile. Nothing is learned, and the grades come in the end."""
    good = Fake().change
    async with endpoint() as fake, running(tmp_path / "d", job=of(fake)) as run:
        reason = "connection refused"
        if case in BROKEN:
            fake.change, reason = BROKEN[case]
        elif case == "500":
            fake.status, reason = 500, "HTTP 500"
        elif case == "slow":
            monkeypatch.setattr(endpoints, "ANSWER_SECONDS", 0.05)
            fake.open.clear()
            reason = "no answer within 0.05 s"
        else:
            await fake.stop()
        await run.fill_batch()
        status = run.gateway.status
        await run.until(lambda: "tried 3 times" in status().waiting_for)
        assert f"the engine, the teacher {fake.url} does not answer: {reason}" in status().waiting_for
        [problem] = [rule for rule in (await run.gateway.reader.health()).rules if rule.name == "engine"]
        assert problem.level == "warn" and f"the teacher {fake.url} does not answer" in problem.text
        saved = await run.gateway.versions.save()
        assert saved.policy_version == 0 and run.compute.begun == [] and status().state == "learning"
        monkeypatch.setattr(endpoints, "ANSWER_SECONDS", 60.0)
        fake.change, fake.status = good, 200
        fake.open.set()
        if case == "dead":
            await fake.start()
        forest = (await learned(run)).forest
    assert np.isfinite(forest["teacher"]).all() and run.compute.learned == [0]


async def test_a_run_waits_for_its_teacher_at_the_start_and_can_be_stopped(tmp_path: Path) -> None:
    fake = Fake(port=1)
    async with running(tmp_path / "d", job=of(fake), wait_ready=False) as run:
        status = run.gateway.status
        await run.until(lambda: "tried 2 times" in status().waiting_for)
        assert status().state == "loading" and "connection refused" in status().waiting_for
        await run.gateway.engine.stop()
        assert status().state == "offline"


async def test_calls_go_on_beside_a_dead_teacher_if_tokens_may_be_old(tmp_path: Path) -> None:
    async with endpoint() as fake, running(tmp_path / "d", job={**of(fake), "max_staleness": 1}) as run:
        await fake.stop()
        await run.fill_batch()
        await run.until(lambda: "does not answer" in run.gateway.status().waiting_for)
        await run.gateway.versions.save()
        await run.episode(1.0, task="later")
        assert run.compute.begun == []
        await fake.start()
        await learned(run)


async def test_a_stop_while_the_teacher_is_dead_keeps_the_batch(tmp_path: Path) -> None:
    async with endpoint() as fake:
        async with running(tmp_path / "d", job=of(fake)) as run:
            await fake.stop()
            await run.fill_batch()
            await run.until(lambda: "does not answer" in run.gateway.status().waiting_for)
            await run.gateway.engine.stop()
            assert run.compute.begun == []
        await fake.start()
        async with running(tmp_path / "d", job=of(fake)) as run:
            forest = (await learned(run)).forest
    assert np.isfinite(forest["teacher"]).all()


async def test_a_slow_replica_is_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(endpoints, "PAUSES", (60.0,))
    async with endpoint() as slow, endpoint() as quick, running(tmp_path / "d", job=of(slow, quick)) as run:
        slow.open.clear()
        await run.batch()
        assert np.isfinite(run.compute.loaded[0].forest["teacher"]).all()
        slow.open.set()
    assert slow.requests > 2 and len(quick.prompts) >= 1


async def test_a_teacher_that_becomes_another_model_stops_the_run(tmp_path: Path) -> None:
    async with endpoint() as fake, running(tmp_path / "d", job=of(fake)) as run:
        fake.change = lambda answer, prompt: with_another_text(answer)
        await run.fill_batch()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert "another tokenizer" in run.gateway.phase.reason and run.compute.begun == []
        fake.change = Fake().change
        run.gateway.engine.start()
        await learned(run)


# ---- stored grades ---------------------------------------------------------------------------------------------------


async def test_a_replay_reads_the_stored_grades(tmp_path: Path) -> None:
    async with endpoint() as fake, running(tmp_path / "d", job=of(fake, top_k=2)) as run:
        await run.batch()
        weights, num = run.compute.weights, len(fake.prompts)
        fake.change = lambda answer, prompt: with_logprob(answer, -0.9)
        run.compute.die()
        await run.until(lambda: run.compute.starts == 2 and run.gateway.phase.state == "sampling")
        assert (run.compute.weights, len(fake.prompts)) == (weights, num) and not run.gateway.status().replay_difference


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
async def test_damaged_grades_are_asked_for_again(tmp_path: Path, damage: str) -> None:
    async with endpoint() as fake, running(tmp_path / "d", job=of(fake)) as run:
        await run.batch()
        weights, num = run.compute.weights, len(fake.prompts)
        [path] = (run.folder / "grades").iterdir()
        raw = bytearray(path.read_bytes())
        raw[raw.index(run.compute.loaded[0].forest["teacher"].tobytes())] ^= 1
        path.unlink() if damage == "missing" else path.write_bytes(raw[:100] if damage == "cut" else raw)
        run.compute.die()
        await run.until(lambda: run.compute.starts == 2 and run.gateway.phase.state == "sampling")
        assert run.compute.weights == weights and len(fake.prompts) == 2 * num


async def test_a_changed_teacher_counts_for_later_batches(tmp_path: Path) -> None:
    """The pending batch keeps its own. The same model at another address is the same teacher."""
    async with endpoint() as old, endpoint(models=("m", "n")) as new, running(tmp_path / "d", job=of(old)) as run:
        await old.stop()
        await run.fill_batch()
        await run.until(lambda: "does not answer" in run.gateway.status().waiting_for)
        await replace_recipe(run, teacher=[new.url], teacher_model="n")
        assert not new.prompts, "another model does not grade the pending batch"
        await replace_recipe(run, teacher=[new.url])
        await run.until(lambda: run.gateway.swarm.policy_version == 1 and run.gateway.phase.state == "sampling")
        num = len(new.prompts)
        await replace_recipe(run, teacher=[new.url], teacher_model="n")
        await run.batch()
        assert len(new.prompts) > num
        names = [json.loads(one.job.model_dump_json())["recipe"] for one in run.gateway.swarm.batches.from_version(0)]
    assert [one["teacher_model"] for one in names] == ["m", "n"]


async def replace_recipe(run: Running, **parameters: Any) -> None:
    await replace_job(run, recipe=recipe(**parameters))


async def replace_job(run: Running, **changes: Any) -> None:
    body = job_body(run.gateway)
    await run.gateway.replace_job(JobBody(revision=body.revision, job={**body.job, **changes}))


async def test_grades_that_a_checkpoint_covers_are_removed(tmp_path: Path) -> None:
    job = {"checkpoint_every": 1, "keep_checkpoints": 1}
    async with endpoint() as fake, running(tmp_path / "d", job={**job, **of(fake)}) as run:
        for _ in range(3):
            await run.batch()
        assert sorted(path.name for path in (run.folder / "grades").iterdir()) == ["000002-policy.npz"]
