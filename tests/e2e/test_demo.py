"""`agentjet demo` and `agentjet eval` on a tiny model: real processes from end to end.

Pinned here:
1. the demo writes what it promises, and `result.json` has the agreed keys; the server has both scores;
2. the exported folder loads in `transformers`; (thorough) it answers, one at a time, what the server's policy answers,
   greedy and sampled;
3. (thorough) Ctrl-C ends it with exit code 130 and leaves no process behind, nor does a kill.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.runs import read_runs
from tests.e2e.server import PATIENCE, Server, environment, is_running
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AGREED = {
    "seed",
    "steps",
    "seconds",
    "tasks",
    "base_success",
    "final_success",
    "episodes",
    "aborted",
    "multi_turn_share",
}
PLAIN = ["--set", "model.threads=1", "--set", "model.dtype=float32", "--set", "model.device=cpu"]
SMALL = [*PLAIN, "--set", "job.batch_size=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentjet.cli", *arguments]


RECORDING = """
import json, os, pathlib
from examples.arithmetic.agent import FirstAnswer, held_out_tasks

examiner = FirstAnswer(seed=5)

def agent(task, episode):
    reward = examiner(task, episode)
    pathlib.Path(os.environ["ANSWERS"]).write_text(json.dumps(examiner.answers))
    return reward
"""


def evaluate(folder: Path, target: str, *arguments: str) -> dict[str, Any]:
    """The answers to eight held-out sums."""
    agent, answers = folder / "recording.py", folder / "answers.json"
    agent.write_text(RECORDING)
    chosen = ("--agent", f"{agent}:agent", "--task-file", f"{agent}:held_out_tasks", "--tasks", "8")
    ended = subprocess.run(
        command("eval", target, "--json", "--concurrency", "1", *chosen, *arguments),
        capture_output=True,
        text=True,
        env=environment() | {"ANSWERS": str(answers)},
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(answers.read_text())
    assert len(found) == 8
    return found


def demo(model: Path, out: Path) -> None:
    """Two steps of the demo, which must end well."""
    ended = subprocess.run(
        command(
            "demo", "--model", str(model), "--steps", "2", "--tasks", "10", "--seed", "3", "--out", str(out), *SMALL
        ),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_demo_writes_what_it_promises(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo(model, out)
    result = json.loads((out / "result.json").read_text())
    assert result.keys() >= AGREED
    assert (result["seed"], result["steps"], result["tasks"], result["aborted"]) == (3, 2, 10, 0)
    assert result["episodes"] >= 2 * 2 * 8
    assert 0 <= result["multi_turn_share"] <= 1
    assert len(result["rewards"]) == 2 and all(map(math.isfinite, result["rewards"]))
    figures = read_runs([out / "server"]).runs[0].figures
    assert [figures["evaluation_first"], figures["evaluation_last"]] == [
        result["base_success"],
        result["final_success"],
    ]
    assert (figures["evaluations"], figures["score_best"]) == (2, None)
    assert (out / "reward.png").stat().st_size > 10_000
    assert "data:image/png" in (out / "report.html").read_text()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(out / "model").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(out / "model").chat_template


@pytest.mark.thorough
def test_the_exported_model_answers_as_the_server_does(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo(model, out)
    with Server(model, out / "server", job__max_steps=2) as server:
        assert server.get("/status")["policy_version"] == 2
        for how in (["--temperature", "0"], []):
            answers = evaluate(tmp_path, server.url, "--token", server.token, *how)
            assert evaluate(tmp_path, str(out / "model"), *PLAIN, *how) == answers


@pytest.mark.thorough
def test_ctrl_c_ends_the_demo_and_its_server(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            command("demo", "--model", str(model), "--steps", "5000", "--tasks", "2", "--out", str(tmp_path), *SMALL),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while "step 1 " not in (text := server_log(tmp_path)):
            assert demo.poll() is None and time.monotonic() < deadline, text + log.read_text()
            time.sleep(0.05)
        [server] = children(demo.pid)
        [worker] = children(*children(server))  # Below its guardian.
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == 130
    finally:
        demo.kill()
    assert not is_running(server) and not is_running(worker)
    assert "interrupted" in log.read_text()
    assert (tmp_path / "server" / "serve.log").stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "server" / "runs" / "default" / "checkpoints").glob("step_*"))


@pytest.mark.thorough
def test_a_demo_that_is_killed_leaves_no_server(model: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(model), "--steps", "5000", "--tasks", "2", "--out", str(tmp_path), *SMALL)
    demo = subprocess.Popen(command("demo", *arguments), stdout=subprocess.DEVNULL, env=environment())
    deadline = time.monotonic() + PATIENCE
    try:
        while "step 1 " not in (text := server_log(tmp_path)):
            assert demo.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
        [server] = children(demo.pid)
        [worker] = children(*children(server))  # Below its guardian.
    finally:
        demo.kill()
        demo.wait()
    while is_running(server) or is_running(worker):
        assert time.monotonic() < deadline, server_log(tmp_path)
        time.sleep(0.05)
    kept = tmp_path / "server" / "runs" / "default" / "checkpoints"
    assert list(kept.glob("step_*")), "what it had learned is kept"


def server_log(out: Path) -> str:
    path = out / "server" / "serve.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def children(pid: int) -> list[int]:
    """Process ids of the children that any thread of `pid` started."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for group in found for child in group]
