"""A server with fronts. `tests/e2e/test_fronts.py` has the processes.

1. The addresses that agents get.
2. The server's own port answers every request as without fronts, except calls with the key of an episode.
3. A front that is frozen or ends while it starts is replaced, and the log has the reason.
4. A call that crashes several workers is given up by its front, which counts the workers as the server does.
5. A server whose front lost its file refuses to start if calls in it may still be learned.
6. A front that is silent is what training waits for.
7. A batch during which several fronts end is a failure.
8. Two requests that end an episode follow each other: the refused one does not let its calls go on.
9. A report without changes, as of an idle front twice a second, writes nothing.
10. An end that the server cannot record lets calls go on.
11. Fronts start when all runs are open. The agents of a run that is closed get an error that SDKs retry.
12. A front whose connection ends is replaced before its next report is due.
13. A front whose file takes no calls says so in its reports, and the server shows it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httpx
import pytest
from starlette.requests import HTTPConnection

from agentjet.compute.backend import ProcessCompute
from agentjet.config import ServeConfig
from agentjet.errors import ConfigError, Conflict, Later, RequestError, Unauthorized, Unavailable, WorkerDied
from agentjet.front.calls import MAX_CRASHES, CallRequest
from agentjet.front.http import listen
from agentjet.front.run import RunReport
from agentjet.front.segment import EpisodeActivity
from agentjet.fronts import supervision
from agentjet.fronts.process import FrontReport
from agentjet.fronts.supervision import FrontProcesses
from agentjet.processes.rpc import Peer
from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest, FrontView, RunSettings, status_of
from agentjet.server.fronts import FrontedCalls
from agentjet.swarm import EpisodeRecord
from agentjet.types import Conversation, Message
from tests.fakes import running
from tests.fronts_in_process import ADDRESS, FrontInProcess
from tests.server.serving import bearer, serving


@pytest.mark.parametrize(
    ("front_url", "asked", "address"),
    [
        ("", "http://127.0.0.1:8400/", "http://127.0.0.1:{port}"),
        ("", "https://box.example:8400/runs/other/", "https://box.example:{port}"),
        ("", "https://box.example/", "https://box.example:{port}"),
        ("", "http://[::1]:8400/", "http://[::1]:{port}"),
        ("", "http://[::1]/", "http://[::1]:{port}"),
        ("https://agents.example/f{front}", "http://127.0.0.1:8400/", "https://agents.example/f1"),
        ("https://agents.example/f{front}/", "http://127.0.0.1:8400/", "https://agents.example/f1"),
        ("http://box{front}.example:80", "http://127.0.0.1:8400/", "http://box1.example:80"),
    ],
)
def test_addresses(front_url: str, asked: str, address: str) -> None:
    settings = {"server": {"fronts": 2, "front_url": front_url}, "compute": {"backend": "cluster"}}
    config, compute = ServeConfig.model_validate(settings), cast(ProcessCompute, SimpleNamespace())
    with closing(listen("127.0.0.1", 0)) as first, closing(listen("127.0.0.1", 0)) as second:
        fronts = FrontProcesses(config, compute, [first, second], time.time)
        assert fronts.address(1, asked) == address.replace("{port}", str(second.getsockname()[1]))


def test_a_front_whose_report_is_overdue_is_silent_and_one_that_was_late_is_not() -> None:
    config = ServeConfig.model_validate({"server": {"fronts": 1}, "compute": {"backend": "cluster"}})
    with closing(listen("127.0.0.1", 0)) as listener:
        fronts = FrontProcesses(config, cast(ProcessCompute, SimpleNamespace()), [listener], time.time)
        handle = fronts._handles[0]
        handle.reported, handle.lag = time.monotonic() - 1000, 0.25
        assert (fronts.views()[0].lag, fronts.views()[0].problem) == (0, "starts")
        handle.ready.set()
        assert fronts.views()[0].lag > 900 and fronts.views()[0].problem.startswith("silent for ")
        handle.reported, handle.lag = handle.reported + 2000, 12.0
        assert (fronts.views()[0].lag, fronts.views()[0].problem) == (12, "")


@pytest.mark.anyio
async def test_the_run_waits_for_a_front_that_is_silent(tmp_path: Path) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        assert run.gateway.fronted is not None
        assert run.gateway.waiting_for().startswith("clients")
        well = FrontView(front=0, ready=True, calls=1, load=0.5, lag=0.1, starts=1)
        views = [well, well.model_copy(update={"front": 1, "problem": "silent for 12 s"})]
        run.gateway.fronted.fronts.views = lambda: views  # type: ignore[method-assign]
        assert run.gateway.waiting_for() == run.gateway.status().waiting_for == "front 1 (silent for 12 s)"


@pytest.mark.anyio
@pytest.mark.parametrize(("num_calls", "is_refused"), [(0, False), (1, True)])
async def test_a_server_without_the_file_of_a_front(tmp_path: Path, num_calls: int, is_refused: bool) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        fronts = cast(FrontInProcess, cast(FrontedCalls, run.gateway.fronted).fronts)
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        for _ in range(num_calls):
            assert [one async for one in fronts.calls().answer(episode.id, "", HELLO)]
        await run.gateway.finish(episode.id, FinishRequest(reward=1.0))
        path = run.gateway.folder / "calls" / "front-0.sqlite"
    for file in sorted(path.parent.iterdir()):
        file.unlink()
    for make_fronts in (None, FrontInProcess):  # The number of fronts may have changed.
        with (
            pytest.raises(ConfigError, match=f"lacks {path}, with calls of 1 episode ") if is_refused else nullcontext()
        ):
            async with running(tmp_path / "d", make_fronts=make_fronts):
                pass


CONNECTED = "from agentjet.processes.rpc import Link; import time; link = Link.from_environment()"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("import time; time.sleep(1000)", 0.2, "front-0 did not connect for 0.2 s"),
        (f"{CONNECTED}; time.sleep(1000)", 5.0, "front-0 did not answer 'begin' for 5 s"),
        ("raise SystemExit('a bug')", 60.0, "which ends with 'a bug'; it is replaced"),
        (f"{CONNECTED}; raise SystemExit('a bug')", 60.0, "front-0 ended with exit code 1; see "),
        (f"{CONNECTED}; import os; os.kill(os.getpid(), 9)", 60.0, "front-0 ended by SIGKILL; see "),
    ],
)
async def test_a_front_that_is_frozen_or_ends_while_it_starts_is_replaced(
    code: str,
    seconds: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervision, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(supervision, "START_SECONDS", seconds)
    settings = {"server": {"data_dir": tmp_path, "fronts": 1}, "compute": {"backend": "cluster"}}
    compute = cast(ProcessCompute, SimpleNamespace(front_gone=lambda front: None, policies=()))
    with closing(listen("127.0.0.1", 0)) as listener:
        fronts = FrontProcesses(ServeConfig.model_validate(settings), compute, [listener], time.time)
        fronts.start()
        try:
            async with asyncio.timeout(120):
                while said not in caplog.text:
                    await asyncio.sleep(0.05)
                starts = fronts.views()[0].starts
                while fronts.views()[0].starts == starts:
                    await asyncio.sleep(0.05)
        finally:
            await fronts.close()


HELLO = CallRequest(Conversation((Message("user", "hello"),)))


@pytest.mark.anyio
async def test_a_batch_that_several_fronts_end_during_fails(tmp_path: Path) -> None:
    """Else the fronts would be ended for ever, one after the other: the engine counts the failure on the batch."""
    settings = {"server": {"data_dir": tmp_path, "fronts": 2}, "compute": {"backend": "cluster"}}

    class Deadly:
        async def ask(self, *args: Any) -> None:
            raise WorkerDied("front-0 ended by SIGKILL")

    with closing(listen("127.0.0.1", 0)) as first, closing(listen("127.0.0.1", 0)) as second:
        compute = cast(ProcessCompute, SimpleNamespace())
        fronts = FrontProcesses(ServeConfig.model_validate(settings), compute, [first, second], time.time)
        for handle in fronts._handles:
            handle.ready.set()

        async def replace_peers() -> None:
            while True:
                for handle in fronts._handles:
                    handle.peer = cast(Peer, Deadly())
                await asyncio.sleep(0)

        replacing = asyncio.create_task(replace_peers())
        try:
            async with asyncio.timeout(5):
                with pytest.raises(WorkerDied, match="SIGKILL, while it built the forests of batch 3"):
                    await fronts.batch("default", 3)
        finally:
            replacing.cancel()


@pytest.mark.anyio
async def test_a_batch_waits_for_any_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def build(*_: Any) -> tuple[dict[str, Any], dict[str, float]]:
        return {}, {"tokens": 2.0}

    monkeypatch.setattr(supervision, "ask_for_batch", build)
    settings = {"server": {"data_dir": tmp_path, "fronts": 2}, "compute": {"backend": "cluster"}}
    with closing(listen("127.0.0.1", 0)) as first, closing(listen("127.0.0.1", 0)) as second:
        compute = cast(ProcessCompute, SimpleNamespace())
        fronts = FrontProcesses(ServeConfig.model_validate(settings), compute, [first, second], time.time)
        building = asyncio.create_task(fronts.batch("default", 3))
        await asyncio.sleep(0.01)
        second_one = fronts._handles[1]  # The first one may never start.
        second_one.peer, second_one.reported = cast(Peer, SimpleNamespace(ask=None)), time.monotonic()
        second_one.ready.set()
        assert await asyncio.wait_for(building, 10) == ({}, {"tokens": 2.0})


KEY = "THE-KEY"
"""Stands in a path for the key of an episode."""
CALLS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
ANSWERED = {
    ("HEAD", "/"): 200,  # Agents check their base URL.
    ("HEAD", f"/k/{KEY}/"): 200,
    ("HEAD", "/runs/default/"): 200,
    ("HEAD", "/runs/none/"): 200,
    ("HEAD", "/v1/models"): 401,
    ("HEAD", "/metrics"): 401,
    ("HEAD", "/openapi.json"): 200,
    ("GET", "/"): 200,
    ("GET", "/openapi.json"): 200,
    ("GET", "/openapi.json/"): 307,
    ("GET", "/docs"): 404,
    ("GET", "/docs/"): 404,
    ("GET", "/redoc"): 404,
    ("GET", "/healthz"): 200,
    ("GET", "/healthz/"): 307,
    ("GET", "/readyz"): 200,
    ("GET", "/metrics"): 401,
    ("GET", "/metrics/"): 307,
    ("GET", "/swarm/v1/status"): 401,
    ("GET", "/swarm/v1/status/"): 307,
    ("GET", "/swarm/v1/nothing"): 404,
    ("GET", "/ui/nothing/app.js"): 404,
    ("GET", "/nothing"): 404,
    ("GET", "/nothing/"): 404,
    ("GET", "/models"): 404,
    ("POST", "/chat/completions"): 404,
    ("GET", "/runs/default"): 401,
    ("GET", "/runs/none/v1/models"): 401,
    ("GET", "/v1"): 307,
    ("GET", "/v1/nothing"): 404,
    ("GET", "/v1/models"): 401,
    ("GET", "/v1/chat/completions/"): 404,
    ("GET", f"/k/{KEY}/v1/nothing"): 404,
    ("GET", f"/k/{KEY}/nothing"): 404,
    ("POST", "/"): 405,
    ("POST", "/healthz"): 405,
    ("POST", "/v1/nothing"): 404,
    ("POST", f"/k/{KEY}/v1/models"): 405,
    ("DELETE", "/v1/models"): 405,
    **{("OPTIONS", path): 405 for path in ("/", "/healthz", "/metrics", "/v1/models", "/openapi.json", *CALLS)},
    **{("GET", path): 405 for path in CALLS if not path.endswith("count_tokens")},
    **{("POST", path): 401 for path in CALLS},
}
"""Requests without a token and without a body, and their status."""
REFUSED = [("GET", "/v1/models"), ("GET", "/v1/models/policy"), *(("POST", path) for path in CALLS)]
"""Requests with the key of an episode, which its front answers."""


@pytest.mark.anyio
async def test_the_servers_port_answers_as_without_fronts(tmp_path: Path) -> None:
    seen: list[dict[tuple[str, str], tuple[int, str]]] = []
    for folder, make_fronts in (("alone", None), ("fronts", FrontInProcess)):
        async with serving(tmp_path / folder / "d", make_fronts=make_fronts) as served:
            key = (await served.begin(mode="eval"))["api_key"]
            async with httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=60) as asking:
                answers: dict[tuple[str, str], tuple[int, str]] = {}
                for method, path in ANSWERED:
                    answer = await asking.request(method, path.replace(KEY, key))
                    answers[method, path] = answer.status_code, answer.headers.get("allow", "")
                seen.append(answers)
                for method, path in REFUSED:
                    in_header = await asking.request(method, path, headers=bearer(key))
                    for answer in (in_header, await asking.request(method, f"/k/{key}{path}")):
                        is_refused = answer.status_code == 403 and f"its own base URL, {ADDRESS}/v1." in answer.text
                        assert is_refused == (make_fronts is not None), (method, path, answer.text)
    assert {request: status for request, (status, _) in seen[0].items()} == ANSWERED
    assert seen[1] == seen[0]


@pytest.mark.anyio
async def test_a_call_that_crashes_several_workers_is_given_up_by_its_front(tmp_path: Path) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        fronted = run.gateway.fronted
        assert fronted is not None and isinstance(fronted.fronts, FrontInProcess)
        calls = fronted.fronts.calls()

        async def say() -> list[str | None]:
            episode = await run.gateway.begin(BeginRequest(task_id="t"))
            chunks = [chunk async for chunk in calls.answer(episode.id, "", HELLO)]
            return [chunk.call.response.content for chunk in chunks if chunk.call is not None]

        run.compute.may_sample.clear()
        deadly = asyncio.create_task(say())
        for tried in range(1, MAX_CRASHES + 1):
            await run.until(lambda tried=tried: len(run.compute.asked) == tried)
            run.compute.die()
        with pytest.raises(RequestError) as refusal:
            await asyncio.wait_for(deadly, 30)
        assert (status_of(refusal.value), refusal.value.code) == (500, "call_killed_workers")
        run.compute.may_sample.set()
        assert await say() == ["hi"], "other calls go on"
        assert run.compute.starts == MAX_CRASHES + 1


@pytest.mark.anyio
async def test_a_refused_end_beside_an_accepted_one_does_not_let_calls_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        gateway, fronted = run.gateway, run.gateway.fronted
        assert fronted is not None and isinstance(fronted.fronts, FrontInProcess)
        calls, hello = fronted.fronts.calls(), CallRequest(Conversation((Message("user", "hello"),)))
        episode = await gateway.begin(BeginRequest(task_id="t"))
        disk, sync = threading.Event(), gateway.swarm.file.sync
        answer, ask = asyncio.Event(), fronted.fronts.ask

        async def late(*args: Any) -> Any:
            found = await ask(*args)
            await answer.wait()
            return found

        monkeypatch.setattr(gateway.swarm.file, "sync", lambda: (disk.wait(), sync()))
        monkeypatch.setattr(fronted.fronts, "ask", late)
        other = asyncio.create_task(gateway.begin(BeginRequest(task_id="t")))
        await run.until(lambda: gateway.commits._under_way is not None)  # The ends are not committed before its sync.
        finish = asyncio.create_task(gateway.finish(episode.id, FinishRequest(reward=1.0)))
        abort = asyncio.create_task(gateway.abort(episode.id, AbortRequest()))
        await asyncio.sleep(0.1)
        answer.set()
        await run.until(lambda: gateway.swarm.episode(episode.id).status == "finished")
        await asyncio.sleep(0.1)
        try:
            with pytest.raises(RequestError, match="is ending"):
                [chunk async for chunk in calls.answer(episode.id, "", hello)]
        finally:
            disk.set()
        ended, refused, _ = await asyncio.gather(finish, abort, other, return_exceptions=True)
        assert isinstance(ended, EpisodeRecord) and isinstance(refused, Conflict) and refused.code == "episode_finished"
        assert not gateway.swarm.journal.call_facts(episode.id)
        await asyncio.gather(*(gateway.finish(episode.id, FinishRequest(reward=1.0)) for _ in range(2)))
        assert not fronted._finished


@pytest.mark.anyio
async def test_a_report_of_calls_alone_writes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        await run.gateway.commits.durable()
        assert run.gateway.fronted is not None
        run.gateway.fronted.heard(0, RunReport(EpisodeActivity(), 3, 0.0))
        assert run.gateway.phase.gate.num_calls() == 3
        assert not run.gateway.swarm.file.has_uncommitted


@pytest.mark.anyio
async def test_an_end_that_the_server_cannot_record_lets_calls_go_on(tmp_path: Path) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        gateway, fronts = run.gateway, cast(FrontInProcess, cast(FrontedCalls, run.gateway.fronted).fronts)
        episode = await gateway.begin(BeginRequest(task_id="t"))
        assert [one async for one in fronts.calls().answer(episode.id, "", HELLO)]
        await gateway.commits.durable()
        gateway.swarm.file.db.execute("PRAGMA query_only = ON")
        with pytest.raises(Later, match="could not be written"):
            await gateway.finish(episode.id, FinishRequest(reward=1.0))
        gateway.swarm.file.db.execute("PRAGMA query_only = OFF")
        await asyncio.gather(*fronts._tasks)
        assert [one async for one in fronts.calls().answer(episode.id, "", HELLO)]
        assert (await gateway.finish(episode.id, FinishRequest(reward=1.0))).num_calls == 2


@pytest.mark.anyio
async def test_a_front_reports_that_its_file_takes_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        fronts = cast(FrontInProcess, cast(FrontedCalls, run.gateway.fronted).fronts)
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        assert fronts._front._runs["default"].report().refusal == ""
        with monkeypatch.context() as broken:
            broken.setattr("os.fdatasync", Mock(side_effect=OSError("broken")))
            with pytest.raises(Later, match="not trusted any more"):
                _ = [one async for one in fronts.calls().answer(episode.id, "", HELLO)]
        assert "check the disk, then restart the server" in fronts._front._runs["default"].report().refusal


@pytest.mark.anyio
async def test_fronts_start_when_all_runs_are_open(tmp_path: Path) -> None:
    """A front that answers agents refuses the keys of runs that it does not have, for good."""
    known: list[list[str]] = []

    class Noted(FrontInProcess):
        def start(self) -> None:
            known.append([*self.runs])
            super().start()

    for _ in range(2):
        async with running(tmp_path / "d", make_fronts=Noted) as run:
            await run.runs.put("other", RunSettings())
    assert known == [["default"], ["default", "other"]]


@pytest.mark.anyio
async def test_agents_of_a_run_that_is_closed_are_to_call_again(tmp_path: Path) -> None:
    """The server may be stopping: their SDKs repeat the call until the next one answers."""
    async with running(tmp_path / "d", make_fronts=FrontInProcess) as run:
        fronts = cast(FrontInProcess, cast(FrontedCalls, run.gateway.fronted).fronts)
        front = fronts._front
        await run.runs.put("other", RunSettings())
        gateway = run.of_run("other").gateway
        await gateway.engine.wait_until_up()
        episode = await gateway.begin(BeginRequest(task_id="t"))
        await run.until(lambda: "other" in front._runs)

        def asked(key: str) -> HTTPConnection:
            return HTTPConnection({"type": "http", "path": f"/runs/other/k/{key}/v1/models", "headers": []})

        agent = asked(front._runs["other"].keys.sign(episode.id, episode.begun))
        assert front._enter("other", agent).name == "other"
        await run.runs.end("other")
        with pytest.raises(Unavailable) as refused:
            front._enter("other", agent)
        assert refused.value.code == "run_closed"
        with pytest.raises(Unauthorized):
            front._enter("other", asked("stranger"))
        with pytest.raises(Unavailable, match="was closed during the request"):
            await gateway.finish(episode.id, FinishRequest(reward=1.0))
        await run.runs.put("other", RunSettings())
        await run.until(lambda: "other" in front._runs)
        assert front._enter("other", agent).name == "other"


@pytest.mark.anyio
async def test_a_front_whose_connection_ends_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "REPORT_SECONDS", 1000.0)
    settings = {"server": {"data_dir": tmp_path, "fronts": 1}, "compute": {"backend": "cluster"}}
    run = RunReport(EpisodeActivity(), 3, 0.0, refusal="its disk is full")
    report = FrontReport({"r": run}, {}, cpu_seconds=30.0, lag=0.25)

    async def ask(op: str, *_: Any) -> FrontReport | None:
        return report if op == "report" else None

    async def stop() -> str:
        return "ended by SIGKILL"

    died = asyncio.get_running_loop().create_future()
    peer = SimpleNamespace(name="front-0", ask=ask, stop=stop, died=died, num_messages=0, pending={}, process=None)
    peers = [peer]

    async def start(*_: Any, **__: Any) -> Any:
        return peers.pop() if peers else await asyncio.Event().wait()

    ignored = dict.fromkeys(("heard", "front_gone"), lambda *_: None)
    compute = cast(ProcessCompute, SimpleNamespace(policies=(), others=lambda _: {}, **ignored))
    with closing(listen("127.0.0.1", 0)) as listener:
        fronts = FrontProcesses(ServeConfig.model_validate(settings), compute, [listener], time.time)
        fronts._supervisor = cast(Any, SimpleNamespace(start=start))
        life = asyncio.create_task(fronts._live(fronts._handles[0]))
        try:
            async with asyncio.timeout(10):
                while fronts.views()[0].lag != report.lag:
                    await asyncio.sleep(0.01)
                assert (fronts.views()[0].calls, fronts.views()[0].load) == (3, 0), "its start is no load"
                assert fronts.views()[0].problem == run.refusal
                died.set_result(WorkerDied("the connection to front-0 ended"))
                while fronts.views()[0].starts == 1:
                    await asyncio.sleep(0.01)
            assert (fronts.views()[0].calls, fronts.views()[0].problem) == (0, "starts")
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
