"""What people do with a campaign while it runs, and its page.

1. A message becomes an entry at a point of the campaign, once, also after kills; a resumed campaign decides the same.
2. Notes reach those who propose; vetoed changes are not tried; added budget is spent; an ended campaign goes on.
3. A fortnight with dead servers, full disks, an upgrade, messages and kills is that of an undisturbed campaign.
4. The page is whole, has no scripts and no markup of others, and says what runs where.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from agentjet.errors import ConfigError
from agentjet.research.campaign import campaign as deciding
from agentjet.research.campaign.campaign import Campaign, rules
from agentjet.research.campaign.planner import plan_study
from agentjet.research.campaign.proposers import PROMPTS, CodingAgent, LanguageModel, LlmToolCall, Reply
from agentjet.research.campaign.report import PAGE, LivePage, build, standing
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Intervention, Strategist, View
from agentjet.research.journal import HUMAN, INBOX, NOTEBOOK, HumanMessage, Inbox, JournalEntry, Notebook, read_log
from agentjet.research.models import Outcome, Trial
from agentjet.research.report import StudyView, gather
from agentjet.research.scheduler import added_cost
from agentjet.research.swarm_runner import RunningTrial, ServerUnavailable
from agentjet.research.topic import read_topic
from tests.research.campaign.campaign_world import Commits, FakeClock, FormulaRunner, truncating
from tests.research.world import killed

DAY = 86400.0
Messages = Mapping[int, Sequence[HumanMessage]]
"""Messages that people write when the entry with a number is made."""


class Visited(Notebook):
    """People write at some entries. The process is killed at one. A full disk refuses some entries once."""

    def __init__(
        self, path: Path, messages: Messages | None = None, kill: int = 0, sick: bool = False, **options: Any
    ) -> None:
        self.messages, self.kill, self.sick = messages or {}, kill, sick
        self.refused: set[str] = set()
        super().__init__(path, **options)

    def entry(self, kind: str, content: object, because: Sequence[int] = (), *, key: str = "") -> JournalEntry:
        if self.sick and key not in self.refused and zlib.crc32(key.encode()) % 7 == 0:
            self.refused.add(key)
            raise OSError(errno.ENOSPC, "No space left on device")
        made = super().entry(kind, content, because, key=key)
        for message in self.messages.get(made.number, ()):
            self.inbox.put(message)
        if made.number == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return made


class Ideas:
    """Proposes changes of settings that nobody tried yet, and what a note asks for."""

    name = "model"

    def __init__(self, number: int = 9) -> None:
        self.number = number

    def propose(self, view: View, most: int) -> Sequence[Intervention]:
        numbers = [*range(self.number), *(99 for entry in view.notebook if entry.kind == "note")]
        ideas = {f"idea {n}": Intervention(f"idea {n}", "settings", {f"job.x{n}": 1}) for n in numbers}
        return [idea for name, idea in ideas.items() if name not in view.tried][:most]


EFFECTS = {"job.x1": 0.11, "job.x2": 0.14, "job.x3": -0.2, "job.x5": 0.12, "job.x7": 0.03, "job.x99": 0.13}


NOISE = 0.07
"""At which a first look decides nothing."""


def many(settings: Mapping[str, Any]) -> dict[str, float]:
    """Several changes raise the score, one lowers it, others do nothing."""
    return {**truncating(settings), "score": 0.1 + sum(EFFECTS.get(name, 0.0) for name in settings)}


def play(
    folder: Path,
    runner: FormulaRunner | None = None,
    proposers: Sequence[Any] = (),
    budget: Budget = Budget(runs=40.0),  # noqa: B008
    clock: FakeClock | None = None,
    tell: Callable[[str], None] = print,
    **options: Any,
) -> tuple[Any, list[JournalEntry]]:
    """Runs a campaign to its end."""
    runner, clock = runner or FormulaRunner(Commits(), many), clock or FakeClock()
    with Visited(folder, **{"now": lambda: 0.0, **options}) as notebook:
        asked = [*(proposers or [Ideas()]), Strategist()]
        done = Campaign(Question("why low?", budget), notebook, runner.commits, runner, asked, clock, tell).run()
        return done, notebook.entries


def of(entries: Sequence[JournalEntry], *kinds: str) -> list[JournalEntry]:
    return [entry for entry in entries if entry.kind in kinds]


def note(text: str = "look at the prompt") -> HumanMessage:
    return HumanMessage("note", text)


def proposed(entries: Sequence[JournalEntry]) -> list[str]:
    return [entry.content["name"] for entry in of(entries, "hypothesis")]


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "point"),
    [(2, "round 1, message 1"), (3, "round 1, message 1"), (9, "round 1 screen, message 1"), (-1, "before the end")],
)
def test_a_message_is_an_entry_at_a_point_of_the_campaign(at: int, point: str, tmp_path: Path) -> None:
    """Also of one that was killed as soon as the entry was on disk: the message is taken once."""
    quiet, whole, torn = (tmp_path / name for name in ("quiet", "whole", "torn"))
    _, undisturbed = play(quiet)
    messages = {at if at > 0 else len(undisturbed) - 1: [note(), HumanMessage("budget", runs=1.0)]}
    done, entries = play(whole, messages=messages)
    [first, second] = of(entries, *HUMAN)
    assert point in first.key and second.number == first.number + 1 and not [*(whole / INBOX).iterdir()]
    for kill in (first.number, second.number):
        killed(lambda kill=kill: play(torn, messages=messages, kill=kill))  # type: ignore[misc]
        assert [path.name for path in (torn / INBOX).iterdir()]
    again, resumed = play(torn)
    assert not [*(torn / INBOX).iterdir()]
    assert [(e.kind, e.key) for e in resumed] == [(e.kind, e.key) for e in entries]
    assert again == done


def test_messages_that_come_late_do_not_change_what_was_decided(tmp_path: Path) -> None:
    """A veto of what was confirmed, written while no process runs, is an entry after the others."""
    killed(lambda: play(tmp_path, kill=30))
    with Notebook(tmp_path, writer=False) as notebook:
        before = [(entry.kind, entry.key) for entry in notebook.entries]
        veto = HumanMessage("veto", notebook.of("hypothesis")[0].content["name"])
    Inbox(tmp_path).put(veto)
    _, entries = play(tmp_path)
    assert [(entry.kind, entry.key) for entry in entries[:30]] == before
    assert [entry.number > 30 for entry in of(entries, "veto")] == [True]


def test_a_veto_of_what_is_not_proposed_yet(tmp_path: Path) -> None:
    done, entries = play(
        tmp_path, messages={1: [HumanMessage("veto", "idea 2"), HumanMessage("veto", "longer answers")]}
    )
    assert "idea 2" not in proposed(entries) and not any("longer answers" in name for name in proposed(entries))
    assert "idea 1" in proposed(entries) and "idea 2" not in done["accepted"]


class Stubborn(Ideas):
    def propose(self, view: View, most: int) -> Sequence[Intervention]:
        return [Intervention(name, "settings", {"job.x2": len(name)}) for name in ("idea 2", "other + idea 2")]


def test_a_proposal_of_what_is_vetoed_is_refused(tmp_path: Path) -> None:
    _, entries = play(tmp_path, proposers=[Stubborn()], messages={1: [HumanMessage("veto", "idea 2")]})
    reasons = [entry.content["reason"] for entry in of(entries, "refused")]
    assert reasons[:2] == ["people vetoed 'idea 2'", "people vetoed 'other + idea 2'"]


def test_a_veto_between_screens_and_a_study(tmp_path: Path) -> None:
    """Nothing is launched for a change after its veto."""
    _, free = play(tmp_path / "free")
    first = of(free, "study")[0]
    for entry in of(free[: first.number], "hypothesis", "observed", "screened"):
        folder = tmp_path / str(entry.number)
        done, entries = play(folder, messages={entry.number: [HumanMessage("veto", first.content["name"])]})
        veto = of(entries, "veto")[0].number
        assert first.content["name"] not in [study.content["name"] for study in of(entries[veto:], "study")]
        assert first.content["name"] not in done["accepted"]
        commit = next(e.content["commit"] for e in of(free, "hypothesis") if e.content["name"] == first.content["name"])
        later = [e for e in of(entries[veto:], "intent") if e.content.get("trial", {}).get("arm") == commit]
        assert not later


@pytest.mark.parametrize("runs", [0, 8])
def test_a_veto_of_what_is_studied(runs: int, tmp_path: Path) -> None:
    """It ends at the next look, without a verdict, also if the campaign is killed there."""

    class Slow(FormulaRunner):
        def launch(self, key: str, trial: Trial) -> None:
            super().launch(key, trial)
            if trial.phase == "confirm" and len([*self.folder.glob("*-1")]) == runs:  # type: ignore[union-attr]
                Inbox(tmp_path).put(veto)

    (tmp_path / "launches").mkdir()
    options: dict[str, Any] = {"proposers": [Ideas(3)], "budget": Budget(runs=60.0)}
    _, free = play(tmp_path / "free", FormulaRunner(Commits(), many, noise=NOISE), **options)
    study, undisturbed = of(free, "study")[0], of(free, "learned")[0]
    assert len(undisturbed.content["outcomes"]["base"]) > 4, "its first look decides nothing"
    veto = HumanMessage("veto", study.content["name"])
    messages = {} if runs else {study.number: [veto]}
    runner = Slow(Commits(), many, noise=NOISE, folder=tmp_path / "launches")
    _, entries = play(tmp_path, runner, messages=messages, **options)
    learned = of(entries, "learned")[0]
    assert learned.content["verdict"] == "inconclusive" and learned.content["finding"]["reason"].startswith("vetoed")
    assert learned.content["spent"] == runs and len(learned.content["outcomes"]["base"]) == runs / 2
    with Notebook(tmp_path / "part", now=lambda: 0.0) as part:  # as if it was killed before it learned that
        for entry in entries[: learned.number - 1]:
            part.entry(entry.kind, entry.content, entry.because, key=entry.key)
    again = FormulaRunner(runner.commits, many, noise=NOISE, folder=tmp_path / "launches")
    _, resumed = play(tmp_path / "part", again, **options)
    assert [(e.kind, e.key, e.content.get("finding")) for e in resumed] == [
        (e.kind, e.key, e.content.get("finding")) for e in entries
    ]
    assert "vetoed by people" in build(tmp_path)[0].read_text(encoding="utf-8")


def test_a_veto_of_an_arm_of_a_topic(tmp_path: Path) -> None:
    """Its claims stay open, and the others are decided."""
    question = Question("Compare temperatures 0.8, 1 and 1.3", Budget(runs=100.0))
    plan = plan_study(question, read_topic(question.topic), {}, cast(Any, Commits()))
    arms = [arm["name"] for arm in plan["study"]["arms"]]
    Inbox(tmp_path).put(HumanMessage("veto", arms[-1]))
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        runner = FormulaRunner(Commits(), many)
        Campaign(question, notebook, cast(Any, runner.commits), runner, [Strategist()], FakeClock(), planned=plan).run()
        learned = notebook.of("learned")[0].content
        names = [{claim["arm"], claim["against"]} for claim in plan["study"]["hypotheses"]]
        assert len(names) > 1 and set(learned["outcomes"]) == {*arms}
        for claimed, finding in zip(names, learned["findings"], strict=True):
            assert finding["reason"].startswith("vetoed by people") is (arms[-1] in claimed)
        assert not learned["outcomes"][arms[-1]] and all(learned["outcomes"][arm] for arm in arms[:-1])
        (tmp_path / "source.json").write_text("{}")
        notebook.check(HumanMessage("reopen"))
        LivePage(notebook, list).write()
    facts = gather(StudyView(read_log(tmp_path / "study.sqlite")))
    assert any("not decided, because vetoed by people" in sentence for sentence in facts["answer"])
    assert any(sentence.startswith("People vetoed an arm of") for sentence in facts["deviations"])
    assert f"vetoed by people: {arms[-1]}" in (tmp_path / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("unit", ["runs", "hours"])
def test_added_budget_is_looked_for_before_the_end(unit: str, tmp_path: Path) -> None:
    budget = Budget(**{unit: 13.0 if unit == "runs" else 0.01})
    done, entries = play(tmp_path / "small", budget=budget)
    assert "budget" in done["reason"]
    added = HumanMessage("budget", **{unit: 40.0})
    more, all_of_it = play(tmp_path / "more", budget=budget, messages={len(entries) - 1: [added]})
    assert more["spent"][unit] > done["spent"][unit] and len(of(all_of_it, "ended")) == 1
    assert more["spent"]["runs"] <= 53.0 or unit == "hours"
    with Notebook(tmp_path / "more", writer=False) as notebook:
        assert notebook.budget() == (unit, getattr(budget, unit) + 40.0)
        [line] = notebook.standing()["people"]
        assert line.startswith(f"added to the budget: 40 more {unit} (#")


def test_an_ended_campaign_is_reopened_and_goes_on_from_there(tmp_path: Path) -> None:
    small = Budget(runs=13.0)
    runner = FormulaRunner(Commits(), many)
    first, entries = play(tmp_path, runner, budget=small)
    assert play(tmp_path, runner, budget=small)[0] == first, "without a message it stays as it is"
    for number, added in ((2, 30.0), (3, 0.0)):
        Inbox(tmp_path).put(HumanMessage("reopen", runs=added))
        done, longer = play(tmp_path, runner, budget=small)
        assert longer[: len(entries)] == entries and len(of(longer, "ended")) == number
        assert longer[-1].key == f"ended {number}" and done["spent"]["runs"] <= 13.0 + 30.0
        assert (len(longer) > len(entries) + 2) is (number == 2)
        entries = longer
    markdown = build(tmp_path)[0].read_text(encoding="utf-8")
    assert markdown.count("| ended |") == 3 and markdown.count("| reopened |") == 2
    assert "Budget: 13 runs, 30 were added" in markdown and "The campaign ended because" in markdown


def test_files_of_others_in_the_inbox(tmp_path: Path) -> None:
    inbox = tmp_path / INBOX
    (inbox / "folder").mkdir(parents=True)
    strange = {
        "a.json": "{",
        "b.json": '{"kind": "note", "text": "x", "more": 1}',
        "c.json": "x" * 10**6,
        "d.json": '{"kind": "note", "text": " "}',
        "e.json": '{"kind": "budget", "runs": -3.0}',
        "f.json": "[" * 10_000,
        "g.json": '{"kind": "note", "text": "\\ud800"}',
    }
    for name, text in strange.items():
        (inbox / name).write_text(text, encoding="utf-8")
    (inbox / ".h.json.12").write_text("half of a mess")
    os.mkfifo(inbox / "pipe")
    told: list[str] = []
    done, entries = play(tmp_path, tell=told.append)
    assert done["accepted"] and not of(entries, *HUMAN)
    ignored = [line for line in told if "is not a message to this campaign, and is ignored" in line]
    assert len(ignored) == len(strange) + 2 and len([*inbox.iterdir()]) == len(strange) + 3


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"kind": "note", "text": " "}, "the note is empty: give the remark"),
        ({"kind": "veto", "text": ""}, "the veto is empty: give the name of a proposal"),
        ({"kind": "note", "text": "x" * 10**6}, "the note has 1,000,000 characters: give at most 2,000"),
        ({"kind": "note", "text": "\udcff"}, "the note is not valid text: give UTF-8"),
        ({"kind": "budget", "runs": -1.0}, "the added budget is negative: a budget only grows"),
    ],
)
def test_messages_that_cannot_be_sent(message: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        HumanMessage(**message)


@dataclass
class Listening:
    """A language model that keeps what it is asked, and proposes nothing."""

    asked: list[str] = field(default_factory=list)

    def reply(self, messages: Sequence[Any], tools: Sequence[Any]) -> Reply:
        self.asked.append(messages[1]["content"])
        return Reply(calls=(LlmToolCall("1", "finish", '{"reason": "no"}'),))


def test_notes_and_vetoes_reach_those_who_propose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tasks = Listening(), list[str]()
    monkeypatch.setattr(CodingAgent, "_run", lambda self, folder, task: tasks.append(task))
    agent, llm = CodingAgent(("true",), unsafe=True), LanguageModel(model, tmp_path / "llm.jsonl")
    play(tmp_path, proposers=[llm, agent], messages={1: [*map(note, "abcdef"), HumanMessage("veto", "idea 7")]})
    for asked in (model.asked[0], tasks[0].removeprefix(PROMPTS["edit"].format(topic="why low?"))):
        lines = asked.splitlines()
        start = lines.index("Notes, newest first:")
        assert [line[0] for line in lines[start + 1 : start + 6]] == [*"fedcb"]
        assert lines[start + 6] == "Do not propose 'idea 7': vetoed."


def test_a_language_model_joins_a_campaign_that_is_resumed(tmp_path: Path) -> None:
    """It is asked from then on, and rounds that are over stay as they were; nor does it leave a hole when it goes."""
    runs = [({"kill": 20}, [Strategist()]), ({"kill": 45}, [Ideas(), Strategist()]), ({}, [Strategist()])]
    runner = FormulaRunner(Commits(), many)
    entries: list[JournalEntry] = []
    for options, proposers in runs:
        before = [(entry.kind, entry.key) for entry in entries]

        def work(options: Any = options, proposers: Any = proposers) -> None:
            with Visited(tmp_path, now=lambda: 0.0, **options) as notebook:
                question = Question("why low?", Budget(runs=60.0))
                Campaign(question, notebook, runner.commits, runner, proposers, FakeClock()).run()

        killed(work) if options else work()
        with Notebook(tmp_path, writer=False) as notebook:
            entries = notebook.entries
        assert [(entry.kind, entry.key) for entry in entries[: len(before)]] == before
    assert entries[-1].kind == "ended"


# ---- a fortnight -----------------------------------------------------------------------------------------------------


@dataclass
class Cluster(FormulaRunner):
    """Eight servers on which a full run takes a day. Servers die, all are away for some days, and disks are full."""

    clock: FakeClock = field(default_factory=FakeClock)
    kill: int = 0
    """The process is killed by its launch with this number, from 1."""
    free: list[float] = field(default_factory=lambda: [0.0] * 8)
    """By server, when its run ends."""
    ends: dict[str, float] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    """Launches for which the disk was full, once."""

    def _reach(self) -> None:
        if any(begin <= self.clock.seconds / DAY < end for begin, end in ((2.0, 3.5), (9.0, 9.6))):
            raise ServerUnavailable("no server answers")

    def launch(self, key: str, trial: Trial) -> None:
        if key not in self.full and zlib.crc32(key.encode()) % 5 == 0:
            self.full.add(key)
            raise OSError(errno.ENOSPC, "No space left on device")
        super().launch(key, trial)
        server = self.free.index(min(self.free))
        self.free[server] = max(self.free[server], self.clock.seconds) + DAY * trial.fidelity
        self.ends[key] = self.free[server]
        if len(self.launched) == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def collect(self, key: str) -> Outcome:
        self.clock.seconds = max(self.clock.seconds, self.ends.get(key, 0.0))
        found = super().collect(key)
        return Outcome(found.trial, "infra_failed", note="the server died") if is_lost(key) else found


def is_lost(key: str) -> bool:
    """True for a sixth of the first attempts."""
    return key.endswith((" 1", "-1")) and zlib.crc32(key[::-1].encode()) % 6 == 0


def spent(launches: Path) -> float:
    """Full runs that the servers carried out."""
    reached: dict[str, float] = {}
    kept = {path.name.replace("_", " "): path for path in launches.iterdir()}
    trials = [Trial.from_json(json.loads(path.read_text())) for key, path in kept.items() if not is_lost(key)]
    return sum(added_cost(reached, trial) for trial in sorted(trials, key=lambda trial: trial.fidelity))


def fortnight(folder: Path, commits: Commits, messages: Messages, kill: int = 0, kill_launch: int = 0) -> Any:
    """Runs a process of the campaign, from the time at which the one before it ended."""
    (folder / "launches").mkdir(parents=True, exist_ok=True)
    clock = FakeClock()
    if (folder / NOTEBOOK).exists():
        with Notebook(folder, writer=False) as notebook:
            clock.seconds = max(entry.at for entry in notebook.entries)
    runner = Cluster(commits, many, clock=clock, kill=kill_launch, folder=folder / "launches")
    options = {"messages": messages, "kill": kill, "sick": True, "now": clock.time}
    done, entries = play(folder, runner, budget=Budget(runs=40.0), clock=clock, tell=lambda line: None, **options)
    return done, entries, clock.seconds / DAY


def without_time(entries: Sequence[JournalEntry]) -> list[object]:
    """The entries without the names of messages, hours and dates."""

    def kept(content: object) -> object:
        if isinstance(content, dict):
            return {key: kept(value) for key, value in content.items() if key not in ("hours", "file")}
        return content

    return [(entry.number, entry.kind, entry.key, entry.because, kept(entry.content)) for entry in entries]


@pytest.mark.parametrize("draw", [1, 2, 3])
def test_a_fortnight(draw: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any entry and launch, it has the entries of an undisturbed campaign, and launches nothing twice."""
    rng, quiet, stormy = random.Random(draw), tmp_path / "quiet", tmp_path / "stormy"
    days = sorted(rng.sample(range(4, 60), 5))
    messages = dict(
        zip(
            days,
            (
                [note("try the idea with the number 99")],
                [HumanMessage("veto", "idea 7"), HumanMessage("veto", "an idea that nobody has yet")],
                [HumanMessage("budget", runs=20.0)],
                [note(), note("<b>again</b>")],
                [HumanMessage("veto", "idea 5")],
            ),
            strict=True,
        )
    )
    commits = Commits()
    done, entries, _ = fortnight(quiet, commits, messages)
    end, launches = len(entries), len([*(quiet / "launches").iterdir()])
    assert entries[-1].kind == "ended" and len(of(entries, *HUMAN)) == 7
    Inbox(quiet).put(HumanMessage("reopen", runs=30.0))
    done, entries, passed = fortnight(quiet, commits, messages)
    launches = len([*(quiet / "launches").iterdir()]) - launches
    assert passed > 14 and len(of(entries, "ended")) == 2 and len(of(entries, "study")) >= 3

    people = [entry.number for entry in of(entries, *HUMAN) if entry.number <= end]
    before = sorted({*rng.sample(range(2, end), 4), *rng.sample(people, 2), end})
    for number in before:
        killed(lambda number=number: fortnight(stormy, commits, messages, kill=number))  # type: ignore[misc]
    Inbox(stormy).put(HumanMessage("reopen", runs=30.0))
    with monkeypatch.context() as upgraded:
        upgraded.setattr(deciding, "rules", lambda: {"version": "9.9", "hash": "feed"})
        with pytest.raises(ConfigError, match=r"and this is AgentJet 9\.9 \(feed\)"):
            fortnight(stormy, commits, messages)
    killed(lambda: fortnight(stormy, commits, messages, kill_launch=rng.randint(1, launches)))
    monkeypatch.setattr(deciding, "__version__", "9.9")  # of the same rules
    rules.cache_clear()
    after = {end + 1, len(entries), *rng.sample(range(end + 1, len(entries)), 3)}
    for number in sorted(after):
        with Notebook(stormy, writer=False) as notebook:
            is_there = len(notebook.entries) >= number
        if not is_there:
            killed(lambda number=number: fortnight(stormy, commits, messages, kill=number))  # type: ignore[misc]
    again, resumed, _ = fortnight(stormy, commits, messages)
    rules.cache_clear()
    assert without_time(resumed) == without_time(entries)
    assert again["accepted"] == done["accepted"] and again["reason"] == done["reason"]
    names = [sorted(path.name for path in (folder / "launches").iterdir()) for folder in (quiet, stormy)]
    assert names[0] == names[1]
    for folder, ending in ((quiet, done), (stormy, again)):
        assert ending["spent"]["runs"] == pytest.approx(spent(folder / "launches")) and ending["spent"]["runs"] <= 90
        with Notebook(folder, writer=False) as notebook:
            assert notebook.budget() == ("runs", 90.0) and notebook.spending()["runs"] == pytest.approx(
                ending["spent"]["runs"]
            )


# ---- the page --------------------------------------------------------------------------------------------------------


def test_a_page_of_a_campaign_that_works(tmp_path: Path) -> None:
    runner = FormulaRunner(Commits(), many)
    killed(lambda: play(tmp_path, runner, messages={1: [note("<script>alert(1)</script> & [x](http://y)")]}, kill=40))
    play(tmp_path / "whole", runner)
    with Notebook(tmp_path, writer=False) as notebook:
        study = of(notebook.entries, "study")[0]
        changed = study.content["study"]["arms"][1]["code"]
        of_study = Trial(study.key.removeprefix("study "), changed, {}, 1, "confirm")
        running = [
            RunningTrial(of_study, "http://127.0.0.1:1", 0.0),
            RunningTrial(Trial("campaign", runner.commits.first, {}, 1, "explore", 1 / 3), "local <server> 2", 60.0),
        ]
        Inbox(tmp_path).put(note("waits"))
        LivePage(notebook, lambda: running).write()
        page = (tmp_path / PAGE).read_text(encoding="utf-8")
        facts = standing(notebook, running)
    assert "<script" not in page and "<a " not in page and page.count('http-equiv="refresh"') == 1
    assert page.rstrip().endswith("</html>") and "local &lt;server&gt; 2" in page and "1970-01-01 00:01:00 UTC" in page
    assert [run["what"] for run in facts["running"]] == [study.content["name"], "the subject as given"]
    assert (
        facts["running"][0]["why"] == f"study of {study.content['name']}"
        and "Waits for the campaign: note waits" in page
    )
    [first, *_] = facts["rounds"]
    steps = {proposal["name"]: proposal["steps"] for proposal in first["proposals"]}
    assert any("fixed a study" in step for step in steps[study.content["name"]])
    assert any("score after a third of a run" in step for step in steps["idea 0"])
    assert facts["facts"]["people"][0].startswith("note by people: <script>")


def test_the_page_follows_the_campaign_and_never_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.research.campaign.report.WRITE_SECONDS", 0.001)
    told: list[str] = []
    with Notebook(tmp_path, now=lambda: 0.0) as notebook:
        runner = FormulaRunner(Commits(), many)
        (tmp_path / PAGE).mkdir()  # it cannot be replaced
        with LivePage(notebook, list, tell=told.append):
            question = Question("why low?", Budget(runs=40.0))
            Campaign(question, notebook, runner.commits, runner, [Strategist()], FakeClock()).run()
            (tmp_path / PAGE).rmdir()
    assert all("is not up to date" in line for line in told) and len({*told}) == len(told)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "ended:" in page and "refresh" not in page and not [*tmp_path.glob(".live*")]


def test_the_page_of_a_campaign_that_has_just_begun(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        LivePage(notebook, list).write()
    assert "No round has begun." in (tmp_path / PAGE).read_text(encoding="utf-8")
