"""Studies on real servers with a tiny model.

1. Whatever is killed in the middle of a study, the researcher with all it started, or a server alone: the study ends,
   nothing was launched twice or lost, the ledger says what an undisturbed study's would, and no process is left.
2. A longer trial goes on from where the shorter one ended.
3. A server of somebody else is leased: strangers are refused meanwhile, and find their own run as they left it. A
   study uses several side by side, and another waits for them, told by whom they are held. One that serves other
   weights under the model's name is refused.
   One that dies for good ends the study's run in a sentence, costs it nothing, and is gone on with.
4. Ctrl-C ends a study that can be gone on with, and leaves no process.
5. A run whose environment is dead, or whose tasks cannot be played, has no score; code that changed stops the study.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet import Swarm
from agentjet.cli.research.local import LocalPlace, local_places
from agentjet.errors import ConfigError, Conflict
from agentjet.research.folder import StudyFolder
from agentjet.research.journal import read_book
from agentjet.research.leased import LeasedPlace
from agentjet.research.models import Arm, Hypothesis, Knob, Study, Subject, Trial
from agentjet.research.report.proceedings import Proceedings
from agentjet.research.swarm_runner import SwarmRunner, name_of_run
from tests.e2e.server import PATIENCE, Server, environment, is_running
from tests.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AGENT = """
import zlib
import httpx
from agentjet import Task

HTTP = httpx.Client(timeout=60, trust_env=False)

def agent(task, episode):
    body = {"model": episode.model, "messages": [{"role": "user", "content": task.id}]}
    key = {"Authorization": f"Bearer {episode.api_key}"}
    answer = HTTP.post(f"{episode.base_url}/chat/completions", json=body, headers=key).raise_for_status().json()
    length = len(answer["choices"][0]["message"]["content"] or "") % 5
    return length + zlib.crc32(episode.id.encode()) / 2**40  # no two score alike: each step has something to learn

def broken(task, episode):
    raise OSError("the game's server is gone")

def tasks():
    return [Task(f"t{number}") for number in range(4)]

def held_out():
    return [Task(f"h{number}") for number in range(4)]
"""
STEPS = 3
LONG = 3 * PATIENCE


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    make_model(tmp_path / "model")
    code = tmp_path / "agent.py"
    code.write_text(AGENT)
    named = Subject(
        model=str(tmp_path / "model"),
        agent=f"{code}:agent",
        tasks=f"{code}:tasks",
        held_out=f"{code}:held_out",
        settings={
            "model.device": "cpu",
            "model.dtype": "float32",
            "job.batch_size": 2,
            "job.group_size": 2,
            "job.max_tokens": 6,
            "job.checkpoint_every": 1,
            "sampler.cache_tokens": 4096,
        },
        steps=STEPS,
        evaluations=STEPS,
        concurrency=4,
    )
    return named.hashed()


def study_of(subject: Subject) -> Study:
    return Study(
        topic="does the rate matter?",
        metric="length of the answer modulo 5",
        sesoi=0.5,
        arms=(Arm("small", {"job.optimizer.lr": 1e-5}), Arm("large", {"job.optimizer.lr": 1e-2})),
        hypotheses=(Hypothesis("the large rate scores higher", "large", "small"),),
        budget=8.0,
        looks=(4,),
        subject=subject,
    )


class Researcher:
    """`agentjet research run` as a process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log_file = folder.with_suffix(".log")
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agentjet.cli", "research", "run", str(folder), *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def until(self, predicate: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not predicate():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def servers(self) -> list[int]:
        """Process ids of the servers it has."""
        return [pid for pid in children(self.process.pid) if "serve" in command_line(pid)]

    def is_training(self) -> bool:
        """Whether some run is in its middle: with a step, and without its last score."""
        return any(2 <= len(scores) <= STEPS for scores in map(scores_of, self.folder.glob("runs/*/record.json")))


def children(pid: int) -> list[int]:
    """Of any of its threads, and theirs."""
    found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def scores_of(record: Path) -> dict[str, float]:
    scores: dict[str, float] = json.loads(record.read_text(encoding="utf-8"))["scorings"]
    return scores


def test_a_study_that_is_killed_ends_as_if_it_had_not_been(subject: Subject, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    StudyFolder(folder).write(study_of(subject), "")
    first = Researcher(folder)
    first.until(lambda: first.is_training() and bool(read_book(folder / "journal.jsonl").outcomes))
    started = children(first.process.pid)
    first.process.kill()
    first.process.wait()
    assert len(started) >= 2

    second = Researcher(folder)
    second.until(lambda: not any(map(is_running, started)))  # they end with whoever started them
    second.until(lambda: bool(second.servers()) and second.is_training())
    os.kill(second.servers()[0], signal.SIGKILL)
    assert second.process.wait(LONG) == 0, second.log

    book = read_book(folder / "journal.jsonl")
    assert len(book.trials) == 8 and set(book.attempts.values()) == {1}, second.log
    assert {len(outcomes) for outcomes in book.outcomes.values()} == {1}
    assert {outcome.end for [outcome] in book.outcomes.values()} == {"completed"}
    for trial in book.trials.values():
        [outcome] = book.outcomes[trial.id]
        assert len(outcome.curve) == STEPS + 1 and outcome.score == outcome.curve[-1]
        assert len(outcome.signals["reward/mean"]) == STEPS and None not in outcome.signals["reward/mean"]
        assert {*scores_of(folder / "runs" / name_of_run(trial) / "record.json")} == {"0", "1", "2", "3"}
    assert (folder / "report.html").exists() and (folder / "report.md").exists()
    assert children(second.process.pid) == []


def test_ctrl_c_leaves_no_process(subject: Subject, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    StudyFolder(folder).write(study_of(subject), "")
    researcher = Researcher(folder)
    researcher.until(lambda: len(researcher.servers()) == 2)
    started = children(researcher.process.pid)
    researcher.process.send_signal(signal.SIGINT)
    assert researcher.process.wait(LONG) == 130, researcher.log
    assert not any(map(is_running, started))
    assert f"go on with: agentjet research run {folder}" in researcher.log
    assert read_book(folder / "journal.jsonl").outcomes == {}


def test_a_longer_trial_goes_on_from_the_shorter_one(subject: Subject, tmp_path: Path) -> None:
    short = Trial("s", "a", {"job.optimizer.lr": 1e-3}, 5, "explore", 1 / 3)
    long = replace(short, fidelity=1.0)
    with SwarmRunner(subject, tmp_path, local_places(1)) as runner:
        runner.launch("short", short)
        first = runner.collect("short")
        runner.launch("long", long)
        second = runner.collect("long")
    assert len(first.curve) == 2 and second.curve[:2] == first.curve and len(second.curve) == STEPS + 1
    assert second.signals["reward/mean"][:1] == first.signals["reward/mean"]
    with SwarmRunner(subject, tmp_path, []) as later:  # what ended is known without a server
        assert later.has("long") and later.collect("long") == second


def test_a_server_of_others_is_leased_and_given_back(subject: Subject, tmp_path: Path) -> None:
    trials = [Trial("s", "a", {"job.optimizer.lr": 1e-3}, seed, "explore", fidelity) for seed, fidelity in LINES]
    with Server(Path(subject.model), tmp_path / "server", "--set", "job.checkpoint_every=0") as server:
        server.batch()
        with SwarmRunner(subject, tmp_path, [LeasedPlace(server.url, admin_of(server), "a study", print)]) as runner:
            runner.launch("0", trials[0])
            server.until(lambda: server.get("/lease")["run"].startswith(name_of_run(trials[0])))
            stranger = server.http.post("/episodes", json={"task_id": "t"})
            assert (stranger.status_code, stranger.json()["code"]) == (409, "leased")
            for number, trial in enumerate(trials[1:], 1):
                runner.launch(str(number), trial)
            outcomes = [runner.collect(str(number)) for number in range(len(trials))]
        assert [(outcome.end, len(outcome.curve)) for outcome in outcomes] == [
            ("completed", 2),
            ("completed", STEPS + 1),
            ("completed", STEPS + 1),
        ]
        assert outcomes[2].curve[:2] == outcomes[0].curve  # the same run, gone on with
        assert server.get("/lease")["run"] == ""
        assert server.get("/status")["policy_version"] == 1
        server.batch()


def test_a_server_of_other_weights_is_refused_whatever_they_are_called(subject: Subject, tmp_path: Path) -> None:
    other = make_model(tmp_path / "elsewhere" / Path(subject.model).name, seed=1)
    trials = [Trial("s", "a", {"job.optimizer.lr": 1e-3}, seed, "explore", 1 / 3) for seed in (5, 6)]
    with Server(Path(subject.model), tmp_path / "one") as one, Server(other, tmp_path / "two") as two:
        with SwarmRunner(subject, tmp_path, [LeasedPlace(one.url, admin_of(one), "a study", print)]) as runner:
            runner.launch("0", trials[0])
            assert runner.collect("0").end == "completed"
        with SwarmRunner(subject, tmp_path, [LeasedPlace(two.url, admin_of(two), "a study", print)]) as runner:
            runner.launch("1", trials[1])
            with pytest.raises(ConfigError, match=f"{two.url} serves other weights"):
                runner.collect("1")


def test_a_study_on_two_servers_of_others_that_another_has_to_wait_for(subject: Subject, tmp_path: Path) -> None:
    study, other = tuning_of(subject, "which rate?"), tuning_of(subject, "which rate, again?")
    model = Path(subject.model)
    with Server(model, tmp_path / "one") as one, Server(model, tmp_path / "two") as two:
        options = [option for server in (one, two) for option in server_options(server)]
        for folder, planned in (("study", study), ("other", other)):
            StudyFolder(tmp_path / folder).write(planned, "")
        first = Researcher(tmp_path / "study", *options)
        first.until(lambda: all(server.get("/lease")["run"] for server in (one, two)))
        held = rf"leased to 'study {study.id}: which rate\?' for another \d+ s"
        with Swarm(one.url, admin_of(one)) as person, pytest.raises(Conflict, match=held):
            person.take_lease("somebody", 60)
        second = Researcher(tmp_path / "other", *options)
        waiting = [f"waiting for {server.url}: The server is leased to 'study {study.id}" for server in (one, two)]
        second.until(lambda: all(line in second.log for line in waiting))
        assert first.process.wait(LONG) == 0, first.log
        second.until(
            lambda: all(server.get("/lease")["holder"] == f"study {other.id}: {other.topic}" for server in (one, two))
        )
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(LONG) == 130, second.log
        assert [server.get("/lease")["run"] for server in (one, two)] == ["", ""]
        assert [server.get("/status")["policy_version"] for server in (one, two)] == [0, 0]
        runs = [{path.name for path in (server.data_dir / "runs").iterdir()} for server in (one, two)]

    book = read_book(tmp_path / "study" / "journal.jsonl")
    assert len(book.trials) == 4 and {book.outcomes[name][0].end for name in book.trials} == {"completed"}
    names = {name_of_run(trial) for trial in book.trials.values()}
    placed = [{name.partition("-")[0] for name in there} & names for there in runs]
    assert all(placed) and placed[0] | placed[1] == names and not placed[0] & placed[1]
    with SwarmRunner(subject, tmp_path / "study", []) as runner:
        for name in book.trials:
            assert runner.ask(f"{name}-1", "weights") == {"steps": STEPS, "learner": STEPS, "sampler": STEPS}
            assert runner.ask(f"{name}-1", "regrade") is None
    assert (tmp_path / "study" / "report.html").exists()
    assert "could not be asked: what several tries at a task found before and after" in first.log


def test_a_server_of_others_that_dies_for_good_costs_nothing(subject: Subject, tmp_path: Path) -> None:
    folder, model = tmp_path / "study", Path(subject.model)
    StudyFolder(folder).write(study_of(subject), "")
    with Server(model, tmp_path / "server") as server:
        first = Researcher(folder, *server_options(server))
        first.until(lambda: bool(read_book(folder / "journal.jsonl").outcomes) and first.is_training())
        server.kill()
        assert first.process.wait(LONG) == 2, first.log
    said = f"--server {server.url}: no answer from {server.url}"
    assert said in first.log and f"go on from here with: agentjet research run {folder}" in first.log
    ended = {name: [outcome.end for outcome in of] for name, of in read_book(folder / "journal.jsonl").outcomes.items()}
    assert ended and {end for ends in ended.values() for end in ends} == {"completed"}, first.log
    with Server(model, tmp_path / "server") as server:
        second = Researcher(folder, *server_options(server))
        assert second.process.wait(LONG) == 0, second.log
    book = read_book(folder / "journal.jsonl")
    assert len(book.trials) == 8 and set(book.attempts.values()) == {1}, second.log
    assert {outcome.end for [outcome] in book.outcomes.values()} == {"completed"}
    assert Proceedings(book).ledger.total == 8.0


def tuning_of(subject: Subject, topic: str) -> Study:
    """A study that can pay for tuning one arm and for no seed that confirms: four runs."""
    return Study(
        topic=topic,
        metric="length of the answer modulo 5",
        sesoi=0.5,
        arms=(Arm("tuned", {}, (Knob("job.optimizer.lr", (1e-3, 1e-2)),)), Arm("fixed", {"job.optimizer.lr": 1e-5})),
        hypotheses=(Hypothesis("tuning helps", "tuned", "fixed"),),
        budget=6.7,
        looks=(4,),
        rungs=(1.0,),
        subject=subject,
    )


def admin_of(server: Server) -> str:
    return (server.data_dir / "admin-token").read_text().strip()


def server_options(server: Server) -> tuple[str, ...]:
    return "--server", server.url, "--admin-token-file", str(server.data_dir / "admin-token")


LINES = ((5, 1 / 3), (6, 1.0), (5, 1.0))
"""Seeds and fidelities: the third trial continues the first."""


def test_a_dead_environment_is_no_score(subject: Subject, tmp_path: Path) -> None:
    broken = replace(subject, agent=subject.agent.replace(":agent", ":broken"), evaluator=subject.agent, code="")
    with SwarmRunner(broken, tmp_path, local_places(1)) as runner:
        runner.launch("k", Trial("s", "a", {}, 5, "confirm"))
        with pytest.raises(ConfigError, match=r"nothing was counted(.|\n)*the game's server is gone"):
            runner.collect("k")
    assert not (tmp_path / "launches" / "k" / "outcome.json").exists()
    assert not list((tmp_path / "runs").iterdir())  # a repeat begins anew


def test_code_that_changed_stops_the_study(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT + "# edited\n")
    with SwarmRunner(subject, tmp_path, [LocalPlace(1, 1)]) as runner:
        runner.launch("k", Trial("s", "a", {}, 5, "confirm"))
        with pytest.raises(ConfigError, match=r"subject\.code = .* restore"):
            runner.collect("k")
