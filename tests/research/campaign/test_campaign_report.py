"""What is pinned: the report is built from the notebook alone, every claim has its entry, markup of others is inert;
references lead to the table of steps; costs include those of studies; what a machine cannot guarantee is a limit. Only
what ran was tried, and only who answered proposed. A verdict comes with its doubts.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.report import build, gather, subject
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Intervention, Proposer, ProposerAway, Strategist, View
from agentjet.research.journal import Notebook
from agentjet.research.models import Outcome
from agentjet.research.report import number
from tests.research.campaign.campaign_world import Commits, FakeClock, FormulaRunner, truncating

ROOT = Path(__file__).parents[3]


def conducted(folder: Path, topic: str = "why <b>low</b>?") -> None:
    runner = FormulaRunner(Commits())
    with Notebook(folder, now=lambda: 0.0) as notebook:
        question = Question(topic, Budget(runs=60.0))
        limits = ["code runs without a fence"]
        strategist, clock = [Strategist()], FakeClock()
        Campaign(question, notebook, runner.commits, runner, strategist, clock, limits=limits).run()


def test_the_report_of_a_mended_subject(tmp_path: Path) -> None:
    conducted(tmp_path)
    markdown, page = (path.read_text(encoding="utf-8") for path in build(tmp_path))
    assert "with “longer answers”, confirmed with fresh seeds" in markdown
    assert "longer answers: supported" in markdown and "`job.max_tokens = 40`" in markdown
    assert "<b>low</b>" not in page and "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "figures" / "effects.svg").read_text() in page and "](figures/curves1.svg)" in markdown
    assert "* Code runs without a fence (\\#1)." in markdown
    with Notebook(tmp_path, writer=False) as notebook:
        facts = gather(notebook)
        learned = notebook.of("learned")[0]
        assert f'<a href="#entry-{learned.number}">#{learned.number}</a>' in page
        assert f'<tr id="entry-{learned.number}">' in page
        assert facts["cost"]["runs"] == notebook.known("ended").content["spent"]["runs"]
        for one in facts["studies"]:
            found = notebook.entries[one["entry"] - 1].content["finding"]
            assert found["estimate"] == one["findings"][0]["estimate"]
            runs = [f"| {run['seed']} | 100 % | {number(run['score'])} | 0.1, " for run in one["trials"]]
            assert len(runs) == 8 and all(run in markdown for run in runs), "each run has its seed and its curve"


def test_the_amounts_of_arms_are_those_of_their_runs(tmp_path: Path) -> None:
    """Longer answers cost tokens at equal episodes."""

    class Counted(FormulaRunner):
        def collect(self, key: str) -> Outcome:
            run = super().collect(key)
            counts = {"batch/episodes": (8.0,) * 6, "batch/sampled_tokens": (run.settings["job.max_tokens"],) * 6}
            return replace(run, signals={**run.signals, **counts})

    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        run_campaign(notebook, Counted(Commits()), 40.0)
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert "| base | 48 | 60 | – |" in markdown and "| changed | 48 | 240 | – |" in markdown


def test_a_remedy_that_helps_twice_has_two_names(tmp_path: Path) -> None:
    """Answers need 16 times as many tokens, and the remedy allows four times as many."""
    runner = FormulaRunner(Commits(), lambda settings: truncating({"job.max_tokens": settings["job.max_tokens"] / 5}))
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        run_campaign(notebook, runner, 60.0)
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert "with “longer answers” and “longer answers (2)”, confirmed with fresh seeds" in markdown
    assert "### longer answers (2): supported" in markdown


def test_a_campaign_that_is_at_work(tmp_path: Path) -> None:
    conducted(tmp_path / "whole")
    with Notebook(tmp_path / "whole", writer=False) as whole, Notebook(tmp_path / "part") as part:
        for entry in whole.entries[: whole.of("study")[0].number]:
            part.entry(entry.kind, entry.content, entry.because, key=entry.key)
    markdown, _ = (path.read_text(encoding="utf-8") for path in build(tmp_path / "part"))
    assert "No change is confirmed yet" in markdown and "The campaign is not finished." in markdown
    assert "The study is under way" in markdown and "effects.svg" not in markdown


def test_the_same_notebook_gives_the_same_report(tmp_path: Path) -> None:
    conducted(tmp_path)
    first = [path.read_bytes() for path in build(tmp_path)]
    assert [path.read_bytes() for path in build(tmp_path)] == first


def test_what_people_and_other_versions_wrote_is_shown(tmp_path: Path) -> None:
    """Notes stand at the top, and entries of unknown kinds in the table of steps. Cited papers are related work."""
    conducted(tmp_path / "whole")
    cites = {"cites": [{"file": "a.md", "title": "On limits", "why": "cut answers"}]}
    with Notebook(tmp_path / "whole", writer=False) as whole, Notebook(tmp_path / "part") as part:
        for entry in whole.entries:
            content = {**entry.content, **(cites if entry.kind == "started" else {})}
            part.entry(entry.kind, content, entry.because, key=entry.key)
        note = part.entry("note", {"text": "the tasks are *mine*"})
        part.entry("weighed", {"meaning": "a new kind"})
        part.entry("silent", {"number": 3})
    markdown = build(tmp_path / "part")[0].read_text(encoding="utf-8")
    assert (
        f"campaign:* the tasks are \\*mine\\* (\\#{note.number})" in markdown and "| weighed | a new kind |" in markdown
    )
    assert "silent" not in markdown and "* On limits (a.md): cut answers" in markdown


def test_a_campaign_of_an_earlier_version_keeps_its_report(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs" / "studies" / "brevity", tmp_path / "brevity")
    with pytest.raises(ConfigError, match="did not keep the runs of its studies"):
        build(tmp_path / "brevity")


def test_runs_on_several_machines_are_listed(tmp_path: Path) -> None:
    class Moved(FormulaRunner):
        def collect(self, key: str) -> Outcome:
            place = "2 cores" if len(self.launched) < 5 else "8 cores"
            return replace(super().collect(key), machine={"AgentJet": "0.2", "hardware": place})

    with Notebook(tmp_path, now=lambda: 86400.0) as notebook:
        run_campaign(notebook, Moved(Commits()), 40.0)
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    found = re.findall(r"\* (\d+) runs: AgentJet 0\.2; hardware (\d) cores\.", markdown)
    assert {cores for _, cores in found} == {"2", "8"} and "The first entry is of 1970-01-02 00:00" in markdown


def test_the_ablation_is_in_the_report(tmp_path: Path) -> None:
    runner = FormulaRunner(Commits())
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        run_campaign(notebook, runner, 160.0, Pair())
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert "### the parts of longer answers + rate" in markdown
    assert re.search(r"\| longer answers \+ rate needs job.max\\?_tokens \|.*\| supported \|", markdown)
    assert re.search(r"\| longer answers \+ rate needs job.optimizer.lr \|.*\| practically equivalent \|", markdown)


def test_a_report_without_observations_is_refused(tmp_path: Path) -> None:
    with Notebook(tmp_path):
        pass
    with pytest.raises(ConfigError, match="nothing was observed yet"):
        build(tmp_path)


class Silent:
    """A proposer that never answers."""

    name = "llm"

    def propose(self, view: View, most: int) -> Sequence[Intervention]:
        raise ProposerAway("http://127.0.0.1:1/v1: Connection refused")


class Twice:
    """A proposer of two changes that gain nothing."""

    name = "twice"
    used: Mapping[str, float] = {"read": 100, "written": 10, "price": 0.5}

    def propose(self, view: View, most: int) -> Sequence[Intervention]:
        return [Intervention(f"rate {rate}", "settings", {"job.optimizer.lr": rate}) for rate in (0.002, 0.003)]


def run_campaign(notebook: Notebook, runner: FormulaRunner, budget: float, *proposers: Proposer) -> None:
    """Runs a campaign whose proposers are asked before the strategist. `budget` in full runs."""
    question = Question("why low?", Budget(runs=budget))
    Campaign(question, notebook, runner.commits, runner, [*proposers, Strategist()], FakeClock()).run()


def test_only_what_ran_was_tried_and_only_who_answered_proposed(tmp_path: Path) -> None:
    """A budget that pays for one screen leaves proposals without a run."""
    runner = FormulaRunner(Commits())
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        run_campaign(notebook, runner, 10.0, Silent(), Twice())
        ran = {entry.content["trial"]["arm"] for entry in notebook.of("observed")}
        proposed = notebook.of("hypothesis")
        untried = [entry.content["name"] for entry in proposed if entry.content["commit"] not in ran]
        facts = gather(notebook)
    assert 0 < len(untried) == facts["cost"]["untried"] < len(proposed)
    steps = {step["what"] for step in facts["steps"]}
    assert {step.rpartition(": ")[2] for step in steps if step.startswith("not tried, proposed by")} == {*untried}
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert f"{len(untried)} of {len(proposed)} proposals were not tried." in markdown
    row = r"\| A language model or the record of one \(llm\) \| 0 \| 2 \| [\d.]+ \| – \| – \| http://127.0.0.1:1/v1"
    assert re.search(row, markdown)


def test_a_verdict_comes_with_its_doubts(tmp_path: Path) -> None:
    """Two changes together, of which one was also run alone; a base without spread, and scores near both ends."""
    low, high = {"score": 0.0}, {"score": 0.95}

    def formula(settings: Mapping[str, Any]) -> Mapping[str, float]:
        return {**truncating(settings), **(high if settings["job.max_tokens"] > 10 else low)}

    runner = Bounded(Commits(), formula, noise=0.05)
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        run_campaign(notebook, runner, 40.0, Pair())
        facts = gather(notebook)
    [claim] = facts["studies"][0]["findings"]
    assert facts["studies"][0]["name"] == "longer answers + rate"
    assert claim["verdict"] == "supported" and claim["high"] > 1
    look, room, flat = claim["doubts"]
    assert look.startswith("This verdict came at look 1 of 3.") and "All seeds of “base” scored the same." in flat
    assert "“base” with 0 leaves room for a difference of +0 to +1. The interval reaches beyond" in room
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert f"> {look}" in markdown and f"> {flat}" in markdown


class Pair:
    """A proposer of two changes as one."""

    name = "pair"

    def propose(self, view: View, most: int) -> Sequence[Intervention]:
        changes = {"job.max_tokens": 40, "job.optimizer.lr": 0.002}
        return [Intervention("longer answers + rate", "settings", changes)]


class Bounded(FormulaRunner):
    """Scores are from 0 to 1."""

    def collect(self, key: str) -> Outcome:
        run = super().collect(key)
        score = 0.0 if run.score is None or run.score < 0.5 else min(1.0, run.score)
        return replace(run, score=score, curve=(0.0, score))


def test_the_subject_is_described_as_far_as_the_first_run_shows_it() -> None:
    bare = {"signals": {}, "settings": {}, "by_task": {}, "facts": {}, "curve": [0.1]}
    assert not any(value for name, value in subject(bare).items() if name != "evaluations")
    known = subject(
        bare
        | {"signals": {"batch/episodes": [16.0, 16.0], "held_out/plays": [None, 32.0]}, "by_task": {"a": (0, 1, 8)}}
        | {"settings": {"model.name": "m"}, "facts": {"tasks_held_out": 4.0}}
    )
    assert (known["model"], known["trained_tasks"], known["held_out_tasks"]) == ("m", 1, 4.0)
    assert (known["batches"], known["episodes"], known["plays"]) == (2, 32.0, 32.0)


def test_a_note_of_people(tmp_path: Path) -> None:
    """A note of people stands at the top."""
    conducted(tmp_path)
    (tmp_path / "note.txt").write_text("the answers\nare *played*\n", encoding="utf-8")
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert "campaign:* are \\*played\\*" in markdown and "The commits are not kept" in markdown
    assert "| 97.28 % |" in markdown and "in simulations" in markdown.lower()
    assert "--budget 60runs --seed 0 --out NEW" in markdown
