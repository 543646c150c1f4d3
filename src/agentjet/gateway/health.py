"""The health of a run: one table of rules, `RULES`, which the page, `agentjet watch` and `agentjet status` share.

A rule judges the newest steps, the present batch or the server. It returns a finding, or None without facts. In a run
with named policies a rule on a metric of a policy reports the worst policy. Thresholds mark what is worth a look; they
are not tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from agentjet.config import JobConfig
from agentjet.gateway.learning import REWARD, held_out_fall, learning
from agentjet.gateway.loop_lag import BOUND, Gap
from agentjet.gateway.observability import divergence
from agentjet.gateway.reward_fall import find_fall
from agentjet.protocol import REPORTED_BATCHES, EvaluationView, HealthRuleView, HealthView, Level, duration
from agentjet.types import EngineState

PAGE = "docs/health.md"
TEXT = Path(__file__).with_name("health.md")
"""The page's original, which `make docs` copies."""
NEWEST = 5
"""Steps that most rules judge."""
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
    loop: Gap | None = None
    """The worst gap of the event loop in the last ten minutes."""


class SilentEpisode(NamedTuple):
    """The live training episode whose last call, or begin, is the oldest."""

    id: str
    task_id: str
    client_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Facts:
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
    usual_seconds: float | None = None
    """The median duration of the newest finished training episodes; None before the first."""
    server: ServerFacts | None = None

    @property
    def num_lost(self) -> int:
        """Aborted and expired episodes of the present batch and of the newest ones."""
        return self.lost + round(sum(sum(step.get(name, 0.0) for name in LOST) for step in self.steps[-NEWEST:]))


class Finding(NamedTuple):
    """Result of a rule."""

    level: Level
    text: str


Judge = Callable[[Facts], Finding | None]


@cache
def remedies() -> Mapping[str, str]:
    """Returns the first paragraph of each rule in the documentation. A link is the path of its file."""
    sections = re.split(r"^### ", TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    plain = (re.sub(r"\[[^\]]*\]\(([^)#]*)[^)]*\)", r"`docs/\1`", section) for section in sections)
    return {
        name.strip(): " ".join(text.strip().partition("\n\n")[0].split())
        for name, _, text in (one.partition("\n") for one in plain)
    }


def health(facts: Facts) -> HealthView:
    """Returns the answers for a run."""
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
    return HealthView(learning=learning(facts.steps, facts.evaluations), rules=rules)


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def values_of(facts: Facts, metric: str) -> dict[str, list[float]]:
    """Values of a metric over all known steps, by the policy in front of its name, or by '' without one."""
    found: dict[str, list[float]] = {}
    for step in facts.steps:
        for name, value in step.items():
            policy, is_it, rest = name.partition(metric)
            if is_it and not rest and not policy.startswith("agent/"):  # Clients choose the names after `agent/`.
                found.setdefault(policy.rstrip("/"), []).append(value)
    return found


def worst(findings: Mapping[str, Finding | None]) -> Finding | None:
    """Returns the worst finding, with its policy if there are several."""
    known = {policy: finding for policy, finding in findings.items() if finding is not None}
    if not known:
        return None
    policy = max(known, key=lambda name: SEVERITY.index(known[name].level))
    level, text = known[policy]
    return Finding(level, f"{policy}: {text}" if policy else text)


def of_each_policy(metric: str, judge: Callable[[list[float], Facts], Finding | None]) -> Judge:
    """A rule on the values of a metric, applied to each policy."""
    return lambda facts: worst({policy: judge(values, facts) for policy, values in values_of(facts, metric).items()})


def graded(share: float, warn: float, bad: float) -> Level:
    return "bad" if share >= bad else "warn" if share >= warn else "ok"


# ---- the server ----------------------------------------------------------------------------------------------------

RESTARTS = 3
"""Starts of the worker that are worth a look."""
SILENT_SECONDS = 300.0


def engine(facts: Facts) -> Finding | None:
    server = facts.server
    if server is None:
        return None
    if server.state == "failed":
        return Finding("bad", f"the engine failed: {server.reason}")
    if server.state == "loading" and server.reason:
        return Finding("warn", server.reason)
    restarts = server.workers_started - 1
    hung = f", {server.workers_hung} of them because they hung" if server.workers_hung else ""
    text = f"{restarts} workers ended and were replaced{hung}" if restarts > 0 else f"the engine is {server.state}"
    return Finding("warn" if restarts >= RESTARTS or hung else "ok", text)


def disk(facts: Facts) -> Finding | None:
    server = facts.server
    if server is None:
        return None
    if server.refusal:
        return Finding("bad", f"the disk refuses the journal: {server.refusal}")
    if server.checkpoint_error:
        return Finding("bad", f"the newest checkpoint failed: {server.checkpoint_error}")
    if server.unusable_checkpoints:
        return Finding(
            "warn", f"{server.unusable_checkpoints} checkpoints are unusable: see unusable_checkpoints of the status"
        )
    return Finding("ok", "journal and checkpoints are written")


def clients(facts: Facts) -> Finding | None:
    server = facts.server
    if server is None or server.is_over or server.client_seconds is None:
        return None
    seconds = server.client_seconds
    if seconds < SILENT_SECONDS:
        return Finding("ok", f"a client was seen {seconds:.0f} s ago")
    return Finding("warn", f"no client was seen for {seconds / 60:.0f} minutes: training waits for episodes")


HELD_SECONDS = 0.25
"""CPU seconds of a gap of the event loop that agents notice."""
LONG_HELD_SECONDS = 3.0
"""CPU seconds of a gap that leases are renewed after."""


def loop(facts: Facts) -> Finding | None:
    """States the longest gap of the event loop, in CPU seconds, which do not depend on other programs."""
    gap = facts.server.loop if facts.server is not None else None
    if gap is None:
        return None
    if gap.cpu < HELD_SECONDS:
        return Finding("ok", f"the server was not held for more than {max(gap.cpu, BOUND) * 1000:.0f} ms of CPU time")
    held_by = gap.held_by or "code that is not AgentJet's"
    text = f"the server answered nothing for {gap.cpu:.2g} s of CPU time ({gap.wall:.2g} s), held by {held_by}"
    return Finding(graded(gap.cpu, HELD_SECONDS, LONG_HELD_SECONDS), text)


# ---- episodes ------------------------------------------------------------------------------------------------------

DROPPED = "groups/dropped"
"""Metric of all dropped groups; its name with `_REASON` has those of one reason."""
SILENT_LIMITS = ((30.0, 3.0), (300.0, 10.0))
"""Seconds without a call, and multiples of the usual duration, from which an episode is `warn`, and `bad`."""
SILENT_UNKNOWN = 60.0
"""The same as long as the usual duration is not known."""
FEWEST_EPISODES = 4
"""Ended episodes of the present batch from which their outcomes are judged."""


def silent(facts: Facts) -> Finding | None:
    """Judges the time without a call by the usual duration of a whole episode. It warns at most if that is unknown."""
    if facts.silent is None:
        return None
    seconds, usual = facts.silent.seconds, facts.usual_seconds
    if usual is None:
        level: Level = "warn" if seconds >= SILENT_UNKNOWN else "ok"
    else:
        level = graded(seconds, *(max(least, times * usual) for least, times in SILENT_LIMITS))
    if level == "ok":
        return Finding("ok", f"the longest time since a call of a live episode is {duration(seconds)}")
    known = "no episode has finished yet" if usual is None else f"whole episodes usually take {duration(usual)}"
    return Finding(
        level,
        f"episode {facts.silent.id} of task {facts.silent.task_id}, client {facts.silent.client_id}, has made no call "
        f"for {duration(seconds)}; {known}: does a tool hang?",
    )


def episodes(facts: Facts) -> Finding | None:
    """Judges the newest batches and the present one; the present one alone if it loses half of its episodes, because
    such a batch may never end.
    """
    came, gone, where = facts.finished, facts.lost, "this batch"
    if came + gone < FEWEST_EPISODES or gone < came:
        came += round(sum(step.get("batch/episodes", 0.0) for step in facts.steps[-NEWEST:]))
        gone = facts.num_lost
        where = "this batch and the newest ones"
    if came + gone < FEWEST_EPISODES:
        return None
    text = f"{gone} of {came + gone} episodes of {where} ended without a reward"
    by = f", all of client {facts.failing_client}" if facts.failing_client else ""
    why = f"; most often{by}: {facts.reason}" if gone and facts.reason else ""
    return Finding(graded(gone / (came + gone), 0.1, 0.3), text + why)


def groups(facts: Facts) -> Finding | None:
    values = values_of(facts, "groups/zero_variance").get("", [])[-NEWEST:]
    if not values:
        return None
    text = f"{fmean(values):.0%} of the groups teach nothing: all rewards of a group are equal"
    newest = facts.steps[-1]
    if newest.get("reward/std") == 0.0:
        mean = newest[REWARD]
        text += f". In the newest step every reward is {mean:.3g}: check a few answers and their rewards by hand"
    return Finding("bad" if values[-3:] == [1.0] * 3 else graded(fmean(values), 0.5, 0.9), text)


MEANT = ("surplus", "rolled_back")
"""Reasons for which groups are dropped on purpose: spare ones, and those that the operator undid."""


def dropped(facts: Facts) -> Finding | None:
    newest = facts.steps[-NEWEST:]
    counts: dict[str, float] = {}
    for step in newest:
        for name, value in step.items():
            total, is_it, reason = name.partition(f"{DROPPED}_")
            if is_it and not total and reason not in MEANT:
                counts[reason] = counts.get(reason, 0.0) + value
    if not newest or facts.job is None:
        return None
    lost, trained = sum(counts.values()), facts.job.batch_size * len(newest)
    share = lost / (lost + trained)
    main = max(counts, key=lambda name: counts[name]) if lost else ""
    text = f"{lost:.0f} of {lost + trained:.0f} groups were dropped" + (f", most of them as {main}" if main else "")
    return Finding(graded(share, 0.34, 0.75), text)


def refused(facts: Facts) -> Finding | None:
    newest = [step for step in facts.steps[-NEWEST:] if "batch/unscorable" in step]
    num = sum(step.get("batch/episodes", 0.0) for step in newest)
    if not num:
        return None
    share = sum(step["batch/unscorable"] for step in newest) / num
    text = f"requests were refused in {share:.0%} of the episodes, whose rewards may judge the refusals"
    return Finding(graded(share, 0.05, 0.5), text)


def reward(facts: Facts) -> Finding | None:
    """Judges rewards that were higher and are now all the same, as after an update that broke the policy."""
    newest = next((step[REWARD] for step in reversed(facts.steps) if REWARD in step), None)
    if newest is None:
        return None
    fall = find_fall(facts.steps, facts.job.batch_size if facts.job is not None else 0)
    if fall is None:
        return Finding("ok", f"the newest mean reward is {newest:.3g}")
    if fall.is_chance and fall.num_steps < REPORTED_BATCHES:
        return Finding("ok", f"all rewards of the newest step are {fall.now:.3g}; they were up to {fall.highest:.3g}")
    last = facts.versions[fall.last]
    question = f"did the update of step {last} break the policy? Lower job.optimizer.lr and {_way_back(facts, last)}"
    if fall.new_code:
        question = f"does the new code, a tool or a reward function fail? Or {question}"
    else:
        question += "; or did the agent, its tools or its rewards change then?"
    text = f"rewards were up to {fall.highest:.3g} until step {last}, and all are {fall.now:.3g} since"
    return Finding("warn" if fall.is_chance else "bad", f"{'; '.join([text, *fall.signs])}: {question}")


def _way_back(facts: Facts, step: int) -> str:
    """The rollback that undoes a step, if a checkpoint is old enough."""
    if facts.checkpoints is None and step > 1:
        return f"go back to version {step - 1} or before (agentjet checkpoints rollback)"
    older = [version for version in facts.checkpoints or () if version < step]
    if older:
        return f"go back to the checkpoint of version {max(older)} (agentjet checkpoints rollback {max(older)})"
    return "start again, because no checkpoint is older than that step"


def truncated(values: list[float], facts: Facts) -> Finding | None:
    share = fmean(values[-NEWEST:])
    limit = f" = {facts.job.max_tokens}" if facts.job is not None else ""
    return Finding(graded(share, 0.1, 0.5), f"{share:.0%} of the answers were cut at job.max_tokens{limit}")


def held_out(facts: Facts) -> Finding | None:
    if not facts.evaluations:
        return None
    newest = facts.evaluations[-1]
    if fallen := held_out_fall(facts.evaluations):
        return Finding("bad", fallen)
    return Finding("ok", f"held-out score {newest.score:.3g} at version {newest.policy_version}")


# ---- learning ------------------------------------------------------------------------------------------------------

JUMP = 10.0
"""Multiple of its median at which a gradient norm is worth a look."""
FEWEST_NORMS = 8
MISMATCH = 0.01
"""Divergence per token between sampler and learner, in nats. Rounding causes a thousandth of it."""
STALE_MISMATCH = 0.1
"""The same with `job.max_staleness`, where older weights sampled some tokens."""


def weights(facts: Facts) -> Finding | None:
    if not values_of(facts, "weights/finite"):
        return None
    reason = divergence(facts.steps[-1])
    return Finding("bad", reason) if reason else Finding("ok", "all weights are finite")


def update(facts: Facts) -> Finding | None:
    """Steps that teach a policy nothing do not count."""
    found: dict[str, Finding | None] = {}
    for policy in values_of(facts, "weights/sampler"):
        changes, gradient = (f"{policy}/{name}".lstrip("/") for name in ("weights/sampler", "optim/grad_norm"))
        taught = [step for step in facts.steps if step.get(gradient, 1.0) and step.get("groups/zero_variance") != 1.0]
        newest = [step[changes] for step in taught if changes in step][-NEWEST:]
        found[policy] = Finding("ok", "the steps change the weights that sample")
        if len(newest) == NEWEST and not any(newest):
            text = f"the newest {NEWEST} steps with a gradient changed not one bit of the weights that sample"
            found[policy] = Finding("bad", f"{text}: is job.optimizer.lr too low?")
    return worst(found)


def gradient(facts: Facts) -> Finding | None:
    skipped = {policy: _skipped(values[-NEWEST:]) for policy, values in values_of(facts, "optim/skipped_steps").items()}
    norms = {policy: _norms(values) for policy, values in values_of(facts, "optim/grad_norm").items()}
    found = [finding for finding in (worst(skipped), worst(norms)) if finding is not None]
    return max(found, key=lambda finding: SEVERITY.index(finding.level), default=None)


def _skipped(newest: list[float]) -> Finding | None:
    num = sum(value > 0 for value in newest)
    if not num:
        return None
    return Finding(
        "bad" if num > len(newest) / 2 else "warn",
        f"{num} of the newest {len(newest)} steps had a gradient that is not finite: they changed nothing",
    )


def _norms(values: list[float]) -> Finding:
    usual = median(values[:-1]) if len(values) >= FEWEST_NORMS else values[-1]
    if values[-1] > JUMP * usual > 0:
        return Finding("warn", f"the gradient norm is {values[-1]:.3g}, {values[-1] / usual:.0f} times its median")
    return Finding("ok", f"the gradient is finite, its norm {values[-1]:.3g}")


def mismatch(values: list[float], facts: Facts) -> Finding | None:
    usual = median(values[-NEWEST:])
    bound = STALE_MISMATCH if facts.job is not None and facts.job.max_staleness else MISMATCH
    text = f"sampler and learner differ by {usual:.2g} nats a token"
    return Finding(graded(usual, bound, 10 * bound), text)


def entropy(values: list[float], facts: Facts) -> Finding | None:
    """An entropy that falls while the reward rises is learning."""
    early, late = fmean(values[:NEWEST]), fmean(values[-NEWEST:])
    text = f"the mean entropy of {NEWEST} steps went from {early:.3g} to {late:.3g} nats a token in {len(values)} steps"
    has_collapsed = len(values) >= 2 * NEWEST and late < early / 2
    if has_collapsed and learning(facts.steps, facts.evaluations).answer != "yes":
        return Finding("warn", f"{text}, and the reward does not rise")
    return Finding("ok", text)


# ---- conversations ---------------------------------------------------------------------------------------------------


def delivery(values: list[float], facts: Facts) -> Finding | None:
    orphans = sum(values[-NEWEST:])
    trained = sum(sum(sampled[-NEWEST:]) for sampled in values_of(facts, "batch/sampled_tokens").values())
    share = orphans / (orphans + trained) if orphans else 0.0
    return Finding(graded(share, 0.1, 0.5), f"{share:.0%} of the sampled tokens did not reach their agents")


def drift(values: list[float], facts: Facts) -> Finding | None:
    if not any(values):
        return Finding("ok", "every trained token is the sampled one")
    return Finding("bad", "tokens of the journal differ from the sampled ones: the journal is damaged")


RULES: Mapping[str, Judge] = {
    "engine": engine,
    "disk": disk,
    "loop": loop,
    "clients": clients,
    "weights": weights,
    "gradient": gradient,
    "update": update,
    "mismatch": of_each_policy("policy/mismatch_kl", mismatch),
    "entropy": of_each_policy("policy/entropy", entropy),
    "reward": reward,
    "groups": groups,
    "silent": silent,
    "episodes": episodes,
    "dropped": dropped,
    "truncated": of_each_policy("completion/truncated", truncated),
    "refused": refused,
    "delivery": of_each_policy("forest/orphan_tokens", delivery),
    "drift": of_each_policy("forest/drift", drift),
    "held_out": held_out,
}
"""The rules, causes before their consequences. Each name is the anchor of a section in the documentation."""
