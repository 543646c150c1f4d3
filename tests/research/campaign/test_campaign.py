"""What is pinned: the loop mends a truncated subject; budget, refusals, waiting, resuming and bad input.

The notebook has one writer, readers beside it, and entries that can only be added.
"""

from __future__ import annotations

import ast
import json
import math
import os
import signal
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.research.campaign.campaign import OFFLINE, Campaign, rules
from agentjet.research.campaign.report import build
from agentjet.research.campaign.runs import OBSERVING, Budget, Question, seed_of
from agentjet.research.campaign.strategist import Intervention, ProposerAway, Strategist, View
from agentjet.research.journal import NOTEBOOK, JournalEntry, Notebook
from agentjet.research.models import Outcome, Refused, Trial
from tests.research.campaign.campaign_world import SICK, Commits, FakeClock, FormulaRunner, truncating
from tests.research.world import killed

QUESTION = Question("why does it stay low?", Budget(runs=60.0))


def campaign(
    folder: Path,
    runner: FormulaRunner | None = None,
    question: Question = QUESTION,
    proposers: Sequence[Any] = (),
    clock: FakeClock | None = None,
) -> tuple[Any, list[JournalEntry]]:
    runner = runner or FormulaRunner(Commits())
    with Notebook(folder, now=lambda: 0.0) as notebook:
        done = Campaign(
            question, notebook, runner.commits, runner, [*proposers, Strategist()], clock or FakeClock()
        ).run()
        return done, notebook.entries


def kinds(entries: Sequence[JournalEntry]) -> list[str]:
    return [entry.kind for entry in entries]


def test_a_truncated_subject_is_mended(tmp_path: Path) -> None:
    done, entries = campaign(tmp_path)
    assert done["accepted"] == ["longer answers"] and done["reason"] == "nothing is worth trying"
    assert done["score"] > 0.7
    order = kinds(entries)
    assert order.index("hypothesis") < order.index("screened") < order.index("study") < order.index("learned")
    assert done["spent"]["runs"] <= 60


def test_every_study_is_in_the_notebook_before_its_data(tmp_path: Path) -> None:
    runner = FormulaRunner(Commits())
    seen: list[bool] = []
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:

        class Watching(FormulaRunner):
            def launch(self, key: str, trial: Trial) -> None:
                if trial.study != OBSERVING:
                    seen.append(notebook.known(f"study {trial.study}") is not None)
                super().launch(key, trial)

        watching = Watching(runner.commits)
        Campaign(QUESTION, notebook, watching.commits, watching, [Strategist()], FakeClock()).run()
    assert seen and all(seen)


def test_a_healthy_subject_has_nothing_to_mend(tmp_path: Path) -> None:
    commits = Commits({**SICK, "job.max_tokens": 300})
    done, entries = campaign(tmp_path, FormulaRunner(commits))
    assert done["accepted"] == [] and done["base"] == commits.first and "study" not in kinds(entries)


def test_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    for runs in (10.0, 11.0, 14.0, 25.0):
        done, _ = campaign(tmp_path / str(runs), question=Question("t", Budget(runs=runs)))
        assert done["spent"]["runs"] <= runs


def test_a_budget_below_one_study_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget = 5 runs.* give 10 runs or more"):
        Question("t", Budget(runs=5.0))


def test_hours_are_a_budget(tmp_path: Path) -> None:
    done, _ = campaign(tmp_path, question=Question("t", Budget(hours=0.001)))
    assert done["accepted"] == [] and "budget" in done["reason"]


def test_a_subject_that_cannot_run_ends_with_its_error(tmp_path: Path) -> None:
    runner = FormulaRunner(Commits(), error="agent.py:3: NameError: name 'x' is not defined")
    done, _ = campaign(tmp_path, runner)
    assert done["reason"] == "the subject cannot run: agent.py:3: NameError: name 'x' is not defined"
    assert done["accepted"] == [] and done["spent"]["runs"] == 0.0, "a run without a step costs nothing"


def test_a_lost_run_is_repeated(tmp_path: Path) -> None:
    done, entries = campaign(tmp_path, FormulaRunner(Commits(), lost=2))
    assert done["accepted"] == ["longer answers"]
    assert [bool(entry.content["outcome"]["note"]) for entry in entries if entry.kind == "observed"][:3] == [
        True,
        True,
        False,
    ]


@dataclass
class Blackout(FormulaRunner):
    """Loses every run for a while, after so many results: the folder of the weights is away, or the GPU is taken."""

    clock: FakeClock = field(default_factory=FakeClock)
    after: int = 1
    until: float = math.inf

    def collect(self, key: str) -> Outcome:
        self.after -= 1
        if self.after >= 0 or self.clock.seconds > self.until:
            return super().collect(key)
        return Outcome(self.trial(key).id, "infra_failed", note="no such folder: weights")


@pytest.mark.parametrize("after", [1, 2, 3, 6, 9])
def test_waits_while_all_runs_are_lost(tmp_path: Path, after: int) -> None:
    """In a screen, and in a study."""
    clock = FakeClock()
    runner = Blackout(Commits(), clock=clock, after=after, until=20_000.0)
    done, entries = campaign(tmp_path, runner, clock=clock)
    assert done["accepted"] == ["longer answers"] and clock.slept[:3] == [60.0, 120.0, 240.0]
    assert kinds(entries).count("learned") == 1 and done["spent"]["hours"] < 1


def test_what_a_study_waited_for_is_known_on_resume(tmp_path: Path) -> None:
    clock = FakeClock()
    runner = Blackout(Commits(), clock=clock, after=6, until=20_000.0)
    done, entries = campaign(tmp_path / "whole", runner, clock=clock)
    learned = next(entry.number for entry in entries if entry.kind == "learned")
    assert entries[learned - 1].content["probed"]["number"] > 0
    with Notebook(tmp_path / "part", now=lambda: 0.0) as part:
        for entry in entries[:learned]:
            part.entry(entry.kind, entry.content, entry.because, key=entry.key)
    again, _ = campaign(tmp_path / "part", runner, clock=clock)
    assert again["spent"]["runs"] == pytest.approx(done["spent"]["runs"])


def test_lost_runs_never_end_a_campaign(tmp_path: Path) -> None:
    commits, clock = Commits(), FakeClock()
    for after, message in (
        (0, "the first run was lost 3 times: no such folder: weights"),
        (1, "Resume the campaign later"),
    ):
        with pytest.raises(ConfigError, match=message):
            campaign(tmp_path / str(after), Blackout(commits, clock=clock, after=after), clock=clock)
        done, _ = campaign(tmp_path / str(after), FormulaRunner(commits))
        assert done["accepted"] == ["longer answers"]


def test_an_arm_that_is_always_lost_is_not_waited_for(tmp_path: Path) -> None:
    """The subject as given runs meanwhile, so the arm is the reason."""

    class Heavy(FormulaRunner):
        def collect(self, key: str) -> Outcome:
            found, settings = super().collect(key), self.commits.settings(self.trial(key).arm)
            lost = Outcome(found.trial, "infra_failed", note="out of memory")
            return lost if settings["job.max_tokens"] > 10 else found

    clock = FakeClock()
    done, _ = campaign(tmp_path, Heavy(Commits()), clock=clock)
    assert done["reason"] == "nothing is worth trying; longer answers could not run: out of memory"
    assert clock.slept == []


def test_waits_for_a_runner_that_is_away(tmp_path: Path) -> None:
    clock = FakeClock()
    done, _ = campaign(tmp_path, FormulaRunner(Commits(), away=5), clock=clock)
    assert done["accepted"] == ["longer answers"] and clock.slept == [60.0, 120.0, 240.0, 480.0, 960.0]
    assert done["spent"]["hours"] < 0.2


def test_gives_up_after_a_week_and_goes_on_later(tmp_path: Path) -> None:
    commits = Commits()
    with pytest.raises(ConfigError, match="Resume the campaign later"):
        campaign(tmp_path, FormulaRunner(commits, away=10**6))
    done, _ = campaign(tmp_path, FormulaRunner(commits))
    assert done["accepted"] == ["longer answers"]


def test_no_signal_at_all(tmp_path: Path) -> None:
    runner = FormulaRunner(Commits(), lambda _: {"score": 0.0})
    done, _ = campaign(tmp_path, runner)
    assert done["accepted"] == [] and done["reason"] in ("nothing is worth trying",)


def test_a_judge_that_leaks_ends_the_campaign(tmp_path: Path) -> None:
    runner = FormulaRunner(Commits(), lambda _: {"score": 0.9, "swapped": 1.0})
    done, entries = campaign(tmp_path, runner)
    assert "the judge pays answers that belong to other tasks" in done["reason"] and "study" not in kinds(entries)


def test_a_judge_that_scores_all_the_same_ends_the_campaign(tmp_path: Path) -> None:
    class Constant(FormulaRunner):
        def collect(self, key: str) -> Outcome:
            return replace(super().collect(key), score=0.5, curve=(0.5, 0.5), by_task={"a": (0.5, 0.5, 8)})

    done, entries = campaign(tmp_path, Constant(Commits()))
    assert "give every answer the same score" in done["reason"] and "hypothesis" not in kinds(entries)


def test_a_gain_by_a_leak_is_refused(tmp_path: Path) -> None:
    def formula(settings: Any) -> dict[str, float]:
        found = truncating(settings)
        return {**found, "swapped": 1.0 if found["score"] > 0.6 else 0.1}

    done, entries = campaign(tmp_path, FormulaRunner(Commits(), formula))
    assert done["accepted"] == []
    assert any("answers of other tasks" in entry.content["reason"] for entry in entries if entry.kind == "refused")


@dataclass
class Counting(FormulaRunner):
    """Answers of 40 tokens use twice as much of an amount."""

    signal: str = "batch/sampled_tokens"

    def collect(self, key: str) -> Outcome:
        run, trial = super().collect(key), self.launched[key]
        each = 200.0 if self.commits.settings(trial.arm)["job.max_tokens"] == 40 else 100.0
        steps = int(trial.setting.get("steps", 6)) if trial.fidelity == 1 else 2
        return replace(run, signals={**run.signals, self.signal: (each,) * steps})


@pytest.mark.parametrize(("equal", "signal"), [("tokens", "batch/sampled_tokens"), ("seconds", "time/sample")])
def test_arms_learn_from_equal_amounts(equal: Any, signal: str, tmp_path: Path) -> None:
    """A mended answer has twice the tokens, so its full runs have half of the steps, in screens and in studies."""
    runner = Counting(Commits(), signal=signal)
    done, entries = campaign(tmp_path, runner, replace(QUESTION, equal=equal))
    assert done["accepted"] == ["longer answers"]
    study = next(entry.content["study"] for entry in entries if entry.kind == "study")
    assert [arm["changes"] for arm in study["arms"]] == [{}, {"steps": 3}]
    full = [trial for trial in runner.launched.values() if trial.arm == done["base"] and trial.fidelity == 1]
    assert full and all(trial.setting == {"steps": 3} for trial in full)


def test_the_topic_is_a_title_without_a_model(tmp_path: Path) -> None:
    done, entries = campaign(tmp_path, question=Question("pourquoi la récompense stagne-t-elle ?", Budget(runs=60.0)))
    assert done["accepted"] == ["longer answers"] and entries[0].content["asks"] == OFFLINE


def test_another_question_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    campaign(tmp_path)
    with Notebook(tmp_path / "b", now=lambda: 0.0) as notebook:
        runner = FormulaRunner(Commits(), away=10**6)
        with pytest.raises(ConfigError):
            Campaign(QUESTION, notebook, runner.commits, runner, [Strategist()], FakeClock()).run()
    with pytest.raises(ConfigError, match="another campaign"):
        campaign(tmp_path / "b", question=Question("another", Budget(runs=60.0)))


def test_other_rules_do_not_go_on_with_a_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Resume the campaign later"):
        campaign(tmp_path, FormulaRunner(Commits(), away=10**6))
    with monkeypatch.context() as other:
        other.setattr("agentjet.research.campaign.campaign.rules", lambda: {"version": "9.9", "hash": "feed"})
        with pytest.raises(
            ConfigError, match=r"began by the rules of AgentJet 0\..*, and this is AgentJet 9\.9 \(feed\)"
        ):
            campaign(tmp_path)
    done, entries = campaign(tmp_path)
    assert done["accepted"] == ["longer answers"] and entries[0].content["rules"] == rules()


def test_a_notebook_without_rules_says_so(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        content = {"question": QUESTION.to_json(), "first": Commits().first, "asks": OFFLINE, "limits": []}
        notebook.entry("started", content, key="started")
    _, entries = campaign(tmp_path)
    assert "the rules at the start are not in this notebook" in entries[1].content["meaning"]


def test_the_rules_are_code_and_not_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    found, parse = rules()["hash"], ast.parse
    for change, is_same in (("PROMISING = 2.0", False), ("# a remark", True), ('"""A remark."""', True)):
        monkeypatch.setattr(ast, "parse", lambda text, change=change: parse(f"{text}\n{change}\n"))
        assert (rules.__wrapped__()["hash"] == found) is is_same


@pytest.mark.parametrize("own", [True, False])
def test_a_gain_at_step_0_is_the_changes_own(own: bool, tmp_path: Path) -> None:
    """An agent that computes the answer itself needs no learning."""

    class Starting(FormulaRunner):
        def collect(self, key: str) -> Outcome:
            run = super().collect(key)
            assert run.score is not None
            return replace(run, curve=(run.score if own else 0.1, run.score))

    _, entries = campaign(tmp_path, Starting(Commits()))
    learned = next(entry.content for entry in entries if entry.kind == "learned")
    assert ("the change itself makes most of the difference, and not learning" in learned["meaning"]) is own
    assert "at step 0 the difference is +" in learned["meaning"] and len(learned["outcomes"]["base"]) == 4
    screened = next(entry.content["full"][0] for entry in entries if entry.kind == "screened")
    assert (screened["at_start"] > 0.3) is own
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert "| mean at step 0 |" in markdown and "at step 0)" in markdown


def test_the_time_of_proposers_counts(tmp_path: Path) -> None:
    clock = FakeClock()

    class Slow(Scripted):
        def propose(self, view: View, most: int) -> Sequence[object]:
            clock.seconds += 3 * 3600
            return []

    for _ in "again":
        done, _ = campaign(tmp_path, question=Question("t", Budget(hours=48.0)), proposers=[Slow()], clock=clock)
    assert done["spent"]["hours"] > 6
    with Notebook(tmp_path, writer=False) as notebook:
        assert notebook.spending()["hours"] == pytest.approx(done["spent"]["hours"])


@pytest.mark.parametrize(("rises", "room", "says"), [(True, 0.2, True), (False, 0.2, False), (True, 0.0, False)])
def test_runs_that_have_not_converged(rises: bool, room: float, says: bool, tmp_path: Path) -> None:
    class Rising(FormulaRunner):
        def collect(self, key: str) -> Outcome:
            run = super().collect(key)
            assert run.score is not None
            return replace(run, curve=(0.1, run.score - (0.1 if rises else 0.0), run.score))

    def formula(settings: Mapping[str, Any]) -> dict[str, float]:
        found = truncating(settings)
        return {**found, "score": found["score"] + 0.2 - room}

    campaign(tmp_path, Rising(Commits(), formula))
    text = "The score of “changed” still rose between the last two evaluations: by 0.1 (at 95 %, 0.1 or more)."
    assert (text in build(tmp_path)[0].read_text(encoding="utf-8")) is says


def test_edited_files_are_noted(tmp_path: Path) -> None:
    commits = Commits()
    commits.changed = ["agent.py"]
    _, entries = campaign(tmp_path, FormulaRunner(commits))
    assert "agent.py" in next(entry.content["meaning"] for entry in entries if entry.kind == "edited")


class Scripted:
    """Gives the same answers in every round."""

    name = "model"

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.asked = 0

    def propose(self, view: View, most: int) -> Sequence[object]:
        self.asked += 1
        return self.answers


HOSTILE: tuple[object, ...] = (
    "I would raise the learning rate.",
    {"name": "x"},
    {"name": "x", "kind": "settings", "changes": {"job.max_tokens": 99}, "seeds": 10**6},
    {"name": "x", "kind": "settings", "changes": {"job.seed": 3}},
    {"name": "x", "kind": "settings", "changes": {"job.max_steps": 10**6}},
    {"name": "x", "kind": "settings", "changes": {"model.name": "gpt"}},
    {"name": "x", "kind": "settings", "changes": {"job.group_size": 4096, "job.batch_size": 8}},
    {"name": "x", "kind": "reward", "patch": "--- a/judge.py\n+++ b/judge.py\n"},
    {"name": "x", "kind": "settings", "changes": {"job.max_tokens": 99}, "why": "the score is 0.987654"},
    {"name": "x", "kind": "settings", "changes": {"job.max_tokens": 99}, "evidence": [999]},
    {"name": "x", "kind": "settings", "changes": {"job.max_tokens": 99}, "why": "the score is 1e999"},
    {"name": "x", "kind": "settings", "changes": {"job.group_size": 10**400, "job.batch_size": 1}},
    None,
    [[[[]]]],
    {"name": "x\0y", "kind": "settings", "changes": {"job.max_tokens": 99}},
    {"name": "x\ud800", "kind": "settings", "changes": {"job.max_tokens": 99}},
    {"name": "x", "kind": "settings", "changes": {"job.max_tokens": 99}, "why": "\ud800"},
    {"name": "x\ny", "kind": "settings", "changes": {"job.max_tokens": 99}},
    {"name": "x", "kind": "settings", "changes": {"job.optimizer.lr": float("inf")}},
    {"name": "x", "kind": "settings", "changes": {"job.max_tokens": 99}, "evidence": [10**30]},
    {"name": "x", "kind": "settings", "changes": {f"job.x{n}": n for n in range(10_000)}},
    {"name": "x", "kind": "agent", "patch": "x" * 10_000_000},
    {"name": "x" * 10_000_000, "kind": "settings", "changes": {"job.max_tokens": 99}},
    "\ud800\0" * 5_000_000,
    json.loads("[" * 900 + "]" * 900),
)


@pytest.mark.parametrize(
    "answer",
    [
        Intervention("x", "settings", {"job.max_tokens": math.inf}),
        Intervention("x", "settings", {"job.max_tokens": 99}, why="\ud800"),
        Intervention("x", "agent", patch="\ud800"),
        Intervention("x", "settings", {"job.\0": 1}),
        object(),
        ValueError("out of range"),
        SystemError("a library failed"),
    ],
)
def test_an_odd_answer_is_recorded_and_never_fatal(tmp_path: Path, answer: Any) -> None:
    """Also for a campaign that is resumed after it: the answer is in its notebook."""

    class Odd(Scripted):
        def propose(self, view: View, most: int) -> Sequence[object]:
            if isinstance(answer, Exception):
                raise answer
            return [answer]

    class Checking(Commits):
        def commit(self, base: str, intervention: Intervention) -> str:
            subprocess.run(["true", *intervention.changes], input=intervention.patch.encode(), check=True)
            return super().commit(base, intervention)

    for _ in "again":
        done, entries = campaign(tmp_path, FormulaRunner(Checking()), proposers=[Odd()])
        assert done["accepted"] == ["longer answers"]
    asked = [entry.content for entry in entries if entry.kind == "intent" and entry.content.get("proposer") == "model"]
    assert "refused" in kinds(entries) or all("a library" in one["away"] or "range" in one["away"] for one in asked)


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_proposals_are_refused_and_the_strategist_goes_on(tmp_path: Path, hostile: object) -> None:
    done, entries = campaign(tmp_path, proposers=[Scripted(as_proposed(hostile))])
    assert done["accepted"] == ["longer answers"]
    assert all(entry.content["origin"] == "strategist" for entry in entries if entry.kind == "hypothesis")
    assert "refused" in kinds(entries)


def test_a_sound_proposal_is_tried(tmp_path: Path) -> None:
    sound = Intervention("thirty tokens", "settings", {"job.max_tokens": 40}, evidence=(3,), why="truncated 0.667")
    done, _ = campaign(tmp_path, proposers=[Scripted(sound)])
    assert done["accepted"][0] in ("thirty tokens", "longer answers")


def test_a_patch_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The strategist's own patch may be too long, if it changes a large file of tasks."""
    done, entries = campaign(tmp_path, proposers=[Scripted(Intervention("long", "tasks", patch="x" * 200_001))])
    assert done["accepted"] == ["longer answers"]
    reason = next(entry.content["reason"] for entry in entries if entry.kind == "refused")
    assert "patch" in reason and "at most 200000 characters" in reason


def test_a_proposer_that_is_away_does_not_stop_the_campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Away(Scripted):
        def propose(self, view: View, most: int) -> Sequence[object]:
            raise ProposerAway("no answer in 60 s")

    done, entries = campaign(tmp_path, proposers=[Away()])
    assert done["accepted"] == ["longer answers"]
    assert any("no answer in 60 s" in str(entry.content) for entry in entries if entry.kind == "intent")
    assert {*capsys.readouterr().out.splitlines()} == {"asking model, which may take minutes"}


def as_proposed(answer: object) -> Intervention | str:
    """The intervention of a model's answer, or the reason why it is none."""
    try:
        return Intervention.from_json(answer)
    except (ConfigError, ValueError) as error:
        return str(error)


class Doomed(Notebook):
    """Kills its process as soon as the entry with its number is on disk."""

    number = 0

    def entry(self, kind: str, content: object, because: Sequence[int] = (), *, key: str = "") -> JournalEntry:
        made = super().entry(kind, content, because, key=key)
        if made.number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return made


@pytest.mark.parametrize("number", [2, 3, 5, 9, 12])
def test_killed_at_an_entry_it_ends_the_same(tmp_path: Path, number: int) -> None:
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    for folder in (quiet, stormy):
        (folder / "launches").mkdir(parents=True)
    _, undisturbed = campaign(quiet, FormulaRunner(Commits(), folder=quiet / "launches"))

    def run_until_killed() -> None:
        runner = FormulaRunner(Commits(), folder=stormy / "launches")
        with Doomed(stormy, now=lambda: 0.0) as notebook:
            notebook.number = number
            Campaign(QUESTION, notebook, runner.commits, runner, [Strategist()], FakeClock()).run()

    killed(run_until_killed)
    _, entries = campaign(stormy, FormulaRunner(Commits(), folder=stormy / "launches"))
    assert [(entry.kind, entry.key) for entry in entries] == [(entry.kind, entry.key) for entry in undisturbed]
    assert sorted(path.name for path in (quiet / "launches").iterdir()) == sorted(
        path.name for path in (stormy / "launches").iterdir()
    )


# ---- notebook --------------------------------------------------------------------------------------------------------


def test_entries_survive_and_are_numbered(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        first = notebook.entry("started", {"topic": "x"})
        second = notebook.entry("observed", {"score": 0.5}, [first.number])
        assert second.number == 2 and second.because == (1,)
    with Notebook(tmp_path) as again:
        assert [entry.content for entry in again.entries] == [{"topic": "x"}, {"score": 0.5}]


def test_one_writer(tmp_path: Path) -> None:
    with Notebook(tmp_path), pytest.raises(ConfigError, match="is being written by another process"):
        Notebook(tmp_path)


def test_readers_beside_the_writer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no campaign"):
        Notebook(tmp_path / "none", writer=False)
    with Notebook(tmp_path) as notebook, Notebook(tmp_path, writer=False) as reader:
        notebook.entry("started", {})
        reader.refresh()
        assert len(reader.entries) == 1


def test_append_only(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.entry("started", {})
        for statement in ("UPDATE entries SET content = '1'", "DELETE FROM entries"):
            with (
                sqlite3.connect(tmp_path / NOTEBOOK) as other,
                pytest.raises(sqlite3.IntegrityError, match="append only"),
            ):
                other.execute(statement)


def test_budgets() -> None:
    assert Budget.parse("48h") == Budget(hours=48.0)
    assert Budget.parse("500runs") == Budget(runs=500.0)
    for wrong in ("much", "0h", "-1runs", "nanh", "xh"):
        with pytest.raises(ConfigError, match="budget"):
            Budget.parse(wrong)


def test_an_intervention_changes_something() -> None:
    with pytest.raises(ConfigError, match="changes nothing"):
        Intervention("idle", "settings")


# ---- chance ----------------------------------------------------------------------------------------------------------


@dataclass
class Lucky(FormulaRunner):
    """The first run of the subject scores as high as that of the mended one."""

    def collect(self, key: str) -> Outcome:
        outcome, trial = super().collect(key), self.trial(key)
        if outcome.score is None or (trial.arm, trial.seed) != (self.commits.first, seed_of(QUESTION, 0)):
            return outcome
        return replace(outcome, score=0.8, curve=(0.1, 0.8))


def test_one_lucky_run_of_the_base_does_not_hide_a_gain(tmp_path: Path) -> None:
    done, _ = campaign(tmp_path, Lucky(Commits()))
    assert done["accepted"] == ["longer answers"]


def test_of_gains_that_do_not_differ_clearly_the_one_that_ends_more_signs_is_studied(tmp_path: Path) -> None:
    """The other one only if it is clearly better."""
    both, one = (
        Intervention(name, "settings", {"job.max_tokens": limit, "job.temperature": 1.2}, why="")
        for name, limit in (("both", 40), ("one", 20))
    )
    for ahead, studied in ((0.1, "both"), (0.3, "one")):

        def formula(settings: Mapping[str, Any], ahead: float = ahead) -> dict[str, float]:
            is_one = settings["job.max_tokens"] == 20
            return {**truncating(settings), "score": 0.2 + 0.4 * (settings["job.max_tokens"] > 10) + ahead * is_one}

        _, entries = campaign(tmp_path / studied, FormulaRunner(Commits(), formula), proposers=[Scripted(both, one)])
        assert next(e.content["name"] for e in entries if e.kind == "study") == studied


# ---- parts -----------------------------------------------------------------------------------------------------------

BUNDLE = Intervention(
    "bundle",
    "settings",
    {"job.max_tokens": 40, "job.optimizer.lr": 0.002, "job.temperature": 0.7},
    patch="x",
    why="truncated 0.667",
    evidence=(3,),
)


def only_length_gains(settings: Mapping[str, Any]) -> dict[str, float]:
    """The rate does nothing, the temperature harms, and the patch helps, too."""
    found = truncating(settings)
    return {**found, "score": found["score"] - 0.2 * (settings["job.temperature"] < 1) + 0.4 * ("patch" in settings)}


class OfParts(Commits):
    """The patch cannot be left out."""

    def without(self, base: str, whole: str, part: str) -> str:
        if part == "patch":
            raise Refused("it does not load: agent.py:3")
        return super().without(base, whole, part)


def test_a_confirmed_bundle_is_taken_apart(tmp_path: Path) -> None:
    runner, question = FormulaRunner(OfParts(), only_length_gains), Question("t", Budget(runs=150.0))
    done, entries = campaign(tmp_path, runner, question, [Scripted(BUNDLE)])
    assert done["accepted"][0] == "bundle" and done["spent"]["runs"] <= 150
    parts, plan, found = (next(e for e in entries if e.kind == kind) for kind in ("parts", "ablation", "ablated"))
    assert parts.content["inseparable"] == {"patch": "it does not load: agent.py:3"} and not parts.content["left_out"]
    assert {part: each["verdict"] for part, each in found.content["findings"].items()} == {
        "job.max_tokens": "supported",
        "job.optimizer.lr": "practically_equivalent",
        "job.temperature": "refuted",
    }
    assert "job.temperature does harm: without it the score is higher" in found.content["meaning"]
    first = next(e.content["commit"] for e in entries if e.kind == "study")
    whole, *others = plan.content["study"]["arms"]
    assert whole["code"] == first and len(others) == 3, "the base stays the whole"
    assert plan.content["study"]["alpha"] == question.alpha_of(2)
    left = 150 - sum(e.content.get("spent", e.content.get("cost", 0)) for e in entries[: plan.number])
    assert found.content["spent"] <= left / 4
    again, replayed = campaign(tmp_path, FormulaRunner(OfParts(), only_length_gains), question, [Scripted(BUNDLE)])
    assert (again, len(replayed)) == (done, len(entries))


ONE_PART = replace(BUNDLE, changes={"job.max_tokens": 40})
"""Beside the patch, which cannot be left out. Without it nothing of the change works, as the study has shown."""


@pytest.mark.parametrize(
    ("runs", "made", "parts"), [(30.0, BUNDLE, 0), (68.0, BUNDLE, 2), (150.0, None, 0), (150.0, ONE_PART, 0)]
)
def test_as_many_parts_as_a_quarter_of_what_is_left_pays_for(
    tmp_path: Path, runs: float, made: Intervention | None, parts: int
) -> None:
    """Nothing is taken apart if the change has one part only."""
    runner, proposers = FormulaRunner(OfParts(), only_length_gains), [Scripted(made)] if made else []
    _, entries = campaign(tmp_path, runner, Question("t", Budget(runs=runs)), proposers)
    arms = [len(e.content["study"]["arms"]) - 1 for e in entries if e.kind == "ablation"]
    assert sum(arms[:1]) == parts


def test_parts_learn_from_equal_amounts(tmp_path: Path) -> None:
    """A whole without its longer answers has all of its steps again. The last part is not paid for."""
    runner, question = Counting(OfParts(), only_length_gains), Question("t", Budget(runs=75.0), equal="tokens")
    done, entries = campaign(tmp_path, runner, question, [Scripted(BUNDLE)])
    parts, plan = (next(e.content for e in entries if e.kind == kind) for kind in ("parts", "ablation"))
    assert [arm["changes"] for arm in plan["study"]["arms"]] == [{"steps": 3}, {"steps": 6}, {"steps": 3}]
    assert [*parts["arms"]] == ["job.max_tokens", "job.optimizer.lr"] and done["spent"]["runs"] <= 75
    assert parts["left_out"] == ["job.temperature", "patch"]
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert "The budget did not pay for: `job.temperature`, `patch`." in markdown


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_killed_while_it_takes_apart(tmp_path: Path, behind: int) -> None:
    """At the list of the parts, at the plan, and at the result."""
    question, quiet, stormy = Question("t", Budget(runs=150.0)), tmp_path / "quiet", tmp_path / "stormy"

    def runner(folder: Path) -> FormulaRunner:
        (folder / "launches").mkdir(parents=True, exist_ok=True)
        commits = OfParts()
        whole = commits.commit(commits.first, BUNDLE)
        for part in BUNDLE.changes:  # a repository keeps its commits
            commits.without(commits.first, whole, part)
        return FormulaRunner(commits, only_length_gains, folder=folder / "launches")

    _, undisturbed = campaign(quiet, runner(quiet), question, [Scripted(BUNDLE)])
    number = next(e.number for e in undisturbed if e.kind == "parts") + behind

    def run_until_killed() -> None:
        used = runner(stormy)
        with Doomed(stormy, now=lambda: 0.0) as notebook:
            notebook.number = number
            proposers = [Scripted(BUNDLE), Strategist()]
            Campaign(question, notebook, used.commits, used, proposers, FakeClock()).run()

    killed(run_until_killed)
    _, entries = campaign(stormy, runner(stormy), question, [Scripted(BUNDLE)])
    assert [(e.kind, e.key) for e in entries] == [(e.kind, e.key) for e in undisturbed]
    places = [sorted(path.name for path in (folder / "launches").iterdir()) for folder in (quiet, stormy)]
    assert places[0] == places[1]
