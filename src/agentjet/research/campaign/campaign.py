"""`Campaign`: observe, propose, screen, confirm, learn and follow up, until the budget or the ideas are spent.

If its topic was planned as a study (`campaign.planner`), it observes the subject once, conducts that study, and ends.

Every decision is a function of the notebook: a resumed campaign runs again over its entries, and makes only what they
lack.

The *base* is the subject with every confirmed change. The *tip* is a commit on top of it whose changes are not
confirmed yet: if a change ends a sign and the score stays, the next proposals build on it, because one trouble can hide
another. A study always compares with the base.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files as package_files
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any

from agentjet import __version__
from agentjet.client.agent_source import one_line
from agentjet.errors import ConfigError
from agentjet.research.campaign.runs import (
    PASSING,
    SHORT,
    CampaignRuns,
    Clock,
    Ending,
    Question,
    RunObservation,
    StudyRuns,
    seed_of,
)
from agentjet.research.campaign.strategist import Intervention, Proposer, ProposerAway, View, broken, signs
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.diagnosis import FAILED, PLAYS, toml_of
from agentjet.research.journal import AGAIN, DECIDED, JournalEntry, Notebook, copied, proposer_of, stored, write_whole
from agentjet.research.models import (
    MEASURED,
    Arm,
    Finding,
    Hypothesis,
    Refused,
    Study,
    Value,
    canonical,
    hash_of,
    shortened,
)
from agentjet.research.question import answer
from agentjet.research.report import StudyView, plan_page
from agentjet.research.scheduler import (
    AMOUNTS,
    DIRECTIONAL,
    TrialLauncher,
    TrialRunner,
    amount,
    conduct,
    estimate_cost,
    work_of,
)
from agentjet.research.statistics import variance

# ---- the campaign ----------------------------------------------------------------------------------------------------

MOST = 6
"""Interventions screened in a round."""
KEPT = 3
"""Interventions that are run at full length after the first screen: the first one if it is not clearly behind the base,
and the best that are ahead of it."""
PROMISING = 2.0
"""Smallest effects of interest that a screen must gain before a study. A study supports a change if its whole interval
lies beyond one of them, so it can hardly support less than two."""
CLEAR = 4.0
"""Smallest effects of interest from which the difference of two runs counts as clear."""
STUDIES = 2
"""Most studies of a round."""
DEPTH = 3
"""Most unconfirmed changes on top of each other."""
ROUNDS = 12
FAILURES = 2
"""Rounds after which an intervention that did not gain is not tried again."""
APART = 1 / 4
"""Share of what is left that may be spent to take a confirmed change apart."""
LONGEST_TEXT = 2_000
"""Maximum characters that are stored of an answer or of a refused proposal."""
OFFLINE = (
    "Without a language model the topic is only the title. The campaign asks: what keeps this subject's score from "
    "rising, and which change of its settings, agent, prompt, reward or tasks raises it?"
)


@dataclass(frozen=True)
class Candidate:
    entry: int
    commit: str
    intervention: Intervention


@dataclass(frozen=True)
class Screened:
    candidate: Candidate
    seen: RunObservation
    base: RunObservation
    luck: float = 0.0
    """Score by which this run of the base is above the mean of all its runs."""

    @property
    def gain(self) -> float:
        """Score above the base, of one full run with the same seed."""
        assert self.seen.run.score is not None and self.base.run.score is not None
        return self.seen.run.score - self.base.run.score + self.luck

    def to_json(self) -> dict[str, Any]:
        """`at_start` is the gain at step 0, where nothing is learned yet."""
        first = [run.curve[0] for run in (self.seen.run, self.base.run) if run.curve]
        at_start = {"at_start": first[0] - first[1]} if len(first) == 2 else {}
        return {"name": self.candidate.intervention.name, "commit": self.seen.commit, "gain": self.gain, **at_start}


@dataclass(frozen=True)
class Position:
    """The base, and the commit that the next proposals change."""

    base: RunObservation
    tip: RunObservation
    unconfirmed: tuple[str, ...] = ()
    """Names of the changes between them."""


class Campaign:
    """One campaign over its notebook. `proposers` are asked in their order; the first ones share half of a round."""

    def __init__(
        self,
        question: Question,
        notebook: Notebook,
        repo: SubjectRepo,
        runner: TrialRunner,
        proposers: Sequence[Proposer],
        clock: Clock = time,
        tell: Callable[[str], None] = print,
        limits: Sequence[str] = (),
        planned: Mapping[str, Any] | None = None,
    ) -> None:
        """`runner` gets trials whose arms are commits. `tell` gets a line for each wait for a server or a disk.
        `limits` are sentences about what this machine cannot guarantee. `planned` is the study of the topic: see
        `planner.plan_study`; the notebook of a begun campaign has it.
        """
        self._planned = planned
        self.question, self.notebook, self.repo = question, notebook, repo
        self.proposers, self.limits = proposers, limits
        self.runs = CampaignRuns(question, notebook, runner, clock, tell, self._ending)
        self.position: Position | None = None
        self.tried: dict[str, set[str]] = {}
        """By commit, names of the interventions that were tried on it."""
        self.failures: dict[str, int] = {}
        """By name, rounds in which an intervention did not gain."""
        self.studies = 0
        self.scores: dict[str, list[list[float]]] = {}
        """By commit, the scores of each study of it."""
        self.unable: dict[str, str] = {}
        """By name, why an intervention has no score."""

    def run(self) -> Any:
        """Conducts the campaign to its end and returns the content of the entry `ended`. Raises `ConfigError`."""
        if ended := self.notebook.over():
            return ended.content
        planned = self._start().get("planned")
        self.runs.spend(0.0, self.notebook.hours_planned)
        try:
            first = self.runs.observe([self.repo.first], seed_of(self.question, 0), "the subject", [1])[0]
            while first.run.score is None:
                self.runs.end(f"the subject cannot run: {first.run.note}", "first run")
            self.position, last = Position(first, first), ROUNDS
            if planned is not None:
                self._answer(planned, first)
            first = self._again(first)
            self.position = Position(first, first)
            for number in count(1):
                while number > last:
                    last += ROUNDS * self.runs.end(f"{last} rounds are done", f"round {number}")
                self.position = self._round(number, self.position)
        except Ending as ending:
            return ending.args[0]

    def _answer(self, planned: Mapping[str, Any], first: RunObservation) -> None:
        """Conducts the study of the topic. Raises `Ending`."""
        while said := broken(first.run):
            self.runs.end(said[0], "first run")
        study, commits = Study.from_json(planned["study"]), planned["commits"]
        own = [arm.changes for arm in study.arms]
        if self.question.equal in MEASURED:
            named = [commits[arm.name] for arm in study.arms]
            what = f"how many {self.question.equal} an arm uses"
            self.runs.observe(named, seed_of(self.question, 0), what, [first.entry], SHORT, own)
        arms = tuple(replace(arm, changes=self.runs.setting(commits[arm.name], arm.changes)) for arm in study.arms)
        study = replace(study, arms=arms)
        for number in count(1):
            learned = self._answered(number, study, commits, first)
            ends = {one["hypothesis"]: one["verdict"] for one in learned["findings"]}
            still_open = tuple(claim for claim in study.hypotheses if ends[claim.id] == "inconclusive")
            text = f"{len(still_open)} of {len(ends)} claims stay open" if still_open else DECIDED
            while not self.runs.end(text, f"answer {number}"):
                pass
            # Reopened: fresh seeds for what is open.
            study = replace(study, hypotheses=still_open, seed=seed_of(self.question, number))

    def _answered(
        self, number: int, study: Study, commits: Mapping[str, str], first: RunObservation
    ) -> Mapping[str, Any]:
        """Conducts the study with this number on the topic. The first has its files in the campaign's folder."""
        self.studies += 1
        study = replace(study, alpha=self.question.alpha_of_topic(self.studies))
        cost = estimate_cost(study)
        while (left := self.runs.left()) < cost.least:
            pays = f"the budget pays for {max(0.0, left):.1f} more"
            needs = f"the study needs {cost.least:.1f} full runs at least, and {pays}"
            self.runs.end(needs, f"study {number} of the topic")
        study = replace(study, budget=round(min(left, cost.most), 6))
        content = {"study": study.to_json(), "name": study.topic, "commits": commits}
        plan = json.dumps(content["study"], indent=2, ensure_ascii=False)
        folder = self.notebook.path / (f"study-{number}" if number > 1 else "")
        folder.mkdir(exist_ok=True)
        for name, text in (("study.json", f"{plan}\n"), ("plan.md", plan_page(study))):
            self.runs.patiently(partial(write_whole, folder / name, text))
        entry = self.runs.note("study", content, f"study {study.id}", [first.entry])

        def learn() -> dict[str, Any]:
            findings, content = self._conduct(study, commits, file=folder / "study.sqlite")
            said = " ".join(answer(study, {one.hypothesis: one for one in findings}))
            found = {"findings": [one.to_json() for one in findings], "verdict": "answered", "accepted": False}
            return {"name": study.topic, "meaning": said, **found, **content}

        return self._learned(f"learned {study.id}", [entry.number], learn)

    def _learned(self, key: str, because: Sequence[int], learn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The content of the entry about a study, which is conducted if the notebook lacks it. Spends its costs."""
        known, kind = self.runs.known(key), key.partition(" ")[0]
        for within in self.notebook.entries[because[0] : known.number] if known else ():
            self.runs.apply(within)
        content: dict[str, Any] = (known or self.runs.note(kind, learn(), key, because)).content
        if known and (probed := content.get("probed")):
            self.runs.probes += probed["number"]
            self.runs.spend(probed["runs"], probed["hours"])
        self.runs.spend(content["spent"], content["hours"])
        return content

    def _again(self, first: RunObservation) -> RunObservation:
        """The first run of the subject, or a second one that shows a broken judge. Its score counts, too."""
        if broken(first.run) or self.runs.left() < 2 + self.question.study_cost:
            return first
        [again] = self.runs.observe([first.commit], seed_of(self.question, -1), AGAIN, [first.entry])
        if again.run.score is not None:
            self.scores[first.commit] = [[again.run.score]]
        return again if broken(again.run) else first

    # ---- the steps of a round ----------------------------------------------------------------------------------------

    def _round(self, number: int, position: Position) -> Position:
        """Returns where the campaign stands after it. Raises `Ending`."""
        self.runs.take(f"round {number}")
        if self.runs.is_vetoed(*position.unconfirmed):
            position = Position(position.base, position.base)
        candidates = self._propose(number, position)
        if not candidates:
            if position.tip != position.base:
                return Position(position.base, position.base)
            unable = "".join(f"; {name} could not run: {note}" for name, note in self.unable.items())
            said = [*broken(position.base.run), f"nothing is worth trying{unable}"]
            self.runs.end(said[0], f"round {number}")
            return position
        screened = self._screen(number, position, candidates)
        promising = [found for found in screened if found.gain >= PROMISING * self.question.sesoi]
        promising = promising or [found for found in screened[:1] if found.gain >= self.question.sesoi]  # seen again
        least_clear = max((found.gain for found in promising), default=0.0) - CLEAR * self.question.sesoi
        # Among gains that do not differ clearly, the one that ended the most signs: what is left of them hides others.
        promising.sort(key=lambda found: (found.gain < least_clear, -len(position.base.causes - found.seen.causes)))
        for found in promising[:STUDIES]:
            if "leaking_judge" in found.seen.causes - position.base.causes:
                reason = "its gain comes with the judge paying answers of other tasks, so it is not a gain"
                candidate = found.candidate
                key = f"round {number} leak {candidate.commit}"
                self._note_refusal(key, candidate.intervention.to_json(), reason, candidate.entry)
                continue
            if not self._is_repeated(number, position, found):
                continue
            self.runs.take(f"round {number} study of {found.candidate.commit}")
            if self.runs.is_vetoed(found.candidate.intervention.name):
                continue
            if self._confirm(number, position, found):
                for other in screened:
                    self._count_failure(other.candidate, other.gain < 0)
                self.position = Position(found.seen, found.seen)
                self._take_apart(number, position, found)
                return self.position
        for found in screened:
            self._count_failure(found.candidate)
        return self._deeper(number, position, screened)

    def _count_failure(self, candidate: Candidate, failed: bool = True) -> None:
        name = candidate.intervention.name
        self.failures[name] = self.failures.get(name, 0) + failed

    def _propose(self, number: int, position: Position) -> list[Candidate]:
        """Asks the proposers, checks each proposal, and makes the commits."""
        found: list[Candidate] = []
        base, commits = position.tip.commit, {position.base.commit, position.tip.commit}
        worn = {name for name, times in self.failures.items() if times >= FAILURES}
        worn.update(self.runs.vetoed)
        tried = self.tried.setdefault(base, set())
        present = {proposer.name: proposer for proposer in self.proposers}
        asked_before = [e for e in self.notebook.of("intent") if e.key.startswith(f"round {number} asked ")]
        for name in dict.fromkeys([*map(proposer_of, asked_before), *present]):
            last = name == self.proposers[-1].name
            most = MOST - len(found) if last else max(1, MOST // 2 - len(found))
            asked = f"round {number} asked {name}"
            entry = self.runs.known(asked)
            if entry is None and self.runs.is_replayed():
                continue  # it was not there in this round
            entry = entry or self.runs.note(
                "intent",
                self.runs.patiently(partial(self._ask, present[name], position, worn | tried, most)),
                asked,
                [position.tip.entry],
            )
            self.runs.spend(0.0, entry.content.get("hours", 0.0))
            for i, proposal in enumerate(entry.content["proposals"]):
                key = f"round {number} {name} {i}"
                try:
                    if i >= most:
                        raise Refused(f"more than {most} proposals in a round")
                    if isinstance(proposal, str):
                        raise Refused(f"the answer cannot be used: {proposal}")
                    made = Intervention.from_json(proposal)
                    if self.runs.is_vetoed(made.name):
                        raise Refused(f"people vetoed {made.name!r}")
                    if made.name in worn | tried:
                        raise Refused(f"{made.name!r} was tried; its result is in the notebook")
                    check_settings(made, position.tip.run.settings)
                    check_evidence(made, self.notebook.entries[: entry.number])
                    commit = self.runs.patiently(partial(self.repo.commit, base, made))
                    if commit in commits:
                        raise Refused("it makes the same files as the base or as another proposal")
                except (Refused, ConfigError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
                    is_ours = isinstance(error, Refused | ConfigError)
                    reason = str(error) if is_ours else f"it cannot be used: {one_line(error)}"
                    self._note_refusal(key, proposal, reason, entry.number)
                    continue
                commits.add(commit)
                tried.add(made.name)
                content = {"origin": name, "commit": commit, "on": base, **made.to_json()}
                hypothesis = self.runs.note("hypothesis", content, key, [entry.number, *made.evidence])
                found.append(Candidate(hypothesis.number, commit, made))
        return found

    def _ask(self, proposer: Proposer, position: Position, tried: Set[str], most: int) -> dict[str, Any]:
        if proposer is not self.proposers[-1]:
            self.runs.tell(f"asking {proposer.name}, which may take minutes")
        tip, entries, files = position.tip, tuple(self.notebook.entries), self.repo.files(position.tip.commit)
        judge = self.repo.judge_source()
        view = View(self.question.topic, tip.run, tip.entry, tried, entries, files, judge, {*self.runs.vetoed})
        begun, asked = self.runs.working_time(), {"proposer": proposer.name}
        try:
            answers = proposer.propose(view, most)
        except Exception as away:  # the boundary: a program or a model that answers may make a proposer fail anyhow
            if isinstance(away, OSError) and away.errno in PASSING:
                raise
            text = str(away) if isinstance(away, ProposerAway) else one_line(away)
            answers, asked = [], {**asked, "away": as_text(text)}
        hours = (self.runs.working_time() - begun) / 3600
        used = {"used": dict(used)} if (used := getattr(proposer, "used", {})) else {}
        return {**asked, "proposals": [storable(answer) for answer in answers], "hours": hours, **used}

    def _screen(self, number: int, position: Position, candidates: list[Candidate]) -> list[Screened]:
        """Runs the candidates short, the better ones in full, with the seed of the base. Best first."""
        because, point = [candidate.entry for candidate in candidates], f"round {number} screen"
        self._check_budget(1, point)
        alive = self._not_vetoed(candidates, point)
        score = position.base.run.score or 0.0
        others = [other for study in self.scores.get(position.base.commit, ()) for other in study]
        luck = max(0.0, score - fmean([score, *others]))  # nothing would gain against one lucky run
        affordable = int(self.runs.left() - self.question.study_cost)
        seed = seed_of(self.question, 0)
        short: dict[str, float] = {}
        is_measured = self.question.equal in MEASURED
        each = 1.0 if is_measured else 1.0 - SHORT  # a full run goes on from the short one
        if (len(alive) > 2 and affordable >= 2) or (is_measured and alive):
            alive = alive[: max(1, int((self.runs.left() - self.question.study_cost - each) / SHORT + 1e-9))]
            seen = self.runs.observe([each.commit for each in alive], seed, f"round {number} screen", because, SHORT)
            short = {at.commit: at.run.score for at in seen if at.run.score is not None}
            self._note_unable(alive, seen)
            level = position.base.score_at(SHORT) - luck
            ahead = [each for each in alive[1:] if short.get(each.commit, -math.inf) > level]
            ahead.sort(key=lambda each: -short[each.commit])
            if short.get(alive[0].commit, -math.inf) > level - CLEAR * self.question.sesoi:
                ahead.insert(0, alive[0])
            else:
                self._count_failure(alive[0])
            ahead = self._not_vetoed(ahead, f"round {number} full runs")
            affordable = int((self.runs.left() - self.question.study_cost) / each + 1e-9)
            alive = ahead[: min(KEPT, affordable)]
        full = self.runs.observe([each.commit for each in alive[:affordable]], seed, f"round {number}", because)
        self._note_unable(alive, full)
        found = [
            Screened(candidate, seen, position.base, luck)
            for candidate, seen in zip(alive, full, strict=False)
            if seen.run.score is not None
        ]
        found.sort(key=lambda screened: -screened.gain)
        content = {
            "base": {"commit": position.base.commit, "score": position.base.run.score},
            "short": [{"name": each.intervention.name, "score": short.get(each.commit)} for each in candidates],
            "full": [each.to_json() for each in found],
        }
        entries = [position.base.entry, *because, *(seen.entry for seen in full)]
        self.runs.note("screened", content, f"round {number} screened", entries)
        return found

    def _note_unable(self, candidates: Sequence[Candidate], seen: Sequence[RunObservation]) -> None:
        for candidate, found in zip(candidates, seen, strict=False):
            if found.run.score is None:
                self.unable[candidate.intervention.name] = as_text(shortened(found.run.note, 200))

    def _not_vetoed(self, candidates: Sequence[Candidate], point: str) -> list[Candidate]:
        """The candidates that people did not veto until this point."""
        self.runs.take(point)
        return [each for each in candidates if not self.runs.is_vetoed(each.intervention.name)]

    def _check_budget(self, runs: int, point: str) -> None:
        """Raises `Ending` if the budget does not pay for these full runs and a study after them."""
        while self.runs.left() < runs + self.question.study_cost:
            self.runs.end("the budget that is left does not pay for another study", point)

    def _is_repeated(self, number: int, position: Position, found: Screened) -> bool:
        """True if the gain is clear, or comes again with a second seed: a study costs more than two runs."""
        if found.gain >= CLEAR * self.question.sesoi:
            return True
        self._check_budget(2, f"round {number} again {found.candidate.commit}")
        commits, seed = (position.base.commit, found.seen.commit), seed_of(self.question, -1)
        base, changed = self.runs.observe(commits, seed, f"round {number} again", [found.candidate.entry])
        if base.run.score is None or changed.run.score is None:
            return False
        again = Screened(found.candidate, changed, base)
        content = {"base": {"commit": base.commit, "score": base.run.score}, "full": [again.to_json()]}
        because = [found.seen.entry, base.entry, changed.entry]
        self.runs.note("screened", content, f"round {number} again {found.candidate.commit}", because)
        return again.gain > 0 and (found.gain + again.gain) / 2 >= PROMISING * self.question.sesoi

    def _confirm(self, number: int, position: Position, found: Screened) -> bool:
        """Conducts a study of the candidate against the base. True if it is supported."""
        self._check_budget(0, f"round {number} study of {found.candidate.commit}")
        made, commits = found.candidate.intervention, (position.base.commit, found.candidate.commit)
        claim = Hypothesis(
            f"{made.name}: {made.predicts}".removesuffix(": ")[:300], "changed", "base", sign="+", why=made.why[:300]
        )
        study = self._study(
            number, made.name, dict(zip(("base", "changed"), commits, strict=True)), [claim], self.runs.left()
        )
        because = [found.candidate.entry, found.seen.entry, position.base.entry]
        plan = {"study": study.to_json(), "name": made.name, "commit": found.candidate.commit}
        entry = self.runs.note("study", plan, f"study {study.id}", because)
        learned = self._learned(f"learned {study.id}", [entry.number], lambda: self._compared(study, made))
        self._remember(study, learned)
        accepted: bool = learned["accepted"]
        if accepted:
            reason = f"{made.name} is confirmed; the next changes build on it"
            follow = {"base": found.candidate.commit, "reason": reason}
            self.runs.note("followed", follow, f"followed {study.id}", [entry.number])
        else:
            self.failures[made.name] = FAILURES
        return accepted

    def _remember(self, study: Study, learned: Mapping[str, Any]) -> None:
        for arm in study.arms:
            self.scores.setdefault(arm.code, []).append(learned["outcomes"][arm.name])

    def _take_apart(self, number: int, position: Position, found: Screened) -> None:
        """Compares the confirmed change with itself less one part, for as many parts as a share of what is left pays
        for. Changes nothing else: the base stays the whole.
        """
        base, whole, name = position.base.commit, found.candidate.commit, found.candidate.intervention.name
        budget, is_measured = APART * self.runs.left(), self.question.equal in MEASURED
        most = int(budget / (self.question.looks[0] + SHORT * is_measured) - 1 + 1e-9)
        parts = self.runs.patiently(partial(self.repo.parts, base, whole))
        if most < 1 or len(parts) < 2:
            return
        known = self.runs.known(f"parts of {whole}")
        if known is None:
            made: dict[str, dict[str, str]] = {"arms": {}, "inseparable": {}}
            for part in parts:
                try:
                    if len(made["arms"]) < most:
                        made["arms"][part] = self.runs.patiently(partial(self.repo.without, base, whole, part))
                except Refused as refusal:
                    made["inseparable"][part] = as_text(str(refusal))
            left_out = [part for part in parts if part not in made["arms"] | made["inseparable"]]
            content = {"name": name, "commit": whole, **made, "left_out": left_out}
            known = self.runs.note("parts", content, f"parts of {whole}", [found.candidate.entry])
        commits: dict[str, str] = known.content["arms"]
        if len(commits) + len(known.content["left_out"]) < 2:  # without its only part, the whole is the base
            return
        if is_measured:  # their lengths
            self.runs.observe([*commits.values()], seed_of(self.question, 0), "a part", [known.number], SHORT)
            budget -= SHORT * len(commits)
        claims = [Hypothesis(f"{name} needs {part}"[:300], "whole", f"without {part}", sign="+") for part in commits]
        arms = {"whole": whole, **{f"without {part}": commit for part, commit in commits.items()}}
        study = self._study(number, f"the parts of {name}", arms, claims, budget)
        plan = {"study": study.to_json(), "name": name, "commit": whole}
        entry = self.runs.note("ablation", plan, f"study {study.id}", [known.number])

        def learn() -> dict[str, Any]:
            findings, content = self._conduct(study, {arm.name: arm.code for arm in study.arms})
            ends = dict(zip(commits, findings, strict=True))
            said = "; ".join(f"{part} {OF_PART[each.verdict]}" for part, each in ends.items())
            of_parts = {part: each.to_json() for part, each in ends.items()}
            return {"name": name, "findings": of_parts, "meaning": f"of the parts of {name}: {said}", **content}

        self._remember(study, self._learned(f"ablated {study.id}", [entry.number], learn))

    def _study(
        self, number: int, title: str, commits: Mapping[str, str], claims: Sequence[Hypothesis], budget: float
    ) -> Study:
        """The next study of the campaign. It spends at most `budget`."""
        self.studies += 1
        budget = min(budget, 1.0 * len(commits) * self.question.looks[-1])
        arms = tuple(Arm(name, self.runs.setting(commit), code=commit) for name, commit in commits.items())
        return Study(
            f"{self.question.topic}: {title}",
            self.question.metric,
            self.question.sesoi,
            arms,
            tuple(claims),
            budget=round(budget, 6),
            reserve=0.0,
            alpha=self.question.alpha_of(self.studies),
            looks=self.question.looks,
            evaluator=self.question.evaluator,
            seed=seed_of(self.question, number),
            spread=spread_of(self.scores.get(arms[0].code, ())),
        )

    def _compared(self, study: Study, made: Intervention) -> dict[str, Any]:
        commits = {arm.name: arm.code for arm in study.arms}
        [finding], content = self._conduct(study, commits, {"base": "", "changed": made.name})
        return {
            "name": made.name,
            "finding": finding.to_json(),
            "verdict": finding.verdict,
            "accepted": finding.verdict == "supported",
            "meaning": meaning(made, finding, content["starts"]),
            **content,
        }

    def _conduct(
        self, study: Study, commits: Mapping[str, str], names: Mapping[str, str] = {}, file: Path | None = None
    ) -> tuple[list[Finding], dict[str, Any]]:
        """The findings, and what the runs of the study add up to. The log of the study is written to the `file`, or is
        in the content. `names` are those of arms that people veto, if these are others.
        """
        begun, before, number = self.runs.working_time(), dict(self.runs.spent), self.runs.probes

        def act() -> tuple[list[Finding], TrialLauncher]:
            runner = StudyRuns(self.runs, names)
            with copied(file) as log:
                return conduct(study, log, runner, commits, runner.vetoed)

        findings, launcher = self.runs.patiently(act)
        assert isinstance(launcher.runner, StudyRuns)
        view = StudyView(launcher.log)
        probed = {name: self.runs.spent[name] - before[name] for name in before}
        starts = {arm.name: [curve[0] for curve in view.curves(arm.name)] for arm in study.arms}
        signals = [outcome.signals for of_trial in launcher.log.outcomes.values() for outcome in of_trial]
        return findings, {
            "starts": starts,
            **({} if file else {"log": [[entry.kind, kept(entry)] for entry in launcher.log.entries]}),
            "outcomes": {arm.name: view.scores(arm.name) for arm in study.arms},
            "spent": launcher.spending.total + launcher.runner.repeated,
            "hours": (self.runs.working_time() - begun) / 3600 - probed["hours"],
            "probed": {"number": self.runs.probes - number, **probed},
            **{name: amount(signals, name) for name in ("episodes", "tokens")},
        }

    def _deeper(self, number: int, position: Position, screened: list[Screened]) -> Position:
        """Builds on a change that ended a sign and lost little or shows a hidden sign, or returns to the base."""
        shown = {sign.cause for sign in signs(position.tip.run)}
        ended = [
            (gone, found)
            for found in screened
            if (gone := position.tip.causes - found.seen.causes)
            and not self.runs.is_vetoed(found.candidate.intervention.name)
            and (found.gain > -2 * self.question.sesoi or {sign.cause for sign in signs(found.seen.run)} - shown)
            and "leaking_judge" not in found.seen.causes
        ]
        if not ended or len(position.unconfirmed) >= DEPTH:
            return Position(position.base, position.base)
        gone, best = max(ended, key=lambda pair: (len(pair[0]), pair[1].gain))
        content = {
            "tip": best.candidate.commit,
            "reason": f"{best.candidate.intervention.name} ended {', '.join(sorted(gone))} without a gain that can be "
            "confirmed; another trouble may hide it",
        }
        self.runs.note("followed", content, f"round {number} followed", [best.seen.entry])
        return Position(position.base, best.seen, (*position.unconfirmed, best.candidate.intervention.name))

    # ---- the notebook ------------------------------------------------------------------------------------------------

    def _start(self) -> dict[str, Any]:
        """The content of the first entry."""
        content = {
            "question": stored(self.question.to_json()),
            "first": self.repo.first,
            "asks": OFFLINE if len(self.proposers) == 1 else self.question.topic,
            "limits": list(self.limits),
            "rules": rules(),
            **({"planned": self._planned, "asks": self._planned["study"]["reading"]} if self._planned else {}),
        }
        found: dict[str, Any] = self.runs.note("started", content, "started").content
        for name in ("question", "first"):
            if found[name] != content[name]:
                raise ConfigError(
                    f"this folder has another campaign ({found['question']['topic']!r}): its {name} is {found[name]!r} "
                    f"and not {content[name]!r}; resume that one, or choose another folder"
                )
        began, present = found.get("rules"), content["rules"]
        if began is None:
            text = "the rules at the start are not in this notebook; the campaign goes on by the present ones"
            self.runs.note("edited", {"meaning": text}, "unknown rules")
        elif began["hash"] != present["hash"]:
            versions = [f"AgentJet {each['version']} ({each['hash']})" for each in (began, present)]
            raise ConfigError(
                f"this campaign began by the rules of {versions[0]}, and this is {versions[1]}: the same data could "
                "end otherwise. Resume it with that version, or start with another --out"
            )
        if changed := self.repo.changed_outside():
            text = f"files of the subject changed since the start ({', '.join(changed)}); the campaign uses its copy"
            self.runs.note("edited", {"meaning": text}, "edited")
        return found

    def _note_refusal(self, key: str, asked: object, reason: str, entry: int) -> None:
        content = {"asked": as_text(asked), "reason": as_text(reason)}
        self.runs.note("refused", content, f"{key} refused", [entry])

    def _ending(self, reason: str) -> dict[str, Any]:
        position = self.position
        accepted = [entry.content["name"] for entry in self.notebook.of("learned") if entry.content["accepted"]]
        return {
            "reason": reason,
            "base": position.base.commit if position else self.repo.first,
            "accepted": accepted,
            "score": position.base.run.score if position else None,
            "spent": self.runs.spent,
        }


DECIDING = (
    *("campaign/campaign.py", "campaign/runs.py", "campaign/strategist.py"),
    *("scheduler.py", "statistics.py", "diagnosis.py", "question.py"),
)
"""Source of the rules by which a campaign decides, besides `remedies.toml`."""


@cache
def rules() -> dict[str, str]:
    """The version, and a hash of the code and the table that decide, without comments and docstrings."""
    parts = [canonical(toml_of("agentjet.research.campaign", "remedies.toml"))]
    for name in DECIDING:
        tree = ast.parse(package_files("agentjet.research").joinpath(name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                remarks = [one for one in body if isinstance(one, ast.Expr) and type(one.value) is ast.Constant]
                body[:] = [one for one in body if one not in remarks]
        parts.append(ast.dump(tree))
    return {"version": __version__, "hash": hash_of(parts)}


# ---- proposals -------------------------------------------------------------------------------------------------------

FIXED = ("job.seed", "job.max_steps", "job.keep_best")
"""Settings of the campaign itself."""
NUMBER = re.compile(r"(?<![\w.])([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)\s*(%?)")
CLOSE = 0.02
"""Relative difference within which a cited number counts as that of the evidence."""
TRIVIAL = 3
"""Whole numbers up to this are words, such as "one of two"."""


def check_settings(made: Intervention, settings: Mapping[str, Value]) -> None:
    """`settings` are those in effect on the base."""
    for name, value in made.changes.items():
        if not name.startswith("job.") or name in FIXED:
            raise Refused(f"{name} = {value!r}: it is not the proposer's to change; give settings of the job")
    before, after = (work_of({**settings, **changes}, 1) for changes in ({}, made.changes))
    if before != after:
        raise Refused(
            f"job.batch_size x job.group_size: the base has {before:.0f} episodes a step, and arms are compared at "
            "equal episodes; change both settings"
        )


def check_evidence(made: Intervention, entries: Sequence[JournalEntry]) -> None:
    """Every number in `why` must be one of the cited entries."""
    by_number = {entry.number: entry for entry in entries}
    if missing := [number for number in made.evidence if number not in by_number]:
        raise Refused(f"evidence = {missing}: the notebook has no such entries; cite numbers of entries")
    cited = numbers_in(" ".join(json.dumps(by_number[number].content) for number in made.evidence))
    for number in numbers_in(made.why):
        whole = number.is_integer() and abs(number) <= TRIVIAL
        if not whole and not any(math.isclose(number, known, rel_tol=CLOSE, abs_tol=1e-12) for known in cited):
            raise Refused(f"why: {number:g} stands in none of the cited entries; cite the entry that has it")


def numbers_in(text: str) -> list[float]:
    return [float(digits.replace(",", "")) / (100 if percent else 1) for digits, percent in NUMBER.findall(text)]


def storable(answer: Intervention | str) -> Any:
    """A proposer's answer for the notebook: as text, with the reason, if it cannot be stored or read back."""
    try:
        if isinstance(answer, str):
            return as_text(answer)
        content = stored(answer.to_json())
        canonical(content).encode()  # lone surrogates have no bytes
        return Intervention.from_json(content).to_json()
    except (ConfigError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return as_text(f"{one_line(error)}: {answer!r}")


def as_text(content: object) -> str:
    """Text for the notebook: valid Unicode of limited length."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text[:LONGEST_TEXT].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def spread_of(studies: Sequence[Sequence[float]]) -> float:
    """Standard deviation over the seeds of a commit within its studies, rounded; 0 without two seeds."""
    known = [scores for scores in studies if len(scores) > 1]
    degrees = sum(len(scores) - 1 for scores in known)
    total = math.fsum((len(scores) - 1) * variance(scores) for scores in known)
    return round(math.sqrt(total / degrees), 9) if degrees else 0.0


def kept(entry: JournalEntry) -> Any:
    """An entry of a study's log for the notebook: without what a report does not print. Amounts are one sum each."""
    if entry.kind != "outcome":
        return entry.content
    reported = entry.content["signals"]
    signals = {name: reported[name] for name in (PLAYS, FAILED) if name in reported}
    signals |= {
        name: [math.fsum(filter(None, reported[name]))] for name in chain(*AMOUNTS.values()) if name in reported
    }
    return {**entry.content, "signals": signals, "settings": {}, "transcripts": [], "by_task": {}}


OF_PART: Mapping[str, str] = {
    "supported": "is needed",
    "refuted": "does harm: without it the score is higher",
    "practically_equivalent": "makes no difference that matters",
    "inconclusive": "is undecided",
}
OWN = 0.5
"""Share of a difference that, if it exists at step 0, makes it one of the change itself."""


def meaning(made: Intervention, finding: Finding, starts: Mapping[str, Sequence[float]]) -> str:
    """The lesson of a finding, in one sentence. `starts` are the scores at step 0, where nothing is learned yet."""
    size = (
        "" if finding.estimate is None else f" by {finding.estimate:+.3g} ({finding.low:+.3g} to {finding.high:+.3g})"
    )
    if finding.estimate and all(starts.values()):
        at_start = fmean(starts["changed"]) - fmean(starts["base"])
        is_own = finding.verdict in DIRECTIONAL and at_start / finding.estimate >= OWN
        own = "; so the change itself makes most of the difference, and not learning" if is_own else ""
        size += f"; at step 0 the difference is {at_start:+.3g}{own}"
    match finding.verdict:
        case "supported":
            return f"{made.name} raises the score{size}"
        case "refuted":
            return f"{made.name} lowers the score{size}; this rules it out: {made.refutes}"
        case "practically_equivalent":
            return f"{made.name} makes no difference that matters{size}; this rules it out: {made.refutes}"
    return f"{made.name} stays open{size}: {finding.reason}"
