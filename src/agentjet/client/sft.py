"""Supervised fine-tuning: one `sft` call, from the check of the demonstrations to the report."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentjet.client.connection import Connection
from agentjet.client.inputs import build_request, check_counts, read_json_lines
from agentjet.client.notebook import first_line, html_of
from agentjet.client.report import Progress, Step, cross_entropy
from agentjet.client.training import target_version
from agentjet.errors import ConfigError, Conflict, Later
from agentjet.protocol import DemonstrationBody, Event, SftRequest, SftResponse

SERVER_WAIT = 600.0
"""Seconds that the server may need to tokenise a batch, besides the usual limit of a request."""
EXAMPLE = '{"messages": [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}]}'


@dataclass(frozen=True, slots=True, repr=False)
class SftReport:
    """The result of `sft`."""

    steps: tuple[Step, ...]
    """One for each batch that was learned."""
    num_demonstrations: int
    num_answers: int
    num_tokens: int
    """Tokens of the answers in one epoch."""
    seconds: float

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean cross-entropy per token of each batch, before the batch was learned."""
        return tuple(cross_entropy(step.metrics) for step in self.steps)

    def __str__(self) -> str:
        losses = f", cross-entropy {self.losses[0]:.3f} to {self.losses[-1]:.3f}" if self.steps else ""
        return f"{len(self.steps)} batches of {self.num_demonstrations} demonstrations in {self.seconds:.0f} s{losses}"

    def __repr__(self) -> str:
        return first_line(self)

    def _repr_html_(self) -> str:
        """The report in a notebook, with the curve of the cross-entropy."""
        table = {"answers": self.num_answers, "tokens": self.num_tokens}
        return html_of(str(self), table, self.losses, "cross-entropy of each batch")


def read_demonstrations(path: Path) -> tuple[list[DemonstrationBody], set[str]]:
    """Returns the demonstrations of a file of JSON lines, and the names of the keys that were ignored.

    Raises `ConfigError` for a file that cannot be read, is empty, or has a wrong line.
    """
    found, ignored = list[DemonstrationBody](), set[str]()
    for number, row in read_json_lines(path):
        try:
            found.append(demonstration(row, f"{path.name[-200:]}:{number}"))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        ignored |= row.keys() - {"messages", "tools"}
    if not found:
        raise ConfigError(f"{path}: the file has no demonstrations")
    return found, ignored


def demonstration(line: Any, task_id: str) -> DemonstrationBody:
    """Returns the demonstration of a dataset's line, whose further keys are ignored. Raises `ValueError`.

    `tools`, and `arguments` of tool calls, may be JSON text or JSON values.
    """
    if not isinstance(line, Mapping) or not isinstance(line.get("messages"), list) or not line["messages"]:
        raise ValueError(f"{task_id}: a demonstration is an object with messages, such as {EXAMPLE}")
    tools = line.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{task_id}: tools is text that is not JSON ({error})") from None
    if not all(isinstance(one, Mapping) for one in line["messages"]):
        raise ValueError(f"{task_id}: every message is an object with role and content, such as in {EXAMPLE}")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{task_id}: tools is a list of tool definitions")
    messages = [_openai_form(message) for message in line["messages"]]
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{task_id}: {half} is half of a character, which UTF-8 cannot encode") from None
    except RecursionError:
        raise ValueError(f"{task_id}: the messages or tools are nested too deeply for JSON") from None
    return DemonstrationBody(task_id=task_id, messages=messages, tools=tools)


def _openai_form(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have ids, and arguments as JSON text. Hugging Face data sets omit the ids."""
    calls = message.get("tool_calls")
    known = {key: value for key, value in message.items() if value is not None}
    if message.get("role") == "tool":
        known.setdefault("tool_call_id", "")
    if not isinstance(calls, list):
        return known
    return known | {"tool_calls": [_with_text_arguments(call) for call in calls]}


def _with_text_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if not isinstance(function.get("arguments", ""), str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": "", **call, "function": function}


def checked_demonstrations(given: Iterable[Mapping[str, Any] | DemonstrationBody]) -> list[DemonstrationBody]:
    """Returns the demonstrations. Raises `ValueError` for a wrong one, or if there is none."""
    found = [
        one if isinstance(one, DemonstrationBody) else demonstration(one, f"demonstration-{number}")
        for number, one in enumerate(given, 1)
    ]
    if not found:
        raise ValueError("there are no demonstrations: give objects with messages")
    return found


@dataclass
class SftTraining:
    """The arguments of one `sft` call."""

    connection: Connection
    client_id: str
    demonstrations: Sequence[DemonstrationBody]
    epochs: int
    batch_size: int
    lr: float | None
    policy: str
    seed: int
    progress: bool

    def __post_init__(self) -> None:
        """Raises `ValueError` for an argument out of range."""
        check_counts(1, epochs=self.epochs, batch_size=self.batch_size)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr = {self.lr!r}: it is a number above 0")

    async def run(self) -> SftReport:
        """See `AsyncSwarm.sft`."""
        started = time.monotonic()
        batches = self._batches()
        status = await self.connection.status()
        target_version(status, len(batches))
        shown = Progress("sft", len(batches), wanted=self.progress)
        checked = [await self._send(part, check_only=True) for part in self._parts(self.demonstrations)]
        num_tokens = sum(part.num_tokens for part in checked)
        shown.notify(f"{len(self.demonstrations)} demonstrations with {num_tokens} tokens of answers")
        steps: list[Step] = []
        async with aclosing(self.connection.events(after=status.last_event)) as events:
            for part in batches:
                sent = await self._send(part)
                assert sent.batch is not None and sent.last_event is not None, "the batch is on disk"
                steps.append(await _learned(sent.batch, sent.last_event, events))
                shown.step(steps[-1].metrics)
        return SftReport(
            steps=tuple(steps),
            num_demonstrations=len(self.demonstrations),
            num_answers=sum(part.num_answers for part in checked),
            num_tokens=num_tokens,
            seconds=time.monotonic() - started,
        )

    def _batches(self) -> list[Sequence[DemonstrationBody]]:
        """The batches of all epochs. Each epoch has another order, which depends on the seed only."""
        found: list[Sequence[DemonstrationBody]] = []
        for epoch in range(self.epochs):
            order = list(self.demonstrations)
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            found += self._parts(order)
        return found

    def _parts(self, demonstrations: Sequence[DemonstrationBody]) -> list[Sequence[DemonstrationBody]]:
        size = self.batch_size
        return [demonstrations[at : at + size] for at in range(0, len(demonstrations), size)]

    async def _send(self, part: Sequence[DemonstrationBody], *, check_only: bool = False) -> SftResponse:
        body = build_request(
            SftRequest,
            demonstrations=list(part),
            policy=self.policy,
            lr=self.lr,
            check_only=check_only,
            client_id=self.client_id,
        )
        key, retry = uuid.uuid4().hex, self.connection.retry
        for attempt in itertools.count():  # A batch of another client, or an evaluation, may take long.
            try:
                send = self.connection.request("POST", "/sft", body=body, key=key, patience=0, server_wait=SERVER_WAIT)
                return SftResponse.model_validate(await send)
            except Later as later:
                if later.code == "engine_failed":
                    raise Conflict(later.message, code=later.code) from None
                await retry.sleep(max(later.retry_after, retry.delay(attempt)))
        raise AssertionError("the attempts have no end")


async def _learned(batch: int, committed: int, events: AsyncIterator[Event]) -> Step:
    """Returns the step of a batch once it is learned. Raises `Conflict` if it never will be.

    Events up to number `committed` are about earlier batches, perhaps one with the same id.
    """
    async for event in events:
        if event.seq <= committed:
            continue
        if event.kind == "step" and event.body["policy_version"] == batch + 1:
            return Step(batch + 1, event.body["metrics"])
        if event.kind == "batch" and event.body["batch"] == batch:
            raise Conflict(
                f"batch {batch} was given up, because workers crash on it: {event.body['reason']}; try a smaller "
                "batch_size",
                code="batch_set_aside",
            )
        if event.kind == "state" and event.body["state"] == "failed":
            raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")
    raise AssertionError("the stream of events has no end")
