"""What a training run sees of a server: the steps it learns, up to the run's last, and what it waits for meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Self

from agentjet.client.connection import Connection
from agentjet.client.progress import Progress
from agentjet.client.report import Step
from agentjet.client.rollout import Runner
from agentjet.errors import AgentJetError, Conflict, InvalidRequest
from agentjet.protocol import REPORTED_BATCHES, StatusResponse, batches_without_variance, report_lines

QUIET_SECONDS = 10.0
"""So long a run may get no episode before it shows what the server waits for."""
LOOK_SECONDS = 2.0
"""Between two looks at whether it does, and at what the server waits for."""


@dataclass
class Server:
    """A server at the beginning of a run, the policy version that ends it, and what was learned so far."""

    connection: Connection
    status: StatusResponse
    target: int
    learned: list[Step] = field(default_factory=list)

    @classmethod
    async def reach(cls, connection: Connection, steps: int) -> Self:
        """The server as it is now; `steps` more batches are wanted of it.

        Raises `Conflict` when its engine is stopped or failed, `InvalidRequest` when its job ends before.
        """
        status = await status_of(connection)
        return cls(connection, status, _target(status, steps))

    async def follow(self, note: Callable[[Mapping[str, float]], None], say: Callable[[str], None]) -> None:
        """Take in the steps until the policy is at version `target`; `note` is given the metrics of each. Raises
        `Conflict` when the engine fails. Says so when batches in a row could teach nothing, once for each such row."""
        version = self.status.policy_version
        async with aclosing(self.connection.events(after=self.status.last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    self.learned.append(Step(version, event.body["metrics"]))
                    note(self.learned[-1].metrics)
                    if batches_without_variance([step.metrics for step in self.learned]) == REPORTED_BATCHES:
                        await self._report_zero_variance(say)
                    if version >= self.target:
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _report_zero_variance(self, say: Callable[[str], None]) -> None:
        with suppress(AgentJetError):  # What is wrong with the server is found out by those who need it.
            found = (await status_of(self.connection)).zero_variance
            if found is not None:
                say("\n".join(report_lines(found)))


async def status_of(connection: Connection) -> StatusResponse:
    """What a server is doing."""
    return StatusResponse.model_validate(await connection.request("GET", "/status"))


async def say_what_it_waits_for(connections: Sequence[Connection], runner: Runner, shown: Progress) -> None:
    """Without end: while nothing is live and nothing could be begun for a while, ask the servers why."""
    retry = connections[0].retry
    num_begun, since, is_shown = runner.num_begun, retry.clock(), False
    while True:
        await retry.sleep(LOOK_SECONDS)
        if runner.live or runner.num_begun != num_begun:
            num_begun, since = runner.num_begun, retry.clock()
            if is_shown:
                shown.waits("")
            is_shown = False
        elif retry.clock() - since >= QUIET_SECONDS:
            with suppress(AgentJetError):  # What is wrong with a server is found out by those who need it.
                shown.waits("; ".join([(await status_of(connection)).waiting_for for connection in connections]))
                is_shown = True


def _target(status: StatusResponse, steps: int) -> int:
    """The policy version at which `steps` more batches are learned, if the server can get there."""
    if status.state in ("offline", "failed"):
        raise Conflict(f"the engine is {status.state}: {status.waiting_for}", code=f"engine_{status.state}")
    target = status.policy_version + steps
    if status.max_steps and target > status.max_steps:
        raise InvalidRequest(
            f"the job ends at max_steps = {status.max_steps} and the policy is at version {status.policy_version}: "
            f"{status.max_steps - status.policy_version} steps are left, {steps} were asked for",
            param="steps",
        )
    return target
