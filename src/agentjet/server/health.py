"""The health of a run: one table of rules, `RULES`, which the page, `agentjet watch` and `agentjet status` share.

A rule judges the newest steps, the present batch or the server. It returns a finding, or None without facts. In a run
with named policies a rule on a metric of a policy reports the worst policy.

A rule of `STATED` states a fact. Each other rule is an estimate: `python -m bench.alarms` measures its false alarms in
whole healthy runs, and its power at the smallest damage that its documentation names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from agentjet.config import JobConfig
from agentjet.errors import counted
from agentjet.protocol import EvaluationView, HealthRuleView, HealthView, Level, duration, newest_held_out
from agentjet.server.learning import REWARD, find_fall, held_out_fall, learning, of_present_code, reward_metrics, rise
from agentjet.server.monitoring import BOUND, Gap, divergence, metrics_not_finite
from agentjet.swarm.episodes import Refill, is_gone
from agentjet.swarm.state import ABSENT_SECONDS, OutcomeCounts
from agentjet.types import SOLE_POLICY, EngineState

PAGE = "docs/health.md"
TEXT = Path(__file__).with_name("health.md")
"""The page's original, which `make docs` copies."""
NEWEST = 5
"""Steps that most rules judge."""
UNLIKELY = 1e-5
"""Probability below which chance is ruled out. It is small because one looks after every step of a run."""
LOST = ("episodes/aborted", "episodes/expired")
"""Metrics of episodes that ended without a reward, without those that were not needed."""
SEVERITY: tuple[Level, ...] = ("ok", "warn", "bad")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of a run that is being served."""

    state: EngineState
    reason: str = ""
    refusal: str = ""
    """The disk's refusal to write the journal, or ''."""
    workers_started: int = 1
    workers_hung: int = 0
    unusable_checkpoints: int = 0
    checkpoint_error: str = ""
    """Error of the newest checkpoint, or ''."""
    client_seconds: float | None = None
    """Seconds since a client was last seen; None before the first one."""
    is_over: bool = False
    """True if `job.max_steps` is reached."""
    problem: str = ""
    """A sentence about what hinders the present work, such as a teacher that does not answer, or ''."""
    loop: Gap | None = None
    """The worst gap of the event loop in the last ten minutes."""


class SilentEpisode(NamedTuple):
    """The live training episode whose last call, or begin, is the oldest."""

    id: str
    task_id: str
    client_id: str
    seconds: float
    unheard: float = 0.0
    """Seconds since a call or a heartbeat of it."""
    expires_in: float = 0.0
    """Seconds until its lease ends."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts that the rules judge."""

    steps: Sequence[Mapping[str, float]] = ()
    """Metrics of the newest steps, the newest last."""
    job: JobConfig | None = None
    versions: Sequence[int] = ()
    """The policy version after each step."""
    evaluations: Sequence[EvaluationView] = ()
    finished: int = 0
    """Finished episodes of the present batch."""
    lost: int = 0
    """Aborted and expired episodes of the present batch."""
    reason: str = ""
    """The most frequent reason of the newest lost episodes."""
    failing_client: str = ""
    """The client of all episodes with this reason, or '' for several."""
    checkpoints: Sequence[int] | None = None
    """Policy versions of the checkpoints; None if they are not known."""
    silent: SilentEpisode | None = None
    longest_seconds: float | None = None
    """The longest duration of the newest finished training episodes; None before the first."""
    newest_code: tuple[str, OutcomeCounts] | None = None
    """The code version used last and its outcomes, if there are others."""
    failing_code: str = ""
    """The code version of all episodes with `reason`, or '' for several."""
    refill: Refill | None = None
    first: Sequence[Mapping[str, float]] = ()
    """Metrics of the run's first steps; empty if they are not known."""
    policies: Sequence[str] = ()
    """The policies that the settings name."""
    server: ServerFacts | None = None

    @property
    def num_lost(self) -> int:
        """Aborted and expired episodes of the present batch and of the newest ones."""
        return self.lost + round(sum(sum(step.get(name, 0.0) for name in LOST) for step in self.steps[-NEWEST:]))


class RuleResult(NamedTuple):
    """Result of a rule."""

    level: Level
    text: str


Judge = Callable[[RunFacts], RuleResult | None]


@cache
def remedies() -> Mapping[str, str]:
    """Returns the first paragraph of each rule in the documentation. A link is the path of its file."""
    sections = re.split(r"^### ", TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    plain = (re.sub(r"\[[^\]]*\]\(([^)#]*)[^)]*\)", r"`docs/\1`", section) for section in sections)
    return {
        name.strip(): " ".join(text.strip().partition("\n\n")[0].split())
        for name, _, text in (one.partition("\n") for one in plain)
    }


def health(facts: RunFacts) -> HealthView:
    found = {name: judge(facts) for name, judge in RULES.items()}
    rules = [
        HealthRuleView(
            name=name,
            level=finding.level,
            text=finding.text,
            docs=f"{PAGE}#{name}",
            remedy="" if finding.level == "ok" else remedies().get(name, ""),
        )
        for name, finding in found.items()
        if finding is not None
    ]
    return HealthView(learning=learning(facts.steps, facts.evaluations, facts.first, facts.policies), rules=rules)


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def values_of(facts: RunFacts, metric: str) -> dict[str, list[float]]:
    """Values of a metric over all known steps, by the policy in front of its name, or by '' without one."""
    names = {policy: f"{policy}/{metric}" if policy else metric for policy in ("", *facts.policies)}
    found = {policy: [step[name] for step in facts.steps if name in step] for policy, name in names.items()}
    return {policy: values for policy, values in found.items() if values}


def newest(facts: RunFacts, metric: str) -> float:
    return sum(step.get(metric, 0.0) for step in facts.steps[-NEWEST:])


def exceeds(count: float, total: float, usual: float) -> bool:
    """True if chance hardly explains `count` of `total` at a probability of `usual` (Chernoff's bound)."""
    if total <= 0 or count <= usual * total:
        return False
    share = min(count / total, 1.0)
    rest = (1 - share) * log((1 - share) / (1 - usual)) if share < 1 else 0.0
    return total * (share * log(share / usual) + rest) >= -log(UNLIKELY)


def worst(findings: Mapping[str, RuleResult | None] | Mapping[str, RuleResult]) -> RuleResult | None:
    """Returns the worst finding, with its policy if there are several."""
    known = {policy: finding for policy, finding in findings.items() if finding is not None}
    if not known:
        return None
    policy = max(known, key=lambda name: SEVERITY.index(known[name].level))
    level, text = known[policy]
    return RuleResult(level, f"{policy}: {text}" if policy else text)


def of_each_policy(metric: str, judge: Callable[[list[float], RunFacts], RuleResult | None]) -> Judge:
    return lambda facts: worst({policy: judge(values, facts) for policy, values in values_of(facts, metric).items()})


def _name(policy: str, metric: str) -> str:
    return f"{policy}/{metric}" if policy else metric


def graded(share: float, warn: float, bad: float) -> Level:
    return "bad" if share >= bad else "warn" if share >= warn else "ok"


# ---- the server ----------------------------------------------------------------------------------------------------

RESTARTS = 3
"""Starts of the worker that are worth a look."""


def engine(facts: RunFacts) -> RuleResult | None:
    server = facts.server
    if server is None:
        return None
    if server.state == "failed":
        return RuleResult("bad", f"the engine failed: {server.reason}")
    if server.state == "loading" and server.reason:
        return RuleResult("warn", server.reason)
    if server.problem:
        return RuleResult("warn", server.problem)
    restarts = server.workers_started - 1
    hung = f" ({server.workers_hung} hung)" if server.workers_hung else ""
    ended = f"{counted(restarts, 'worker')} ended{hung}, now replaced" if restarts > 0 else ""
    return RuleResult("warn" if restarts >= RESTARTS or hung else "ok", ended or f"the engine is {server.state}")


def disk(facts: RunFacts) -> RuleResult | None:
    server = facts.server
    if server is None:
        return None
    if server.refusal:
        return RuleResult("bad", f"the disk refuses the journal: {server.refusal}")
    if server.checkpoint_error:
        return RuleResult("bad", f"the newest checkpoint failed: {server.checkpoint_error}")
    if server.unusable_checkpoints:
        unusable = counted(server.unusable_checkpoints, "unusable checkpoint")
        return RuleResult("warn", f"{unusable}: see unusable_checkpoints of the status")
    return RuleResult("ok", "journal and checkpoints are written")


def clients(facts: RunFacts) -> RuleResult | None:
    server = facts.server
    if server is None or server.is_over or server.client_seconds is None:
        return None
    seconds = server.client_seconds
    if seconds < ABSENT_SECONDS:
        return RuleResult("ok", f"a client was seen {seconds:.0f} s ago")
    return RuleResult("warn", f"no client was seen for {seconds / 60:.0f} minutes: training waits for episodes")


HELD_SECONDS = 0.25
"""CPU seconds of a gap of the event loop that agents notice."""
LONG_HELD_SECONDS = 3.0
"""CPU seconds of a gap that leases are renewed after."""


def loop(facts: RunFacts) -> RuleResult | None:
    """States the longest gap of the event loop, in CPU seconds, which do not depend on other programs."""
    gap = facts.server.loop if facts.server is not None else None
    if gap is None:
        return None
    if gap.cpu < HELD_SECONDS:
        return RuleResult(
            "ok", f"the server was not held for more than {max(gap.cpu, BOUND) * 1000:.0f} ms of CPU time"
        )
    held_by = gap.held_by or "code that is not AgentJet's"
    text = f"the server answered nothing for {gap.cpu:.2g} s of CPU time ({gap.wall:.2g} s), held by {held_by}"
    return RuleResult(graded(gap.cpu, HELD_SECONDS, LONG_HELD_SECONDS), text)


# ---- episodes ------------------------------------------------------------------------------------------------------

DROPPED = "groups/dropped"
"""Metric of all dropped groups; its name with `_REASON` has those of one reason."""
SILENT_LIMITS = ((60.0, 8.0), (300.0, 15.0))
"""Seconds without a call, and multiples of the longest duration, from which an episode is `warn`, and `bad`."""
SILENT_UNKNOWN = 300.0
"""The same, and at most `warn`, as long as no duration is known."""
FAILING, USUAL_FAILING = 0.3, 0.1
"""Share of lost episodes at which the rule is bad, and the share that is usual."""


def silent(facts: RunFacts) -> RuleResult | None:
    """Compares the time without a call with the longest of the newest whole episodes. It warns at most if that is
    unknown. An episode without heartbeats is a fact.
    """
    if facts.silent is None:
        return None
    one, longest = facts.silent, facts.longest_seconds
    client_is_gone = facts.job is not None and is_gone(one.unheard, facts.job.lease_seconds)
    if longest is None:
        level: Level = "warn" if one.seconds >= SILENT_UNKNOWN else "ok"
    else:
        level = graded(one.seconds, *(max(least, times * longest) for least, times in SILENT_LIMITS))
    if level == "ok" and not client_is_gone:
        return RuleResult("ok", f"the longest time since a call of a live episode is {duration(one.seconds)}")
    text = f"episode {one.id} of task {one.task_id}, client {one.client_id}, has made no call for"
    if client_is_gone:
        text += f" {duration(one.seconds)}, and sent no heartbeat for {duration(one.unheard)}: its client is gone. The"
        return RuleResult(
            "warn", f"{text} episode ends without a reward in {duration(one.expires_in)}, and its place is free"
        )
    known = "no episode has finished yet" if longest is None else f"whole episodes took at most {duration(longest)}"
    return RuleResult(level, f"{text} {duration(one.seconds)}; {known}: does a tool hang?")


REASONS = 20
"""Newest lost episodes whose reasons are counted."""


def episodes(facts: RunFacts) -> RuleResult | None:
    """Judges the present batch, which may never end, then the newest batches with it.

    Failures of an older code version do not count against the newest one.
    """
    came, gone, where = facts.finished, facts.lost, "this batch"
    if not exceeds(gone, came + gone, USUAL_FAILING):
        came, gone = came + round(newest(facts, "batch/episodes")), facts.num_lost
        where = "this batch and the newest ones"
    if not came + gone:
        return None
    text = f"{gone} of {came + gone} episodes of {where} ended without a reward"
    by = f", all of client {facts.failing_client}" if facts.failing_client else ""
    code = f", all of code version {facts.failing_code}" if facts.failing_code else ""
    known = min(facts.num_lost, REASONS)
    among = f" among the newest {known}" if known != gone else ""
    text += f"; most often{among}{by}{code}: {facts.reason}" if gone and facts.reason else ""
    level: Level = "ok"
    if exceeds(gone, came + gone, USUAL_FAILING):
        level = "bad" if gone / (came + gone) >= FAILING else "warn"
    if level != "ok" and facts.newest_code is not None and facts.failing_code not in ("", facts.newest_code[0]):
        version, counts = facts.newest_code
        ended = counts.finished + counts.aborted
        if not exceeds(counts.aborted, ended, USUAL_FAILING):
            return RuleResult("ok", f"{text}. Of the newest code version {version}, {counts.aborted} of {ended} did")
    return RuleResult(level, text)


def refill(facts: RunFacts) -> RuleResult | None:
    one = facts.refill
    if one is None:
        return None
    groups = "1 group has" if one.num_groups == 1 else f"{one.num_groups} groups have"
    why = f" ({facts.reason})" if facts.reason else ""
    return RuleResult(
        "warn",
        f"the batch waits because episodes failed{why}: {groups} too few members, and no member is live. Client "
        f"{one.client_id} can begin another one; the group closes in {one.seconds:.0f} s. Mend the agent; a lower "
        "job.lease_seconds shortens the wait, and job.spare_episodes replaces failures in advance",
    )


TEACHES_NOTHING, USUAL_EQUAL = 0.8, 0.5
"""Share of groups without variance at which the rule warns, and the share that may be usual."""


def groups(facts: RunFacts) -> RuleResult | None:
    """Groups in which every reward is the highest of the run are solved, if others had lower rewards."""
    known = [step for step in facts.steps if "groups/zero_variance" in step]
    if not known:
        return None
    size = facts.job.batch_size if facts.job is not None else 1
    judged = known[-max(NEWEST, -(-JUDGED_GROUPS // size)) :]
    most, least = _bounds([*facts.first, *facts.steps])
    solved = sum(step.get("groups/at_best", 0.0) for step in judged if most > least and step.get("reward/max") == most)
    equal, num = sum(step["groups/zero_variance"] for step in judged), len(judged)
    wasted = max(0.0, equal - solved)
    if solved > num / 2 and wasted < num / 2:
        word = "the run is solved: " if solved == num else ""
        return RuleResult(
            "ok", f"{word}{solved / num:.0%} of the groups are solved: each of their rewards is {most:.3g}"
        )
    text = f"{wasted / num:.0%} of the groups teach nothing: all rewards of a group are equal"
    newest_step = judged[-1]
    if newest_step.get("reward/std") == 0.0 and REWARD in newest_step:
        every = f"every reward is {newest_step[REWARD]:.3g}"
        text += f". In the newest step {every}: check a few answers and their rewards by hand"
    if num >= NEWEST and wasted == num:
        return RuleResult("bad", text)
    is_sure = wasted >= TEACHES_NOTHING * num and exceeds(wasted * size, num * size, USUAL_EQUAL)
    return RuleResult("warn" if is_sure else "ok", text)


def is_solved(facts: RunFacts) -> bool:
    """True if each reward of the newest step is the highest of the run, and there were lower ones."""
    most, least = _bounds([*facts.first, *facts.steps])
    newest_step = facts.steps[-1] if facts.steps else {}
    return most > least and newest_step.get(REWARD) == newest_step.get("reward/max", -inf) == most


JUDGED_GROUPS = 40
"""Groups that the rule `groups` needs: more than the newest steps, if batches are small."""


def _bounds(steps: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    most = max((step["reward/max"] for step in steps if "reward/max" in step), default=0.0)
    return most, min((step[REWARD] for step in steps if REWARD in step), default=0.0)


MEANT = ("surplus", "rolled_back", "zero_variance")
"""Reasons for which groups are dropped on purpose: spare ones, those that the operator undid, and those without
variance that the recipe replaces, as at the end of a solved run.
"""


DROPPING, USUAL_DROPPED = 0.5, 0.2
"""Share of dropped groups at which the rule warns, and the share that is usual."""


def dropped(facts: RunFacts) -> RuleResult | None:
    if not facts.steps or facts.job is None:
        return None
    counts: dict[str, float] = {}
    for step in facts.steps[-NEWEST:]:
        for name in [name for name in step if name.startswith(DROPPED) and name != DROPPED]:
            if (reason := name.removeprefix(f"{DROPPED}_")) not in MEANT:
                counts[reason] = counts.get(reason, 0.0) + step[name]
    lost, trained = sum(counts.values()), facts.job.batch_size * len(facts.steps[-NEWEST:])
    main = max(counts, key=lambda name: counts[name]) if lost else ""
    text = f"{lost:.0f} of {lost + trained:.0f} groups were dropped" + (f", most of them as {main}" if main else "")
    is_sure = lost >= DROPPING * (lost + trained) and exceeds(lost, lost + trained, USUAL_DROPPED)
    return RuleResult("warn" if is_sure else "ok", text)


def shares(count: float, total: float, usual: float, limits: tuple[float, float]) -> Level:
    """Level of a share: at least a limit, and beyond chance at the usual share."""
    return graded(count / total, *limits) if exceeds(count, total, usual) else "ok"


def refused(facts: RunFacts) -> RuleResult | None:
    if not any("batch/unscorable" in step for step in facts.steps[-NEWEST:]):
        return None
    num, count = newest(facts, "batch/episodes"), newest(facts, "batch/unscorable")
    if not num:
        return None
    text = f"requests were refused in {count / num:.0%} of the episodes, whose rewards may judge the refusals"
    return RuleResult(shares(count, num, 0.01, (0.1, 0.5)), text)


def images(facts: RunFacts) -> RuleResult | None:
    if not (count := newest(facts, "batch/omitted")):
        return None
    return RuleResult(
        "warn",
        f"in {count:.0f} of {newest(facts, 'batch/episodes'):.0f} episodes images, documents, audio or video were left "
        'out, because job.images = "omit": prompts that differ only in them are the same to the policy',
    )


FEWEST_OFFERS = 200
"""Calls with tools from which none called is worth a look."""


def tools(facts: RunFacts) -> RuleResult | None:
    offered, called = (sum(step.get(f"tools/{name}", 0.0) for step in facts.steps) for name in ("offered", "called"))
    if not offered:
        return None
    if called or offered < FEWEST_OFFERS:
        return RuleResult("ok", f"tools were called in {called:.0f} of the {offered:.0f} calls that offered them")
    return RuleResult("warn", f"tools were offered in {offered:.0f} calls, and none was called")


def reward(facts: RunFacts) -> RuleResult | None:
    """Judges rewards that were higher and are now all the same, as after an update that broke the policy."""
    now = next((step[REWARD] for step in reversed(facts.steps) if REWARD in step), None)
    if now is None:
        return None
    fall = find_fall(facts.steps, facts.job.batch_size if facts.job is not None else 0)
    if fall is None:
        return RuleResult("ok", f"the newest mean reward is {now:.3g}")
    if fall.is_chance:
        return RuleResult(
            "ok", f"all rewards of the newest step are {fall.now:.3g}; they were up to {fall.highest:.3g}"
        )
    last = facts.versions[fall.last]
    question = f"did the update of step {last} break the policy? Lower job.optimizer.lr and {_way_back(facts, last)}"
    if fall.new_code:
        question = f"does the new code, a tool or a reward function fail? Or {question}"
    else:
        question += "; or did the agent, its tools or its rewards change then?"
    text = f"rewards were up to {fall.highest:.3g} until step {last}, and all are {fall.now:.3g} since"
    return RuleResult("bad", f"{'; '.join([text, *fall.signs])}: {question}")


def _way_back(facts: RunFacts, step: int) -> str:
    """The rollback that undoes a step, if a checkpoint is old enough."""
    if facts.checkpoints is None and step > 1:
        return f"go back to version {step - 1} or before (agentjet checkpoints rollback)"
    older = [version for version in facts.checkpoints or () if version < step]
    if older:
        return f"go back to the checkpoint of version {max(older)} (agentjet checkpoints rollback {max(older)})"
    return "start again, because no checkpoint is older than that step"


def truncated(facts: RunFacts) -> RuleResult | None:
    """Names the limit that cut most of the answers: that of the job, the agents' own, or the context.

    The agents' own is a choice of their author, so it is only worth a look if besides all rewards are equal.
    """
    judged = [step for step in facts.steps[-NEWEST:] if "completion/truncated" in step]
    if not judged:
        return None
    share = fmean([step["completion/truncated"] for step in judged])
    calls = sum(step.get("batch/episodes", 1.0) * step.get("episode/num_turns", 1.0) for step in judged)
    level = shares(share * calls, calls, 0.05, (0.15, 0.5))
    limit, is_chosen = cutting_limit(judged, facts.job)
    if is_chosen and (len(judged) < NEWEST or any(step.get("reward/std") for step in judged)):
        level = "ok"
    start, now = _start_and_now(_of_present_code(facts), REWARD)
    if level == "bad" and rise(start, now) >= LIKELY:
        level, limit = "warn", f"{limit}; the reward rose nevertheless, from {fmean(start):.3g} to {fmean(now):.3g}"
    return RuleResult(level, f"{share:.0%} of the answers were cut at {limit}")


def cutting_limit(steps: Sequence[Mapping[str, float]], job: JobConfig | None) -> tuple[str, bool]:
    """A phrase for the limit that cut most answers of these steps, and whether the agents' author chose it."""
    cut, own, full = (
        sum(step.get(name, 0.0) for step in steps)
        for name in ("completion/truncated", "overridden/max_tokens", "completion/context_full")
    )
    of_job = "job.max_tokens" + (f" = {job.max_tokens}" if job is not None else "")
    if cut - own - full >= max(own, full):
        return of_job, False
    if full >= own:
        return f"the end of the context (model.context_length), not at {of_job}", False
    limits = {step.get("overridden/limit", 0.0) for step in steps if step.get("overridden/max_tokens")}
    limit = f"max_tokens = {max(limits):.0f}" if len(limits) == 1 and all(limits) else "limits (max_tokens)"
    return f"{limit} of the agent's own requests, not at {of_job}", True


def held_out(facts: RunFacts) -> RuleResult | None:
    known = newest_held_out(facts.evaluations)
    if not known:
        return None
    if fallen := held_out_fall(facts.evaluations):
        return RuleResult("bad", fallen)
    return RuleResult("ok", f"held-out score {known[-1].score:.3g} at version {known[-1].policy_version}")


# ---- learning ------------------------------------------------------------------------------------------------------

JUMP = 10.0
"""Multiple of its median at which a gradient norm is worth a look."""
FEWEST_NORMS = 8
MISMATCH = 0.01
"""Divergence per token between sampler and learner, in nats. Rounding causes a thousandth of it."""
STALE_MISMATCH = 0.1
"""The same with `job.max_staleness`, where older weights sampled some tokens."""


def weights(facts: RunFacts) -> RuleResult | None:
    if not values_of(facts, "weights/finite"):
        return None
    reason = divergence(facts.steps[-1])
    return RuleResult("bad", reason) if reason else RuleResult("ok", "all weights are finite")


def metrics(facts: RunFacts) -> RuleResult | None:
    """Weights that are not finite explain metrics that are not."""
    if not facts.steps or facts.job is None or divergence(facts.steps[-1]):
        return None
    reason = metrics_not_finite(facts.steps[-NEWEST:], facts.job)
    return RuleResult("warn", reason) if reason else RuleResult("ok", "all metrics are finite")


def update(facts: RunFacts) -> RuleResult | None:
    """Steps that teach a policy nothing do not count. A schedule that has ended is the first cause to name."""
    found: dict[str, RuleResult] = {}
    for policy in values_of(facts, "weights/sampler"):
        changes, norm = _name(policy, "weights/sampler"), _name(policy, "optim/grad_norm")
        taught = [step for step in facts.steps if step.get(norm, 1.0) and step.get("groups/zero_variance") != 1.0]
        newest_ones = [step[changes] for step in taught if changes in step][-NEWEST:]
        found[policy] = _schedule_end(facts, policy) or RuleResult("ok", "the steps change the weights that sample")
        if found[policy].level == "ok" and len(newest_ones) == NEWEST and not any(newest_ones):
            text = f"the newest {NEWEST} steps with a gradient changed not one bit of the weights that sample"
            found[policy] = RuleResult("bad", f"{text}: is job.optimizer.lr too low?")
    return worst(found)


def _schedule_end(facts: RunFacts, policy: str) -> RuleResult | None:
    if facts.job is None or facts.steps[-1].get(_name(policy, "optim/lr")) != 0:
        return None
    optimizer = facts.job.optimizer_of(policy or SOLE_POLICY)
    if optimizer.schedule == "constant":
        return None
    key = f"job.optimizers.{policy}" if policy in facts.job.optimizers else "job.optimizer"
    return RuleResult(
        "bad",
        f"the schedule ended at step {optimizer.total_steps} ({key}.total_steps): the learning rate is 0, and further "
        "steps change nothing. Raise it, or end the run with job.max_steps",
    )


def gradient(facts: RunFacts) -> RuleResult | None:
    skipped = {policy: _skipped(values[-NEWEST:]) for policy, values in values_of(facts, "optim/skipped_steps").items()}
    norms = {policy: _norms(values) for policy, values in values_of(facts, "optim/grad_norm").items()}
    found = [finding for finding in (worst(skipped), worst(norms)) if finding is not None]
    return max(found, key=lambda finding: SEVERITY.index(finding.level), default=None)


def _skipped(newest: list[float]) -> RuleResult | None:
    num = sum(value > 0 for value in newest)
    if not num:
        return None
    return RuleResult(
        "bad" if num > len(newest) / 2 else "warn",
        f"{num} of the newest {len(newest)} steps had a gradient that is not finite: they changed nothing",
    )


def _norms(values: list[float]) -> RuleResult:
    earlier = [value for value in values[:-1] if value > 0]  # A batch without variance has the norm 0.
    usual = median(earlier) if len(earlier) >= FEWEST_NORMS else values[-1]
    if values[-1] > JUMP * usual > 0:
        return RuleResult("warn", f"the gradient norm is {values[-1]:.3g}, {values[-1] / usual:.0f} times its median")
    return RuleResult("ok", f"the gradient is finite, its norm {values[-1]:.3g}")


def mismatch(values: list[float], facts: RunFacts) -> RuleResult | None:
    usual = median(values[-NEWEST:])
    bound = STALE_MISMATCH if facts.job is not None and facts.job.max_staleness else MISMATCH
    text = f"sampler and learner differ by {usual:.2g} nats a token"
    return RuleResult(graded(usual, bound, 10 * bound), text)


def entropy(facts: RunFacts) -> RuleResult | None:
    """An entropy that falls while the reward rises, or that fell while it rose, is learning. Another version of the
    agent's code has other answers and rewards, so only steps of the present one are compared.
    """
    facts = _of_present_code(facts)
    metrics = reward_metrics(facts.steps, facts.policies)
    return worst(
        {
            policy: _entropy(values, facts, policy, metrics)
            for policy, values in values_of(facts, "policy/entropy").items()
        }
    )


def _entropy(values: list[float], facts: RunFacts, policy: str, metrics: Mapping[str, str]) -> RuleResult:
    early, late = fmean(values[:NEWEST]), fmean(values[-NEWEST:])
    text = f"the mean entropy of {NEWEST} steps went from {early:.3g} to {late:.3g} nats a token in {len(values)} steps"
    if len(values) < 2 * NEWEST or late >= early / 2:
        return RuleResult("ok", text)
    start, now = _start_and_now(facts, metrics.get(policy, REWARD))
    if min(len(start), len(now)) < 2 or rise(start, now) >= LIKELY:
        return RuleResult("ok", text)
    return RuleResult("warn", f"{text}, and the mean reward from {fmean(start):.3g} to {fmean(now):.3g}")


def _of_present_code(facts: RunFacts) -> RunFacts:
    """The facts with the steps since the newest change of the agent's code. They do not fit `versions` any more."""
    steps, first, _ = of_present_code(facts.steps, facts.first)
    return replace(facts, steps=steps, first=first)


def _start_and_now(facts: RunFacts, metric: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values of the first steps and of the newest ones. A fast policy rises within a few steps, so the start is
    short.
    """
    first = tuple(step[metric] for step in facts.first or facts.steps if metric in step)
    latest = tuple(step[metric] for step in facts.steps if metric in step)
    return first[:START], latest[START:][-2 * NEWEST :]


LIKELY, START = 1.0, 3
"""Standard deviations from which a rise of the reward since its first steps excuses a fall of the entropy and cut
answers, and the number of these steps."""


# ---- conversations ---------------------------------------------------------------------------------------------------


def delivery(facts: RunFacts) -> RuleResult | None:
    names = ["", *facts.policies]
    if not any(_name(policy, "forest/orphan_tokens") in step for step in facts.steps[-NEWEST:] for policy in names):
        return None
    orphans = sum(newest(facts, _name(policy, "forest/orphan_tokens")) for policy in names)
    total = orphans + newest(facts, "batch/sampled_tokens")
    num, share = newest(facts, "batch/episodes"), orphans / total if total else 0.0
    level = shares(share * num, num, 0.03, (0.1, 0.5)) if num else "ok"  # The tokens of an episode are lost together.
    return RuleResult(level, f"{share:.0%} of the sampled tokens did not reach their agents")


def drift(values: list[float], facts: RunFacts) -> RuleResult | None:
    if not any(values):
        return RuleResult("ok", "every trained token is the sampled one")
    return RuleResult("bad", "tokens of the journal differ from the sampled ones: the journal is damaged")


RULES: Mapping[str, Judge] = {
    "engine": engine,
    "disk": disk,
    "loop": loop,
    "clients": clients,
    "weights": weights,
    "metrics": metrics,
    "gradient": gradient,
    "update": update,
    "mismatch": of_each_policy("policy/mismatch_kl", mismatch),
    "entropy": entropy,
    "reward": reward,
    "groups": groups,
    "silent": silent,
    "episodes": episodes,
    "refill": refill,
    "dropped": dropped,
    "truncated": truncated,
    "refused": refused,
    "images": images,
    "tools": tools,
    "delivery": delivery,
    "drift": of_each_policy("forest/drift", drift),
    "held_out": held_out,
}
"""The rules, causes before their consequences. Each name is the anchor of a section in the documentation."""

STATED = frozenset(
    ("engine", "disk", "loop", "clients", "weights", "metrics", "update", "refill", "images", "tools", "drift")
)
"""The rules that state a fact. The other ones are estimates."""
