"""`agentjet research` without a server.

1. `new` writes a readable plan, and refuses questions that cannot be studied.
2. `status` and `report` read a journal at any stage, also while another process writes it.
3. A study has one researcher at a time. Servers that cannot be are refused.
4. A study that stops does not wait for a server to load. A shared server is contacted first. Trials of several studies
   are runs on it at the same time, each open while its trial runs; a run that cannot be ended is named.
"""

from __future__ import annotations

import importlib.util
import json
import re
import resource
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from typer.testing import CliRunner

from agentjet import Swarm
from agentjet.cli.main import app
from agentjet.cli.research import carry_out, console, summary
from agentjet.cli.serve import ServerEnded
from agentjet.cli.trial_servers import LocalServerSlot, SharedServerSlot
from agentjet.errors import ConfigError
from agentjet.research.journal import StudyFolder, StudyLog, read_log
from agentjet.research.models import Diagnosis, Setting
from agentjet.research.report import StudyView
from agentjet.research.scheduler import conduct
from tests.cli.test_commands import run
from tests.research.reported import Told
from tests.research.world import STUDY, FakeSlot, Formula
from tests.server.serving import ADMIN, Served

CODE = """
from agentjet import Task

def agent(task, episode):
    return 1.0

def train():
    return [Task("a"), Task("b")]

def held_out():
    return [Task("c")]

def boom():
    raise KeyError("no data")

def needy(path):
    return []

def lonely():
    return 1.0

def leaves():
    raise SystemExit(3)
"""


KL = """
[arms.without]
changes = { "job.recipe.kl_coef" = 0.0 }
[arms."with kl"]
changes = { "job.recipe.kl_coef" = 0.02 }
"""


def research(*arguments: str) -> str:
    return run("research", *arguments)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.py").write_text(CODE)
    (tmp_path / "kl.toml").write_text(KL)
    return tmp_path


def new(topic: str, *more: str) -> str:
    usual = {
        "--agent": "play.py:agent",
        "--tasks": "play.py:train",
        "--held-out": "play.py:held_out",
        "--space": "kl.toml",
        "--out": "study",
        "--budget": "60",
    }
    named = [word for name, value in usual.items() if name not in more for word in (name, value)]
    return research("new", topic, *named, *more)


def test_a_plan_is_written_and_read(here: Path) -> None:
    said = new("does a kl penalty help?", "--set", "job.batch_size=4", "--steps", "12")
    assert r"job.recipe.kl_coef" in said and (here / "study" / "plan.md").read_text() in said
    study = StudyFolder(here / "study").study()
    assert study.subject and study.subject.settings == {"job.batch_size": 4} and study.subject.steps == 12
    study.subject.check_code()
    with pytest.raises(ConfigError, match="already holds a plan: choose another folder"):
        new("grpo vs rloo")
    assert json.loads(research("status", "study", "--json")) == {
        "study": study.id,
        "topic": study.topic,
        "stage": "planned",
    }


SPACE = ("--space", "space.toml", "--set", "job.batch_size=4")


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("held-out tasks are also training tasks, such as 'a'", ["--held-out", "play.py:train"]),
        ("there is no function 'gone'", ["--held-out", "play.py:gone"]),
        ("called without arguments, and raised SystemExit: 3", ["--held-out", "play.py:leaves"]),
        ("called without arguments, and raised KeyError", ["--held-out", "play.py:boom"]),
        ("called without arguments, and raised TypeError", ["--held-out", "play.py:needy"]),
        (r"broken\.py: RuntimeError: it is broken$", ["--held-out", "broken.py:held_out"]),
        ("batch_sise", ["--set", "job.batch_sise=4"]),
        ("is not of the form", ["--set", "job.batch_size"]),
        ("'/no/such/model' is neither a folder", ["--model", "/no/such/model"]),
        ("--out play.py: .*; choose a folder", ["--out", "play.py"]),
        ("--out /proc/x: .*; choose a folder", ["--out", "/proc/x"]),
        (r"os\.path:join: 'os\.path' is part of Python itself: name a module", ["--agent", "os.path:join"]),
        (r":agent: expected FILE\.py:FUNCTION, or package\.module:function", ["--agent", ":agent"]),
        (r"exits\.py: importing it ends the program \(SystemExit: 0\)", ["--agent", "exits.py:agent"]),
        (r"play\.py:lonely cannot be called as agent\(task, episode\): too many", ["--agent", "play.py:lonely"]),
        (r"play\.py:lonely cannot be called as agent\(task, episode\): too many", ["--evaluator", "play.py:lonely"]),
        ("subject.agent play.py:lonely cannot be called as agent", [*SPACE, 'agent = "play.py:lonely"']),
        ("there is no function 'gone'", [*SPACE, 'agent = "play.py:gone"']),
        ("arm 'b' does not differ from arm 'a'", [*SPACE, 'changes = { "job.batch_size" = 4 }']),
    ],
)
def test_what_cannot_be_studied_is_refused(message: str, options: list[str], here: Path) -> None:
    """With `--space`, the last word is the second arm."""
    (here / "exits.py").write_text("raise SystemExit(0)")
    (here / "broken.py").write_text("raise RuntimeError('\\nit is broken\\n' + 'and more\\n' * 50)\n")
    if "--space" in options:
        *options, arm = options
        (here / "space.toml").write_text(f"[arms.a]\n[arms.b]\n{arm}\n")
    with pytest.raises(ConfigError, match=message):
        new("does a kl penalty help?", *options)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("--out play.py: .*; choose a folder", ["demo", "--out", "play.py"]),
        ("--out /proc/x: .*; choose a folder", ["demo", "--out", "/proc/x"]),
        (r"has no study\.json", ["run", "study"]),
        ("1 --server and 0 --admin-token-file", ["run", "study", "--server", "http://127.0.0.1:1"]),
    ],
)
def test_what_cannot_be_run_is_refused(message: str, arguments: list[str], here: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        research(*arguments)


def test_a_run_has_a_length_that_it_can_have(here: Path) -> None:
    named = ("--agent", "play.py:agent", "--tasks", "play.py:train", "--held-out", "play.py:held_out")
    asked = ["research", "new", "t", *named, "--space", "kl.toml", "--out", "study", "--budget", "60"]
    result = CliRunner().invoke(app, [*asked, "--steps", "1000000000000"])
    assert result.exit_code == 2 and "--steps" in result.output and "1000000" in result.output


def test_a_study_is_looked_at_and_reported(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "study")
    folder.write(STUDY, "")
    with StudyLog(folder.journal) as journal:  # still open: another process would be writing
        conduct(STUDY, journal, Formula())
        seen = json.loads(research("status", str(folder.path), "--json"))
        assert seen["stage"] == "finished" and seen["findings"][0]["verdict"] == "supported"
        assert 0 < seen["spent"] <= seen["budget"] == STUDY.budget
        assert "supported" in research("status", str(folder.path))
        research("report", str(folder.path))
    report = folder.path / "report.md"
    assert "agrees with the journal" in research("report", str(folder.path), "--check", str(report))
    with pytest.raises(ConfigError, match=r"no\.md: No such file or directory; name a report that is there"):
        research("report", str(folder.path), "--check", str(folder.path / "no.md"))
    report.write_text(report.read_text().replace("supported", "proven", 1))
    with pytest.raises(ConfigError, match="differs from the journal"):
        research("report", str(folder.path), "--check", str(report))


def test_what_runs_is_not_spent_and_the_time_left_is_that_of_the_pace(tmp_path: Path) -> None:
    folder, whole = StudyFolder(tmp_path / "study"), tmp_path / "whole"
    folder.write(STUDY, "")
    with StudyLog(whole) as journal:
        conduct(STUDY, journal, Formula())
    times = count(1000.0, 60.0)
    with pytest.raises(KeyboardInterrupt), StudyLog(folder.journal, now=lambda: next(times)) as journal:
        conduct(STUDY, journal, Told(outcomes_left=2))  # two trials ended, others were launched
    seen = json.loads(research("status", str(folder.path), "--json"))
    assert seen["trials"]["unfinished"] > 0 < seen["launched"]
    log = read_log(folder.journal)
    spent = StudyView(log).spent
    minutes = round((len(log.entries) - 2) * (STUDY.budget - spent) / spent)  # from the second entry to the last
    assert seen["time left"] == f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"
    with StudyLog(whole) as journal:
        full = summary(journal)
    assert full["launched"] == 0 and full["spent"] > seen["spent"] > 0


def test_a_server_is_asked_before_anything_begins(here: Path, served: Served) -> None:
    new("does a kl penalty help?")
    token = here / "token"
    token.write_text("wrong")
    for url, said in (("http://127.0.0.1:9", "could not be reached|127.0.0.1:9"), (served.url, "token")):
        with pytest.raises(ConfigError, match=f"--server {url}: .*({said}).*; give the address of a server that runs"):
            research("run", "study", "--server", url, "--admin-token-file", "token")
    assert not (here / "study" / "launches").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray", "2", "--server", "http://x", "--admin-token-file", "t"), "--ray 2 starts .* --server http://x runs"),
        (("--ray-gpus", "1"), r"--ray-gpus 1: also give the number of servers on the cluster \(--ray\)"),
        (("--ray", "2"), r"--ray 2 needs Ray: .*\[cluster\].*\. Or use servers here \(--local\)"),
    ],
)
def test_servers_of_a_cluster_that_cannot_be(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    new("does a kl penalty help?")
    with pytest.raises(ConfigError, match=said):
        research("run", "study", *options)
    assert not (here / "study" / "launches").exists()


def test_two_researchers_on_one_study(here: Path) -> None:
    new("does a kl penalty help?")
    with StudyLog(here / "study" / "study.sqlite"):
        with pytest.raises(ConfigError, match=r"study\.sqlite is being written by another process: wait for its end"):
            research("run", "study")
        assert not list((here / "study").glob("launches/*"))


def test_a_server_that_loads_is_given_up_if_the_study_stops(tmp_path: Path) -> None:
    """A model may load for minutes. Here it does not exist, and a server that was waited for would say so."""
    stopping = Event()
    stopping.set()
    slot = LocalServerSlot(1, threads=1)
    serving = slot.serve(tmp_path / "run", {"model.name": str(tmp_path / "none")}, stopping)
    with pytest.raises(ServerEnded, match="the study ended before the server was ready"), serving:
        raise AssertionError("it is not ready")


def test_studies_share_a_server(tmp_path: Path, served: Served) -> None:
    slots = [SharedServerSlot(served.url, ADMIN, print) for _ in range(2)]
    folders = [tmp_path / study / "runs" / "a" for study in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    with Swarm(served.url, ADMIN) as swarm:

        def are_open() -> list[bool]:
            return [run.is_open for run in swarm.runs()[1:]]

        setting = {"model.name": swarm.status().model, "job.seed": 7}
        with ExitStack() as serving:
            one, other = (
                serving.enter_context(slot.serve(folder, setting, Event()))
                for slot, folder in zip(slots, folders, strict=True)
            )
            assert are_open() == [True, True] and one.address.url != other.address.url
            with Swarm(one.address.url, one.address.token) as run:
                assert run.job().job["seed"] == 7 and run.status().run == (folders[0] / "name").read_text()
        assert are_open() == [False, False]
        with slots[0].serve(folders[0], setting | {"job.max_steps": 5}, Event()) as again:
            assert again.address == one.address and sorted(are_open()) == [False, True]
            with Swarm(again.address.url, again.address.token) as run:
                assert run.job().job["max_steps"] == 5
        with (
            pytest.raises(ConfigError, match="and the study trains 'other': name another server"),
            slots[0].serve(folders[0], setting | {"model.name": "other"}, Event()),
        ):
            raise AssertionError("it serves another model")
        assert are_open() == [False, False]


def test_a_run_that_cannot_be_ended_is_named(tmp_path: Path, served: Served) -> None:
    told: list[str] = []
    slot = SharedServerSlot(served.url, ADMIN, told.append)
    with Swarm(served.url, ADMIN) as swarm, slot.serve(tmp_path, {"model.name": swarm.status().model}, Event()):
        slot.url = "http://127.0.0.1:9"
    name = (tmp_path / "name").read_text()
    assert len(told) == 1 and told[0].startswith(f"run {name} of http://127.0.0.1:9 may still be open (")
    assert told[0].endswith(f"; to end it: agentjet runs end {name}")


def move(run: Path, settings: Setting) -> None:
    """Moves the folder of the study of a run."""
    folder = run.parent.parent
    folder.rename(folder.with_name("moved"))


def test_a_folder_that_is_moved_or_has_no_room_is_told_in_a_sentence(here: Path) -> None:
    slot = FakeSlot(name="moving", before=move)
    new("does a kl penalty help?")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(ConfigError, match=r"^study/study\.sqlite: .* agentjet research run study$"):
            carry_out(Path("study"), [slot])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(ConfigError, match=r"^study.*: No such file .* study's folder, and continue"):
        carry_out(Path("study"), [slot])
    assert read_log(here / "moved" / "study.sqlite").study


def test_what_is_told_is_for_people(tmp_path: Path) -> None:
    lines: list[str] = []
    with StudyLog(tmp_path / "study.sqlite") as journal:
        journal.notify = console(lines.append, journal)
        conduct(STUDY, journal, Formula(lost={1}))
        trial = list(journal.trials)[1]
        journal.entry("diagnosis", Diagnosis(trial, "too_hard", "all earn the same").to_json())
    assert re.fullmatch(r"diagnosed: trial 2, explore 'a', seed \d+: too hard: all earn the same", lines[-1])
    assert not [line for line in lines if "{" in line or "_" in line]
    assert "decided: frozen: a: gain = 0, lr = 16; b: gain = 3, lr = 16" in lines
