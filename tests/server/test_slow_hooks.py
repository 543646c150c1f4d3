"""A hook of a plug-in that takes long, or never returns, in the gateway.

1. The event loop and the other runs go on meanwhile. A hook that returns in time changes nothing else.
2. After `server.hook_timeout` its run stops with the name of the hook. The status names its thread until that ends.
3. No finished episode is lost: the group is decided once the engine, or the server, is started again.
4. Validators are called once for the same parameters, and not in the event loop, also those of an older batch.
5. The page's hook delays only the page that needs it. After its limit it is not called again for the same recipe.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentjet.errors import InvalidRequest, Later
from agentjet.protocol import BeginRequest, CloseGroupsRequest, FinishRequest, GroupName, JobBody, RunSettings
from agentjet.recipes import hooks, registry
from agentjet.recipes.hooks import PlugInThreads
from tests.fakes import Running, job_body, running
from tests.plugins.waiting import Waiting
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

WAITING = "tests.plugins.waiting:Waiting"
FILE = r"it was at .*(waiting|threading)\.py:\d+; mend the recipe"
AT_START = ("needs", "value_heads")
LIMIT = 0.1


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    registry._validated.clear()
    Waiting.calls.clear()
    Waiting.entered.clear()
    Waiting.released.clear()
    yield
    Waiting.released.set()


def job(hook: str) -> dict[str, object]:
    return {"recipe": {"name": WAITING, "hook": hook}, "batch_size": 1}


async def opened(run: Running, hook: str) -> Running:
    await run.runs.put("slow", RunSettings(job={**job(hook), "group_size": 2, "max_tokens": 32}))
    return run.of_run("slow")


async def fill(slow: Running) -> list[str]:
    """Fills a batch of a run whose hook may be slow."""
    ended = []
    async with asyncio.timeout(30):
        while len(ended) < 2:
            try:
                ended.append(await slow.episode(float(len(ended))))
            except Later as later:
                assert later.code == "engine_failed"
                return ended
    return ended


@pytest.mark.parametrize("hook", [*AT_START, "rollout", "accept"])
async def test_the_server_goes_on_while_a_hook_waits(tmp_path: Path, hook: str) -> None:
    async with serving(tmp_path / "d") as served:
        run = served.run
        slow = await opened(run, hook)
        filling = asyncio.create_task(fill(slow))
        await run.until(Waiting.entered.is_set)
        await run.batch()
        assert (await served.http.get("/healthz")).status_code == 200
        if hook in ("rollout", "accept"):
            assert f"calling `{hook}` of the recipe" in slow.gateway.status().waiting_for
            evaluated = await slow.gateway.begin(BeginRequest(task_id="e", mode="eval"))
            await slow.say(evaluated.id)
        Waiting.released.set()
        await filling
        await run.until(lambda: slow.gateway.swarm.policy_version == 1)
        status = slow.gateway.status()
        assert (status.abandoned_hooks, status.episodes["trained"], status.episodes["dropped"]) == ([], 2, 0)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("hook", [*AT_START, "rollout", "accept"])
async def test_a_hook_past_its_limit_stops_its_run_only(tmp_path: Path, hook: str, restarts: bool) -> None:
    async with running(tmp_path / "d", server={"hook_timeout": LIMIT}) as run:
        slow = await opened(run, hook)
        if hook in AT_START:
            finished = []
        else:
            finished = await fill(slow)
            assert len(finished) == (2 if hook == "accept" else 0)
        await run.until(lambda: slow.gateway.phase.state == "failed")
        reason, [named] = slow.gateway.phase.reason, slow.gateway.status().abandoned_hooks
        for sentence in (reason, named):
            assert f"the recipe '{WAITING}': `{hook}` did not return within" in sentence
        assert "within 0.1 s (server.hook_timeout); it was at " in reason and "thread 'hook of run slow'" in named
        assert "mend the recipe and start the server again; nothing is lost" in reason
        await run.batch()
        assert slow.gateway.status().episodes["waiting"] == len(finished)
        Waiting.released.set()
        if not restarts:
            await run.until(lambda: not slow.gateway.status().abandoned_hooks)
            slow.gateway.engine.start()
            await learn(slow, finished)
    if restarts:
        async with running(tmp_path / "d") as run:
            await learn(run.of_run("slow"), finished)


async def learn(slow: Running, finished: list[str]) -> None:
    """Fills the rest of the first batch. It has the finished episodes."""
    await slow.gateway.engine.wait_until_up()
    if not finished:
        await fill(slow)
    await slow.until(lambda: slow.gateway.swarm.policy_version == 1)
    [batch] = slow.gateway.swarm.batches.from_version(0)
    assert not finished or batch.episode_ids == tuple(finished)
    assert slow.gateway.status().episodes["trained"] == 2


async def test_a_group_that_its_client_left_waits_for_the_recipe(tmp_path: Path) -> None:
    """No event says that such a group is closing."""
    async with running(tmp_path / "d", job={**job("accept"), "min_group_size": 2, "group_size": 3}) as run:
        for reward in (0.0, 1.0):
            begun = await run.gateway.begin(BeginRequest(task_id="t", client_id="c", group="g"))
            await run.say(begun.id)
            await run.gateway.finish(begun.id, FinishRequest(reward=reward))
        left = CloseGroupsRequest(client_id="c", groups=[GroupName(group="g")])
        assert await run.gateway.close_groups(left) == 0
        await run.until(Waiting.entered.is_set)
        waiting = await run.gateway.reader.waiting()
        assert [group.state for group in waiting.groups] == ["closing"]
        text = run.gateway.swarm.queries.waiting_for()
        assert text.startswith("`accept` of the recipe: 0 of 1 groups are complete, 0 open, 1 closing, 0 ep")
        run.gateway.swarm.reap()
        Waiting.released.set()
        await run.until(lambda: run.gateway.swarm.policy_version == 1)


async def test_begins_of_one_group_ask_once(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={**job("rollout"), "group_size": 4}) as run:
        asking = [asyncio.create_task(run.gateway.begin(BeginRequest(task_id="t", client_id="c"))) for _ in range(4)]
        await run.until(Waiting.entered.is_set)
        Waiting.released.set()
        episodes = await asyncio.gather(*asking)
        assert len({episode.group_id for episode in episodes}) == 1 and Waiting.calls.count("rollout") == 1


async def test_a_begin_that_is_cancelled_abandons_its_hook(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job=job("rollout")) as run:
        asking = asyncio.create_task(run.gateway.begin(BeginRequest(task_id="t")))
        await run.until(Waiting.entered.is_set)
        asking.cancel()
        await asyncio.wait([asking])
        assert "`rollout`" in run.gateway.status().abandoned_hooks[0] and run.gateway.phase.state == "sampling"
        Waiting.released.set()
        await run.batch()


async def test_an_endless_loop_is_ended(tmp_path: Path) -> None:
    async with running(tmp_path / "d", server={"hook_timeout": LIMIT}, job=job("endless accept")) as run:
        await fill(run)
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert "`accept` did not return" in run.gateway.phase.reason
        await run.until(lambda: not run.gateway.status().abandoned_hooks)


@pytest.mark.parametrize("hook", [*AT_START, "validators"])
async def test_a_job_whose_recipe_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    monkeypatch.setattr(hooks, "VALIDATORS", PlugInThreads(LIMIT))
    async with running(tmp_path / "d", server={"hook_timeout": LIMIT}) as run:
        body = job_body(run.gateway)
        replaced = JobBody(revision=body.revision, job={**body.job, "recipe": {"name": WAITING, "hook": hook}})
        with pytest.raises(InvalidRequest, match=f"`{hook}` did not return within 0.1 s.*{FILE}"):
            await run.gateway.replace_job(replaced)
        [named] = run.gateway.status().abandoned_hooks
        assert f"`{hook}` did not return within" in named
        assert job_body(run.gateway) == body
        await run.batch()
        Waiting.released.set()
        await run.until(lambda: not run.gateway.status().abandoned_hooks)


async def test_a_run_whose_validators_do_not_end_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "VALIDATORS", PlugInThreads(LIMIT))
    async with running(tmp_path / "d") as run:
        Waiting.released.set()
        await opened(run, "validators")
    Waiting.released.clear()
    registry._validated.clear()
    async with running(tmp_path / "d") as run:
        view = run.runs.views()[1]
        assert view.state == "failed" and "`validators` did not return within 0.1 s" in view.reason
        assert any("thread 'validators of Waiting'" in one for one in run.gateway.status().abandoned_hooks)
        await run.batch()


async def test_the_server_goes_on_while_validators_wait(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        opening = asyncio.create_task(opened(served.run, "validators"))
        await served.run.until(Waiting.entered.is_set)
        assert (await served.http.get("/healthz")).status_code == 200
        await served.run.batch()
        assert not opening.done()
        Waiting.released.set()
        await (await opening).batch()


async def test_the_server_goes_on_while_validators_of_an_older_batch_wait(tmp_path: Path) -> None:
    """Only that batch, which is learned again, names their recipe."""
    Waiting.released.set()
    async with running(tmp_path / "d") as run:
        first = job_body(run.gateway)
        other = {**first.job, "recipe": {"name": WAITING, "hook": "validators"}}
        await run.gateway.replace_job(JobBody(revision=first.revision, job=other))
        await run.batch()
        await run.gateway.replace_job(JobBody(revision=job_body(run.gateway).revision, job=first.job))
    for path in (run.folder / "checkpoints").glob("*"):
        shutil.rmtree(path)
    Waiting.released.clear()
    Waiting.entered.clear()
    registry._validated.clear()
    async with serving(tmp_path / "d", wait_ready=False) as served:
        await served.run.until(Waiting.entered.is_set)
        assert (await served.http.get("/healthz")).status_code == 200
        assert served.run.compute.learned == [] and not Waiting.released.is_set()
        Waiting.released.set()
        await served.run.gateway.engine.wait_until_up()
        assert served.run.compute.learned == [0]


async def test_validators_run_once_for_the_same_parameters(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        slow = await opened(run, "")
        await slow.gateway.engine.wait_until_up()
        await slow.batch()
        await slow.gateway.replace_job(job_body(slow.gateway))
        assert Waiting.calls.count("validators") <= 2, "as they were sent, and as the journal has them"


@pytest.mark.parametrize("limit", [20.0, 600.0])
async def test_other_reads_go_on_while_the_hook_of_a_page_waits(tmp_path: Path, limit: float) -> None:
    async with running(tmp_path / "d", server={"hook_timeout": limit}, job=job("reward_advantages")) as run:
        await run.batch()
        reader = run.gateway.reader
        clicks = [asyncio.create_task(page) for page in (reader.batch(0), reader.group(1), reader.batch(0))]
        await run.until(Waiting.entered.is_set)
        async with asyncio.timeout(10):
            assert json.loads(await reader.batches(None, 5))["batches"][0]["state"] == "learned"
            assert Waiting.calls.count("reward_advantages") == 1, "several clicks have one thread"
            await reader.close()
        Waiting.released.set()
        for view in map(json.loads, await asyncio.gather(*clicks)):
            assert not view["advantages_note"]


@pytest.mark.parametrize("hook", ["reward_advantages", "endless reward_advantages"])
async def test_advantages_that_do_not_come_are_a_note(tmp_path: Path, hook: str) -> None:
    """Also if the thread of the hook could be ended."""
    async with running(tmp_path / "d", server={"hook_timeout": LIMIT}, job=job(hook)) as run:
        await run.batch()
        for _ in range(3):
            view = json.loads(await run.gateway.reader.batch(0))
            assert "`reward_advantages` did not return within 0.1 s (server.hook" in view["advantages_note"]
            assert "not called again until the recipe or one of its parameters changes" in view["advantages_note"]
            if hook.startswith("endless"):
                await run.until(lambda: not run.gateway.status().abandoned_hooks)
        assert Waiting.calls.count("reward_advantages") == 1
        if not hook.startswith("endless"):
            [named] = run.gateway.status().abandoned_hooks
            assert f"thread 'reward_advantages of {WAITING} of run default': the recipe" in named
        body = job_body(run.gateway)
        mended = JobBody(revision=body.revision, job={**body.job, "recipe": {"name": WAITING, "hook": "mended"}})
        await run.gateway.replace_job(mended)
        await run.batch()
        assert not json.loads(await run.gateway.reader.batch(1))["advantages_note"]
