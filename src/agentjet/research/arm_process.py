"""The process that runs an arm's code: `python -m agentjet.research.arm_process`.

It loads the arm's agent and training tasks, trains, and plays held-out tasks for the trial's process, which judges.
Orders are JSON lines on standard input, answers are JSON lines on standard output. The first order is an `ArmOrder`.
Output of the agent goes to standard error. The process ends when its standard input closes.

`ArmClient` is the other side. With `Subject.readable` the process is sandboxed: it reads these folders, Python
and the system, writes to `ArmOrder.folder` only, and reaches the trial's server only.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentjet.client.agent_source import OURS, load_function
from agentjet.client.inputs import load_agent
from agentjet.client.report import rows
from agentjet.client.rollout import Agent, AgentFailing, call_agent
from agentjet.client.swarm_client import AsyncSwarm
from agentjet.client.threads import in_thread
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.models import Address, Judge, Message, Record, Subject, canonical
from agentjet.sandbox import AsyncProcess, Limits, Sandbox, missing, origin_of
from agentjet.types import Task

ENDING_SECONDS = 20.0
"""Time to abort live episodes."""
LOADING_SECONDS = 300.0
"""Time to import an arm's code and to make its tasks."""
LONGEST_ANSWER = 64 << 20
LONGEST_OUTPUT = 64 << 20
"""Bytes of what the agent prints. They go to the trial's log, so an endless print would fill the disk."""
LIMITS = Limits(processes=1024)
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""Environment variables of a sandboxed process. Others may hold keys."""


@dataclass(frozen=True)
class ArmOrder(Record):
    """The code to load, and the run to play on."""

    subject: Subject
    """Without the judge's part."""
    address: Address
    folder: str
    """The only folder to which a sandboxed process writes."""
    unsafe: bool = False
    """Run without a sandbox where none can be made."""

    @classmethod
    def of(cls, subject: Subject, address: Address, folder: Path, *, arm: str = "", unsafe: bool = False) -> ArmOrder:
        judges: dict[str, Any] = {"held_out": "", "evaluator": "", "hidden": (), "files": {}, "weights": {}}
        return cls(replace(subject, agent=subject.agent_of(arm), **judges), address, str(folder), unsafe)


class ArmFailed(AgentJetError):
    """The arm's own code failed: another try would fail the same way."""


# ---- the process -----------------------------------------------------------------------------------------------------


class ArmProcess:
    """Carries out the orders of a trial."""

    def __init__(self, order: ArmOrder, swarm: AsyncSwarm) -> None:
        """Raises `ConfigError` for code that cannot be loaded."""
        self.subject, self.swarm, url = order.subject, swarm, order.address.url
        agent = load_agent(self.subject.agent, option="agent")
        deployed = load_agent(self.subject.deployed, option="deployed") if self.subject.deployed else agent
        self.tasks = self.subject.training_tasks()
        reward = load_function(self.subject.reward, option="reward") if self.subject.reward else None
        self.agent, self.deployed = reaching(url, agent, swarm, reward), reaching(url, deployed, swarm)

    async def train(self, steps: int, seed: int) -> dict[str, Any]:
        await self.swarm.train(
            self.agent,
            self.tasks,
            steps=steps,
            concurrency=self.subject.concurrency,
            seed=seed,
            progress=False,
            reproducible=len({task.task_set for task in self.tasks}) == 1,
        )
        return {}

    async def play(self, tasks: Sequence[Mapping[str, Any]], repeats: int, version: int, seed: int) -> dict[str, Any]:
        """Plays tasks as deployed. The reward that the agent returns is not used."""
        report = await self.swarm.evaluate(
            self.deployed,
            [Task(**task) for task in tasks],
            repeats=repeats,
            concurrency=self.subject.concurrency,
            progress=False,
            at_version=version,
            record=False,
            seed=seed,
        )
        all_finished = len(report.finished) == len(report.results)
        reason = "" if all_finished else report.errors.most_common(1)[0][0]
        return {"plays": len(report.results) + report.num_repeated, "reason": reason}


def listed(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    return [{"id": task.id, "task_set": task.task_set, "payload": task.payload} for task in tasks]


def reaching(url: str, agent: Agent, swarm: AsyncSwarm, reward: Judge | None = None) -> Agent:
    """The agent with episodes at the server's address `url`: a sandbox has another one than the server gives. A
    `reward` pays in place of the agent: for the conversation of its last call, as the server recorded it.
    """
    origin = origin_of(url)

    @functools.wraps(agent)
    async def play(task: Task, episode: Any) -> Any:
        episode.base_url = f"{origin}{episode.base_url.removeprefix(origin_of(episode.base_url))}"
        # The episode of a synchronous agent is made of this answer.
        episode.begun = episode.begun.model_copy(update={"base_url": episode.base_url})
        returned = await call_agent(agent, task, episode)
        if reward is None:
            return returned
        return await in_thread(reward, task, conversation(await swarm.episode_tree(episode.id)))

    return play


def conversation(episode: Any) -> list[Message]:
    """The messages of an episode's last call and its answer; empty if it made no call."""
    found = rows(episode)
    return found[-1]["messages"] if found else []


async def serve(orders: asyncio.Queue[bytes], send: Callable[[object], None]) -> None:
    """Answers orders until they end. An error is an answer too; `own` marks those of the arm's code."""
    order = ArmOrder.from_json(json.loads(await orders.get()))
    async with AsyncSwarm(order.address.url, order.address.token) as swarm:
        arm: ArmProcess | None = None
        while True:
            try:
                if arm is None:
                    arm = ArmProcess(order, swarm)
                    answer = {
                        "tasks": json.loads(json.dumps(listed(arm.tasks), default=str))
                    }  # a payload may be no JSON
                else:
                    wanted = json.loads(await orders.get())
                    answer = await getattr(arm, wanted.pop("do"))(**wanted)
            except (AgentFailing, ConfigError, ValueError) as error:
                answer = {"error": f"{error}{place_of(error.__cause__)}", "own": True}
            except AgentJetError as error:
                answer = {"error": str(error), "own": False}
            send(answer)
            if arm is None:
                return


def place_of(error: BaseException | None) -> str:
    """` (FILE:LINE)` of the innermost line of the user's code; empty if it is unknown."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<") and not Path(f.filename).is_relative_to(OURS)]
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the agent's prints go to the log

    def send(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    async def run() -> None:
        loop, orders = asyncio.get_running_loop(), asyncio.Queue[bytes]()
        serving = asyncio.create_task(serve(orders, send))

        def read() -> None:
            rest = b""
            while piece := os.read(0, 1 << 20):  # not through Python's buffer: its lock would be held at the exit
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    loop.call_soon_threadsafe(orders.put_nowait, line)
            # Live episodes are aborted on exit. Not SIGINT: a signal that this thread gets does not wake the loop.
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(serving.cancel)
            time.sleep(2 * ENDING_SECONDS)
            end_group(os.getpid())  # the arm's code holds the loop, and the trial that would kill it may be gone
            os._exit(1)

        threading.Thread(target=read, daemon=True).start()
        await serving

    with suppress(asyncio.CancelledError, KeyboardInterrupt, BrokenPipeError):
        asyncio.run(run())


# ---- the other side --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmAnswer(Record):
    """An answer of the process, checked: the arm's code can write its own. Each order is answered by some fields."""

    tasks: tuple[Task, ...] = ()
    plays: int = 0
    reason: str = ""
    error: str = ""
    own: bool = False


class ArmClient:
    """The process of an arm, as the trial sees it."""

    def __init__(self, process: asyncio.subprocess.Process | AsyncProcess) -> None:
        self._process = process
        self._excess = ""
        """Why the process was ended, if it printed too much."""
        self.tasks: list[Task] = []
        """The training tasks, as the arm describes them."""

    async def ask(self, order: object) -> ArmAnswer:
        """Sends an order and waits for the answer. Raises `ArmFailed`, or the error of the server."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(canonical(order).encode() + b"\n")
            await process.stdin.drain()
            answer = ArmAnswer.from_json(json.loads(await process.stdout.readline()))
        except (ValueError, RecursionError, ConnectionError, ConfigError) as error:  # it ended, or wrote something else
            await ended(process)
            if isinstance(error, ConfigError):
                raise ArmFailed(f"the agent's code wrote to the answers of its process: {error}") from None
            excess = self._excess
            if isinstance(process, AsyncProcess) and process.exceeded:
                excess = f"the agent {process.exceeded}"
            raise ArmFailed(excess or f"the agent's process ended with exit code {process.returncode}") from None
        if answer.error:
            raise (ArmFailed if answer.own else AgentJetError)(answer.error)
        return answer

    async def forward_output(self) -> None:
        """Copies what the process prints to this process's standard error. Kills it after `LONGEST_OUTPUT` bytes."""
        assert self._process.stderr is not None
        left = LONGEST_OUTPUT
        while content := await self._process.stderr.read(1 << 16):
            left -= len(content)
            if left < 0:
                self._excess = (
                    f"the agent was ended, because it printed more than {LONGEST_OUTPUT >> 20} MiB: print less"
                )
                self._process.kill()
                return
            os.write(2, content)

    async def train(self, steps: int, seed: int) -> None:
        await self.ask({"do": "train", "steps": steps, "seed": seed})

    async def play(self, tasks: Sequence[Task], repeats: int, version: int, seed: int) -> ArmAnswer:
        order = {"do": "play", "tasks": listed(tasks), "repeats": repeats, "version": version, "seed": seed}
        return await self.ask(order)


@asynccontextmanager
async def started(order: ArmOrder) -> AsyncIterator[ArmClient]:
    """Starts the process of an arm and loads its code. Raises `ArmFailed` if it cannot be loaded."""
    process, order = await begun(order)
    arm = ArmClient(process)
    forwarding = asyncio.create_task(arm.forward_output())
    try:
        try:
            async with asyncio.timeout(LOADING_SECONDS):
                answer = await arm.ask(order.to_json())
        except TimeoutError:
            process.kill()
            raise ArmFailed(
                f"{order.subject.agent}: loading it and its tasks took longer than {LOADING_SECONDS:g} s"
            ) from None
        if not answer.tasks:
            subject = order.subject
            raise ArmFailed(f"{subject.agent}: its process gave no training tasks: tasks = {subject.tasks!r}")
        arm.tasks = [*answer.tasks]
        yield arm
    finally:
        await ended(process)
        await asyncio.wait([forwarding], timeout=1.0)  # A process that the arm left may hold its output open.
        forwarding.cancel()


def sandbox_for(url: str, folder: Path, readable: tuple[Path, ...], variables: Mapping[str, str]) -> Sandbox:
    """A sandbox that writes to its folder, and reaches the server at `url` only, or any without one."""
    rights = Sandbox(folder=folder, readable=readable, limits=LIMITS, variables=variables)
    return replace(rights, network="model" if url else "open", model_url=url, paths=("/",))


async def begun(order: ArmOrder) -> tuple[asyncio.subprocess.Process | AsyncProcess, ArmOrder]:
    """The process, and the order with the addresses that it must use. Raises `ConfigError` without a sandbox."""
    command = [sys.executable, "-P", "-m", "agentjet.research.arm_process"]
    options: dict[str, Any] = {}
    if readable := order.subject.readable:
        home = Path(order.folder)
        home.mkdir(parents=True, exist_ok=True)
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        own = {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        options = {"cwd": readable[0], "env": kept | own}
        if not (reason := missing()):
            sandbox = sandbox_for(order.address.url, home, tuple(map(Path, readable)), kept | own)
            moved = replace(order, address=Address(sandbox.inside_url(order.address.url), order.address.token))
            return await sandbox.start_async(command, cwd=Path(readable[0]), limit=LONGEST_ANSWER), moved
        if not order.unsafe:
            raise ConfigError(f"{reason}; or run arms with the rights of this user (--unsafe)")
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=LONGEST_ANSWER, start_new_session=True, **options
    ), order


async def ended(process: asyncio.subprocess.Process | AsyncProcess) -> None:
    """Closes the process's input, and kills it if it does not end. Kills what it started: a sandbox does so itself."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), ENDING_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    finally:
        if isinstance(process, asyncio.subprocess.Process):
            end_group(process.pid)


def end_group(leader: int) -> None:
    """Kills the processes of a group, if that process leads one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def checked(order: ArmOrder) -> list[Task]:
    """Loads an arm's code once, without a server. Returns its training tasks. Raises `ArmFailed`."""

    async def load() -> list[Task]:
        async with started(order) as arm:
            return arm.tasks

    try:
        return asyncio.run(load())
    except ConfigError:
        raise
    except AgentJetError as error:  # no server is there, so any other error is the arm's
        raise ArmFailed(str(error)) from None


if __name__ == "__main__":
    main()
