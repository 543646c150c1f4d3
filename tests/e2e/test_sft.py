"""`agentjet sft` on a real server: it learns answers and preferences, and a kill changes no bit of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.client.test_teacher import Scripted, doubled
from tests.e2e.server import Server, are_equal, environment
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


LINES = {
    "sft": {"messages": [{"role": "user", "content": "%s?"}, {"role": "assistant", "content": "hello"}]},
    "dpo": {"prompt": "%s?", "chosen": "hello", "rejected": "no"},
    "kto": {"prompt": "%s?", "completion": "hello", "label": True},
}
LEAST = {"sft": 1.0, "dpo": 0.1, "kto": 0.02}
"""The least fall of the loss."""


@pytest.mark.parametrize("recipe", LINES)
def test_the_command_trains_and_a_kill_changes_nothing(tmp_path: Path, recipe: str) -> None:
    model, file = make_model(tmp_path / "model"), tmp_path / "answers.jsonl"
    lines = [json.dumps(LINES[recipe]) % n for n in range(8)]
    if recipe == "kto":
        lines[::2] = [line.replace("hello", "no").replace("true", "false") for line in lines[::2]]
    file.write_text("\n".join(lines))
    options = ["--epochs", "5", "--batch-size", "8", "--lr", "0.01", "--json", "--recipe", recipe]
    with Server(model, tmp_path / "data", job__checkpoint_every=2) as server:
        where = ["--url", server.url, "--token", server.token]
        command = [sys.executable, "-m", "agentjet.cli", "sft", str(file), *options, *where]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["policy_version"] == 5 and report["last_loss"] < report["first_loss"] - LEAST[recipe]
        assert recipe == "sft" or (report["accuracies"][0], report["accuracies"][-1]) == (0, 1)
        before = server.exported()
        server.kill()
    with Server(model, tmp_path / "data", job__checkpoint_every=2) as server:
        server.until(lambda: server.get("/status")["state"] == "sampling")
        assert server.get("/status")["policy_version"] == 5
        assert are_equal(server.exported(), before)


AGENT = """
import openai

def agent(task, episode):
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as llm:
        asked = {"model": episode.model, "messages": [{"role": "user", "content": str(task.payload["n"])}]}
        answer = llm.chat.completions.create(**asked).choices[0].message.content
    return float(answer == str(2 * task.payload["n"]) and task.payload["n"] > 1)
"""


def test_the_command_collects_and_trains(tmp_path: Path) -> None:
    teacher = Scripted(doubled)
    threading.Thread(target=teacher.serve_forever, daemon=True).start()
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"n": n}) for n in range(6)))
    with Server(make_model(tmp_path / "model"), tmp_path / "data") as server:
        options = ["--agent", "agent.py:agent", "--task-file", "tasks.jsonl", "--json", "--batch-size", "4"]
        options += ["--teacher", teacher.endpoint.base_url, "--teacher-model", "strong"]
        command = [sys.executable, "-m", "agentjet.cli", "sft", *options, "--url", server.url, "--token", server.token]
        known = environment() | {"AGENTJET_TEACHER_KEY": teacher.endpoint.api_key}
        for version in (1, 2):
            done = subprocess.run(command, capture_output=True, text=True, env=known, check=False, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert (report["policy_version"], report["demonstrations"]) == (version, 4)
            assert len(teacher.asked) == 6, "the second command has all episodes in its files"
    teacher.shutdown()
    teacher.server_close()
