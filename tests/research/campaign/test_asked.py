"""1. A topic's study runs in a campaign: observed once, conducted, answered; the same on a second passing.
2. Arms learn from equal tokens, if the question says so.
3. A study that the budget cannot pay for is refused before a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agentjet.cli.research import compares_seconds
from agentjet.errors import ConfigError
from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.planner import knobs_of, plan_study
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Strategist
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.journal import DECIDED, HumanMessage, Inbox, JournalEntry, Notebook, read_log
from agentjet.research.models import Equal, Outcome, Study, Subject
from agentjet.research.question import given_levels
from agentjet.research.report import StudyView, gather
from agentjet.research.topic import read_topic
from tests.cli.test_commands import run
from tests.research.campaign.campaign_world import SICK, Commits, FakeClock, FormulaRunner

HEALTHY = Commits({**SICK, "job.max_tokens": 300})


def hotter(settings: Mapping[str, Any]) -> dict[str, float]:
    return {"score": 0.5 + 0.2 * (float(settings["job.temperature"]) > 1)}


def plan_of(topic: str, commits: Commits, budget: Budget, equal: Equal = "episodes", *levels: str) -> Any:
    question = Question(topic, budget, equal=equal)
    asked = read_topic(topic)
    return question, plan_study(question, asked, given_levels(levels), cast(SubjectRepo, commits))


def campaign(
    folder: Path, topic: str, runner: FormulaRunner, budget: Budget, equal: Equal = "episodes"
) -> tuple[Any, list[JournalEntry]]:
    question, plan = plan_of(topic, runner.commits, budget, equal)
    with Notebook(folder, now=lambda: 0.0) as notebook:
        ran = Campaign(
            question, notebook, cast(Any, runner.commits), runner, [Strategist()], FakeClock(), planned=plan
        ).run()
        return ran, notebook.entries


RUNS = Budget(runs=60.0)


@pytest.mark.parametrize(
    ("topic", "said", "decided"),
    [
        (
            "Temperature 1 or 1.3?",
            "Temperature 1.3 scores higher than temperature 1: yes, +0.2",
            "all claims are decided",
        ),
        ("Does an entropy bonus help?", "no difference of 0.05 or more", "all claims are decided"),
        (
            "Does the best temperature depend on the group size?",
            "depends on job.group_size: no difference of 0.05 or more",
            "all claims are decided",
        ),
    ],
)
def test_a_topic_is_answered(tmp_path: Path, topic: str, said: str, decided: str) -> None:
    done, entries = campaign(tmp_path, topic, FormulaRunner(HEALTHY, hotter, folder=tmp_path), Budget(runs=100.0))
    assert done["reason"] == decided and done["spent"]["runs"] <= 100
    assert [entry.kind for entry in entries] == ["started", "intent", "observed", "study", "learned", "ended"]
    assert said in entries[4].content["meaning"]
    facts = gather(StudyView(read_log(tmp_path / "study.sqlite")))
    plan = plan_of(topic, HEALTHY, Budget(runs=100.0))[1]["study"]
    assert Study.from_json(plan).id == Study.from_json(entries[3].content["study"]).id, "the plan that was shown"
    assert Study.from_json(plan).id in (tmp_path / "plan.md").read_text(encoding="utf-8")
    assert " ".join(facts["answer"]) == entries[4].content["meaning"] and facts["stage"] == "finished"
    assert facts["ledger"]["total"] + 1 == pytest.approx(done["spent"]["runs"])


@pytest.mark.parametrize("passed", range(1, 6))
def test_a_topic_that_was_interrupted_goes_on(tmp_path: Path, passed: int) -> None:
    """The notebook ends after each of its entries; the runner and the study's file know more."""
    topic = "Temperature 1 or 1.3?"
    done, entries = campaign(tmp_path, topic, FormulaRunner(HEALTHY, hotter, folder=tmp_path), RUNS)
    with Notebook(part := tmp_path / "part", now=lambda: 0.0) as notebook:
        for entry in entries[:passed]:
            notebook.entry(entry.kind, entry.content, entry.because, key=entry.key)
    (part / "study.sqlite").write_bytes((tmp_path / "study.sqlite").read_bytes())
    again, other = campaign(part, topic, FormulaRunner(HEALTHY, hotter, folder=tmp_path), RUNS)
    assert again["reason"] == done["reason"]
    assert [entry.key for entry in other] == [entry.key for entry in entries]
    assert other[4].content["findings"] == entries[4].content["findings"]


def test_each_arm_tunes_what_it_does_not_set(tmp_path: Path) -> None:
    """A recipe that needs a larger learning rate is compared at its own."""

    def score(settings: Mapping[str, Any]) -> dict[str, float]:
        best = 0.1 if settings.get("job.recipe.name") == "rloo" else 0.001
        return {"score": 0.5 + 0.3 * (settings["job.optimizer.lr"] == best)}

    question = Question("Is rloo better?", Budget(runs=60.0))
    knobs = knobs_of(given_levels(["job.optimizer.lr=0.001", "job.optimizer.lr=0.1"], "--tune"))
    plan = plan_study(question, read_topic(question.topic), {}, cast(SubjectRepo, HEALTHY), knobs)
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        runner = FormulaRunner(HEALTHY, score)
        Campaign(question, notebook, cast(Any, HEALTHY), runner, [Strategist()], FakeClock(), planned=plan).run()
    view = StudyView(read_log(tmp_path / "study.sqlite"))
    assert {arm: setting["job.optimizer.lr"] for arm, setting in view.chosen.items()} == {
        "recipe grpo": 0.001,
        "recipe rloo": 0.1,
    }
    assert "no difference of" in gather(view)["answer"][0]


class Talkative(FormulaRunner):
    """The temperature 1.3 makes answers twice as long."""

    def collect(self, key: str) -> Outcome:
        found, trial = super().collect(key), self.trial(key)
        each = 200.0 if trial.setting.get("job.temperature") == 1.3 else 100.0
        steps = int(trial.setting.get("steps", 6)) if trial.fidelity == 1 else 2
        object.__setattr__(found, "signals", {"batch/sampled_tokens": (each,) * steps})
        return found


def test_arms_learn_from_equal_tokens(tmp_path: Path) -> None:
    done, entries = campaign(tmp_path, "Temperature 1 or 1.3 at equal tokens?", Talkative(HEALTHY), RUNS, "tokens")
    study = next(entry.content["study"] for entry in entries if entry.kind == "study")
    assert [arm["changes"]["steps"] for arm in study["arms"]] == [6, 3]
    assert done["reason"] == "all claims are decided"


@pytest.mark.parametrize(
    ("topic", "equal", "expected"),
    [
        ("Temperature 1 or 1.3?", "episodes", False),
        ("Temperature 1 or 1.3?", "seconds", True),
        ("How do score and training time change with a turn limit of 1, 3 and 5?", "episodes", True),
    ],
)
def test_seconds_are_compared_on_machines_of_one_kind(topic: str, equal: Equal, expected: bool) -> None:
    assert compares_seconds(*plan_of(topic, HEALTHY, RUNS, equal)) is expected


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("Temperature 0.7, 1 or 1.3?", r"budget = 10\.0 runs: 3 arms with 4 to 12 seeds need 13 to 37 full runs"),
        ("Group size 4 or 6", "64 is no multiple of it"),
        ("Is a beta2 of 0.9 or 2 better?", "arm 'beta2 2': .*beta2"),
    ],
)
def test_a_study_that_cannot_begin(topic: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(topic, HEALTHY, Budget(runs=10.0))


def test_hours_that_cannot_pay_for_the_study_end_it(tmp_path: Path) -> None:
    done, _ = campaign(tmp_path, "Temperature 1 or 1.3?", FormulaRunner(HEALTHY, hotter), Budget(hours=0.0001))
    assert done["reason"] == "the study needs 8.0 full runs at least, and the budget pays for 0.0 more"
    run("research", "report", str(tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert (
        "The study of the topic has not begun; the score of the subject is" in markdown and done["reason"] in markdown
    )
    assert "## Method" not in markdown and "at equal episodes. The metric is" in markdown


def test_the_place_of_a_model_changes_no_seed() -> None:
    class Placed(Commits):
        model = "tiny"

        def described(self, commit: str) -> Subject:
            return replace(super().described(commit), model=self.model)

    class Elsewhere(Placed):
        model = "/srv/models/tiny"

    plans = [plan_of("Temperature 1 or 1.3?", of({**SICK}), RUNS)[1] for of in (Placed, Elsewhere)]
    assert plans[0] == plans[1] and plans[0]["study"]["subject"]["model"] == "tiny"


def test_the_report_of_a_topic_has_what_people_and_planners_did(tmp_path: Path) -> None:
    question, plan = plan_of("Temperature 1 or 1.3?", HEALTHY, Budget(runs=100.0))
    plan["asked"]["cites"] = [{"file": "heat.md", "title": "", "says": "warm samples explore"}]
    plan["asked"]["used"] = {"hours": 0.5, "read": 1000.0, "written": 500.0, "price": 0.02}
    runner = FormulaRunner(HEALTHY, hotter)
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        Campaign(question, notebook, cast(Any, HEALTHY), runner, [Strategist()], FakeClock(), planned=plan).run()
        note = notebook.entry("note", {"text": "only *warm* ones"})
        hours = notebook.of("ended")[0].content["spent"]["hours"]
        assert notebook.spending()["hours"] == pytest.approx(hours) and hours > 0.5, "the plan's hours count"
        assert {"temperature 1", "temperature 1.3"} <= notebook.names()
    assert "all claims are decided" in run("research", "digest", str(tmp_path))
    run("research", "report", str(tmp_path))
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"campaign:* only \\*warm\\* ones (\\#{note.number})" in markdown
    assert "* heat.md (heat.md): warm samples explore" in markdown
    assert r"| The plan of the topic | 1 | 1 | 1,800 | 1,500 | 0.02 | – |" in markdown
    assert "agrees with the journal" in run("research", "report", str(tmp_path), "--check", str(tmp_path / "report.md"))


def test_a_reopened_topic_tests_what_is_open_with_fresh_seeds(tmp_path: Path) -> None:
    """A gain that is about as large as matters stays open; the other claim is decided."""

    def score(settings: Mapping[str, Any]) -> dict[str, float]:
        return {"score": 0.5 + {0.8: 0.0, 1.0: 0.05, 1.3: 0.4}[float(settings["job.temperature"])]}

    topic, runner = "Compare temperatures 0.8, 1 and 1.3", FormulaRunner(HEALTHY, score, noise=0.03)
    question, plan = plan_of(topic, HEALTHY, Budget(runs=40.0))

    def conducted() -> list[JournalEntry]:
        with Notebook(tmp_path, now=lambda: 0.0) as notebook:
            repo = cast(Any, HEALTHY)
            Campaign(question, notebook, repo, runner, [Strategist()], FakeClock(), planned=plan).run()
            return list(notebook.entries)

    assert conducted()[-1].content["reason"] == "1 of 2 claims stay open"
    assert conducted()[-1].content["reason"] == "1 of 2 claims stay open"
    Inbox(tmp_path).put(HumanMessage("reopen", runs=30.0))
    entries = conducted()
    first, second = [Study.from_json(entry.content["study"]) for entry in entries if entry.kind == "study"]
    assert len(second.hypotheses) == 1 and second.hypotheses[0] in first.hypotheses and second.seed != first.seed
    assert second.alpha < first.alpha and (tmp_path / "study-2" / "study.sqlite").exists()
    assert entries[-1].content["spent"]["runs"] <= 70
    (tmp_path / "source.json").write_text("{}")
    assert run("research", "report", str(tmp_path)).count("report.html") == 2
    assert "[study 2](study-2/report.html) tested with fresh seeds" in (tmp_path / "report.md").read_text()
    with Notebook(tmp_path / "decided", now=lambda: 0.0) as notebook:
        for entry in (entries[0], replace(entries[-1], content={**entries[-1].content, "reason": DECIDED})):
            notebook.entry(entry.kind, entry.content, key=entry.key)
        with pytest.raises(ConfigError, match="all claims are decided: ask another question"):
            notebook.check(HumanMessage("reopen"))
