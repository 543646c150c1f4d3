"""The health rules: each has a run that trips it and one that must not; and the Overview of a served run.

1. `TRIPS` has for each rule the facts that trip it, with level and words, and similar facts that do not.
2. Every rule has a section in `docs/health.md`.
3. `Overview` collects the facts of a served run, and the cells of its groups.
4. `GET /health` and `GET /waiting` have these bodies, for viewers.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import typer

from agentjet.cli.main import app
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.protocol import (
    AbortRequest,
    BeginRequest,
    FinishRequest,
    HealthRuleView,
    HealthView,
    WaitingView,
    ZeroVariance,
    duration,
    flatten,
)
from agentjet.server.health import (
    RULES,
    STATED,
    TEXT,
    RunFacts,
    ServerFacts,
    SilentEpisode,
    health,
    remedies,
)
from agentjet.server.monitoring import Gap
from agentjet.server.read import health_of
from agentjet.swarm import EpisodeRecord
from agentjet.swarm.episodes import Refill, Silence
from agentjet.swarm.state import OutcomeCounts
from bench import alarms
from tests.fakes import running, saying
from tests.server.serving import VIEWER, serving
from tests.server.test_learning import evaluation

pytestmark = pytest.mark.anyio
JOB = JobConfig(batch_size=4)
POLICIES = ("planner", "coder")
ENDING = JobConfig(optimizer=OptimizerConfig(schedule="linear", total_steps=8))
STUCK = SilentEpisode("ep_1", "t1", "c", 100.0)
MENDED = ("v2", OutcomeCounts(finished=20))
UP = ServerFacts("sampling", client_seconds=3.0)
Steps = list[dict[str, float]]


def same(num: int = 5, **metrics: float) -> Steps:
    """Equal steps; `a__b` is the metric `a/b`."""
    return [{name.replace("__", "/"): value for name, value in metrics.items()} for _ in range(num)]


def each(metric: str, *values: float) -> Steps:
    return [{metric: value} for value in values]


def held(cpu: float, wall: float) -> RunFacts:
    """A server whose event loop was held."""
    return RunFacts(server=replace(UP, loop=Gap(0.0, cpu, wall, "agentjet.swarm.f")))


def fallen(num: int, **metrics: float) -> Steps:
    """Steps whose rewards are all 0."""
    return same(num, reward__mean=0.0, reward__std=0.0, groups__zero_variance=1.0, **metrics)


def two_policies(falls: str, rises: str) -> Steps:
    """The entropy of one policy falls, and the rewards of one rise; those of the episodes show neither."""
    return [
        {"reward/mean": 0.5}
        | {f"{name}/policy/entropy": 0.3 if name == falls and n >= 5 else 1.2 for name in POLICIES}
        | {f"{name}/reward/mean": 0.1 * n if name == rises else 0.5 for name in POLICIES}
        for n in range(10)
    ]


OWN_LIMIT = {
    "completion__truncated": 0.45,
    "overridden__max_tokens": 0.45,
    "overridden__limit": 12.0,
    "batch__episodes": 64.0,
}
TWO_OWN_LIMITS = {name: value for name, value in OWN_LIMIT.items() if name != "overridden__limit"}
"""Half of the answers each: none is that of most."""
WEAK_METRICS = {"reward__mean": 0.0625, "reward__std": 0.24, "groups__zero_variance": 0.75}
RISING = (0.09, 0.33, 0.33, 0.40, 0.59, 0.71, 0.50, 0.60, 0.55, 0.76, 0.70, 0.72)
SHORT_RUN = [{"policy/entropy": 1.2 - 0.1 * n, "reward/mean": reward} for n, reward in enumerate(RISING)]
RISING_RUN = [{"reward/mean": reward, "batch/episodes": 64.0} for reward in RISING]
FAST_RUN = (0.021, 0.042, 0.094, 0.201, 0.469, 0.49, 0.146, 0.284, 0.43, 0.343, 0.18, 0.288)
"""A run of the demo whose reward rose within its first steps."""


def with_entropies(rewards: tuple[float, ...]) -> Steps:
    """Steps whose entropy falls fast."""
    return [{"policy/entropy": max(0.1, 1.8 - 0.4 * n), "reward/mean": reward} for n, reward in enumerate(rewards)]


def coded(num: int, version: str, reward: float, entropy: float = 1.2, **metrics: float) -> Steps:
    """Steps of a version of the agent's code, whose rewards are nearly constant."""
    own = {"policy/entropy": entropy, f"code/{version}/reward_mean": reward}
    return [one | own | {"reward/mean": reward + 0.001 * (n % 3 - 1)} for n, one in enumerate(same(num, **metrics))]


CUT = {"completion__truncated": 0.95, "batch__episodes": 64.0}
WEAK = same(1, **WEAK_METRICS, completion__tokens=11.8, policy__entropy=1.63)
"""One success in 16 episodes: chance alone may bring none in the next batches."""
SOLVED = same(6, reward__mean=1.0, reward__std=0.0, reward__max=1.0, groups__zero_variance=1.0, groups__at_best=1.0)
SOUND = same(6, reward__mean=0.5, reward__std=0.5, groups__zero_variance=0.0)


TRIPS: list[tuple[str, RunFacts, str, str, RunFacts]] = [
    ("engine", RunFacts(server=ServerFacts("failed", "no such model")), "bad", "no such model", RunFacts(server=UP)),
    (
        "engine",
        RunFacts(server=replace(UP, workers_started=2, workers_hung=1)),
        "warn",
        "1 worker ended",
        RunFacts(server=replace(UP, workers_started=2)),
    ),
    ("disk", RunFacts(server=replace(UP, refusal="disk full")), "bad", "disk full", RunFacts(server=UP)),
    ("disk", RunFacts(server=replace(UP, checkpoint_error="no space")), "bad", "no space", RunFacts(server=UP)),
    ("disk", RunFacts(server=replace(UP, unusable_checkpoints=2)), "warn", "2 unusable", RunFacts(server=UP)),
    ("loop", held(0.26, 0.3), "warn", "0.26 s of CPU time (0.3 s), held by agentjet.swarm.f", held(0.24, 60.0)),
    ("loop", held(3.1, 3.2), "bad", "3.1 s of CPU time (3.2 s), held by agentjet.swarm.f", held(0.01, 0.01)),
    (
        "clients",
        RunFacts(server=replace(UP, client_seconds=720.0)),
        "warn",
        "12 minutes",
        RunFacts(server=replace(UP, client_seconds=720.0, is_over=True)),
    ),
    ("weights", RunFacts(same(1, weights__finite=0.0)), "bad", "diverged", RunFacts(same(1, weights__finite=1.0))),
    (
        "metrics",
        RunFacts(same(1, batch__not_finite__policy__gap=1.0), JOB),
        "warn",
        "the metrics 'policy/gap' of the batch are NaN or infinite, and were left out",
        RunFacts(same(1, batch__not_finite__policy__gap=1.0, weights__finite=0.0), JOB),
    ),
    (
        "gradient",
        RunFacts(same(optim__skipped_steps=1.0)),
        "bad",
        "5 of the newest 5",
        RunFacts(same(optim__skipped_steps=0.0, optim__grad_norm=0.5)),
    ),
    ("gradient", RunFacts(each("optim/skipped_steps", 0, 0, 0, 1, 0)), "warn", "1 of the newest 5", RunFacts()),
    (
        "gradient",
        RunFacts(each("optim/grad_norm", *[0.5] * 8, 9.0)),
        "warn",
        "18 times",
        RunFacts(each("optim/grad_norm", *[0.5] * 8, 2.0)),
    ),
    (
        "update",
        RunFacts(same(weights__sampler=0.0)),
        "bad",
        "lr too low",
        RunFacts(same(weights__sampler=0.0, groups__zero_variance=1.0)),
    ),
    (
        "update",
        RunFacts(same(a__weights__sampler=5.0, b__weights__sampler=0.0, b__optim__grad_norm=0.1), policies=("a", "b")),
        "bad",
        "b: the newest 5 steps",
        RunFacts(same(a__weights__sampler=5.0, b__weights__sampler=0.0, b__optim__grad_norm=0.0), policies=("a", "b")),
    ),
    (
        "update",
        RunFacts(same(1, weights__sampler=0.0, optim__lr=0.0), ENDING, [9]),
        "bad",
        "the schedule ended at step 8 (job.optimizer.total_steps)",
        RunFacts(same(1, weights__sampler=1.0, optim__lr=1e-6), ENDING, [7]),
    ),
    (
        "mismatch",
        RunFacts(same(policy__mismatch_kl=0.05), JOB),
        "warn",
        "0.05 nats",
        RunFacts(same(policy__mismatch_kl=0.05), JobConfig(max_staleness=2)),
    ),
    (
        "mismatch",
        RunFacts(same(policy__mismatch_kl=0.5), JOB),
        "bad",
        "0.5 nats",
        RunFacts(same(policy__mismatch_kl=1e-4)),
    ),
    (
        "entropy",
        RunFacts([*same(5, policy__entropy=1.2, reward__mean=0.5), *same(5, policy__entropy=0.3, reward__mean=0.5)]),
        "warn",
        "from 1.2 to 0.3 nats a token in 10 steps, and the mean reward from 0.5 to 0.5",
        RunFacts(SHORT_RUN, first=SHORT_RUN[:10]),
    ),
    (
        "entropy",
        RunFacts(with_entropies((0.5, 0.4, 0.6, 0.5, 0.4, 0.5, 0.6, 0.4, 0.5, 0.4))),
        "warn",
        "and the mean reward from 0.5 to 0.471",
        RunFacts(with_entropies(FAST_RUN), first=with_entropies(FAST_RUN)[:10]),
    ),
    (
        "entropy",
        RunFacts([*coded(6, "v1", 0.1, 1.2), *coded(6, "v2", 0.5, 1.2), *coded(6, "v2", 0.5, 0.3)]),
        "warn",
        "from 1.2 to 0.3 nats a token in 12 steps, and the mean reward from 0.5 to 0.5",
        RunFacts([*coded(6, "v1", 0.1, 1.2), *coded(6, "v1", 0.9, 0.3), *coded(12, "v2", 0.05, 0.3)]),
    ),
    (
        "entropy",
        RunFacts(two_policies("planner", "coder"), policies=POLICIES),
        "warn",
        "planner: the mean entropy of 5 steps went from 1.2 to 0.3 nats a token in 10 steps, and the mean reward",
        RunFacts(two_policies("planner", "planner"), policies=POLICIES),
    ),
    (
        "reward",
        RunFacts([*SOUND, *fallen(1)], JOB, range(1, 8)),
        "bad",
        "rewards were up to 0.5 until step 6, and all are 0 since: did the update of step 6 break the policy? Lower "
        "job.optimizer.lr and go back to version 5 or before (agentjet checkpoints rollback)",
        RunFacts([*SOUND, *fallen(1), *SOUND], JOB, range(1, 14)),
    ),
    (
        "reward",
        RunFacts([*SOUND, *fallen(1)], JOB, range(1, 8), checkpoints=[2, 4, 6, 7]),
        "bad",
        "go back to the checkpoint of version 4 (agentjet checkpoints rollback 4); or did",
        RunFacts(),
    ),
    (
        "reward",
        RunFacts([*SOUND, *fallen(1)], JOB, range(1, 8), checkpoints=[7]),
        "bad",
        "Lower job.optimizer.lr and start again, because no checkpoint is older than that step; or did",
        RunFacts(),
    ),
    (
        "reward",
        RunFacts([*WEAK, *fallen(1, completion__tokens=2.2)], JOB, range(1, 3)),
        "bad",
        "2.2 tokens an answer instead of 11.8: did the update of step 1",
        RunFacts([*WEAK, *fallen(1, completion__tokens=11.0)], JOB, range(1, 3)),
    ),
    (
        "reward",
        RunFacts([*WEAK, *fallen(1, policy__entropy=0.042)], JOB, range(1, 3)),
        "bad",
        "0.042 nats of entropy a token instead of 1.63",
        RunFacts([*WEAK, *fallen(1, policy__entropy=0.8)], JOB, range(1, 3)),
    ),
    (
        "reward",
        RunFacts([*SOUND, *fallen(3)], JOB, range(1, 10)),
        "bad",
        "all are 0 since",
        RunFacts([*WEAK, *fallen(3)], JOB, range(1, 5)),
    ),
    (
        "reward",
        RunFacts(
            [*(one | {"code/v1/reward_mean": 0.5} for one in SOUND), *fallen(1, code__v2__reward_mean=0.0)],
            JOB,
            range(1, 8),
        ),
        "bad",
        "the agent's code changed to v2: does the new code, a tool or a reward function fail? Or did the "
        "update of step 6 break",
        RunFacts(
            [*same(3, **WEAK_METRICS, code__v1__reward_mean=0.06), *fallen(1, code__v2__reward_mean=0.0)],
            JOB,
            range(1, 5),
        ),
    ),
    (
        "reward",
        RunFacts(
            [
                *(one | {"code/v1/reward_mean": 0.5} for one in SOUND),
                *same(1, reward__mean=0.01, reward__std=0.1, code__v2__reward_mean=0.01),
                *fallen(3, code__v2__reward_mean=0.0),
            ],
            JOB,
            range(1, 11),
        ),
        "bad",
        "the agent's code changed to v2: does the new code",
        RunFacts(),
    ),
    (
        "reward",
        RunFacts(
            [
                *same(4, reward__mean=1.0, groups__zero_variance=0.0, code__v1__reward_mean=1.0),
                *same(35, reward__mean=0.95, groups__zero_variance=0.0, code__v2__reward_mean=0.95),
                *fallen(3, code__v2__reward_mean=0.0),
            ],
            JOB,
            range(1, 43),
        ),
        "bad",
        "all are 0 since: did the update of step 39 break the policy? Lower job.optimizer.lr and go back to version 38 "
        "or before (agentjet checkpoints rollback); or did the agent, its tools or its rewards change then?",
        RunFacts(),
    ),
    ("groups", RunFacts(fallen(5), JOB), "bad", "In the newest step every reward is 0", RunFacts(SOUND, JOB)),
    (
        "groups",
        RunFacts(same(20, groups__zero_variance=0.9), JOB),
        "warn",
        "90%",
        RunFacts(same(20, groups__zero_variance=0.7), JOB),
    ),
    (
        "groups",
        RunFacts(SOLVED, JOB),
        "bad",
        "every reward is 1",
        RunFacts(SOLVED, JOB, first=same(1, reward__mean=0.2)),
    ),
    (
        "silent",
        RunFacts(silent=STUCK, longest_seconds=12.0),
        "warn",
        "episode ep_1 of task t1, client c, has made no call for 1 min 40 s; whole episodes took at most 12 s: does a ",
        RunFacts(silent=STUCK, longest_seconds=25.0),
    ),
    (
        "silent",
        RunFacts(silent=STUCK._replace(seconds=960.0), longest_seconds=12.0),
        "bad",
        "16 min",
        RunFacts(silent=STUCK._replace(seconds=55.0), longest_seconds=0.1),
    ),
    (
        "silent",
        RunFacts(silent=STUCK._replace(seconds=960.0)),
        "warn",
        "no episode has finished yet",
        RunFacts(silent=STUCK),
    ),
    (
        "silent",
        RunFacts(job=JOB, silent=STUCK._replace(unheard=70.0, expires_in=50.0), longest_seconds=50.0),
        "warn",
        "sent no heartbeat for 1 min 10 s: its client is gone. The episode ends without a reward in 50 s",
        RunFacts(job=JOB, silent=STUCK._replace(unheard=40.0), longest_seconds=50.0),
    ),
    (
        "episodes",
        RunFacts(finished=2, lost=8, reason="Timeout"),
        "bad",
        "most often: Timeout",
        RunFacts(finished=2, lost=4),
    ),
    (
        "episodes",
        RunFacts(lost=177, reason="Timeout", failing_code="v2"),
        "bad",
        "177 of 177 episodes of this batch ended without a reward; most often among the newest 20, all of code version "
        "v2: Timeout",
        RunFacts(),
    ),
    (
        "episodes",
        RunFacts(same(batch__episodes=64.0, episodes__aborted=20.0)),
        "warn",
        "100 of 420",
        RunFacts(same(batch__episodes=64.0, episodes__aborted=7.0)),
    ),
    (
        "episodes",
        RunFacts(same(batch__episodes=16.0, episodes__aborted=16.0)),
        "bad",
        "80 of 160",
        RunFacts(same(batch__episodes=16.0, episodes__surplus=16.0)),
    ),
    (
        "episodes",
        RunFacts(
            finished=2, lost=8, reason="E", failing_code="v2", newest_code=("v2", OutcomeCounts(finished=2, aborted=8))
        ),
        "bad",
        "all of code version v2: E",
        RunFacts(finished=2, lost=8, reason="E", failing_code="v1", newest_code=MENDED),
    ),
    (
        "refill",
        RunFacts(refill=Refill(1, "c", 97.4), reason="ToolError"),
        "warn",
        "the batch waits because episodes failed (ToolError): 1 group has too few members, and no member is live. "
        "Client c can begin another one; the group closes in 97 s. Mend the agent; a lower job.lease_seconds",
        RunFacts(),
    ),
    (
        "dropped",
        RunFacts(same(groups__dropped_stale=7.0, groups__dropped_zero_variance=9.0), JOB),
        "warn",
        "35 of 55 groups were dropped, most of them as stale",
        RunFacts(same(groups__dropped_stale=1.0, groups__dropped_zero_variance=40.0), JOB),
    ),
    (
        "truncated",
        RunFacts(same(completion__truncated=0.25, batch__episodes=64.0), JobConfig(max_tokens=32)),
        "warn",
        "25% of the answers were cut at job.max_tokens = 32",
        RunFacts(same(completion__truncated=0.08, batch__episodes=64.0)),
    ),
    (
        "truncated",
        RunFacts([one | {"completion/truncated": 0.95} for one in RISING_RUN], JobConfig(max_tokens=24)),
        "warn",
        "95% of the answers were cut at job.max_tokens = 24; the reward rose nevertheless, from 0.25 to 0.614",
        RunFacts([one | {"completion/truncated": 0.1} for one in RISING_RUN], JobConfig(max_tokens=24)),
    ),
    (
        "truncated",
        RunFacts([*coded(6, "v1", 0.1, **CUT), *coded(12, "v2", 0.9, **CUT)], JobConfig(max_tokens=24)),
        "bad",
        "95% of the answers were cut at job.max_tokens = 24",
        RunFacts([*coded(6, "v1", 0.1, **CUT), *coded(12, "v2", 0.9)], JobConfig(max_tokens=24)),
    ),
    (
        "truncated",
        RunFacts(
            [*coded(6, "v1", 0.9, **CUT), *coded(6, "v2", 0.1, **CUT), *coded(6, "v2", 0.6, **CUT)],
            JobConfig(max_tokens=24),
        ),
        "warn",
        "the reward rose nevertheless, from 0.1 to ",
        RunFacts(),
    ),
    (
        "truncated",
        RunFacts(same(reward__std=0.0, **OWN_LIMIT), JOB),
        "warn",
        "45% of the answers were cut at max_tokens = 12 of the agent's own requests, not at job.max_tokens = 256",
        RunFacts(same(reward__std=0.4, **OWN_LIMIT), JOB),
    ),
    (
        "truncated",
        RunFacts(same(completion__truncated=0.45, completion__context_full=0.4, batch__episodes=64.0), JOB),
        "warn",
        "45% of the answers were cut at the end of the context (model.context_length), not at job.max_tokens = 256",
        RunFacts(same(completion__truncated=0.08, completion__context_full=0.08, batch__episodes=64.0), JOB),
    ),
    (
        "truncated",
        RunFacts(same(reward__std=0.0, **TWO_OWN_LIMITS), JOB),
        "warn",
        "45% of the answers were cut at limits (max_tokens) of the agent's own requests, not at job.max_tokens = 256",
        RunFacts(same(reward__std=0.4, **TWO_OWN_LIMITS), JOB),
    ),
    (
        "truncated",
        RunFacts(
            [one | {"overridden/limit": 16.0 + n % 2} for n, one in enumerate(same(reward__std=0.0, **OWN_LIMIT))], JOB
        ),
        "warn",
        "45% of the answers were cut at limits (max_tokens) of the agent's own requests, not at job.max_tokens = 256",
        RunFacts(
            [one | {"overridden/limit": 16.0 + n % 2} for n, one in enumerate(same(reward__std=0.4, **OWN_LIMIT))], JOB
        ),
    ),
    (
        "refused",
        RunFacts(same(batch__episodes=64.0, batch__unscorable=8.0)),
        "warn",
        "12%",
        RunFacts(same(batch__episodes=64.0, batch__unscorable=2.0)),
    ),
    (
        "images",
        RunFacts(same(batch__episodes=8.0, batch__omitted=2.0)),
        "warn",
        'in 10 of 40 episodes images, documents, audio or video were left out, because job.images = "omit"',
        RunFacts(same(batch__episodes=8.0)),
    ),
    (
        "tools",
        RunFacts(same(tools__offered=48.0, tools__called=0.0)),
        "warn",
        "tools were offered in 240 calls, and none was called",
        RunFacts([*same(tools__offered=48.0, tools__called=0.0), *same(1, tools__offered=9.0, tools__called=1.0)]),
    ),
    (
        "delivery",
        RunFacts(same(forest__orphan_tokens=30.0, batch__sampled_tokens=70.0, batch__episodes=16.0)),
        "warn",
        "30%",
        RunFacts(same(forest__orphan_tokens=1.0, batch__sampled_tokens=70.0, batch__episodes=16.0)),
    ),
    ("drift", RunFacts(same(forest__drift=1.0)), "bad", "damaged", RunFacts(same(forest__drift=0.0))),
    (
        "held_out",
        RunFacts(evaluations=[evaluation(3, 0.7), evaluation(9, 0.4)]),
        "bad",
        "fell from 0.7",
        RunFacts(evaluations=[evaluation(3, 0.7), evaluation(9, 0.68)]),
    ),
]


def rule(facts: RunFacts, name: str) -> HealthRuleView | None:
    return next((one for one in health(facts).rules if one.name == name), None)


@pytest.mark.parametrize("case", TRIPS, ids=[f"{name}-{words}" for name, _, _, words, _ in TRIPS])
def test_a_rule_trips_on_its_run_and_not_on_a_similar_one(case: tuple[str, RunFacts, str, str, RunFacts]) -> None:
    name, broken, level, words, sound = case
    tripped, kept = rule(broken, name), rule(sound, name)
    assert tripped is not None and (tripped.level, tripped.docs) == (level, f"docs/health.md#{name}")
    assert words in tripped.text
    assert kept is None or kept.level == "ok"


def test_every_rule_is_tripped_and_explained() -> None:
    names = list(RULES)
    assert len(set(names)) == len(names) and {case[0] for case in TRIPS} == set(names)
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text(encoding="utf-8")
    assert page == TEXT.read_text(encoding="utf-8"), "`make docs` copies it"
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == names
    assert list(remedies()) == names and all(text.endswith(".") for text in remedies().values())
    assert "see `docs/recipes.md`" in remedies()["entropy"]


def test_each_remedy_names_settings_commands_and_files_that_exist() -> None:
    """A remedy that names a setting of the past changes nothing."""
    settings = {key for key, _ in flatten(JobConfig().model_dump(), "job.")} | {
        "model.dtype",
        "model.name",
        "model.context_length",
    }
    root = Path(__file__).parents[2]
    texts = [*remedies().values()]
    for facts in (case[1] for case in TRIPS):
        texts += [one.text for one in health(facts).rules if one.level != "ok"]
    named = {name.rstrip(".") for text in texts for name in re.findall(r"\b(?:job|model)\.[a-z_.]+", text)}
    assert named and named <= settings, named - settings
    commands = {tuple(words.split()) for text in texts for words in re.findall(r"agentjet ((?:[a-z]+ ?)+)", text)}
    known = subcommands()
    assert commands and all(any(words[:n] in known for n in (1, 2)) for words in commands), commands
    files = {path for text in texts for path in re.findall(r"`(docs/[\w./-]+)`", text)}
    assert files and all((root / path).is_file() for path in files)


def subcommands() -> set[tuple[str, ...]]:
    """The words of each command without subcommands."""
    tree = typer.main.get_command(app)
    found: set[tuple[str, ...]] = set()
    for name, command in getattr(tree, "commands", {}).items():
        nested = getattr(command, "commands", {})
        found |= {(name, inner) for inner in nested} if nested else {(name,)}
    return found


def test_failures_of_an_older_code_version_are_named() -> None:
    found = rule(RunFacts(finished=2, lost=8, reason="E", failing_code="v1", newest_code=MENDED), "episodes")
    assert found is not None and "all of code version v1: E. Of the newest code version v2, 0 of 20 did" in found.text


def test_a_solved_run_is_called_solved() -> None:
    facts = RunFacts(SOLVED, JOB, first=same(1, reward__mean=0.2))
    found = rule(facts, "groups")
    assert found is not None and found.level == "ok"
    assert found.text == "the run is solved: 100% of the groups are solved: each of their rewards is 1"


def test_the_measured_rates_are_those_of_the_page_and_within_the_bounds() -> None:
    result = json.loads(alarms.RESULT.read_text())
    assert alarms.with_table(TEXT.read_text(encoding="utf-8"), result) == TEXT.read_text(encoding="utf-8")
    assert list(result["rules"]) == alarms.estimates() == list(alarms.DAMAGES), "each estimate is measured"
    assert set(result["stated"]) == STATED <= set(RULES)
    assert {name: one["damage"] for name, one in result["rules"].items()} == {
        name: one.text for name, one in alarms.DAMAGES.items()
    }
    assert result["false_alarms_worst"] <= 0.02 and result["power_worst"] >= 0.9 and result["runs_of_each_kind"] >= 2000


def test_few_simulated_runs_agree_with_the_measured_rates() -> None:
    for kind in ("flat", "fast"):
        assert all(rate <= 0.1 for rate in alarms.false_alarms(kind, 20).values())
    assert alarms.power("reward", 10) >= 0.9


@pytest.mark.thorough
def test_the_worst_measured_rates_are_those_of_the_present_rules() -> None:
    """`alarms.json` is of an earlier run. Its worst kind, and its weakest rule, are looked at again."""
    num, rules = 300, json.loads(alarms.RESULT.read_text())["rules"]

    def is_near(rate: float, measured: float) -> bool:
        """True within four standard deviations and one run."""
        return abs(rate - measured) <= 4 * (measured * (1 - measured) / num) ** 0.5 + 1 / num

    rates = alarms.false_alarms("fast", num)
    assert max(rates.values()) <= 0.02
    assert [name for name, rate in rates.items() if rate > rules[name]["false_alarms"] + 0.01] == []
    [weakest] = [name for name, one in rules.items() if one["power"] == min(each["power"] for each in rules.values())]
    assert rules["entropy"]["worst_kind"] == "fast" and weakest == "entropy"
    assert is_near(rates["entropy"], rules["entropy"]["false_alarms"])
    assert is_near(alarms.power("entropy", num), rules["entropy"]["power"])


def test_a_run_without_facts_has_no_findings() -> None:
    assert health(RunFacts()).rules == [] and health(RunFacts()).learning.answer == "too_early"


def test_an_undone_score_is_not_the_held_out_score() -> None:
    undone = evaluation(9, 0.1).model_copy(update={"undone": True})
    found = rule(RunFacts(evaluations=[evaluation(3, 0.7), undone]), "held_out")
    assert found is not None and found.text == "held-out score 0.7 at version 3"
    assert rule(RunFacts(evaluations=[undone]), "held_out") is None


def test_the_worst_policy_is_named_and_metrics_of_clients_are_not_judged() -> None:
    step = {"planner/optim/skipped_steps": 0.0, "coder/optim/skipped_steps": 1.0, "agent/forest/drift": 1.0}
    found = rule(RunFacts([step] * 5, policies=("planner", "coder")), "gradient")
    assert found is not None and found.level == "bad" and found.text.startswith("coder: ")
    assert rule(RunFacts([step] * 5), "drift") is None


async def test_a_batch_that_loses_its_episodes_is_bad_before_its_first_step(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        for number in range(5):
            begun = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", wait=5))
            reason = "ConnectionError: no tool server" if number else "other"
            await run.gateway.abort(begun.id, AbortRequest(reason=reason))
        found = {one.name: one for one in (await run.gateway.reader.health()).rules}
    assert found["episodes"].level == "bad" and "5 of 5" in found["episodes"].text
    assert "; most often, all of client c: ConnectionError: no tool server" in found["episodes"].text
    assert found["engine"].level == found["clients"].level == found["disk"].level == "ok"


@pytest.mark.parametrize("lease", [20.0, 120.0])
def test_the_status_and_the_rule_agree_when_a_client_is_gone(lease: float) -> None:
    job = JobConfig(lease_seconds=lease)
    for unheard in (15.0, 25.0, 35.0, 65.0):
        cause = Silence(unheard, 0.0, 0.0, unheard).cause(job)
        found = rule(RunFacts(job=job, silent=STUCK._replace(unheard=unheard), longest_seconds=50.0), "silent")
        assert found is not None and ("its client is gone" in found.text) == ("its client is gone" in cause), unheard


async def test_the_picture_of_the_present_batch(tmp_path: Path) -> None:
    async with running(tmp_path, saying(lambda prompt: "hi"), job={"group_size": 3}) as run:
        await run.episode(0.5, task="a")
        live = await run.gateway.begin(BeginRequest(task_id="a", task_set="", client_id="c", wait=5))
        run.clock.advance(30)
        lost = await run.gateway.begin(BeginRequest(task_id="b", client_id="c", wait=5))
        kept = await run.gateway.begin(BeginRequest(task_id="b", client_id="c", wait=5))
        await run.gateway.abort(lost.id, AbortRequest(reason="broken"))
        found = await run.gateway.reader.waiting()
        waits = run.gateway.status().waiting_for
        assert f"{live.id} of task a, client c, is silent for 30 s (does a tool hang?): its lease has" in waits
        run.clock.advance(30)
        gone = f"{live.id} of task a, client c, is silent for 1 min (its client is gone: no heartbeat for 1 min): its"
        assert gone in run.gateway.status().waiting_for
        run.clock.advance(-30)
        assert found.text == waits.partition("; ")[0] and "rewards" in found.text, "the cells have the silence"
        assert (found.needed, found.places, found.num_groups) == (2, 2, 2)
        first, second = found.groups
        assert (first.task_id, first.size, first.state) == ("a", 3, "open")
        assert [(cell.state, cell.reward) for cell in first.cells] == [("finished", 0.5), ("live", None)]
        assert first.cells[1].episode_id == live.id and first.cells[1].silent_seconds == 30.0
        assert first.cells[1].expires_in == run.gateway.swarm.job.lease_seconds - 30
        assert first.cells[1].ends_in == run.gateway.swarm.job.max_episode_seconds - 30
        assert [(cell.state, cell.episode_id) for cell in second.cells] == [("live", kept.id), ("failed", lost.id)]
        for episode in (live, kept):
            await run.gateway.finish(episode.id, FinishRequest(reward=1.0))
        cells = (await run.gateway.reader.waiting()).groups[0].cells
        assert {cell.state for cell in cells} == {"finished"} and cells[1].silent_seconds is None


async def test_an_episode_whose_client_sends_heartbeats_only_is_named(tmp_path: Path) -> None:
    """A hanging tool: the client is alive, the agent is not."""
    async with running(tmp_path, saying(lambda prompt: "hi"), job={"group_size": 3}) as run:
        await run.episode(0.5, task="a")
        live = await run.gateway.begin(BeginRequest(task_id="a", client_id="c", wait=5))
        for _ in range(3):
            run.clock.advance(30)
            await run.gateway.heartbeat(live.id)
        found = {one.name: one for one in (await run.gateway.reader.health()).rules}
    assert found["silent"].level == "warn"
    assert found["silent"].text.startswith(f"episode {live.id} of task a, client c, has made no call for 1 min")


async def test_failures_are_named_with_their_refill_their_code_and_the_client_that_is_gone(tmp_path: Path) -> None:
    """A group lost its members with one version of the code; a mended one finishes; then its client is gone."""
    async with running(tmp_path, job={"group_size": 3}) as run:

        async def begin(client: str, code: str) -> EpisodeRecord:
            asked = BeginRequest(task_id="t", client_id=client, code_version=code, wait=5)
            return await run.gateway.begin(asked)

        async def finish(client: str, code: str) -> None:
            begun = await begin(client, code)
            await run.say(begun.id)
            await run.gateway.finish(begun.id, FinishRequest(reward=1.0))

        async def found() -> dict[str, HealthRuleView]:
            return {one.name: one for one in (await run.gateway.reader.health()).rules}

        await finish("old", "v1")
        assert "refill" not in await found()
        for _ in range(9):
            begun = await begin("old", "v1")
            await run.gateway.abort(begun.id, AbortRequest(reason="no tool server"))
        run.clock.advance(20)
        rules, lease = await found(), run.gateway.swarm.job.lease_seconds
        assert (rules["refill"].level, rules["episodes"].level) == ("warn", "bad")
        assert "episodes failed (no tool server): 1 group has too few members" in rules["refill"].text
        assert f"Client old can begin another one; the group closes in {lease - 20:.0f} s" in rules["refill"].text
        await finish("new", "v2")
        text = "9 of 11 episodes of this batch ended without a reward; most often, all of client old, all of code"
        text += " version v1: no tool server. Of the newest code version v2, 0 of 1 did"
        rule_of_episodes = (await found())["episodes"]
        assert (rule_of_episodes.level, rule_of_episodes.text) == ("ok", text)
        live = await begin("new", "v2")
        assert (await found())["silent"].level == "ok"
        run.clock.advance(lease / 2)
        silent = (await found())["silent"]
        assert silent.level == "warn" and silent.text.startswith(
            f"episode {live.id} of task t, client new, has made no"
        )
        assert "and sent no heartbeat for 1 min: its client is gone" in silent.text
        assert f"ends without a reward in {duration(lease / 2)}" in silent.text


async def test_reasons_are_those_of_earlier_batches_too_and_alike_if_only_numbers_differ(tmp_path: Path) -> None:
    """The present batch has lost nothing, and what was not needed is no failure."""
    reasons = ["ToolError: took 31.2 s", "other", "ToolError: took 30.9 s", *["surplus: enough"] * 4]
    async with running(tmp_path, job={"group_size": 3}) as run:
        for reason in reasons:
            begun = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", wait=5))
            await run.gateway.abort(begun.id, AbortRequest(reason=reason))
        facts = RunFacts(same(batch__episodes=2.0, episodes__aborted=0.6))
        [found] = (await run.gateway.reader.read(lambda journal: health_of(facts, journal))).rules
    assert found.text.startswith("3 of 13 episodes") and "all of client c: ToolError: took 3" in found.text


async def test_advice_about_tasks_is_left_out_after_rewards_fell(tmp_path: Path) -> None:
    found = ZeroVariance(batches=3, truncated=0.5, task_id="t", prompt="p", answers=[])
    assert len(found.advice) > 1
    [only] = found.model_copy(update={"rewards_fell": True}).advice
    assert "`reward`" in only


async def test_viewers_read_health_and_waiting(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        await served.run.batch()
        begun = await served.begin(task_id="next")
        headers = {"Authorization": f"Bearer {VIEWER}"}
        health = HealthView.model_validate((await served.http.get("/swarm/v1/health", headers=headers)).json())
        waiting = WaitingView.model_validate((await served.http.get("/swarm/v1/waiting", headers=headers)).json())
        assert health.learning.answer == "too_early" and health.learning.num_steps == 1
        assert {"engine", "disk", "groups", "episodes"} <= {rule.name for rule in health.rules}
        assert [cell.episode_id for group in waiting.groups for cell in group.cells] == [begun["episode_id"]]
        assert waiting.text == (await served.http.get("/swarm/v1/status")).json()["waiting_for"]
        async with httpx.AsyncClient(base_url=served.url, trust_env=False) as stranger:
            for path in ("health", "waiting"):
                assert (await stranger.get(f"/swarm/v1/{path}")).status_code == 401
