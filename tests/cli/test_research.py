"""`agentjet research` without a server.

1. `new` writes a readable plan, and refuses questions that cannot be studied.
2. `steer` refuses invalid requests at once.
3. `status` and `report` read a journal at any stage, also while another process writes it.
4. A shared server is contacted first. Trials of several studies are runs on it at the same time, each open while its
   trial runs; a run that cannot be ended is named.
"""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import pytest
from typer.testing import CliRunner

from agentjet import Swarm
from agentjet.cli.main import app
from agentjet.cli.research import check_same, demo_plan
from agentjet.cli.research.execution import ConsoleLog, carry_out
from agentjet.cli.research.study import summary
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.journal import StudyFolder, StudyJournal, read_log
from agentjet.research.launcher import SteeringFile
from agentjet.research.models import AddArm, AddHypothesis, Cap, Diagnosis, Pause
from agentjet.research.records import Setting
from agentjet.research.report.facts import StudyView
from agentjet.research.scheduler import conduct, conduct_with_annexes
from agentjet.research.servers import SharedServerSlot
from tests.research.world import STUDY, Formula
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


def research(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["research", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.py").write_text(CODE)
    return tmp_path


def new(topic: str, *more: str, held_out: str = "play.py:held_out") -> str:
    named = ("--agent", "play.py:agent", "--tasks", "play.py:train", "--held-out", held_out)
    return research("new", topic, *named, "--out", "study", "--budget", "60", *more)


def test_a_plan_is_written_and_read(here: Path) -> None:
    said = new("does a kl penalty help?", "--set", "job.batch_size=4", "--steps", "12")
    assert "job.recipe.kl_coef" in said and (here / "study" / "plan.md").read_text() in said
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


def test_what_cannot_be_studied_is_refused(here: Path) -> None:
    for said, arguments in (
        ("held-out tasks are also training tasks, such as 'a'", {"held_out": "play.py:train"}),
        ("there is no function 'gone'", {"held_out": "play.py:gone"}),
        ("called without arguments, and raised SystemExit: 3", {"held_out": "play.py:leaves"}),
        ("called without arguments, and raised KeyError", {"held_out": "play.py:boom"}),
        ("called without arguments, and raised TypeError", {"held_out": "play.py:needy"}),
    ):
        with pytest.raises(ConfigError, match=said):
            new("does a kl penalty help?", **arguments)
    with pytest.raises(ConfigError, match="batch_sise"):
        new("does a kl penalty help?", "--set", "job.batch_sise=4")
    for sesoi in ("0", "inf", "nan"):
        with pytest.raises(ConfigError, match=f"--sesoi {sesoi}: give a finite difference"):
            new("does a kl penalty help?", "--sesoi", sesoi)
    for out in ("play.py", "/proc/x"):
        with pytest.raises(ConfigError, match=f"--out {out}: .*; choose a folder"):
            research("demo", "--out", out)
        with pytest.raises(ConfigError, match=f"--out {out}: .*; choose a folder"):
            new("does a kl penalty help?", "--out", out)
    for agent, said in (
        ("os.path:join", r"os\.path:join: 'os\.path' is part of Python itself: name a module"),
        (":agent", r":agent: expected FILE\.py:FUNCTION, or package\.module:function"),
    ):
        with pytest.raises(ConfigError, match=said):
            new("does a kl penalty help?", "--agent", agent)
    (here / "exits.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match=r"exits\.py: importing it ends the program \(SystemExit: 0\)"):
        new("does a kl penalty help?", "--agent", "exits.py:agent")
    for llm, said in (
        (("nonsense", "--llm-model", "m"), "--llm 'nonsense' is not a URL: give one such as http"),
        (("http://127.0.0.1:9/v1",), "also give the model's name"),
    ):
        with pytest.raises(ConfigError, match=said):
            new("does a kl penalty help?", "--llm", *llm)
    for option in ("--agent", "--evaluator"):
        with pytest.raises(ConfigError, match=r"play\.py:lonely cannot be called as agent\(task, episode\): too many"):
            new("does a kl penalty help?", option, "play.py:lonely")
    for arm, said in (
        ('agent = "play.py:lonely"', "subject.agent play.py:lonely cannot be called as agent"),
        ('agent = "play.py:gone"', "there is no function 'gone'"),
        ('changes = { "job.batch_size" = 4 }', "arm 'b' does not differ from arm 'a'"),
    ):
        (here / "space.toml").write_text(f"[arms.a]\n[arms.b]\n{arm}\n")
        with pytest.raises(ConfigError, match=said):
            new("is b better?", "--space", "space.toml", "--set", "job.batch_size=4")
    with pytest.raises(ConfigError, match="is not of the form"):
        new("does a kl penalty help?", "--set", "job.batch_size")
    with pytest.raises(ConfigError, match="'/no/such/model' is neither a folder"):
        new("does a kl penalty help?", "--model", "/no/such/model")
    with pytest.raises(ConfigError, match=r"has no study\.json"):
        research("run", "study")
    with pytest.raises(ConfigError, match="1 --server and 0 --admin-token-file"):
        research("run", "study", "--server", "http://127.0.0.1:1")


@pytest.mark.parametrize("content", [b"sk-se\ncret", b"sk-se cret", "sk-sé-cret".encode(), b"sk-se\xffcret", b"\n"])
def test_a_key_that_no_header_can_carry_is_refused_and_never_shown(here: Path, content: bytes) -> None:
    (here / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=r"--llm-key-file key: the file must hold only the key") as refused:
        new("grpo vs rloo", "--llm", "http://127.0.0.1:9/v1", "--llm-model", "m", "--llm-key-file", "key")
    assert "cret" not in str(refused.value) and not (here / "study").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--agent-cli", "'"), r"--agent-cli \"'\": No closing quotation; quote it as a shell would"),
        (("--agent-cli", ""), "--agent-cli '' is not a command: give one, or omit the option"),
        (("--agent-cli", "   "), "--agent-cli '   ' is not a command"),
        (("--run-minutes", "inf"), "--run-minutes inf: give the duration of a full run"),
    ],
)
def test_options_that_say_nothing_are_named(here: Path, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        new("grpo vs rloo", *options)
    assert not (here / "study").exists()


def test_a_run_has_a_length_that_it_can_have(here: Path) -> None:
    named = ("--agent", "play.py:agent", "--tasks", "play.py:train", "--held-out", "play.py:held_out")
    asked = ["research", "new", "grpo vs rloo", *named, "--out", "study", "--budget", "60", "--steps", "1000000000000"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and "--steps" in result.output and "1000000" in result.output


def test_what_an_agents_file_raises_is_a_line(here: Path) -> None:
    (here / "broken.py").write_text("raise RuntimeError('\\nit is broken\\n' + 'and more\\n' * 50)\n")
    with pytest.raises(ConfigError, match=r"broken\.py: RuntimeError: it is broken$"):
        new("grpo vs rloo", held_out="broken.py:held_out")


def test_steering_asks(here: Path) -> None:
    new("does a kl penalty help?")
    with pytest.raises(ConfigError, match="resume: the study is not paused"):
        research("steer", "study", "resume")
    research("steer", "study", "pause")
    research("steer", "study", "cap", "40")
    research("steer", "study", "add-arm", "hot", "--against", "without", "--set", "job.temperature=1.2")
    lines = [json.loads(line) for line in StudyFolder(here / "study").steering_file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["pause", "cap", "add_arm"]
    assert lines[1]["runs"] == 40.0 and lines[2]["changes"] == {"job.temperature": 1.2}
    for arguments, said in (
        (("cap", "much"), "give a number of full runs"),
        (("cap", "0"), "above 0"),
        (("cap", "-1"), "above 0"),
        (("cap", "600"), "above the budget of 60"),
        (("veto",), "name the arm"),
        (("veto", "nobody"), "'nobody' is not an arm of the study"),
        (("veto", "--agianst"), "unknown option"),
        (("add-arm", "b", "--against", "nobody", "--set", "job.temperature=1.1"), "'nobody' is not an arm"),
        (("add-arm", "b", "--against", "hot", "--set", "job.temprature=1.1"), "is not a setting"),
        (
            ("add-arm", "b", "--against", "hot", "--set", "job.recipe.kl_coef=0"),
            "would be arm 'without' under another",
        ),
        (("add-arm", "b", "--against", "hot", "--set", "job.temperature=1.20"), "would be arm 'hot' under another"),
        (("add-arm", "hot", "--against", "without"), "there is an arm 'hot' already"),
    ):
        with pytest.raises(ConfigError, match=said):
            research("steer", "study", *arguments)


def test_a_study_is_looked_at_and_reported(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "study")
    folder.write(STUDY, "")
    with StudyJournal(folder.journal) as journal:  # still open: another process would be writing
        conduct(STUDY, journal, Formula())
        seen = json.loads(research("status", str(folder.path), "--json"))
        assert seen["stage"] == "finished" and seen["findings"][0]["verdict"] == "supported"
        assert 0 < seen["spent"] <= seen["budget"] == STUDY.budget
        assert "supported" in research("status", str(folder.path))
        with pytest.raises(ConfigError, match="pause: the study is finished"):
            research("steer", str(folder.path), "pause")
        SteeringFile(folder.steering_file).append(Pause())  # as if asked just before the end
        assert json.loads(research("status", str(folder.path), "--json"))["never read"] == ['{"kind":"pause"}']
        research("report", str(folder.path))
    report = folder.path / "report.md"
    assert "agrees with the journal" in research("report", str(folder.path), "--check", str(report))
    with pytest.raises(ConfigError, match=r"no\.md: No such file or directory; name a report that is there"):
        research("report", str(folder.path), "--check", str(folder.path / "no.md"))
    report.write_text(report.read_text().replace("supported", "proven", 1))
    with pytest.raises(ConfigError, match="differs from the journal"):
        research("report", str(folder.path), "--check", str(report))


def test_what_runs_is_not_spent_and_the_time_left_is_that_of_the_pace(tmp_path: Path) -> None:
    folder, whole = StudyFolder(tmp_path / "study"), tmp_path / "whole.jsonl"
    folder.write(STUDY, "")
    with StudyJournal(whole) as journal:
        conduct(STUDY, journal, Formula())
    lines = whole.read_bytes().splitlines(keepends=True)
    ends = [slot for slot, line in enumerate(lines) if json.loads(line)["kind"] == "outcome"]
    folder.journal.write_bytes(b"".join(lines[: ends[2]]))  # two trials ended, others were launched
    unpaced = json.loads(research("status", str(folder.path), "--json"))
    assert unpaced["trials"]["unfinished"] > 0 < unpaced["running"] and "time left" not in unpaced
    for key, name, time in (("a", "trial.json", 1000), ("a", "outcome.json", 1060), ("b", "outcome.json", 1120)):
        file = folder.path / "launches" / key / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (time, time))
    seen = json.loads(research("status", str(folder.path), "--json"))
    spent = StudyView(read_log(folder.journal)).spent  # in two minutes
    minutes = round(2 * (STUDY.budget - spent) / spent)
    assert seen["time left"] == f"at most {minutes // 60} h {minutes % 60} min, at the pace so far"
    with StudyJournal(whole) as journal:
        full = summary(journal)
    assert full["running"] == 0 and full["spent"] > seen["spent"] > 0


def test_an_annex_is_looked_at_and_reported(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "study")
    folder.write(STUDY, "")
    steering_file = SteeringFile(folder.steering_file)
    steering_file.append(AddArm(arm="z", against="a", changes={"gain": 2.0, "lr": 4}))
    with StudyJournal(folder.journal) as journal:
        assert len(conduct_with_annexes(STUDY, journal, Formula(), steering_file)) == 2
    seen = json.loads(research("status", str(folder.path), "--json"))["annexes"]["annex-1"]
    assert [finding["claim"] for finding in seen["findings"]] == ["z scores higher than a"]
    said = research("status", str(folder.path))
    assert f"{folder.path}/annex-1, added after the data" in said and "z scores higher than a" in said
    assert research("report", str(folder.path)).split() == [
        str(folder.path / "report.html"),
        str(folder.path / "annex-1" / "report.html"),
    ]
    assert "`annex-`" in (folder.path / "report.md").read_text()
    for report in ("report.md", "report.html", "annex-1/report.md", "annex-1/report.html"):
        assert "agrees with the journal" in research("report", str(folder.path), "--check", str(folder.path / report))
    annex = folder.path / "annex-1" / "report.md"
    annex.write_text(annex.read_text().replace("supported", "proven", 1))
    with pytest.raises(ConfigError, match="'proven'"):
        research("report", str(folder.path), "--check", str(annex))


def test_a_server_is_asked_before_anything_begins(here: Path, served: Served) -> None:
    new("does a kl penalty help?")
    token = here / "token"
    token.write_text("wrong")
    for url, said in (("http://127.0.0.1:9", "could not be reached|127.0.0.1:9"), (served.url, "token")):
        with pytest.raises(ConfigError, match=f"--server {url}: .*({said}).*; give the address of a server that runs"):
            research("run", "study", "--server", url, "--admin-token-file", "token")
    assert not (here / "study" / "launches").exists()


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
            assert again.swarm.job().job["max_steps"] == 5
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


class Moving:
    """A slot during which the study's folder is moved."""

    name = "moving"

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[Served]:
        folder = run.parent.parent
        folder.rename(folder.with_name("moved"))
        raise AgentJetError("over")
        yield

    def check(self) -> None:
        """It is there."""

    def run_finished(self, run: Path) -> None:
        raise AssertionError("nothing was completed")


def test_a_folder_that_is_moved_or_has_no_room_is_told_in_a_sentence(here: Path) -> None:
    new("does a kl penalty help?")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(
            ConfigError, match=r"^study/journal\.jsonl: File too large\. .* agentjet research run study$"
        ):
            carry_out(Path("study"), [Moving()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (here / "study" / "journal.jsonl").read_bytes() == b""
    with pytest.raises(ConfigError, match=r"^study.*: No such file .* study's folder, and continue"):
        carry_out(Path("study"), [Moving()])
    assert read_log(here / "moved" / "journal.jsonl").study


def test_an_adviser_that_gives_nothing_says_why(here: Path) -> None:
    (here / "tasks.py").write_text(CODE)
    (here / "alone").mkdir()
    (here / "alone" / "agent.py").write_text(CODE)
    said = research(
        *("new", "grpo vs rloo", "--agent", "alone/agent.py:agent", "--evaluator", "tasks.py:agent"),
        *("--tasks", "tasks.py:train", "--held-out", "tasks.py:held_out", "--out", "study", "--budget", "60"),
        *("--llm", "http://127.0.0.1:9/v1", "--llm-model", "m", "--agent-cli", "nosuchcmd"),
    )
    assert "plan: no proposals: http://127.0.0.1:9/v1: " in said
    assert "agent-cli: no proposals: command 'nosuchcmd' was not found" in said
    assert said.count("nosuchcmd") == 1, "it is said once"


def test_what_is_told_is_for_people(tmp_path: Path) -> None:
    lines: list[str] = []
    with StudyJournal(tmp_path / "journal.jsonl", ConsoleLog(lines.append)) as journal:
        conduct(STUDY, journal, Formula(lost={1}))
        trial = list(journal.trials)[1]
        journal.append("diagnosis", Diagnosis(trial, "too_hard", "all earn the same").to_json())
        journal.decide(f"regrade of {trial}", None)
        journal.decide("regrade of another", None)
        journal.decide(f"held_out of {trial}", {"before": 0.1, "after": 0.2, "error": 0.1})
    assert re.fullmatch(r"diagnosed: trial 2, explore 'a', seed \d+: too hard: all earn the same", lines[-3])
    assert lines[-2].splitlines() == [
        "the runner cannot report the present grader's rewards of the first samples; not diagnosed: drifting judge",
        "the runner cannot report the held-out evaluator's rewards of the training samples; not diagnosed: length "
        "explosion, reward hacking",
    ]
    assert lines[-1] == ("the runner cannot report pass@k before and after training; not diagnosed: entropy collapse")
    assert not [line for line in lines if "{" in line or "_" in line]
    assert "decided: frozen: a: gain = 0, lr = 16; b: gain = 3, lr = 16" in lines


def test_what_was_asked_is_told_as_it_is_meant(here: Path) -> None:
    lines: list[str] = []
    steering_file = SteeringFile(here / "steer.jsonl")
    steering_file.append(Cap(runs=50))
    steering_file.append(AddArm(arm="z", against="a", changes={"gain": 2.0, "lr": 4}))
    steering_file.append(AddHypothesis(arm="z", against="b"))
    with StudyJournal(here / "journal.jsonl", ConsoleLog(lines.append)) as journal:
        study_runs = conduct_with_annexes(STUDY, journal, Formula(), steering_file)
    assert lines[1:4] == [
        "granted: cap (runs: 50)",
        "granted: add arm (arm: z, against: a, changes: gain = 2, lr = 4)",
        "granted: add hypothesis (arm: z, against: b)",
    ]
    assert len(study_runs) == 2 and any(line.startswith("z scores higher than b: ") for line in lines), (
        "an annex is told, too"
    )
    new("does a kl penalty help?")
    research("steer", "study", "cap", "40")
    assert "not read yet cap (runs: 40)" in research("status", "study")


def test_a_demo_writes_over_nothing(here: Path) -> None:
    model = here / "mine" / "model" / "config.json"
    model.parent.mkdir(parents=True)
    model.write_text("{}")
    with pytest.raises(ConfigError, match=r"--out mine already has a model, .* delete it"):
        research("demo", "--out", "mine")
    assert model.read_text() == "{}"
    new("does a kl penalty help?")
    with pytest.raises(
        ConfigError, match=r"--out study holds another study \('does a kl penalty help\?'\), not the demo"
    ):
        research("demo", "--out", "study")
    assert not (here / "study" / "journal.jsonl").exists() and not (here / "study" / "model").exists()


def test_a_demo_goes_on_with_its_own_seed(here: Path) -> None:
    (here / "model").mkdir()
    files = StudyFolder(here / "demo")
    files.write(demo_plan(here / "model", 3).study, "")
    with pytest.raises(ConfigError, match=r"--seed 0: --out demo holds the demo with seed 3: choose another folder"):
        research("demo", "--out", "demo", "--seed", "0")
    check_same(files, None)
    check_same(files, 3)
