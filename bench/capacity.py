"""How many episodes, replicas and tokens a server carries: `python -m bench.capacity`.

A discrete-event simulation of agents, gateway, journal, replicas and learner, in seconds. It takes the measured costs
of gateway and journal (`cases/costs.json`, or `--costs FILE`) and simulates 100 to 100,000 concurrent episodes on 1 to
1,000 replicas: the resource that saturates first, and the gain of further gateway processes and journals. Replicas and
learner are assumptions: no GPU is needed.

The system is closed: a number of agents plays one episode after another. A call passes the gateway (a FIFO queue with
one server a process), a replica (its running completions advance together, one token a step), and the gateway again,
which handles the tokens, records the call and waits for the disk. Finished groups fill batches; the learner learns
them, one at a time, and publishes. Admission is that of `swarm.mixture.places`: groups wait for a place.

`--measure` measures the CPU of a front process for a call instead, and `--against DIR` that of another checkout
alternately (`bench.front`): `front_call_ratio` is this checkout's cost of a call divided by the other's.

Simplifications: the gateway handles the tokens of a completion at its end. Prompt tokens cost the replica steps of one
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
from bench.machine import CASES, grid, percentile, report

LEARNED = 1000
"""Episodes up to which a simulation lasts until batches were learned. One gateway takes hours for larger batches."""
COLUMNS = ("calls_per_s", "tokens_per_s", "call_s", "call_p95", "gateway", "journal", "replicas", "learner")
COLUMNS += ("publishing", "refused", "stale", "limit")
SATURATED = 0.85  # Share of a resource's time from which it counts as saturated


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
    """CPU seconds of the gateway process, bytes of its journal and memory, and the disk."""

    call: float  # Of a call, besides its tokens
    per_prompt_token: float  # Of each token of the prompt, known or new
    per_new_token: float  # Of each token of the prompt that the gateway did not know
    per_token: float  # Of each token of a plain answer
    per_streamed_token: float
    record: float  # Part of `call` in which it is journalled
    record_token: float
    begin: float
    finish: float
    per_live: float  # Of each begin and finish, for every live episode
    idle_live: float  # A second for every live episode
    route: float  # Of the choice of a replica, for each replica; part of `call` for one
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
    """A point of the simulation. `fronts` are gateway processes that share the agents. With `journals`, that many
    processes record the calls; 0: each front records its own. A batch has as many episodes as there are agents.
    """

    agents: int
    fleet: Fleet
    workload: Workload
    costs: Costs
    fronts: int = 1
    journals: int = 0
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
    gateway: float = 0.0  # Share of the time in which the busiest gateway process computes
    journal: float = 0.0
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
        idle = self.costs.idle_live * plan.agents / plan.fronts
        self._fronts = [Station(self.costs.sync, idle) for _ in range(plan.fronts)]
        self._journals = [Station(self.costs.sync) for _ in range(plan.journals)]
        self._replicas = [Replica(self) for _ in range(plan.fleet.replicas)]
        self._loads: list[tuple[int, int, Replica]] = []
        """Heap of the replicas by load; entries with another load than the replica's are void."""
        self._agents = [Agent(self._fronts[i % plan.fronts]) for i in range(plan.agents)]
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
        for station in (*self._fronts, *self._journals):
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
            gateway=max(station.busy_share(self._now) for station in self._fronts),
            journal=max((station.busy_share(self._now) for station in self._journals), default=0.0),
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
        ready = agent.front.serve(now, self.costs.begin + self.costs.per_live * self._live)
        self.at(agent.front.synced(ready) + agent.turns[agent.turn].seconds, self._send, agent)

    def _next_episode(self) -> list[Turn]:
        return episode(self.plan.workload, next(self._episodes) % NUM_EPISODES)

    def _join(self, agent: Agent) -> bool:
        """True if the agent has a place in a group. See `swarm.mixture.places`."""
        plan, group = self.plan, self._newest
        if group is None or group.dropped or group.members >= plan.group_size:
            batches_ahead = plan.max_staleness + 1 - self._pending
            if len(self._groups) >= self._batch * batches_ahead:
                return False
            group = self._newest = Group()
            self._groups[id(group)] = group
        group.members += 1
        agent.group = group
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
        self._live -= 1
        done = agent.front.serve(now, self.costs.finish + self.costs.per_live * self._live)
        self.at(agent.front.synced(done), self._finished, agent)

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
        work = costs.call / 2 + costs.per_prompt_token * agent.prompt + costs.per_new_token * turn.context
        work += costs.route * self.plan.fleet.replicas
        self.at(agent.front.serve(now, work), self._route, agent)

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
        record = costs.record + costs.record_token * (turn.completion + turn.context)
        self._bytes += costs.bytes_call + costs.bytes_token * (turn.completion + turn.context)
        work = costs.call / 2 + handled
        if not self._journals:
            done = agent.front.serve(now, work)
            self.at(agent.front.synced(done), self._answered, agent)
        else:  # `record` is a part of the measured cost of a call.
            done = agent.front.serve(now, max(0.0, work - record))
            self.at(done, self._recorded, agent, record)

    def _recorded(self, now: float, agent: Agent, record: float) -> None:
        journal = self._journals[id(agent) // 64 % len(self._journals)]
        self.at(journal.synced(journal.serve(now, record)), self._answered, agent)

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
        process = self._journals[0] if self._journals else self._fronts[0]
        process.slow_until = now + 2 * costs.batch_token * tokens
        self._learning_since = now
        self.at(process.slow_until, self._learn, process, tokens)

    def _learn(self, now: float, process: Station, tokens: float) -> None:
        """The batch is built: encode it, send it to all ranks, learn it."""
        fleet, costs = self.plan.fleet, self.costs
        encoded = process.serve(now, costs.rank_token * tokens)
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
    shares = {"gateway": load.gateway, "journal": load.journal, "disk": load.disk, "replicas": load.replicas}
    shares["publish" if load.publishing > load.learner / 2 else "learner"] = load.learner
    name = max(shares, key=lambda name: shares[name])
    return name if shares[name] >= SATURATED else "agents"


def loads(costs: Costs, agents: Sequence[int], replicas: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """The simulated loads of one gateway, except those with far too few or too many replicas."""
    found = []
    for number in agents:
        for count in [count for count in replicas if 1 <= number / count <= 1000]:
            console.print(f"simulating {number} episodes on {count} replicas ...")
            plan = Plan(number, fleet(count), AGENTS, costs)
            if number > LEARNED:
                plan = replace(plan, calls=max(plan.calls, number), batches=0)
            load = Simulation(plan).run()
            found.append({"agents": number, "num_replicas": count, "limit": first_limit(load), **rounded(asdict(load))})
    return found


def variants(costs: Costs, agents: int, replicas: int, console: Console) -> list[dict[str, Any]]:
    """Changes of one load: runs spread over several gateways, and designs that are not built."""
    whole = Plan(agents, fleet(replicas), AGENTS, costs)
    plain = replace(AGENTS, streamed=0.0)
    cases = {"one gateway": (whole, 1)}
    for gateways in (2, 4, 8, 16):
        part = replace(whole, agents=agents // gateways, fleet=fleet(max(1, replicas // gateways)))
        cases[f"{gateways} gateways, each with its own runs"] = part, gateways
    cases["25 times as many of all, 400 such gateways"] = (
        replace(whole, agents=agents // 16, fleet=fleet(max(1, replicas // 16))),
        400,
    )
    for fronts, journals in ((2, 0), (8, 1), (8, 4), (16, 1)):
        design = f"{journals} journal process{'es' if journals > 1 else ''}" if journals else "a journal each"
        cases[f"not built: {fronts} fronts of one run, {design}"] = replace(whole, fronts=fronts, journals=journals), 1
    cases["no call is streamed"] = replace(whole, workload=plain), 1
    found = []
    for name, (plan, times) in cases.items():
        console.print(f"simulating {agents} episodes on {replicas} replicas: {name} ...")
        load = Simulation(replace(plan, batches=1)).run()
        totals = {n: getattr(load, n) * times for n in ("calls_per_s", "tokens_per_s", "episodes_per_s")}
        found.append({"case": name, "limit": first_limit(load), **rounded({**asdict(load), **totals})})
    return found


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


# ---- limits in closed form -------------------------------------------------------------------------------------------


def limits(costs: Costs) -> dict[str, float]:
    """The load at which each part of one gateway saturates, for the workload `AGENTS`, from the costs alone."""
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
    token = AGENTS.streamed * costs.per_streamed_token + (1 - AGENTS.streamed) * costs.per_token
    call = costs.call + costs.per_prompt_token * statistics.fmean(prompts) + costs.per_new_token * context
    call += token * completion + (costs.begin + costs.finish) / calls
    assumed = Fleet()
    cycle = seconds + completion * (assumed.step + assumed.slots / 2 * assumed.step_per_completion)
    tree = calls * (context + completion)
    written = costs.bytes_call + costs.bytes_token * (context + completion)
    held = costs.memory_live + costs.memory_token * tree / 2 + costs.memory_call
    return {
        "cpu_ms_per_call": 1e3 * call,
        "of_it_streaming_ms": 1e3 * AGENTS.streamed * completion * (costs.per_streamed_token - costs.per_token),
        "calls_per_s": 1 / call,
        "tokens_per_s": completion / call,
        "episodes_at_once": cycle / call,
        "replicas": (cycle - seconds) / call / assumed.slots,
        "disk_share": written / call / costs.disk_bandwidth,
        "kb_memory_per_episode": held / 1024,
        "batch_s_per_1000_episodes": 1000 * tree * costs.batch_token,
        "rank_mb_per_1000_episodes": 1000 * tree * costs.rank_bytes_token / 1e6,
        "rank_s_per_1000_episodes": 1000 * tree * costs.rank_token,
    }


# ---- a front process -----------------------------------------------------------------------------------------


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


# ---- the whole -----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=CASES / "costs.json", help="measured costs, as a JSON object")
    parser.add_argument("--most", type=int, default=100_000, help="concurrent episodes of the largest simulation")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--measure", type=int, metavar="TIMES", help="measure a front so many times; simulate nothing")
    parser.add_argument("--against", type=Path, metavar="DIR", help="the other checkout, for --measure")
    given = parser.parse_args()
    if given.measure:
        return measure(given.measure, given.against)
    progress, output = Console(stderr=True), Console(width=180)
    costs = Costs(**json.loads(given.costs.read_text()))
    result: dict[str, Any] = {"costs": asdict(costs), "limits": rounded(limits(costs))}
    most = 100 if given.quick else given.most
    agents = [number for number in (100, 1000, 10_000, 100_000) if number <= most]
    result["grid"] = loads(costs, agents, (1, 10) if given.quick else (1, 10, 100, 1000), progress)
    result["variants"] = variants(costs, min(4000, most), 4 if given.quick else 48, progress)
    named = {f"{row['agents']} episodes, {row['num_replicas']} replicas": row for row in result["grid"]}
    output.print(grid(named | {row["case"]: row for row in result["variants"]}, *COLUMNS))
    output.print(f"limits: {result['limits']}")
    report("capacity", result, machine=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
