"""The health rules: each has a run that trips it and one that must not; and the Overview of a served run.

1. `TRIPS` has for each rule the facts that trip it, with level and words, and similar facts that do not.
2. Every rule has a section in `docs/health.md`.
3. `Overview` collects the facts of a served run, and the cells of its groups.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.config import JobConfig
from agentjet.gateway.health import RULES, TEXT, Facts, ServerFacts, SilentEpisode, health, remedies
from agentjet.gateway.loop_lag import Gap
from agentjet.gateway.overview import health_of
from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest, HealthRuleView, ZeroVariance
from tests.fakes import running, saying
from tests.gateway.test_learning import evaluation

pytestmark = pytest.mark.anyio
JOB = JobConfig(batch_size=4)
STUCK = SilentEpisode("ep_1", "t1", "c", 50.0)
UP = ServerFacts("sampling", client_seconds=3.0)
Steps = list[dict[str, float]]


def same(num: int = 5, **metrics: float) -> Steps:
    """Equal steps; `a__b` is the metric `a/b`."""
    return [{name.replace("__", "/"): value for name, value in metrics.items()} for _ in range(num)]


def each(metric: str, *values: float) -> Steps:
    return [{metric: value} for value in values]


def held(cpu: float, wall: float) -> Facts:
    """A server whose event loop was held."""
    return Facts(server=replace(UP, loop=Gap(0.0, cpu, wall, "agentjet.swarm.f")))


def fallen(num: int, **metrics: float) -> Steps:
    """Steps whose rewards are all 0."""
    return same(num, reward__mean=0.0, reward__std=0.0, groups__zero_variance=1.0, **metrics)


WEAK_METRICS = {"reward__mean": 0.0625, "reward__std": 0.24, "groups__zero_variance": 0.75}
WEAK = same(1, **WEAK_METRICS, completion__tokens=11.8, policy__entropy=1.63)
"""One success in 16 episodes: chance alone may bring none in the next batches."""
SOUND = same(6, reward__mean=0.5, reward__std=0.5, groups__zero_variance=0.0)


TRIPS: list[tuple[str, Facts, str, str, Facts]] = [
    ("engine", Facts(server=ServerFacts("failed", "no such model")), "bad", "no such model", Facts(server=UP)),
    (
        "engine",
        Facts(server=replace(UP, workers_started=2, workers_hung=1)),
        "warn",
        "1 workers ended",
        Facts(server=replace(UP, workers_started=2)),
    ),
    ("disk", Facts(server=replace(UP, refusal="disk full")), "bad", "disk full", Facts(server=UP)),
    ("disk", Facts(server=replace(UP, checkpoint_error="no space")), "bad", "no space", Facts(server=UP)),
    ("disk", Facts(server=replace(UP, unusable_checkpoints=2)), "warn", "2 checkpoints", Facts(server=UP)),
    ("loop", held(0.26, 0.3), "warn", "0.26 s of CPU time (0.3 s), held by agentjet.swarm.f", held(0.24, 60.0)),
    ("loop", held(3.1, 3.2), "bad", "3.1 s of CPU time (3.2 s), held by agentjet.swarm.f", held(0.01, 0.01)),
    (
        "clients",
        Facts(server=replace(UP, client_seconds=720.0)),
        "warn",
        "12 minutes",
        Facts(server=replace(UP, client_seconds=720.0, is_over=True)),
    ),
    ("weights", Facts(same(1, weights__finite=0.0)), "bad", "diverged", Facts(same(1, weights__finite=1.0))),
    (
        "gradient",
        Facts(same(optim__skipped_steps=1.0)),
        "bad",
        "5 of the newest 5",
        Facts(same(optim__skipped_steps=0.0, optim__grad_norm=0.5)),
    ),
    ("gradient", Facts(each("optim/skipped_steps", 0, 0, 0, 1, 0)), "warn", "1 of the newest 5", Facts()),
    (
        "gradient",
        Facts(each("optim/grad_norm", *[0.5] * 8, 9.0)),
        "warn",
        "18 times",
        Facts(each("optim/grad_norm", *[0.5] * 8, 2.0)),
    ),
    (
        "update",
        Facts(same(weights__sampler=0.0)),
        "bad",
        "lr too low",
        Facts(same(weights__sampler=0.0, groups__zero_variance=1.0)),
    ),
    (
        "update",
        Facts(same(a__weights__sampler=5.0, b__weights__sampler=0.0, b__optim__grad_norm=0.1)),
        "bad",
        "b: the newest 5 steps",
        Facts(same(a__weights__sampler=5.0, b__weights__sampler=0.0, b__optim__grad_norm=0.0)),
    ),
    (
        "mismatch",
        Facts(same(policy__mismatch_kl=0.05), JOB),
        "warn",
        "0.05 nats",
        Facts(same(policy__mismatch_kl=0.05), JobConfig(max_staleness=2)),
    ),
    ("mismatch", Facts(same(policy__mismatch_kl=0.5), JOB), "bad", "0.5 nats", Facts(same(policy__mismatch_kl=1e-4))),
    (
        "entropy",
        Facts([*same(5, policy__entropy=1.2), *same(5, policy__entropy=0.3)]),
        "warn",
        "1.2 to 0.3",
        Facts([{"policy/entropy": 1.2 - 0.1 * n, "reward/mean": 0.1 * n} for n in range(12)]),
    ),
    (
        "reward",
        Facts([*SOUND, *fallen(1)], JOB, range(1, 8)),
        "bad",
        "rewards were up to 0.5 until step 6, and all are 0 since: did the update of step 6 break the policy? Lower "
        "job.optimizer.lr and go back to version 5 or before (agentjet checkpoints rollback)",
        Facts([*SOUND, *fallen(1), *SOUND], JOB, range(1, 14)),
    ),
    (
        "reward",
        Facts([*SOUND, *fallen(1)], JOB, range(1, 8), checkpoints=[2, 4, 6, 7]),
        "bad",
        "go back to the checkpoint of version 4 (agentjet checkpoints rollback 4); or did",
        Facts(),
    ),
    (
        "reward",
        Facts([*SOUND, *fallen(1)], JOB, range(1, 8), checkpoints=[7]),
        "bad",
        "Lower job.optimizer.lr and start again, because no checkpoint is older than that step; or did",
        Facts(),
    ),
    (
        "reward",
        Facts([*WEAK, *fallen(1, completion__tokens=2.2)], JOB, range(1, 3)),
        "bad",
        "2.2 tokens an answer instead of 11.8: did the update of step 1",
        Facts([*WEAK, *fallen(1, completion__tokens=11.0)], JOB, range(1, 3)),
    ),
    (
        "reward",
        Facts([*WEAK, *fallen(1, policy__entropy=0.042)], JOB, range(1, 3)),
        "bad",
        "0.042 nats of entropy a token instead of 1.63",
        Facts([*WEAK, *fallen(1, policy__entropy=0.8)], JOB, range(1, 3)),
    ),
    (
        "reward",
        Facts([*WEAK, *fallen(3)], JOB, range(1, 5)),
        "warn",
        "all are 0 since",
        Facts(fallen(6), JOB, range(1, 7)),
    ),
    (
        "reward",
        Facts(
            [*same(3, **WEAK_METRICS, code__v1__reward_mean=0.06), *fallen(1, code__v2__reward_mean=0.0)],
            JOB,
            range(1, 5),
        ),
        "bad",
        "the agent's code changed to v2: does the new code, a tool or a reward function fail? Or did the "
        "update of step 3 break",
        Facts(
            [*same(3, **WEAK_METRICS, code__v1__reward_mean=0.06), *fallen(1, code__v1__reward_mean=0.0)],
            JOB,
            range(1, 5),
        ),
    ),
    (
        "groups",
        Facts(fallen(2)),
        "bad",
        "In the newest step every reward is 0",
        Facts(SOUND),
    ),
    (
        "groups",
        Facts(same(groups__zero_variance=0.6)),
        "warn",
        "60%",
        Facts(same(groups__zero_variance=0.3)),
    ),
    ("groups", Facts(each("groups/zero_variance", 0, 0, 1, 1, 1)), "bad", "60%", Facts()),
    (
        "silent",
        Facts(silent=STUCK, usual_seconds=12.0),
        "warn",
        "episode ep_1 of task t1, client c, has made no call for 50 s; whole episodes usually take 12 s: does a tool",
        Facts(silent=STUCK, usual_seconds=20.0),
    ),
    (
        "silent",
        Facts(silent=STUCK._replace(seconds=960.0), usual_seconds=12.0),
        "bad",
        "16 min",
        Facts(silent=STUCK._replace(seconds=25.0), usual_seconds=0.1),
    ),
    (
        "silent",
        Facts(silent=STUCK._replace(seconds=960.0)),
        "warn",
        "no episode has finished yet",
        Facts(silent=STUCK),
    ),
    ("episodes", Facts(finished=2, lost=6, reason="Timeout"), "bad", "most often: Timeout", Facts(finished=20, lost=1)),
    (
        "episodes",
        Facts(same(batch__episodes=8.0, episodes__aborted=2.0)),
        "warn",
        "10 of 50",
        Facts(same(batch__episodes=8.0, episodes__aborted=0.0)),
    ),
    (
        "episodes",
        Facts(same(batch__episodes=8.0, episodes__aborted=4.0)),
        "bad",
        "20 of 60",
        Facts(same(batch__episodes=8.0, episodes__surplus=4.0)),
    ),
    (
        "dropped",
        Facts(same(groups__dropped_zero_variance=4.0, groups__dropped_stale=1.0), JOB),
        "warn",
        "most of them as zero_variance",
        Facts(same(groups__dropped_stale=1.0), JOB),
    ),
    (
        "truncated",
        Facts(same(completion__truncated=0.25), JobConfig(max_tokens=32)),
        "warn",
        "25% of the answers were cut at job.max_tokens = 32",
        Facts(same(completion__truncated=0.02)),
    ),
    (
        "refused",
        Facts(same(batch__episodes=8.0, batch__unscorable=1.0)),
        "warn",
        "12%",
        Facts(same(batch__episodes=8.0, batch__unscorable=0.0)),
    ),
    (
        "delivery",
        Facts(same(forest__orphan_tokens=30.0, batch__sampled_tokens=70.0)),
        "warn",
        "30%",
        Facts(same(forest__orphan_tokens=1.0, batch__sampled_tokens=70.0)),
    ),
    ("drift", Facts(same(forest__drift=1.0)), "bad", "damaged", Facts(same(forest__drift=0.0))),
    (
        "held_out",
        Facts(evaluations=[evaluation(3, 0.7), evaluation(9, 0.4)]),
        "bad",
        "fell from 0.7",
        Facts(evaluations=[evaluation(3, 0.7), evaluation(9, 0.68)]),
    ),
]


def rule(facts: Facts, name: str) -> HealthRuleView | None:
    return next((one for one in health(facts).rules if one.name == name), None)


@pytest.mark.parametrize("case", TRIPS, ids=[f"{name}-{words}" for name, _, _, words, _ in TRIPS])
def test_a_rule_trips_on_its_run_and_not_on_a_similar_one(case: tuple[str, Facts, str, str, Facts]) -> None:
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


def test_a_run_without_facts_has_no_findings() -> None:
    assert health(Facts()).rules == [] and health(Facts()).learning.answer == "too_early"


def test_the_worst_policy_is_named_and_metrics_of_clients_are_not_judged() -> None:
    step = {"planner/optim/skipped_steps": 0.0, "coder/optim/skipped_steps": 1.0, "agent/forest/drift": 1.0}
    found = rule(Facts([step] * 5), "gradient")
    assert found is not None and found.level == "bad" and found.text.startswith("coder: ")
    assert rule(Facts([step] * 5), "drift") is None


async def test_a_batch_that_loses_its_episodes_is_bad_before_its_first_step(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        for number in range(5):
            begun = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", wait=5))
            reason = "ConnectionError: no tool server" if number else "other"
            await run.gateway.abort(begun.id, AbortRequest(reason=reason))
        found = {one.name: one for one in (await run.gateway.overview.health()).rules}
    assert found["episodes"].level == "bad" and "5 of 5" in found["episodes"].text
    assert "; most often, all of client c: ConnectionError: no tool server" in found["episodes"].text
    assert found["engine"].level == found["clients"].level == found["disk"].level == "ok"


async def test_the_picture_of_the_present_batch(tmp_path: Path) -> None:
    async with running(tmp_path, saying(lambda prompt: "hi"), job={"group_size": 3}) as run:
        await run.episode(0.5, task="a")
        live = await run.gateway.begin(BeginRequest(task_id="a", task_set="", client_id="c", wait=5))
        run.clock.advance(30)
        lost = await run.gateway.begin(BeginRequest(task_id="b", client_id="c", wait=5))
        kept = await run.gateway.begin(BeginRequest(task_id="b", client_id="c", wait=5))
        await run.gateway.abort(lost.id, AbortRequest(reason="broken"))
        found = await run.gateway.overview.waiting()
        waits = run.gateway.status().waiting_for
        assert f"{live.id} of task a, client c, is silent for 30 s (does a tool hang?): its lease has" in waits
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
        cells = (await run.gateway.overview.waiting()).groups[0].cells
        assert {cell.state for cell in cells} == {"finished"} and cells[1].silent_seconds is None


async def test_an_episode_whose_client_sends_heartbeats_only_is_named(tmp_path: Path) -> None:
    """A hanging tool: the client is alive, the agent is not."""
    async with running(tmp_path, saying(lambda prompt: "hi"), job={"group_size": 3}) as run:
        await run.episode(0.5, task="a")
        live = await run.gateway.begin(BeginRequest(task_id="a", client_id="c", wait=5))
        for _ in range(2):
            run.clock.advance(30)
            await run.gateway.heartbeat(live.id)
        found = {one.name: one for one in (await run.gateway.overview.health()).rules}
    assert found["silent"].level == "warn"
    assert found["silent"].text.startswith(f"episode {live.id} of task a, client c, has made no call for 1 min;")


async def test_reasons_are_those_of_earlier_batches_too_and_alike_if_only_numbers_differ(tmp_path: Path) -> None:
    """The present batch has lost nothing, and what was not needed is no failure."""
    reasons = ["ToolError: took 31.2 s", "other", "ToolError: took 30.9 s", *["surplus: enough"] * 4]
    async with running(tmp_path, job={"group_size": 3}) as run:
        for reason in reasons:
            begun = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", wait=5))
            await run.gateway.abort(begun.id, AbortRequest(reason=reason))
        facts = Facts(same(batch__episodes=2.0, episodes__aborted=0.6))
        [found] = (await run.gateway.reader.read(lambda journal: health_of(facts, journal))).rules
    assert found.text.startswith("3 of 13 episodes") and "all of client c: ToolError: took 3" in found.text


async def test_advice_about_tasks_is_left_out_after_rewards_fell(tmp_path: Path) -> None:
    found = ZeroVariance(batches=3, truncated=0.5, task_id="t", prompt="p", answers=[])
    assert len(found.advice) > 1
    [only] = found.model_copy(update={"rewards_fell": True}).advice
    assert "`reward`" in only
