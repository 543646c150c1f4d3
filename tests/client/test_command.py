"""1. A program gets the model, its episode and its task, and nothing that opens more. 2. Crashes, time-outs and lost
rewards abort, with the end of stderr. 3. No process outlives its episode, however that ended. 4. Placeholders."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from agentjet.client import AgentFailing, AsyncEpisode, AsyncSwarm, Command, CommandFailed, Result
from agentjet.client.command import environment, fill_placeholders, payload_json
from agentjet.errors import ConfigError
from agentjet.protocol import BeginRequest, BeginResponse
from agentjet.sandbox import Limits
from agentjet.types import Task
from tests.client.server import TOKEN as FAKE_TOKEN
from tests.client.server import URL, FakeServer
from tests.fakes import recent_episodes, saying
from tests.server.serving import TOKEN, serving

pytestmark = pytest.mark.anyio

ROW = {"id": "t1", "question": "two words", "answer": 7, "deep": {"list": [1]}}
TASK = Task("t1", payload=ROW)


def episode(base_url: str = "http://127.0.0.1:8400/v1", refused: dict[str, int] | None = None) -> AsyncEpisode:
    begun = BeginResponse(
        episode_id="ep1",
        base_url=base_url,
        api_key="ajk-key",
        model="tiny",
        policy_version=0,
        lease_seconds=60,
        expires_at=0,
    )
    return AsyncEpisode(Answering(refused or {}), begun, BeginRequest(task_id="t1"))


class Answering:
    """A server that answers with an episode in which `refused` was refused."""

    def __init__(self, refused: dict[str, int]) -> None:
        self._refused = refused

    async def request(self, method: str, path: str, *, body: Any = None, patience: float | None = None) -> Any:
        assert (method, path) == ("POST", "/episodes/ep1/heartbeat")
        facts = {"episode_id": "ep1", "status": "live", "mode": "train", "task_id": "t1", "task_set": "", "group": "t1"}
        return {
            **facts,
            "client_id": "c",
            "policy_version": 0,
            "refused": self._refused,
            "unscorable": bool(self._refused),
        }


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def judged(payload: Any, result: Result) -> float:
    assert payload is ROW
    return float(result.stdout or "0") + result.exit_code


def run(command: Command) -> Any:
    return asyncio.run(command(TASK, episode()))


def is_alive(pid: int) -> bool:
    """True if the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    """True if the process ends within 10 s. A signal may take a moment to arrive."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


def test_a_program_is_given_the_model_its_episode_and_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTJET_TOKEN", "opens everything")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "goes before the key")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("SSL_CERT_FILE", "certificates/own.pem")
    given = environment(TASK, episode())
    assert given["SSL_CERT_FILE"] == str(Path.cwd() / "certificates/own.pem"), "it runs in another folder"
    assert given["OPENAI_BASE_URL"] == "http://127.0.0.1:8400/v1"
    assert given["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8400"
    assert given["OPENAI_API_KEY"] == given["ANTHROPIC_API_KEY"] == "ajk-key"
    assert given["OPENAI_MODEL"] == given["ANTHROPIC_MODEL"] == "tiny"
    assert given["AGENTJET_EPISODE"] == "ep1"
    assert json.loads(given["AGENTJET_TASK"]) == ROW
    assert given["NO_PROXY"] == given["no_proxy"] == "example.org,127.0.0.1"
    assert given["PATH"] == os.environ["PATH"]
    assert not {"AGENTJET_TOKEN", "ANTHROPIC_AUTH_TOKEN"} & set(given)
    assert environment(TASK, episode("https://box.example/v1"))["NO_PROXY"] == "example.org"


def test_it_runs_in_an_empty_folder_that_is_removed_after_it_is_judged() -> None:
    folders: list[Path] = []

    def judge(payload: Any, result: Result) -> float:
        folders.append(result.folder)
        assert [path.name for path in result.folder.iterdir()] == ["made"]
        assert (result.folder / "made").read_text() == "two words"
        assert (result.stdout, result.stderr, result.exit_code) == ("0\n", "note\n", 0)
        return result.seconds

    program = (
        "import os,sys; print(len(os.listdir())); print('note', file=sys.stderr); open('made','w').write(sys.argv[1])"
    )
    assert run(Command(python(program, "{task.question}"), judge)) > 0
    assert not folders[0].parent.exists()


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import sys; sys.exit('no such tool')", r"exit code 1; its stderr ends with: no such tool"),
        ("import os; os.kill(os.getpid(), 9)", r"ended by SIGKILL; it printed nothing"),
        ("print('no model at this address'); raise SystemExit(1)", r"its stdout ends with: no model at this address"),
        ("print('note'); import sys; sys.exit('no such tool')", r"its stderr ends with: no such tool$"),
        ("import sys; sys.stderr.write('x' * 9000 + 'the end'); sys.exit(3)", r"exit code 3; .*x{1400}the end"),
    ],
)
def test_a_crash_is_never_scored(program: str, failure: str) -> None:
    def never(payload: Any, result: Result) -> float:
        raise AssertionError("judged")

    with pytest.raises(CommandFailed, match=failure):
        run(Command(python(program), never))


@pytest.mark.parametrize("code", [0, 1, 124, 125, 127, 137])
def test_exit_codes_that_are_judged(code: int) -> None:
    command = Command(python(f"raise SystemExit({code})"), judged, any_exit_code=True)
    if code < 125:
        assert run(command) == code
    else:
        with pytest.raises(CommandFailed, match=f"exit code {code}"):
            run(command)


def test_a_refused_request_aborts_whatever_the_exit_code_says() -> None:
    refusing = episode(refused={"unsupported_in_training: temperature": 3})
    for any_exit_code in (False, True):
        command = Command(python("print(0)"), judged, any_exit_code=any_exit_code)
        with pytest.raises(CommandFailed, match=r"refused requests .*: unsupported_in_training: temperature \(3\)"):
            asyncio.run(command(TASK, refusing))
    assert asyncio.run(Command(python("print(0)"), judged, score_refused=True)(TASK, refusing)) == 0


SHOW_FOLDERS = """
import os, pathlib, tempfile
home = pathlib.Path.home()
(home / "state").write_text("x")
print(home, tempfile.gettempdir(), os.environ["XDG_CONFIG_HOME"], len(os.listdir(home)))
"""


def test_each_episode_has_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    seen: list[list[str]] = []

    def judge(payload: Any, result: Result) -> float:
        seen.append(result.stdout.split())
        return 0.0

    for shared in (False, False, True):
        run(Command(python(SHOW_FOLDERS), judge, shared_home=shared))
    first, second, third = seen
    assert first[0] != second[0] and first[1] != second[1] and first[3] == second[3]
    assert all(not Path(folder).is_relative_to(tmp_path) and not Path(folder).exists() for folder in first[:3])
    assert third[0] == str(tmp_path) and third[2] == str(tmp_path / "mine")


def test_a_program_that_is_not_there_aborts() -> None:
    with pytest.raises(CommandFailed, match="no-such-program could not be started: No such file"):
        run(Command(["no-such-program"], judged))


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""


def test_too_slow_a_program_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(CommandFailed, match=r"the program ran longer than 1 s"):
        run(Command(python(STUBBORN, str(pids), "3600"), judged, timeout=1.0))
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_what_a_program_leaves_running_is_ended_before_it_is_judged(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def judge(payload: Any, result: Result) -> float:
        return float(gone(int(pids.read_text().split()[1])))

    assert run(Command(python(STUBBORN, str(pids), "0"), judge)) == 1.0


async def test_a_cancelled_program_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    running = asyncio.create_task(Command(python(STUBBORN, str(pids), "3600"), judged)(TASK, episode()))  # type: ignore[arg-type]
    while not pids.exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(gone(int(pid)) for pid in pids.read_text().split())


ENDLESS = "import os\nwhile True: os.write({}, b'an answer' * 9999)"
SWAP_PATH = """
import os, sys
print("printed", flush=True)
path = os.path.realpath("/proc/self/fd/1")
for name in (path, "../stdout"):
    try:
        os.unlink(name)
        os.symlink(sys.argv[1], name)
    except OSError:
        pass
"""
LEAVES_A_PRINTER = """
import os, sys, time
print("printed", flush=True)
program = os.getpid()
if child := os.fork():
    with open(sys.argv[1], "w") as file:
        file.write(str(child))
else:
    os.setsid()
    while os.getppid() == program:  # On a busy machine it would print more than is kept before the program ends.
        time.sleep(0.001)
    while True:
        os.write(1, b"more" * 9999)
"""


@pytest.mark.parametrize(("output", "name"), [(1, "stdout"), (2, "stderr")])
def test_a_program_that_prints_without_end_is_ended_and_not_scored(output: int, name: str) -> None:
    with pytest.raises(
        CommandFailed, match=rf"the program printed more than 256 MiB to {name} and was ended.*ends with: .*an answer"
    ):
        run(Command(python(ENDLESS.format(output)), judged, any_exit_code=True))


def test_long_output_is_scored_by_its_end_and_is_not_on_disk() -> None:
    def judge(payload: Any, result: Result) -> float:
        assert {path.name for path in result.folder.parent.iterdir()} == {"work", "home", "tmp"}
        return float(len(result.stdout) == 16 * 2**20 and result.stdout.endswith("the end"))

    assert run(Command(python("print('x' * 20 * 2**20 + 'the end', end='')"), judge)) == 1.0


def test_a_program_cannot_have_another_file_read_as_its_output(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    assert (
        run(Command(python(SWAP_PATH, str(secret)), lambda payload, result: float(result.stdout == "printed\n"))) == 1
    )


def test_a_process_that_left_the_group_cannot_print_after_the_end(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def judge(payload: Any, result: Result) -> float:
        return float(result.stdout.startswith("printed") and gone(int(pid.read_text())))

    assert run(Command(python(LEAVES_A_PRINTER, str(pid)), judge)) == 1.0


def test_placeholders() -> None:
    assert fill_placeholders("{task.question}", ROW) == "two words"
    assert fill_placeholders("a={task.answer},{task.deep.list}", ROW) == "a=7,[1]"
    assert json.loads(fill_placeholders("{task}", ROW)) == ROW
    assert fill_placeholders("{task}", "text") == "text"
    assert fill_placeholders("{print $1} {} {other} {'a': 1}", ROW) == "{print $1} {} {other} {'a': 1}"
    with pytest.raises(ConfigError, match=r"\{task.qestion\}: .* 'qestion'; its keys are: answer, deep, id, question"):
        fill_placeholders("{task.qestion}", ROW)
    with pytest.raises(ConfigError, match=r"\{question\} is not a placeholder: write \{task.question\}"):
        fill_placeholders("ask {question}", ROW)
    with pytest.raises(ConfigError, match="7 is not an object"):
        fill_placeholders("{task.answer.digit}", ROW)
    assert fill_placeholders("{task.question}", {"question": "{task.answer}"}) == "{task.answer}"  # filled once


ASKS = """
import json, os, sys, urllib.request
question = {"role": "user", "content": QUESTION}
body = {"model": os.environ["OPENAI_MODEL"], "messages": [question]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
"""A program that asks the policy and prints the answer. Replace `QUESTION` by an expression."""


async def test_a_program_is_trained_and_the_server_knows_each_end(tmp_path: Path) -> None:
    """One of three tasks crashes: its episodes are aborted with the reason, and the others fill the batch."""

    def judge(payload: Any, result: Result) -> float:
        return float(result.stdout.strip() == "2")

    script = tmp_path / "agent.py"
    program = ASKS.replace("QUESTION", "'number ' + os.environ['AGENTJET_TASK']")
    script.write_text(program + "assert os.environ['AGENTJET_TASK'] != '3', 'three is too much'\n")
    tasks = [Task(f"t{number}", payload=number) for number in (1, 2, 3)]
    reply = saying(lambda prompt: prompt.rpartition("number ")[2][0])
    async with (
        serving(tmp_path / "data", reply) as served,
        AsyncSwarm(served.url, TOKEN) as swarm,
    ):
        report = await swarm.train(
            Command([sys.executable, str(script)], judge), tasks, steps=1, concurrency=3, progress=False
        )
        ended = recent_episodes(served.run.gateway.swarm, 100)
    trained = [one for one in ended if one.trained_in == 0]
    assert sorted((one.task_id, one.reward, one.num_calls) for one in trained) == [
        ("t1", 0.0, 1),
        ("t1", 0.0, 1),
        ("t2", 1.0, 1),
        ("t2", 1.0, 1),
    ]
    failed = [one for one in ended if one.task_id == "t3" and one.reason.startswith("CommandFailed")]
    assert failed and all("AssertionError: three is too much" in one.reason for one in failed)
    assert all(one.reward is None for one in ended if one.task_id == "t3")
    assert report.num_aborted == len(failed)


async def test_a_program_whose_episode_the_server_ended_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    job = {"batch_size": 1, "group_size": 2, "lease_seconds": 0.3}
    async with (
        serving(tmp_path / "data", job=job) as served,
        AsyncSwarm(served.url, TOKEN) as swarm,
    ):
        command = Command(python(STUBBORN, str(pids), "3600"), judged)
        training = asyncio.create_task(swarm.train(command, [TASK], steps=1, concurrency=1, progress=False))
        while not pids.exists():
            await asyncio.sleep(0.01)
        first = [int(pid) for pid in pids.read_text().split()]
        pids.unlink()
        served.run.clock.advance(10)
        while not pids.exists():  # its place was given to the next one
            await asyncio.sleep(0.01)
        assert all(gone(pid) for pid in first)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    assert all(gone(int(pid)) for pid in pids.read_text().split())


SELF: list[Any] = []
SELF.append(SELF)


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({1, 2}, r"\{1, 2\} is a set"),
        ({"when": date(2026, 11, 28)}, r"datetime\.date\(2026, 11, 28\) is a datetime\.date"),
        ({"a": [0, {"b": b"raw"}]}, r"b'raw' is a bytes"),
        ({"a": {("x", 1): 2}}, r"keys must be str, int, float, bool or None, not tuple"),
        ({"a": SELF}, r"Circular reference detected"),
        ({"file": Path("a.txt")}, r"PosixPath\('a\.txt'\) is a pathlib\.PosixPath"),
        *(
            (nested(date(2026, 11, 28), depth), "(datetime.*date|it is nested too deeply)")
            for depth in (600, 900, 5000)
        ),
    ],
)
def test_a_payload_that_is_not_json_is_refused_by_task_value_and_type(payload: Any, why: str) -> None:
    """Before anything is sent; from a stream of tasks, as the reason of the episode."""
    task, command = Task("t7", payload=payload), Command(["true"], lambda payload, result: 1.0)
    match = rf"task 't7': its payload is not JSON: {why}\. A program gets its task as JSON: .* str\(\)"
    server = FakeServer()

    async def scenario(tasks: Any) -> None:
        async with AsyncSwarm(URL, FAKE_TOKEN, transport=server.transport()) as swarm:
            await swarm.train(command, tasks, steps=1, concurrency=1, progress=False)

    with pytest.raises(ConfigError, match=match):
        asyncio.run(scenario([Task("t1"), task]))
    assert not server.requests
    with pytest.raises(AgentFailing, match=match):
        asyncio.run(scenario(iter([task])))


@pytest.mark.parametrize("payload", [None, "text", 1.5, True, [1, (2,)], {1: "a", None: {"b": []}}])
def test_other_payloads_reach_the_program(payload: Any) -> None:
    assert payload_json(Task("t", payload=payload)) == json.dumps(payload)


@pytest.mark.needs("bubblewrap")
async def test_a_program_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    tmp_path.chmod(0o755)
    (tmp_path / "agent.sh").write_text("echo $OPENAI_BASE_URL $AGENTJET_URL $SECRET; echo 1 > made; sleep ${1:-0}")
    results = []
    command = Command(
        ["sh", str(tmp_path / "agent.sh")],
        lambda payload, result: results.append((result.stdout, (result.folder / "made").read_text())) or 1.0,
        sandbox=Limits(),
        readable=[tmp_path],
    )
    assert await command(TASK, episode()) == 1.0
    assert results == [("http://127.0.0.1:8473/v1 http://127.0.0.1:8473\n", "1\n")]
    slow = replace(command, arguments=[*command.arguments, "60"], timeout=0.5)
    with pytest.raises(CommandFailed, match=r"ran longer than 0\.5 s"):
        await slow(TASK, episode())
