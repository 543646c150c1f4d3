"""Several runs and policies of `agentjet serve` and on the command line.

1. The server greets with a line for each policy, and prints the steps of every run, with the run's name in front.
2. `agentjet runs` lists, creates and ends runs; the other commands work with the address of a run.
3. A settings file of a run has the sections of a run only.
4. Spans really leave the process, and a missing package is named with the way out.
5. A port that is in use names its front.
6. The log begins with what was logged before it was open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import ClassVar

import pytest

from agentjet.cli import server_process
from agentjet.config import ServerConfig
from agentjet.errors import ConfigError, Conflict, Forbidden, InvalidRequest, NotFound
from agentjet.front.tracing import tracer_provider
from agentjet.protocol import RunSettings
from agentjet.types import ProcessStatus
from tests.cli.test_commands import at, run
from tests.fakes import running
from tests.server.serving import ADMIN, Served

pytestmark = pytest.mark.anyio

TEAM = {"planner": {}, "coder": {"lora": {"rank": 4}}}


async def test_a_start_shows_its_work_or_the_process_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "d", prepare=lambda compute: compute.may_start.clear(), wait_ready=False) as up:
        assert server_process.start_text(up.gateway) == "waiting for the worker, which loads the model"
        replica = ProcessStatus("policy/replica-0", "replica", "starts", "here", None, is_ready=False)
        monkeypatch.setattr(up.compute, "processes", lambda policy: [replica])
        assert server_process.start_text(up.gateway) == "waiting for a sampler replica: policy/replica-0 starts"
        with up.gateway.telemetry.activity.work("load", "loading the model"):
            assert server_process.start_text(up.gateway) == "loading the model"


async def test_a_line_for_each_policy_and_for_each_step_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path / "d") as up:
        printer = asyncio.create_task(server_process.print_runs(up.runs))
        await up.runs.put("team", RunSettings(policies=TEAM))
        team = up.of_run("team")
        await team.gateway.engine.wait_until_up()
        await asyncio.sleep(2 * server_process.NEW_RUN_SECONDS)
        server_process.greet(up.gateway, "http://here", tmp_path / "d")
        server_process.greet(team.gateway, "http://here", tmp_path / "d")
        await up.batch()
        await team.batch()
        await up.runs.end("team")
        await up.batch()
        printer.cancel()
    lines = capsys.readouterr().out.splitlines()
    [plain] = [line for line in lines if line.startswith("Ready: ") and " parameters on " in line]
    assert plain.endswith("policy version 0.")
    assert "Ready: policies planner, coder, policy version 0." in lines
    facts = plain.removeprefix("Ready: ").removesuffix(", policy version 0.")
    assert f"  planner: tiny, {facts}, all weights" in lines
    assert f"  coder: tiny, {facts}, adapter of rank 4" in lines
    steps = [line.partition("  ")[::2] for line in lines if "step " in line]
    assert [step for step, _ in steps] == ["step 1", "team: step 1", "step 2"]
    assert steps[1][1] == "reward 0.500 (planner 0.500, coder 0.500)"


async def test_a_step_that_cannot_be_printed_is_logged_and_later_ones_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    printed: list[str] = []

    def failing(line: str) -> None:
        printed.append(line)
        if len(printed) < 3:
            raise BrokenPipeError("closed")

    monkeypatch.setattr(server_process, "_print", failing)
    monkeypatch.setattr(server_process, "NEW_RUN_SECONDS", 0.001)
    async with running(tmp_path / "d") as up:
        printer = asyncio.create_task(server_process.print_runs(up.runs))
        for number in range(1, 5):
            await asyncio.sleep(0.05)
            await up.batch()
            await up.until(lambda number=number: len(printed) == number)
        assert not printer.done()
        printer.cancel()
    assert [line.partition("  ")[0] for line in printed] == ["step 1", "step 2", "step 3", "step 4"]
    assert caplog.text.count("could not be printed") == 1 and "BrokenPipeError: closed" in caplog.text


def test_runs_on_the_command_line(served: Served, tmp_path: Path) -> None:
    admin = ["--url", served.url, "--token", ADMIN]
    assert run("runs", "list", *admin).splitlines() == ["default  sampling, policy version 0"]
    file = tmp_path / "team.toml"
    file.write_text("[policies.planner]\n[policies.coder]\n[job]\nbatch_size = 1\ngroup_size = 2\nmax_tokens = 32\n")
    said = run("runs", "create", "team", "--config", str(file), *admin)
    assert "policies planner, coder" in said and f"export AGENTJET_URL={served.url}/runs/team " in said
    assert "agentjet token show client --data-dir DATA_DIR --run team" in said
    folder = served.run.folder.parent / "team"
    there = ["--url", f"{served.url}/runs/team", "--token-file", str(folder / "token")]
    while "loading" in (shown := run("status", *there)):
        pass
    assert "run          team" in shown and "policies     planner, coder" in shown
    given = dict(
        line.removeprefix("export ").split("=", 1) for line in run("episodes", "begin", "t", *there).splitlines()
    )
    assert given["AGENTJET_POLICIES"] == "planner,coder" and "OPENAI_MODEL" not in given
    assert given["OPENAI_BASE_URL"] == f"{served.url}/runs/team/v1"
    assert given["AGENTJET_EPISODE"] in run("episodes", "list", *there)
    run("checkpoints", "create", *there)
    assert "step      0" in run("checkpoints", "list", *there)
    listed = json.loads(run("runs", "list", "--json", *admin))
    assert [(one["name"], one["policies"]) for one in listed] == [("default", []), ("team", ["planner", "coder"])]
    assert "not open, policies planner, coder" in run("runs", "end", "team", *admin)
    with pytest.raises(NotFound, match="'team' is not open"):
        run("status", *there)
    assert "policies planner, coder" in run("runs", "create", "team", *admin), "with its own settings"


def test_runs_that_cannot_be_created(served: Served, tmp_path: Path) -> None:
    admin = ["--url", served.url, "--token", ADMIN]
    file = tmp_path / "run.toml"
    for text, error in (
        (
            '[model]\nname = "x"',
            r"has 'model': a run has \[policies.NAME\] and \[job\] only; the settings of the server",
        ),
        ("[jobb]", r"has 'jobb'.* did you mean \[job\]\?"),
        ("job = 1", "job = 1: it is a section of settings"),
        ("[job", "is not valid TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=error):
            run("runs", "create", "a", "--config", str(file), *admin)
    for text, error in (
        ("[job]\nbach_size = 3", r"did you mean job\.batch_size"),
        ("[policies.Planner]", "lower-case letter"),
        ("[policies.a]\nmodle = 1", r"policies\.a\.modle = 1"),
        ("[policies.a]\nlora = {rank = 4}\n[policies.b]\nmodel = 'other'\nlora = {rank = 4}", "share one base model"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match=error):
            run("runs", "create", "a", "--config", str(file), *admin)
    with pytest.raises(ConfigError, match="does not exist"):
        run("runs", "create", "a", "--config", str(tmp_path / "none.toml"), *admin)
    with pytest.raises(InvalidRequest, match=r"'A/\.\.' is not the name of a run"):
        run("runs", "create", "A/..", *admin)
    with pytest.raises(Conflict, match="'default' has the settings of the server and ends with it"):
        run("runs", "create", "default", *admin)
    with pytest.raises(NotFound, match="no open run 'a'; open are: default"):
        run("runs", "end", "a", *admin)
    with pytest.raises(Forbidden, match="'admin-token'"):
        run("runs", "list", *at(served))
    assert [path.name for path in served.run.folder.parent.iterdir()] == ["default"]


def test_a_data_dir_without_its_journal_has_a_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "default"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"has checkpoints and no journal.*only checkpoints/ to runs/default/ of a"):
        server_process.check_data_dir(tmp_path)
    (folder / "journal.sqlite").touch()
    server_process.check_data_dir(tmp_path)


# ---- tracing ---------------------------------------------------------------------------------------------------------


class Collector(BaseHTTPRequestHandler):
    """Notes what is posted to it."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_spans_arrive() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        provider = tracer_provider(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        tracer = provider.get_tracer("test")
        for name in ("call", "step"):
            tracer.start_span(name).end()
        provider.shutdown()
        collector.shutdown()
        thread.join()
    spans = set()
    for path, body in Collector.received:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert spans == {"call", "step"}


def test_a_port_in_use_names_its_front() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ServerConfig(port=port - 4, fronts=4)
        said = rf"the port {port} of front 3 on 127\.0\.0\.1 is not .* the 4 ports after server\.port = {port - 4}"
        with pytest.raises(ConfigError, match=said):
            server_process._listen(config, 3)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"server\.trace_endpoint = 'http://x' needs .*\[otel\]"):
        tracer_provider("http://x")


def test_the_log_begins_with_what_was_logged_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the warning that the files of fronts lack calls."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    earlier = MemoryHandler(server_process.EARLY_RECORDS, logging.CRITICAL + 1)
    root.addHandler(earlier)
    logging.getLogger("agentjet").warning("early")
    server_process._log_to(tmp_path, earlier)
    logging.getLogger("agentjet").info("late")
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["WARNING agentjet: early", "INFO agentjet: late"]
