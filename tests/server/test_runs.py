"""Runs and their job settings.

The runs of a server on one backend.

1. Two runs train at once. The end of one, and its failures, leave the other alone.
2. A worker that both use and that crashes is replaced for both.
3. Open runs survive a restart. An ended run stays ended, and continues at its version when it is opened again.
4. A run that cannot be opened for any reason is shown, and the server starts.
5. Requests about a run are idempotent and have their effect one after the other. Wrong ones are refused by name.
6. A run whose folder was removed can be ended and created again. A run that the full disk refused can be opened later.
7. A request that began before the end of its run and acts after it is refused with a 503.
8. The policies of a run may be mistyped: they can change until its first episode, unless the run is up, or started
   meanwhile.
9. Adapters of two runs on two base models do not get into one worker.
10. Files of a run directly in the data dir are refused with the way out, and stay.
11. A journal that takes long to open holds neither the event loop nor the stop of the server.

The job settings: accepted settings stay in force over a restart, and refused ones never apply.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    Later,
    NotFound,
    RequestError,
    Unavailable,
    WorkerDied,
)
from agentjet.front.calls import CallRequest
from agentjet.protocol import AbortRequest, BeginRequest, EpisodeQuery, Event, FinishRequest, RunSettings, status_of
from agentjet.server.gateway import Gateway
from agentjet.server.runs import Runs
from agentjet.swarm import Journal
from agentjet.swarm.journal_file import JournalFile
from agentjet.swarm.state import Store
from agentjet.types import JOURNAL, Conversation, Message, PolicyId
from tests.fakes import RUN, Running, job_body, running

pytestmark = pytest.mark.anyio


# ---- runs ------------------------------------------------------------------------------------------------------------

TWO = {"planner": {}, "coder": {}}


async def opened(run: Running, name: str = "other", **settings: object) -> Running:
    """Creates a run and waits until it is up."""
    await run.runs.put(name, RunSettings.model_validate(settings))
    other = run.of_run(name)
    await other.gateway.engine.wait_until_up()
    return other


async def test_two_runs_train_at_once(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        other = await opened(run, policies=TWO)
        assert [(view.name, view.path, view.policies, view.state) for view in run.runs.views()] == [
            ("default", "", (), "sampling"),
            ("other", "/runs/other", ("planner", "coder"), "sampling"),
        ]
        await asyncio.gather(run.batch(), other.batch())
        await run.batch()
        assert run.compute.starts == 1, "they share a worker"
        ended = await run.runs.end("other")
        assert (ended.is_open, ended.policy_version, ended.policies) == (False, None, ("planner", "coder"))
        with pytest.raises(NotFound, match="no open run 'other'; open are: default"):
            run.runs.get("other")
        assert run.compute.workers == {"": {PolicyId()}}
        await run.batch()
        assert run.gateway.swarm.policy_version == 3
        again = await opened(run)
        assert (again.gateway.hosted.names, again.gateway.swarm.policy_version) == (("planner", "coder"), 1)
        assert not run.compute.policies[PolicyId("other", "coder")].learned, "its checkpoint was loaded"
    assert (tmp_path / "d" / "runs" / "other" / "checkpoints" / "step_000001" / "coder").is_dir()


async def test_a_request_that_outlives_its_run_is_refused(tmp_path: Path) -> None:
    """A request holds its gateway from its start, so it may act after the end of the run."""
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        gateway = (await opened(run)).gateway
        episode, _ = [await gateway.begin(BeginRequest(task_id="t")) for _ in range(2)]
        waiting = asyncio.create_task(gateway.begin(BeginRequest(task_id="u", wait=60)))
        listening = asyncio.create_task(_all_events(gateway))
        await asyncio.sleep(0)
        unread = gateway.events()
        await anext(unread)
        await run.runs.end("other")
        await listening
        assert [event async for event in unread], "those that it has read already"
        late: list[Awaitable[object]] = [
            waiting,
            gateway.begin(BeginRequest(task_id="v")),
            gateway.finish(episode.id, FinishRequest(reward=1.0)),
            gateway.abort(episode.id, AbortRequest(), idempotency_key="k"),
            gateway.replace_job(job_body(gateway)),
            gateway.reader.episodes(EpisodeQuery()),
            gateway.reader.episode("unknown"),
            anext(gateway.calls.answer(episode.id, "", CallRequest(Conversation((Message("user", "hello"),))))),
        ]
        for refused in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(refused, Later) and status_of(refused) == 503, refused
        again = await opened(run)
        assert (await again.gateway.finish(episode.id, FinishRequest(reward=1.0))).status == "finished"


async def _all_events(gateway: Gateway) -> list[Event]:
    return [event async for event in gateway.events()]


async def test_open_runs_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await (await opened(run, "a", job={"batch_size": 1})).batch()
        await opened(run, "b")
        await run.runs.end("b")
    async with running(tmp_path / "d") as run:
        assert [(view.name, view.is_open) for view in run.runs.views()] == [
            ("default", True),
            ("a", True),
            ("b", False),
        ]
        a = run.of_run("a")
        assert (a.gateway.swarm.policy_version, a.gateway.swarm.job.batch_size) == (1, 1)
        await a.gateway.engine.wait_until_up()
        await a.batch()


async def test_a_worker_that_two_runs_share_is_replaced_for_both(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        other = await opened(run)
        await asyncio.gather(run.batch(), other.batch())
        run.compute.die()
        await run.until(
            lambda: run.compute.starts == 2 and run.compute.workers.get("") == {PolicyId(), PolicyId("other")}
        )
        await asyncio.gather(run.batch(), other.batch())
        trained = [one.gateway.status().episodes["trained"] for one in (run, other)]
        assert (trained, run.compute.weights) == ([8, 8], run.compute.policies[PolicyId("other")].weights)


async def test_crashes_of_another_run_are_not_ours(tmp_path: Path) -> None:
    """Neither a call nor a batch is given up because operations of another run kill the worker."""
    theirs = WorkerDied("out of memory", during="other/policy")
    async with running(tmp_path / "d") as run:
        run.compute.may_sample.clear()
        episode = await run.gateway.begin(BeginRequest(task_id="e", mode="eval"))
        call = asyncio.create_task(run.say(episode.id))
        for crashes in range(3):
            await run.until(lambda crashes=crashes: len(run.compute.asked) == crashes + 1)
            run.compute.die(theirs)
        run.compute.may_sample.set()
        assert (await call).response.content == "hi"
        run.compute.may_learn.clear()
        await run.fill_batch()
        for crashes in range(3):
            await run.until(lambda crashes=crashes: len(run.compute.begun) == crashes + 1)
            run.compute.die(theirs)
        run.compute.may_learn.set()
        await run.until(lambda: run.gateway.status().episodes["trained"] == 4)


async def test_a_batch_that_kills_workers_is_set_aside_in_its_run(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        other = await opened(run)
        run.compute.deadly = {("other", 0)}
        await asyncio.gather(other.fill_batch(), run.batch())
        await run.until(lambda: other.gateway.status().episodes["dropped"] == 4)
        await run.batch()
        assert run.gateway.status().episodes["dropped"] == 0


async def test_requests_about_a_run_can_be_repeated(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        settings = RunSettings(job={"batch_size": 3})
        first, second = await asyncio.gather(run.runs.put("a", settings), run.runs.put("a", settings))
        assert first.name == second.name == "a" and len(run.runs.open_gateways()) == 2
        gateway = run.runs.get("a")
        assert job_body(gateway).revision == 1
        await run.runs.put("a", RunSettings(job={"batch_size": 5}))
        await run.runs.put("a", RunSettings())
        assert (gateway.swarm.job.batch_size, job_body(gateway).revision) == (5, 2)
        await gateway.engine.wait_until_up()
        ending = asyncio.create_task(run.runs.end("a"))
        await asyncio.sleep(0)
        opened = await run.runs.put("a", RunSettings())
        assert ending.done() and opened.is_open and run.runs.get("a") is not gateway
        assert run.runs.get("a").swarm.job.batch_size == 5
        assert not (await run.runs.end("a")).is_open and not (await run.runs.end("a")).is_open


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("../a", {}, "run_name_invalid", "'../a'"),
        ("default", {}, "default_run", "agentjet job set"),
        ("a", {"policies": {"solo": {}}}, "run_policies_changed", "planner"),
        ("a", {"job": {"batch_sise": 3}}, "invalid_setting", r"job\.batch_sise"),
        ("b", {"policies": {"Planner": {}}}, "invalid_setting", "policies"),
        (
            "b",
            {"policies": {"solo": {"model": "./no"}}},
            "invalid_setting",
            r"policies\.solo\.model = '\./no' is neither",
        ),
        ("b", {"job": {"optimizers": {"coder": {}}}}, "invalid_setting", r"job\.optimizers\.coder"),
    ],
)
async def test_a_wrong_request_changes_nothing(
    tmp_path: Path, name: str, settings: dict[str, object], error: str, message: str
) -> None:
    async with running(tmp_path / "d") as run:
        await run.runs.put("a", RunSettings(policies=TWO))
        before = run.runs.views()
        with pytest.raises((InvalidRequest, Conflict), match=message) as refused:
            await run.runs.put(name, RunSettings.model_validate(settings))
        assert refused.value.code == error
        for unknown in ("../a", "default", "b"):
            with pytest.raises(RequestError):
                await run.runs.end(unknown)
        assert [view.name for view in run.runs.views()] == [view.name for view in before]


async def test_a_run_with_a_damaged_row_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path / "d") as run:
        for name in "ab":
            await opened(run, name)
    with sqlite3.connect(tmp_path / "d" / "runs" / "a" / JOURNAL) as journal:
        journal.execute("INSERT OR REPLACE INTO meta VALUES ('state', '{')")
    journal.close()
    async with running(tmp_path / "d") as run:
        assert [(view.name, view.state) for view in run.runs.views()][1] == ("a", "failed")
        assert run.runs.views()[1].reason == "the log of the server has the failure, ValidationError"
        await run.of_run("b").gateway.engine.wait_until_up()
        await run.batch()
    assert "run a cannot be opened" in caplog.text


@pytest.mark.parametrize("file", ["run.json", "journal.sqlite"])
async def test_a_run_that_cannot_be_opened_is_shown(tmp_path: Path, file: str) -> None:
    async with running(tmp_path / "d") as run:
        await opened(run, "a")
        await run.batch()
    path = tmp_path / "d" / "runs" / "a" / file
    kept = path.read_bytes()
    path.write_text("not what it was " * 100)
    async with running(tmp_path / "d") as run:
        _, view = run.runs.views()
        assert (view.is_open, view.state) == (False, "failed") and file in view.reason
        assert "pydantic" not in view.reason and "\n" not in view.reason
        with pytest.raises(Conflict, match=file) as refused:
            await run.runs.put("a", RunSettings())
        assert refused.value.code == "run_unusable"
        path.write_bytes(kept)
        assert (await run.runs.put("a", RunSettings())).is_open


@pytest.mark.parametrize(("name", "message"), [("journal.sqlite", "is of AgentJet 0.1"), ("checkpoints", "move it to")])
async def test_files_of_a_run_directly_in_the_data_dir_are_refused(tmp_path: Path, name: str, message: str) -> None:
    data = tmp_path / "d"
    async with running(data, job={"checkpoint_every": 1}) as run:
        await run.batch()
        weights = run.compute.weights
    (data / RUN / name).rename(data / name)
    before = sorted(data.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        async with running(data):
            pass
    assert sorted(data.rglob("*")) == before
    (data / name).rename(data / RUN / name)
    async with running(data) as run:
        assert run.compute.weights == weights


async def test_the_record_of_a_run_has_its_first_settings(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 7}) as run:
        await run.runs.put("a", RunSettings(policies={"solo": {"lora": {"rank": 4}}}))
        recorded = json.loads((tmp_path / "d" / "runs" / "a" / "run.json").read_text())
        assert recorded["policies"] == {"solo": {"lora": {"rank": 4}}} and recorded["open"] is True
        assert recorded["job"]["batch_size"] == 7


async def test_the_worker_of_a_policy_changes_while_its_run_is_not_open(tmp_path: Path) -> None:
    moved = RunSettings.model_validate({"policies": {"planner": {"worker": "second"}, "coder": {}}})
    async with running(tmp_path / "d") as run:
        await (await opened(run, "a", policies=TWO)).batch()
        with pytest.raises(Conflict, match="end the run"):
            await run.runs.put("a", moved)
        await run.runs.end("a")
        assert (await run.runs.put("a", moved)).policy_version == 1
        await run.runs.get("a").engine.wait_until_up()
        assert run.compute.workers["second"] == {PolicyId("a", "planner")}


async def test_a_run_that_lost_its_record_is_created_again_with_its_policies(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await (await opened(run, "a", policies=TWO)).batch()
    record = tmp_path / "d" / "runs" / "a" / "run.json"
    record.unlink()
    async with running(tmp_path / "d") as run:
        view = run.runs.views()[1]
        assert (view.name, view.is_open, view.state) == ("a", False, "failed") and "run.json" in view.reason
        with pytest.raises(Conflict, match="planner"):
            await run.runs.put("a", RunSettings())
        assert not record.exists()
        assert (await run.runs.put("a", RunSettings.model_validate({"policies": TWO}))).policy_version == 1


async def test_a_run_without_its_folder_can_be_ended(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        await opened(run)
        shutil.rmtree(tmp_path / "d" / "runs" / "other")
        assert [view.name for view in run.runs.views()] == ["default", "other"]
        await run.runs.end("other")
        again = await opened(run)
        await again.batch()
        assert again.gateway.swarm.policy_version == 1


async def test_the_event_loop_opens_no_journal_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its migration may take long. A server that is stopped in that time leaves the journal to the next one."""
    threads, entered, may_open = [], threading.Event(), threading.Event()
    of_file: Any = JournalFile.open

    def open_slowly(*args: Any) -> Any:
        threads.append(threading.current_thread())
        entered.set()
        may_open.wait(30)
        return of_file(*args)

    async with running(tmp_path / "d") as run:
        monkeypatch.setattr(JournalFile, "open", open_slowly)
        creating = asyncio.create_task(run.runs.put("other", RunSettings()))
        await run.until(entered.is_set)
        await run.batch()
        stopping = asyncio.create_task(run.runs.drain())
        await asyncio.sleep(0)
        may_open.set()
        with pytest.raises(Later, match="being stopped"):
            await creating
        await stopping
        assert threading.main_thread() not in threads
        Journal.open(tmp_path / "d" / "runs" / "other" / JOURNAL).close()


async def test_a_run_that_the_disk_refused_can_be_opened_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise Unavailable("the disk is full", code="journal_unavailable", retry_after=1.0)

    async with running(tmp_path / "d") as run:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "start_job", refuse)
            with pytest.raises(Conflict, match="the disk is full"):
                await run.runs.put("other", RunSettings())
        assert run.runs.views()[1].reason == "the disk is full"
        await (await opened(run)).batch()


async def test_a_failed_run_starts_again_with_a_better_job(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        with pytest.raises(ConfigError, match=r"job\.max_tokens = 1000000 leaves no room for a prompt"):
            await opened(run, job={"max_tokens": 10**6})
        other = await opened(run, job={"max_tokens": 16})
        assert (other.gateway.phase.state, other.gateway.swarm.job.max_tokens) == ("sampling", 16)


@pytest.mark.parametrize("is_ended", [False, True])
async def test_a_run_whose_model_was_mistyped_is_created_again(tmp_path: Path, is_ended: bool) -> None:
    async with running(tmp_path / "d") as run:
        wrong = {"solo": {"model": "org/mistyped", "worker": "second"}}
        run.compute.fail_start = [ConfigError("model.name = 'mistyped' is not a folder")]
        with pytest.raises(ConfigError, match="mistyped"):
            await opened(run, policies=wrong)
        if is_ended:
            await run.runs.end("other")
        other = await opened(run, policies={"planner": {}})
        await other.batch()
        assert json.loads((other.folder / "run.json").read_text())["policies"] == {"planner": {}}
        if is_ended:
            await run.runs.end("other")
        with pytest.raises(Conflict) as refused:
            await run.runs.put("other", RunSettings.model_validate({"policies": wrong}))
        assert refused.value.code == "run_policies_changed"


async def test_a_failed_run_that_is_started_meanwhile_keeps_its_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.fail_start = [ConfigError("model.name = 'mistyped' is not a folder")]
        with pytest.raises(ConfigError, match="mistyped"):
            await opened(run, policies={"solo": {"worker": "second"}})
        gateway, loop, check = run.runs.get("other"), asyncio.get_running_loop(), Runs._checked_job

        async def start() -> None:
            gateway.engine.start()

        def start_first(*args: Any, **kwargs: Any) -> Any:
            asyncio.run_coroutine_threadsafe(start(), loop).result()
            return check(*args, **kwargs)

        monkeypatch.setattr(Runs, "_checked_job", start_first)
        with pytest.raises(Conflict, match=r'its policies are \{"solo"') as refused:
            await run.runs.put("other", RunSettings(policies={"planner": {}}))
        assert refused.value.code == "run_policies_changed" and run.runs.get("other") is gateway
        await gateway.engine.wait_until_up()
        await run.of_run("other").batch()


async def test_corrected_policies_keep_the_job_of_the_run(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        job = {"batch_size": 3, "optimizers": {"planer": {"lr": 1e-3}, "coder": {"lr": 1e-4}}}
        run.compute.fail_start = [ConfigError("model.name = 'mistyped' is not a folder")]
        with pytest.raises(ConfigError, match="mistyped"):
            await opened(run, policies={"planer": {"model": "org/mistyped", "worker": "second"}, "coder": {}}, job=job)
        changed = job_body(run.of_run("other").gateway)
        await run.of_run("other").gateway.replace_job(
            changed.model_copy(update={"job": {**changed.job, "group_size": 7}})
        )
        other = await opened(run, policies=TWO)
        settings = other.gateway.swarm.job
        assert (settings.batch_size, settings.group_size, list(settings.optimizers)) == (3, 7, ["coder"])
        assert settings.optimizers["coder"].lr == 1e-4


async def test_adapters_on_two_base_models_are_refused_before_the_run_is_created(tmp_path: Path) -> None:
    def on(model: str, worker: str = "") -> RunSettings:
        return RunSettings(policies={"solo": {"model": model, "worker": worker, "lora": {"rank": 4}}})

    async with running(tmp_path / "d") as run:
        await run.runs.put("a", on("org/first"))
        with pytest.raises(
            InvalidRequest, match=r"'org/second'.* has adapters of 'org/first' for the run 'a'.*solo.worker"
        ):
            await run.runs.put("b", on("org/second"))
        assert not (tmp_path / "d" / "runs" / "b").exists()
        await run.runs.put("b", on("org/second", worker="own"))
        await run.runs.end("a")
        await run.runs.put("c", on("org/second"))


# ---- job settings ----------------------------------------------------------------------------------------------------


async def test_a_replaced_job_survives_a_restart_with_the_same_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "d") as run:
        body = job_body(run.gateway)
        body.job["task_weights"] = {"math": 2.0, "*": 1.0}
        replaced = await run.gateway.replace_job(body)
        assert replaced.revision == body.revision + 1
    async with running(tmp_path / "d") as run:
        assert job_body(run.gateway) == replaced
        assert "the job settings are those of revision 2" in caplog.text
        assert "job.task_weights.math was not set and is 2.0" in caplog.text
    caplog.clear()
    async with running(tmp_path / "d", job={"batch_size": 3}) as run:
        job = job_body(run.gateway)
        assert (job.revision, job.job["batch_size"], job.job["task_weights"]) == (3, 3, {})
        assert "those in force were of revision 2" in caplog.text
        assert "job.batch_size was 2 and is 3, job.task_weights.math was 2.0 and is not set" in caplog.text
        assert "group_size" not in caplog.text
    caplog.clear()
    async with running(tmp_path / "d", job={"batch_size": 3}) as run:
        assert job_body(run.gateway) == job and "the job settings" not in caplog.text


async def test_a_job_that_the_disk_refuses_is_not_in_force(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        before, db = job_body(run.gateway), run.gateway._journal.file.db
        await run.gateway.commits.durable()
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        body = before.model_copy(
            update={"job": before.job | {"task_weights": {f"task set {i}": 1.0 for i in range(1000)}}}
        )
        with pytest.raises(Later):
            await run.gateway.replace_job(body)
        assert job_body(run.gateway) == before
        db.execute("PRAGMA max_page_count = 1073741823")
        assert (await run.gateway.replace_job(body)).revision == before.revision + 1
