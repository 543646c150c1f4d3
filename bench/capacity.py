"""How many episodes, replicas and tokens a server carries: `python -m bench.capacity`.

A discrete-event simulation of agents, server, fronts, replicas and learner, in seconds. It takes the measured costs of
server and fronts (`cases/costs.json`, or `--costs FILE`) and simulates 1 to 512 replicas with 128 concurrent episodes
each: the resource that saturates first, and the number of fronts that they need. Replicas and learner are assumptions:
no GPU is needed.

The system is closed: a number of agents plays one episode after another. A call passes a front (a FIFO queue with one
server a process), a replica (its running completions advance together, one token a step), and the front again, which
handles the tokens, records the call and waits for the disk. The server begins and ends episodes and reads the reports
of fronts; without fronts it answers the calls, too. Finished groups fill batches; the learner learns them, one at a
time, and publishes. Admission is that of `swarm.mixture.places`: groups wait for a place.

`--measure` measures the CPU of a front process for a call instead, and `--against DIR` that of another checkout
alternately (`bench.front`): `front_call_ratio` is this checkout's cost of a call divided by the other's.

`--fronts N` measures a server with fronts beside one that answers calls itself, in turn: CPU of the server and of the
fronts for a call, calls a CPU second of all processes in relation to the other (`scaling_efficiency`) and to as many
servers without fronts at the same time (`beside_apart`: what fronts cost besides the crowd on the cores), the calls and
tokens a second at which the server has used 85 % of a core, and the fronts that answer them. It fits `cases/costs.json`
to these figures, and writes it with `--save`.

Simplifications: a front handles the tokens of a completion at its end. Prompt tokens cost the replica steps of one
completion only. Nothing fails. Prints tables, then one JSON object as the last line: `docs/scaling.md` explains it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from agentjet.compute.fleet import TURNS
from bench.machine import CASES, ROOT, bounded, grid, markdown, percentile, report, with_text

LEARNED = 10_000
"""Episodes up to which a simulation lasts until batches were learned."""
AGENTS_PER_REPLICA = 128
MAX_FRONTS = 8  # Of a server
PAGE = ROOT / "docs" / "scaling.md"
COLUMNS = {
    "calls_per_s": "calls/s",
    "tokens_per_s": "tokens/s",
    "call_p95": "s a call, p95",
    "server": "server",
    "front": "busiest front",
    "replicas": "replicas",
    "learner": "learner",
    "publishing": "publish",
    "refused": "waiting",
    "limit": "limit",
}
COST_TITLES = {
    "alone_call_ms": "ms of CPU of a call in a server without fronts, with its share of begin and finish",
    "front_call_ms": "ms of CPU of a call in its front",
    "per_new_token_us": "µs of it for a new token of a prompt",
    "per_prompt_token_us": "µs for a known token of a prompt",
    "per_token_us": "µs for a token of a plain answer",
    "per_streamed_token_us": "µs for a token of a streamed answer",
    "server_call_ms": "ms of CPU of the server for a call of a front, with its share of begin and finish",
    "alone_calls_per_s": "calls a second of a server without fronts",
    "front_calls_per_s": "calls a second of a front",
    "run_calls_per_s": "calls a second of a server with fronts",
    "run_tokens_per_s": "sampled tokens a second of a server with fronts",
    "replica_calls_per_s": "calls a second of a full replica (assumed)",
    "fronts_per_replica": "fronts that a full replica needs",
    "replicas_alone": "full replicas of a server without fronts",
    "replicas_of_run": "full replicas of a server with as many fronts as they need",
    "kb_memory_per_episode": "kB of memory of a live episode, in its front",
}
SATURATED = 0.85  # Share of a resource's time from which it counts as saturated
FRONTS_AT_LEAST = {"scaling_efficiency": 0.85, "run_calls_s": 1000, "run_tokens_s": 290_000}
FRONTS_AT_MOST = {"server_call_ms": 0.8}


# ---- the workload: episode `n` of a seed is always the same one ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LongTail:
    """A log-normal distribution, cut at `most`. With `sigma` 0 each value is the mean."""

    mean: float
    sigma: float
    most: float

    def draw(self, rng: random.Random) -> float:
        if not self.sigma:
            return self.mean
        return min(self.most, rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))


class Turn(NamedTuple):
    """Seconds before a call, new prompt tokens, sampled tokens, and True if the answer is streamed."""

    seconds: float
    context: int
    completion: int
    streams: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """The distributions of an episode. `first_context` are the prompt tokens of the first call."""

    calls: LongTail = LongTail(8, 0.8, 64)
    seconds: LongTail = LongTail(3.0, 1.2, 120.0)
    first_context: int = 1000
    context: LongTail = LongTail(300, 1.0, 4000)
    completion: LongTail = LongTail(300, 1.0, 4000)
    streamed: float = 0.5  # Fraction of the calls
    seed: int = 0

    def episode(self, number: int) -> list[Turn]:
        rng = random.Random(self.seed * 1_000_003 + number)
        turns = []
        for turn in range(max(1, round(self.calls.draw(rng)))):
            context = max(1, round(self.context.draw(rng))) if turn else self.first_context
            completion = max(1, round(self.completion.draw(rng)))
            turns.append(Turn(self.seconds.draw(rng), context, completion, rng.random() < self.streamed))
        return turns


AGENTS = Workload()  # Agents with tools: 8 calls of 300 tokens, 3 s between two calls


# ---- the measured costs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of the processes, bytes of the journal and of memory, and the disk."""

    call: float  # Of a call, besides its tokens, in a server without fronts
    per_prompt_token: float  # Of each token of the prompt, known or new
    per_new_token: float  # Of each token of the prompt that was not known
    per_token: float  # Of each token of a plain answer
    per_streamed_token: float
    episode: float  # Begin and finish, in a server without fronts
    idle_live: float  # A second for every live episode
    route: float  # Of the choice of a replica, for each replica; part of `call` for one
    front_call: float  # As `call`, in a front
    front_episode: float  # End of an episode in its front
    server_call: float  # Part of the server in a call of a front: reports and leases
    server_episode: float  # Begin and finish in a server with fronts
    batch_token: float  # Of each forest token, while a batch is built in a thread
    rank_token: float  # Of each forest token, while the batch is encoded for the ranks
    sync: float  # Seconds of a wait for the disk
    disk_bandwidth: float  # Bytes a second, in writes that are waited for one by one
    bytes_call: float  # Bytes written for a call, besides its tokens
    bytes_token: float  # Bytes written for each new token of a prompt or answer
    rank_bytes_token: float = 0.0  # Bytes sent to a rank for each forest token
    memory_live: float = 0.0  # Bytes of a live episode without calls
    memory_token: float = 0.0  # Bytes of each token of a live episode's conversation
    memory_call: float = 0.0  # Bytes of a waiting call, besides its prompt

    def of_call(self, prompt: float, new: float, completion: float, *, streams: bool) -> float:
        """CPU seconds of a call in a server without fronts."""
        token = self.per_streamed_token if streams else self.per_token
        return self.call + self.per_prompt_token * prompt + self.per_new_token * new + token * completion


NUM_EPISODES = 20_000  # Episodes after which the first one is played again

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas and the learner. The defaults are assumptions about an 8B model on GPUs of 80 GB."""

    replicas: int = 1
    slots: int = 64  # Completions that a replica runs at the same time
    step: float = 0.012  # Seconds of a step with one completion
    step_per_completion: float = 50e-6  # Seconds that each running completion adds
    prompt_tokens_per_step: float = 2048.0
    ranks: int = 0  # 0: nothing is learned
    tokens_per_rank: float = 7500.0  # Tokens that a rank learns a second
    weights_bytes: float = 16e9
    weights_bandwidth: float = 12.5e9
    """Bytes a second of the network, from rank 0 to all replicas together, and from the gateway to all ranks."""
    adopt: float = 2.0  # Seconds in which a replica samples nothing while it adopts new weights


@dataclass(frozen=True, slots=True)
class Plan:
    """A point of the simulation. Without `fronts` the server answers the calls. A batch has as many episodes as there
    are agents.
    """

    agents: int
    fleet: Fleet
    workload: Workload
    costs: Costs
    fronts: int = 0
    group_size: int = 8
    max_staleness: int = 2
    calls: int = 20_000  # Calls that are measured at least, after as many that are not
    batches: int = 2  # Batches that are measured at least, after one that is not
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The outcome of a simulated load. Seconds of a call are those that its agent waits."""

    calls_per_s: float
    tokens_per_s: float
    episodes_per_s: float
    call_s: float
    call_p50: float
    call_p95: float
    server: float = 0.0  # Share of the time in which the server computes
    front: float = 0.0  # The same of the busiest front
    disk: float = 0.0
    replicas: float = 0.0  # Share of the replicas' slots in use
    learner: float = 0.0  # Share of the time in which a batch is learned or published
    publishing: float = 0.0
    refused: float = 0.0  # Share of the agents that wait for a place in a batch
    batches: int = 0
    stale: int = 0  # Episodes dropped because a token was too old


# ---- the processes ---------------------------------------------------------------------------------------------------


class Station:
    """A process with one event loop: a FIFO queue before one server, and a disk with group commit."""

    def __init__(self, sync: float, idle: float = 0.0) -> None:
        """`idle` is the share of its time that work without requests takes."""
        self._stretch = 1 / max(0.01, 1 - idle)
        self._idle = self._measured_from = 0.0
        self.slow_until = 0.0
        """Until then a thread of the process computes, too, and the event loop has half of the time."""
        self._free = 0.0
        self._sync = sync
        self._sync_ends = self._next_ends = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Returns the time at which a job that arrives now is done."""
        start = max(now, self._free)
        self._idle += start - max(self._free, min(start, self._measured_from))
        seconds *= self._stretch * (2 if start < self.slow_until else 1)
        self._free = start + seconds
        return self._free

    def measure(self, now: float) -> None:
        """Measure the share from now on."""
        self._idle, self._measured_from = 0.0, now

    def busy_share(self, now: float) -> float:
        """Returns the share of the measured time in which the server was busy."""
        idle = self._idle + max(0.0, now - max(self._free, self._measured_from))
        return 1 - idle / (now - self._measured_from)

    def synced(self, now: float) -> float:
        """Returns the time at which a change of now is on disk. Changes during a wait share the next one."""
        if now >= self._sync_ends:
            self._sync_ends = self._next_ends
        if now >= self._sync_ends:
            self._sync_ends = self._next_ends = now + self._sync
        elif self._next_ends == self._sync_ends:
            self._next_ends += self._sync
        return self._next_ends


class Replica:
    """A sampler that advances all its running completions by a token in each step."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.fleet = simulation.plan.fleet
        self.running: list[tuple[float, int, Agent]] = []
        self.waiting: deque[tuple[float, Agent]] = deque()
        self.steps = 0.0  # Steps done, at `since`
        self.since = 0.0
        self.paused = False
        self.version = 0
        self.slot_seconds = 0.0  # Sum of the seconds of its completions
        self._number = 0  # Number of the scheduled end that counts: earlier ones are void

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def _advance(self, now: float) -> None:
        self.slot_seconds += (now - self.since) * len(self.running)
        if self.running and not self.paused:
            self.steps += (now - self.since) / self._step()
        self.since = now

    def _step(self) -> float:
        return self.fleet.step + self.fleet.step_per_completion * len(self.running)

    def add(self, now: float, agent: Agent, steps: float) -> None:
        self._advance(now)
        self.waiting.append((steps, agent))
        self._plan(now)
        self.simulation.routing(self)

    def pause(self, now: float, paused: bool) -> None:
        self._advance(now)
        self.paused = paused
        self._plan(now)
        self.simulation.routing(self)

    def _plan(self, now: float) -> None:
        while self.waiting and len(self.running) < self.fleet.slots:
            steps, agent = self.waiting.popleft()
            heapq.heappush(self.running, (self.steps + steps, next(self.simulation.numbers), agent))
        self._number += 1
        if self.running and not self.paused:
            left = max(0.0, self.running[0][0] - self.steps) * self._step()
            self.simulation.at(now + left, self._end, self._number)

    def _end(self, now: float, number: int) -> None:
        if number != self._number:
            return
        self._advance(now)
        steps, _, agent = heapq.heappop(self.running)
        self.steps = max(self.steps, steps)
        self._plan(now)
        self.simulation.routing(self)
        self.simulation.sampled(now, agent)


@dataclass(slots=True, eq=False)
class Group:
    front: Station
    members: int = 0
    finished: int = 0
    oldest: int = 10**9
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Agent:
    front: Station
    turns: list[Turn] = field(default_factory=list)
    turn: int = 0
    prompt: int = 0
    sent: float = 0.0
    replica: Replica | None = None
    group: Group | None = None


@lru_cache(NUM_EPISODES)
def episode(workload: Workload, number: int) -> list[Turn]:
    return workload.episode(number)


class Simulation:
    """One run. `run` returns its load."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.costs = plan.costs
        self.numbers = itertools.count()
        self._events: list[Event] = []
        self._server = Station(self.costs.sync, self.costs.idle_live * plan.agents)
        self._fronts = [Station(self.costs.sync) for _ in range(plan.fronts)] or [self._server]
        self._replicas = [Replica(self) for _ in range(plan.fleet.replicas)]
        self._loads: list[tuple[int, int, Replica]] = []
        """Heap of the replicas by load; entries with another load than the replica's are void."""
        self._agents = [Agent(self._fronts[i % len(self._fronts)]) for i in range(plan.agents)]
        self._episodes = itertools.count()
        self._rng = random.Random(plan.seed)
        self._batch = max(1, plan.agents // plan.group_size)
        self._groups: dict[int, Group] = {}  # Open and complete groups, by identity
        self._complete: deque[Group] = deque()
        self._newest: Group | None = None
        self._refused: deque[Agent] = deque()
        self._version = 0
        self._pending = False
        self._live = 0
        for replica in self._replicas:
            self.routing(replica)
        self._reset(0.0)

    # ---- time --------------------------------------------------------------------------------------------------------

    def at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self.numbers), event, arguments))

    def _reset(self, now: float) -> None:
        """Begin to measure."""
        self._began = now
        self._calls = self._tokens = self._ended = self._batches = self._stale = 0
        self._bytes = 0.0
        self._learning = self._publishing = 0.0
        self._taken: list[float] = []
        self._refused_seconds, self._refused_since = 0.0, now
        for station in {self._server, *self._fronts}:
            station.measure(now)
        for replica in self._replicas:
            replica._advance(now)
            replica.slot_seconds = 0.0

    def run(self) -> Load:
        """The load after the warm-up."""
        plan = self.plan
        for agent in self._agents:  # From the middle of an episode, so that they do not run in step.
            agent.turns = self._next_episode()
            agent.turn = self._rng.randrange(len(agent.turns))
            agent.prompt = sum(turn.context + turn.completion for turn in agent.turns[: agent.turn])
            self._begin(0.0, agent, is_first=True)
        self._until(plan.calls, min(1, plan.batches))
        self._reset(self._now)
        self._until(plan.calls, plan.batches)
        return self._load()

    def _until(self, calls: int, batches: int) -> None:
        """Process events until so many calls and batches."""
        events, learns = self._events, self.plan.fleet.ranks > 0
        while events:
            if self._calls >= calls and (not learns or self._batches >= batches):
                return
            self._now, _, event, arguments = heapq.heappop(events)
            event(self._now, *arguments)

    def _load(self) -> Load:
        seconds, plan = self._now - self._began, self.plan
        for replica in self._replicas:
            replica._advance(self._now)
        self._count_refused(self._now)
        slots = plan.fleet.slots * plan.fleet.replicas
        return Load(
            calls_per_s=self._calls / seconds,
            tokens_per_s=self._tokens / seconds,
            episodes_per_s=self._ended / seconds,
            call_s=sum(self._taken) / max(1, len(self._taken)),
            call_p50=percentile(self._taken, 50),
            call_p95=percentile(self._taken, 95),
            server=self._server.busy_share(self._now),
            front=max(station.busy_share(self._now) for station in self._fronts) if plan.fronts else 0.0,
            disk=self._bytes / seconds / self.costs.disk_bandwidth,
            replicas=sum(replica.slot_seconds for replica in self._replicas) / slots / seconds,
            learner=min(1.0, self._learning / seconds),
            publishing=min(1.0, self._publishing / seconds),
            refused=self._refused_seconds / seconds / plan.agents,
            batches=self._batches,
            stale=self._stale,
        )

    # ---- episodes ----------------------------------------------------------------------------------------------------

    def _begin(self, now: float, agent: Agent, *, is_first: bool = False) -> None:
        """Begin an episode, or wait for a place."""
        if self.plan.fleet.ranks and not self._join(agent):
            self._count_refused(now)
            self._refused.append(agent)
            return
        if not is_first:
            agent.turns, agent.turn, agent.prompt = self._next_episode(), 0, 0
        self._live += 1
        ready = self._server.serve(now, self._server_episode / 2)
        self.at(self._server.synced(ready) + agent.turns[agent.turn].seconds, self._send, agent)

    @property
    def _server_episode(self) -> float:
        return self.costs.server_episode if self.plan.fronts else self.costs.episode

    def _next_episode(self) -> list[Turn]:
        return episode(self.plan.workload, next(self._episodes) % NUM_EPISODES)

    def _join(self, agent: Agent) -> bool:
        """True if the agent has a place in a group. See `swarm.mixture.places`."""
        plan, group = self.plan, self._newest
        if group is None or group.dropped or group.members >= plan.group_size:
            batches_ahead = plan.max_staleness + 1 - self._pending
            if len(self._groups) >= self._batch * batches_ahead:
                return False
            group = self._newest = Group(self._rng.choice(self._fronts))  # By a hash of its name
            self._groups[id(group)] = group
        group.members += 1
        agent.group, agent.front = group, group.front
        return True

    def _admit(self, now: float) -> None:
        self._count_refused(now)
        for _ in range(len(self._refused)):
            size = len(self._refused)
            self._begin(now, self._refused.popleft())
            if len(self._refused) == size:  # Refused again.
                self._refused.rotate(1)
                return

    def _count_refused(self, now: float) -> None:
        self._refused_seconds += (now - self._refused_since) * len(self._refused)
        self._refused_since = now

    def _finish(self, now: float, agent: Agent) -> None:
        if self.plan.fronts:
            self.at(agent.front.synced(agent.front.serve(now, self.costs.front_episode)), self._finish_at_server, agent)
        else:
            self._finish_at_server(now, agent)

    def _finish_at_server(self, now: float, agent: Agent) -> None:
        self._live -= 1
        self.at(self._server.synced(self._server.serve(now, self._server_episode / 2)), self._finished, agent)

    def _finished(self, now: float, agent: Agent) -> None:
        self._ended += 1
        group, agent.group = agent.group, None
        if group is not None and not group.dropped:
            group.finished += 1
            if group.finished == self.plan.group_size:
                self._complete.append(group)
                self._compose(now)
        self._begin(now, agent)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _send(self, now: float, agent: Agent) -> None:
        """The agent sends its next call."""
        if agent.group is not None and agent.group.dropped:
            self._live -= 1
            self._begin(now, agent)
            return
        turn, costs = agent.turns[agent.turn], self.costs
        agent.sent = now
        agent.prompt += turn.context
        work = self._half_call + costs.per_prompt_token * agent.prompt + costs.per_new_token * turn.context
        work += costs.route * self.plan.fleet.replicas
        self.at(agent.front.serve(now, work), self._route, agent)

    @property
    def _half_call(self) -> float:
        return (self.costs.front_call if self.plan.fronts else self.costs.call) / 2

    def routing(self, replica: Replica) -> None:
        """The load of a replica changed."""
        if not replica.paused:
            heapq.heappush(self._loads, (replica.load, next(self.numbers), replica))

    def _route(self, now: float, agent: Agent) -> None:
        """To the replica that has the conversation's prefix if it has a free slot, else to the least loaded one."""
        chosen = agent.replica
        if chosen is None or chosen.paused or chosen.load >= self.plan.fleet.slots:
            while self._loads and (self._loads[0][2].paused or self._loads[0][0] != self._loads[0][2].load):
                heapq.heappop(self._loads)
            chosen = self._loads[0][2] if self._loads else chosen or self._replicas[0]
        prefilled = agent.turns[agent.turn].context if chosen is agent.replica else agent.prompt
        agent.replica = chosen
        if agent.group is not None:
            agent.group.oldest = min(agent.group.oldest, chosen.version)
        steps = agent.turns[agent.turn].completion + prefilled / self.plan.fleet.prompt_tokens_per_step
        chosen.add(now, agent, steps)

    def sampled(self, now: float, agent: Agent) -> None:
        """The completion is done: its tokens pass the gateway, and the call is recorded."""
        turn, costs = agent.turns[agent.turn], self.costs
        handled = turn.completion * (costs.per_streamed_token if turn.streams else costs.per_token)
        self._bytes += costs.bytes_call + costs.bytes_token * (turn.completion + turn.context)
        done = agent.front.serve(now, self._half_call + handled)
        if self.plan.fronts:  # The report of the front: nothing waits for it.
            self._server.serve(now, costs.server_call)
        self.at(agent.front.synced(done), self._answered, agent)

    def _answered(self, now: float, agent: Agent) -> None:
        turn = agent.turns[agent.turn]
        self._calls += 1
        self._tokens += turn.completion
        self._taken.append(now - agent.sent)
        agent.prompt += turn.completion
        agent.turn += 1
        if agent.turn < len(agent.turns):
            self.at(now + agent.turns[agent.turn].seconds, self._send, agent)
        else:
            self._finish(now, agent)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _compose(self, now: float) -> None:
        """Learn the oldest complete groups if there are enough, and none are being learned."""
        if self._pending or len(self._complete) < self._batch:
            return
        self._pending = True
        for _ in range(self._batch):
            self._groups.pop(id(self._complete.popleft()))
        if not self.plan.max_staleness:
            self._drop(list(self._groups.values()))
        costs = self.costs
        tokens = self._batch * self.plan.group_size * self._tokens_per_episode
        process = self._fronts[0]
        process.slow_until = now + 2 * costs.batch_token * tokens
        self._learning_since = now
        self.at(process.slow_until, self._learn, tokens)

    def _learn(self, now: float, tokens: float) -> None:
        """The batch is built: encode it, send it to all ranks, learn it."""
        fleet, costs = self.plan.fleet, self.costs
        encoded = self._server.serve(now, costs.rank_token * tokens)
        sent = encoded + costs.rank_bytes_token * tokens * fleet.ranks / fleet.weights_bandwidth
        self.at(sent + tokens / (fleet.ranks * fleet.tokens_per_rank), self._publish)

    @property
    def _tokens_per_episode(self) -> float:
        work = self.plan.workload
        return work.first_context + work.calls.mean * work.completion.mean + (work.calls.mean - 1) * work.context.mean

    def _publish(self, now: float) -> None:
        """Replicas fetch the weights and adopt them, so many at a time. Rank 0 sends to one after another."""
        fleet = self.plan.fleet
        self._version += 1
        at_once = max(1, fleet.replicas // TURNS) if self.plan.max_staleness else fleet.replicas
        turns = [now] * at_once
        transfer, sent = fleet.weights_bytes / fleet.weights_bandwidth, now
        for replica in self._replicas:
            sent = max(heapq.heappop(turns), sent) + transfer
            self.at(sent, replica.pause, True)
            self.at(sent + fleet.adopt, self._adopted, replica, self._version)
            heapq.heappush(turns, sent + fleet.adopt)
        self.at(max(turns), self._learned, now)

    def _adopted(self, now: float, replica: Replica, version: int) -> None:
        replica.version = version
        replica.pause(now, False)

    def _learned(self, now: float, published_since: float) -> None:
        self._pending = False
        self._batches += 1
        self._learning += now - max(self._learning_since, self._began)
        self._publishing += now - max(published_since, self._began)
        too_old = self._version - self.plan.max_staleness
        self._drop([group for group in self._groups.values() if group.oldest < too_old])
        self._compose(now)
        self._admit(now)

    def _drop(self, groups: list[Group]) -> None:
        for group in groups:
            group.dropped = True
            self._stale += group.members
            del self._groups[id(group)]
        self._complete = deque(group for group in self._complete if not group.dropped)


# ---- simulated loads -----------------------------------------------------------------------------------------


def fleet(replicas: int) -> Fleet:
    """Replicas with two ranks each, so that the learner is rarely the limit."""
    return Fleet(replicas=replicas, ranks=2 * replicas)


def first_limit(load: Load) -> str:
    """The resource with the largest share of use, if that counts as saturated."""
    shares = {"server": load.server, "front": load.front, "disk": load.disk, "replicas": load.replicas}
    shares["publish" if load.publishing > load.learner / 2 else "learner"] = load.learner
    name = max(shares, key=lambda name: shares[name])
    return name if shares[name] >= SATURATED else "agents"


def loads(costs: Costs, replicas: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """The simulated loads of one server, without fronts and with as many as the replicas need."""
    needed = limits(costs)["fronts_per_replica"]
    found = []
    for count in replicas:
        for fronts in (0, min(MAX_FRONTS, math.ceil(needed * count))):
            agents = AGENTS_PER_REPLICA * count
            console.print(f"simulating {agents} episodes on {count} replicas with {fronts} fronts ...")
            plan = Plan(agents, fleet(count), AGENTS, costs, fronts)
            if agents > LEARNED:
                plan = replace(plan, calls=max(plan.calls, agents), batches=0)
            load = Simulation(plan).run()
            facts = {"agents": agents, "num_replicas": count, "fronts": fronts, "limit": first_limit(load)}
            found.append({**facts, **rounded(asdict(load))})
    return found


def variants(costs: Costs, replicas: int, console: Console) -> list[dict[str, Any]]:
    """Changes of one load: other numbers of fronts, several servers, no streams."""
    whole = Plan(AGENTS_PER_REPLICA * replicas, fleet(replicas), AGENTS, costs)
    part = replace(whole, agents=whole.agents // 4, fleet=fleet(max(1, replicas // 4)))
    cases = {f"{fronts} fronts": (replace(whole, fronts=fronts), 1) for fronts in (0, 1, 2, 4, 8)}
    cases["4 servers without fronts, each with its own runs"] = part, 4
    plain = replace(whole, workload=replace(AGENTS, streamed=0.0))
    cases |= {f"{fronts} fronts, no call is streamed": (replace(plain, fronts=fronts), 1) for fronts in (0, 4)}
    found = []
    for name, (plan, times) in cases.items():
        console.print(f"simulating {whole.agents} episodes on {replicas} replicas: {name} ...")
        load = Simulation(replace(plan, batches=1)).run()
        totals = {n: getattr(load, n) * times for n in ("calls_per_s", "tokens_per_s", "episodes_per_s")}
        found.append({"case": name, "limit": first_limit(load), **rounded({**asdict(load), **totals})})
    return found


def shares(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its shares in percent."""
    names = ("server", "front", "replicas", "learner", "publishing", "refused")
    is_learning = bool(row["batches"])
    given = {name: f"{row[name]:.0%}" for name in names if is_learning or name not in names[3:]}
    return {**row, **dict.fromkeys(names, "-"), **given}


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


# ---- limits in closed form -------------------------------------------------------------------------------------------


def limits(costs: Costs) -> dict[str, float]:
    """The load at which each process saturates, for the workload `AGENTS`, from the costs alone."""
    turns = [turn for number in range(2000) for turn in AGENTS.episode(number)]
    calls, seconds = len(turns) / 2000, statistics.fmean(turn.seconds for turn in turns)
    completion = statistics.fmean(turn.completion for turn in turns)
    context = statistics.fmean(turn.context for turn in turns)
    prompts = []
    for number in range(2000):
        length = 0
        for turn in AGENTS.episode(number):
            length += turn.context
            prompts.append(length)
            length += turn.completion
    both = [costs.of_call(statistics.fmean(prompts), context, completion, streams=streams) for streams in (True, False)]
    call = AGENTS.streamed * both[0] + (1 - AGENTS.streamed) * both[1]
    alone, front = call + costs.episode / calls, call - costs.call + costs.front_call + costs.front_episode / calls
    server = costs.server_call + costs.server_episode / calls
    assumed = Fleet()
    sampling = completion * (assumed.step + assumed.slots * assumed.step_per_completion)
    of_replica = assumed.slots / sampling
    tree = calls * (context + completion)
    written = costs.bytes_call + costs.bytes_token * (context + completion)
    held = costs.memory_live + costs.memory_token * tree / 2 + costs.memory_call
    return {
        "alone_call_ms": 1e3 * alone,
        "front_call_ms": 1e3 * front,
        "server_call_ms": 1e3 * server,
        "alone_calls_per_s": SATURATED / alone,
        "front_calls_per_s": SATURATED / front,
        "run_calls_per_s": SATURATED / server,
        "run_tokens_per_s": SATURATED / server * completion,
        "replica_calls_per_s": of_replica,
        "replica_episodes": of_replica * (seconds + sampling),
        "fronts_per_replica": of_replica * front / SATURATED,
        "replicas_alone": SATURATED / alone / of_replica,
        "replicas_of_run": SATURATED / server / of_replica,
        "disk_share": written * SATURATED / front / costs.disk_bandwidth,
        "kb_memory_per_episode": held / 1024,
        "batch_s_per_1000_episodes": 1000 * tree * costs.batch_token,
        "rank_mb_per_1000_episodes": 1000 * tree * costs.rank_bytes_token / 1e6,
        "rank_s_per_1000_episodes": 1000 * tree * costs.rank_token,
    }


# ---- front processes -----------------------------------------------------------------------------------------


def measure(times: int, against: Path | None) -> int:
    """Prints the medians of the figures of a front process, and of the other checkout in turn with it."""
    from bench import front  # It imports the workload of this module.

    rounds = []
    for number in range(times):
        found = {"other": front.measure(against)} if against is not None else {}
        rounds.append(found | {"this": front.measure()})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    medians = {
        name: rounded({key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]})
        for name in rounds[0]
    }
    figures: dict[str, Any] = dict(medians["this"])
    if against is not None:
        ratios = [one["this"]["front_call_ms"] / one["other"]["front_call_ms"] for one in rounds]
        figures |= rounded({"front_call_ratio": statistics.median(ratios)}) | {"other": medians["other"]}
    report("capacity", figures, grid(medians))
    return 0


def measure_fronts(fronts: int, times: int, costs_path: Path, *, save: bool) -> int:
    """Prints the cost of a call with fronts beside that in one process, and what one run carries at these costs."""
    from bench import front

    found = front.compare(fronts, times)
    for number, one in enumerate(found["rounds"]):
        print(f"round {number + 1}: {one}", file=sys.stderr, flush=True)
    rounds = found["rounds"]
    server = statistics.median(one["fronts"]["server"] for one in rounds)
    of_front = statistics.median(one["fronts"]["front"] for one in rounds)
    alone = statistics.median(sum(one["alone"].values()) for one in rounds)
    calls = 1e3 * SATURATED / server
    figures: dict[str, Any] = {"server_call_ms": server, "front_call_ms": of_front, "alone_call_ms": alone}
    for key, than in (("scaling_efficiency", "alone"), ("beside_apart", "apart")):
        figures[key] = statistics.median(sum(one[than].values()) / sum(one["fronts"].values()) for one in rounds)
    figures |= {"run_calls_s": calls, "run_tokens_s": calls * AGENTS.completion.mean}
    figures = rounded(figures) | {"fronts": math.ceil(calls * of_front / 1e3 / SATURATED)}
    costs = json.loads(costs_path.read_text()) | rounded(fitted(found["costs"], server, of_front, alone))
    if save:
        costs_path.write_text(json.dumps(costs, indent=2) + "\n")
    table = bounded(figures, FRONTS_AT_LEAST, FRONTS_AT_MOST)
    report("capacity", {**figures, "costs": costs}, table)
    return 0


def fitted(parts: dict[str, float], server: float, front: float, alone: float) -> dict[str, float]:
    """Returns the costs with which a call of the mean sizes takes the measured milliseconds; `parts` has the others."""
    calls = round(AGENTS.calls.mean)
    contexts = [AGENTS.first_context] + [AGENTS.context.mean] * (calls - 1)
    known = [sum(contexts[: i + 1]) + AGENTS.completion.mean * i for i in range(calls)]
    token = (parts["per_token"] + parts["per_streamed_token"]) / 2
    handled = parts["per_prompt_token"] * statistics.fmean(known) + parts["per_new_token"] * statistics.fmean(contexts)
    handled += token * AGENTS.completion.mean
    return {
        **parts,
        "call": alone / 1e3 - handled - parts["episode"] / calls,
        "front_call": front / 1e3 - handled - parts["front_episode"] / calls,
        "server_call": server / 1e3 - parts["server_episode"] / calls,
    }


# ---- the whole -----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=CASES / "costs.json", help="measured costs, as a JSON object")
    parser.add_argument("--most", type=int, default=512, help="replicas of the largest simulation")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--measure", type=int, metavar="TIMES", help="measure a front so many times; simulate nothing")
    parser.add_argument("--against", type=Path, metavar="DIR", help="the other checkout, for --measure")
    parser.add_argument("--fronts", type=int, metavar="N", help="measure a server with so many fronts instead")
    parser.add_argument("--save", action="store_true", help="write the costs that --fronts measured to --costs")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/scaling.md")
    given = parser.parse_args()
    if given.fronts:
        return measure_fronts(given.fronts, given.measure or 1, given.costs, save=given.save)
    if given.measure:
        return measure(given.measure, given.against)
    progress, output = Console(stderr=True), Console(width=180)
    costs = Costs(**json.loads(given.costs.read_text()))
    result: dict[str, Any] = {"costs": asdict(costs), "limits": rounded(limits(costs))}
    most = 1 if given.quick else given.most
    result["grid"] = loads(costs, [count for count in (1, 8, 64, 512) if count <= most], progress)
    result["variants"] = variants(costs, min(64, most), progress)
    named = {f"{row['num_replicas']} replicas, {row['fronts']} fronts": row for row in result["grid"]}
    cases = {row["case"]: row for row in result["variants"]}
    output.print(grid(named | cases, *COLUMNS))
    if given.write:
        micro = {f"{name}_us": 1e6 * cost for name, cost in asdict(costs).items() if name.endswith("_token")}
        facts = result["limits"] | micro
        rows = {title: {"value": float(f"{facts[name]:.3g}")} for name, title in COST_TITLES.items()}
        page = with_text(PAGE.read_text(), "costs", markdown(rows, {"value": ""}))
        page = with_text(page, "replicas", markdown({name: shares(row) for name, row in named.items()}, COLUMNS))
        PAGE.write_text(with_text(page, "variants", markdown({n: shares(row) for n, row in cases.items()}, COLUMNS)))
    output.print(f"limits: {result['limits']}")
    report("capacity", result, machine=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
