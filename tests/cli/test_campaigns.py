"""The commands of campaigns.

1. Options that contradict each other, and folders that do not fit, are refused before anything runs, with the way out.
2. `status` and `digest` print what the notebook holds, also while a campaign works. A proposer that does not answer is
   named at once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.cli.research import conduct, line_of
from agentjet.errors import ConfigError
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.journal import DAY, Notebook, one_start
from agentjet.research.models import Outcome, Setting
from tests.research.campaign.subjects import SUBJECT, write_subject
from tests.research.world import FakeSlot


def research(*arguments: object) -> str:
    """Runs a command, and returns its output or its error, in one line."""
    result = CliRunner().invoke(app, ["research", *map(str, arguments)])
    return " ".join(f"{result.output}{result.exception or ''}".split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "much"], "budget = 'much': give hours or full runs, such as 48h or 500runs"),
        (["--topic", " "], "the topic is empty: give the question"),
        (["--topic", "なぜ学習しないのか"], "translate it, or give a language model (--llm)"),
        (["--budget", "nanruns"], "budget = 'nanruns': give hours or full runs"),
        (["--budget", "1000000000runs"], "budget = 1e+09 runs: give runs or hours, more than 0, at most 1,000,000"),
        (["--budget", "0h"], "budget = 0 hours: give runs or hours, more than 0"),
        (["--agent-env", "HOME"], "--agent-env and --agent-url need --agent-cli"),
        (["--agent-cli", "nosuchcmd -p"], "there is no program 'nosuchcmd'"),
        (["--budget", "3runs"], "give 10 runs or more"),
        (["--llm", "127.0.0.1:8000"], "is not a URL"),
        (["--llm", "http://127.0.0.1:9/v1"], "also give the model's name (--llm-model)"),
        (["--llm", "none.jsonl"], "none.jsonl: No such file or directory: give a record of answers"),
        (["--llm", "none.jsonl", "--llm-model", "m"], "is a record of answers: omit --llm-model"),
        (["--llm-model", "m"], "--llm-model, --llm-key-file, --llm-price and --papers need --llm"),
        (["--agent-cli", "claude", "--agent-env", "NO_SUCH_VARIABLE"], "--agent-env NO_SUCH_VARIABLE"),
        (["--agent-cli", "'"], "quote it as a shell would"),
        (["--server", "http://127.0.0.1:9"], "1 --server and 0 --admin-token-file"),
        (["--level", "steps=3"], "steps: the question is about causes, not about levels"),
        (
            ["--topic", "Is rloo better?", "--tune", "model=a"],
            "--tune model=a: numbers of a setting of the job are tuned",
        ),
        (["--topic", "Is rloo better?", "--budget", "20runs"], "plan.md: start again with --yes to run it"),
        (
            [
                "--topic",
                "Is rloo better?",
                "--budget",
                "10runs",
                "--level",
                "job.recipe=grpo",
                "--level",
                "job.recipe=nope",
            ],
            "no recipe 'nope'",
        ),
        (["--topic", "Longer training?", "--budget", "10runs"], "4 arms with 4 to 12 seeds need"),
        (
            ["--topic", "Learning rate?", "--tune", "job.optimizer.lr=1", "--tune", "job.optimizer.lr=2"],
            "arms differ in it",
        ),
        (["--topic", "Is rloo better?", "--tune", "job.optimizer.lr=0.1"], "give two values or more to choose from"),
        (
            ["--topic", "Is rloo better?", "--level", "foo=3"],
            "--level foo=3: there is no such factor: give a setting of",
        ),
        (["--sesoi", "0"], "sesoi = 0.0: give a share of the judge's scale, between 0 and 1"),
        (["--subject", "none.toml"], "--subject none.toml: No such file or directory: give a subject.toml"),
    ],
)
def test_options_that_do_not_fit(options: list[str], message: str, tmp_path: Path) -> None:
    subject = write_subject(tmp_path / "user")
    usual = {"--topic": "why?", "--subject": subject, "--budget": "20runs", "--out": tmp_path / "c"}
    kept = [word for name, value in usual.items() if name not in options for word in (name, value)]
    given = ["start", "--unsafe", *kept, *options]
    assert message in research(*given)
    assert not (tmp_path / "c" / "notebook.sqlite").exists()


def test_a_plan_that_was_not_run_may_be_asked_again(tmp_path: Path) -> None:
    """Also with other files of the subject."""
    for lr in ("0.01", "0.02"):
        subject = write_subject(tmp_path / "user", subject=SUBJECT.replace("0.01", lr))
        given = ("start", "--subject", subject, "--out", tmp_path / "c", "--budget", "30runs", "--unsafe")
        output = research(*given, "--topic", "Is rloo better?")
        assert "The topic was read as: *Which is better: job.recipe (grpo, rloo)" in output
        assert f"job.optimizer.lr = {lr}" in (tmp_path / "c" / "plan.md").read_text()
    assert "is a campaign" not in research("status", tmp_path / "c")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps = 12", "stepps = 12", "stepps: unknown key; did you mean steps?"),
        ("smollm2-135m", "../model", "model = '../model' is neither a folder here"),
    ],
)
def test_a_subject_that_does_not_fit(before: str, after: str, message: str, tmp_path: Path) -> None:
    subject = write_subject(tmp_path / "user", subject=SUBJECT.replace(before, after))
    output = research("start", "--topic", "why?", "--subject", subject, "--budget", "20runs", "--out", tmp_path / "c")
    assert message in output


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    with Notebook(tmp_path):
        assert "a campaign is there" in research(
            "start", "--topic", "x", "--subject", "s", "--budget", "20runs", "--out", tmp_path
        )
    for command in ("resume", "digest"):
        assert "there is no campaign" in research(command, tmp_path / "none")
    for command in ("status", "report"):
        assert "neither a campaign" in research(command, tmp_path / "none")
    assert "an archived campaign" in research("resume", tmp_path)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").touch()
    assert "is a study" in research("digest", tmp_path / "study")
    (tmp_path / "llm.jsonl").touch()
    started = ("start", "--topic", "why?", "--subject", "s", "--budget", "20runs", "--out", tmp_path / "c")
    assert "the record has no answers" in research(*started, "--llm", tmp_path / "llm.jsonl")


def test_a_campaign_begins_in_an_empty_folder(tmp_path: Path) -> None:
    subject = write_subject(tmp_path / "user", agent="1 / 0")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text("")
    given = ("start", "--unsafe", "--topic", "why?", "--subject", subject, "--budget", "20runs", "--out")
    assert "is not an empty folder: choose another one" in research(*given, tmp_path / "study")
    inside = subject.parent / "campaign"
    for _ in range(2):
        assert "ZeroDivisionError" in research(*given, inside), "a start that failed leaves nothing"
    assert list(inside.iterdir()) == []


def test_two_starts_in_one_folder(tmp_path: Path) -> None:
    subject, out = write_subject(tmp_path / "user"), tmp_path / "c"
    out.mkdir()
    given = ("start", "--unsafe", "--subject", subject, "--out", out, "--topic", "Is rloo?", "--budget", "30runs")
    with one_start(out):
        assert f"--out {out}: a campaign is being started there by another process" in research(*given)
    assert "nothing was run; the plan is" in research(*given)


def test_a_subject_that_could_not_run_needs_another_folder(tmp_path: Path) -> None:
    repo = SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "user"), lambda order: [])
    note = f"ZeroDivisionError ({repo.worktree(repo.first)}/agent.py:1)"
    run = Outcome("t", "arm_failed", note=note).to_json()
    with Notebook(tmp_path / "c") as notebook:
        question = Question("why?", Budget(runs=20.0))
        notebook.entry("started", {"question": question.to_json(), "asks": "why?"}, key="started")
        notebook.entry("observed", {"why": "the subject", "trial": {"arm": "c0"}, "outcome": run, "signs": []})
        notebook.entry("ended", {"reason": f"the subject cannot run: {note}", "score": None}, key="ended")
        assert "ZeroDivisionError" not in line_of(notebook.entries[1]), "the end has it"
    output = research("resume", tmp_path / "c")
    assert f"ended: the subject cannot run: ZeroDivisionError ({tmp_path}/user/agent.py:1)" in output
    assert "start with another --out" in output and output.count("ZeroDivisionError") == 1


def test_a_report_of_a_campaign_is_not_checked(tmp_path: Path) -> None:
    with Notebook(tmp_path):
        assert "only reports of studies are checked" in research("report", tmp_path, "--check", "r")
    assert not (tmp_path / "report.md").exists()


def test_a_demo_writes_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    assert "is not an empty folder: choose another one" in research("demo", "--out", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_what_the_notebook_holds(tmp_path: Path) -> None:
    question = {"topic": "why?", "budget": {"runs": 20.0, "hours": None}}
    with Notebook(tmp_path) as notebook:
        notebook.entry("started", {"question": question, "asks": "why?", "first": "c0", "at": 0.0}, key="started")
        for name in ("slower", "waiting"):
            proposed = {"name": name, "commit": name, "origin": "strategist", "why": "it diverges"}
            notebook.entry("hypothesis", proposed)
        run = Outcome("t", "completed", score=0.5).to_json()
        seen = {"trial": {"arm": "slower"}, "why": "round 1", "outcome": run, "signs": [], "cost": 0.0, "hours": 0.0}
        notebook.entry("observed", seen)
        learned = {"meaning": "slower raises the score", "accepted": True, "verdict": "supported", "spent": 9.0}
        learned |= {"hours": 1.5}
        notebook.entry("learned", learned)
        notebook.entry("edited", {"meaning": "files were edited"})
        assert line_of(notebook.entries[-1]) == "   6 note: files were edited"
        output = research("digest", tmp_path)
        assert "slower raises the score" in output and "9.0 full runs, 1.5 h" in output and "11.0 runs" in output
        found = json.loads(research("status", tmp_path, "--json"))
    assert found["found"] == ["slower raises the score"] and found["tried"] == ["slower"] and "away" not in found
    assert found["ruled out"] == [] and found["stage"] == "working"
    assert json.loads(research("status", tmp_path, "--json"))["stage"].startswith("interrupted")


def test_a_digest_of_an_earlier_day(tmp_path: Path) -> None:
    question = {"topic": "why?", "budget": {"runs": 20.0, "hours": None}}
    now = time.time() - 2.5 * DAY
    with Notebook(tmp_path, now=lambda: now) as notebook:
        notebook.entry("started", {"question": question, "asks": "why?", "first": "c0"}, key="started")
        notebook.entry(
            "learned", {"meaning": "slower helps", "accepted": True, "verdict": "supported", "spent": 9.0, "hours": 1.5}
        )
        now += 1.5 * DAY
        notebook.entry(
            "learned",
            {"meaning": "faster does not", "accepted": False, "verdict": "inconclusive", "spent": 8.0, "hours": 1.0},
        )
    first, second = (research("digest", tmp_path, "--day", day) for day in (1, 2))
    assert "slower helps" in first and "faster does not" not in first and "9.0 full runs, 1.5 h" in first
    assert "the end of day 1" in first and "11.0 runs" in first
    assert "faster does not" in second and "17.0 full runs" in second
    assert "2 days of this campaign are over" in research("digest", tmp_path, "--day", 3)


def test_a_proposer_that_does_not_answer_is_named(tmp_path: Path) -> None:
    question = {"topic": "why?", "budget": {"runs": 20.0, "hours": None}}
    away = {"proposals": [], "away": "http://127.0.0.1:9/v1: Connection refused"}
    with Notebook(tmp_path) as notebook:
        notebook.entry("started", {"question": question, "asks": "why?", "first": "c0", "at": 0.0}, key="started")
        notebook.entry("intent", {"proposals": []}, key="round 1 asked strategist")
        for number in (1, 2):
            notebook.entry("intent", away, key=f"round {number} asked llm")
        lines = [line for entry in notebook.entries if (line := line_of(entry))]
        said = "llm did not answer: http://127.0.0.1:9/v1: Connection refused; the next proposer goes on"
        assert lines[1:] == [f"   3 {said}", f"   4 {said}"]
        assert research("digest", tmp_path).count(said) == 2, "once, and as the newest entry"
        assert json.loads(research("status", tmp_path, "--json"))["away"] == [said]


def test_a_campaign_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.sandbox.missing", lambda: "sandboxes need bubblewrap: apt-get install bubblewrap")
    subject = write_subject(tmp_path / "user")
    given = ["start", "--topic", "why?", "--subject", subject, "--budget", "20runs", "--out", tmp_path / "c"]
    refusal = (
        "a campaign runs code that nobody has read: sandboxes need bubblewrap: apt-get install bubblewrap; or run it"
    )
    assert refusal in research(*given)
    assert not (tmp_path / "c").exists()


def move(run: Path, settings: Setting) -> None:
    """Moves the folder of the campaign of a run."""
    folder = run.parent.parent
    folder.rename(folder.with_name("moved"))


def test_a_campaign_whose_folder_is_moved_goes_on_there(tmp_path: Path) -> None:
    repo = SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "user"), lambda order: [])
    question = Question("why?", Budget(runs=20.0), **repo.rules)
    slots = [FakeSlot(name="moving", before=move), FakeSlot(name="still")]
    for place, said in (("c", "c was moved or removed .* resume FOLDER"), ("moved", "lost 3 times: still: over")):
        with pytest.raises(ConfigError, match=said):
            conduct(tmp_path / place, slots[:1], [], question, unsafe=True)
        slots.pop(0)


def write_campaign(folder: Path, budget: Budget, *kinds: str) -> None:
    """A campaign with its subject, and entries of these kinds after its start."""
    SubjectRepo.create(folder, write_subject(folder.parent / f"{folder.name} user"), lambda order: [])
    with Notebook(folder) as notebook:
        notebook.entry("started", {"question": Question("why?", budget).to_json(), "asks": "why?"}, key="started")
        for kind in kinds:
            notebook.entry(kind, {"reason": "the budget is spent", "score": 0.5, "runs": 0.0, "hours": 0.0})


@pytest.mark.parametrize(
    ("folder", "arguments", "message"),
    [
        ("none", ["note", "FOLDER", "x"], "there is no campaign: begin one with agentjet research start"),
        ("archived", ["veto", "FOLDER", "x"], "an archived campaign without its subject and runs"),
        ("new", ["note", "FOLDER", "x"], "the campaign has just begun: try again in a minute"),
        ("open", ["note", "FOLDER", " \n"], "the note is empty: give the remark"),
        ("open", ["note", "FOLDER", "x" * 100_000], "the note has 100,000 characters: give at most 2,000"),
        ("open", ["veto", "FOLDER", ""], "the veto is empty: give the name of a proposal"),
        ("open", ["budget", "FOLDER"], "Missing option '--add'"),
        ("open", ["budget", "FOLDER", "--add", "many"], "budget = 'many': give hours or full runs"),
        ("open", ["budget", "FOLDER", "--add", ""], "budget = '': give hours or full runs"),
        ("open", ["budget", "FOLDER", "--add", "0runs"], "budget = 0 runs: give runs or hours, more than 0"),
        ("open", ["budget", "FOLDER", "--add=-3runs"], "budget = '-3runs': give hours or full runs"),
        (
            "open",
            ["budget", "FOLDER", "--add", "3h"],
            "the budget of this campaign is in runs: give runs, such as 20runs",
        ),
        ("hours", ["budget", "FOLDER", "--add", "3runs"], "this campaign is in hours: give hours, such as 12h"),
        ("open", ["reopen", "FOLDER"], "the campaign has not ended, or is reopened already: continue it with"),
        ("reopened", ["reopen", "FOLDER"], "the campaign has not ended, or is reopened already: continue it with"),
        ("ended", ["note", "FOLDER", "x"], "the campaign has ended: first use agentjet research reopen"),
        ("ended", ["reopen", "FOLDER", "--add", "3h"], "is in runs: give runs, such as 20runs"),
        ("full", ["note", "FOLDER", "x"], "File exists: nothing was sent"),
        ("killed", ["resume", "FOLDER"], "the campaign had not begun: remove the folder, and start it again"),
        ("planned", ["run", "FOLDER"], "has a plan that was not run: start again"),
    ],
)
def test_messages_that_do_not_fit(folder: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    kinds = {"ended": ["ended"], "reopened": ["ended", "reopen"]}.get(folder, [])
    if folder in ("archived", "new"):
        with Notebook(tmp_path / folder):
            (tmp_path / folder / "source.json").write_text("{}") if folder == "new" else None
    elif folder != "none":
        write_campaign(tmp_path / folder, Budget(hours=9.0) if folder == "hours" else Budget(runs=20.0), *kinds)
    if folder in ("planned", "killed"):
        (tmp_path / folder / "notebook.sqlite").unlink()
        Notebook(tmp_path / folder).close() if folder == "killed" else None
    if folder == "full":
        (tmp_path / folder / "inbox").write_text("in the way")
    assert message in research(*(str(tmp_path / folder) if word == "FOLDER" else word for word in arguments))
    assert not [*tmp_path.glob("*/inbox/*")]


def test_messages_wait_for_the_campaign(tmp_path: Path) -> None:
    campaign = tmp_path / "c"
    write_campaign(campaign, Budget(runs=20.0))
    with Notebook(campaign) as notebook:
        assert "reads it before its next runs" in research("note", campaign, "look at the prompt")
        said = research("veto", campaign, "warmer sampling")
        assert "reads it before its next runs" in said and "no arm has the name 'warmer sampling' so far" in said
        [note, veto] = notebook.inbox.waiting().values()
        assert (note.text, veto.kind, veto.text) == ("look at the prompt", "veto", "warmer sampling")
        again = research("resume", campaign, "--unsafe")
        assert "is being written by another process: wait for its end, or stop it" in again, "two researchers"
        notebook.entry("ended", {"reason": "the budget is spent", "score": 0.5}, key="ended")
    assert "when it goes on: agentjet research resume" in research("reopen", campaign, "--add", "5runs")
    assert "reads it when it goes on" in research("budget", campaign, "--add", "2runs"), "it is reopened already"
    assert "is reopened already" in research("reopen", campaign)
