"""1. Lines of the file are taken once, at fixed points. A torn or malformed one is refused and the next is read.
2. Pause waits, cap limits, a vetoed arm gets no further trial and the others continue.
3. Additions after the data are a separate study: exploratory, fresh seeds on both sides, within the budget.
4. The rules of the verdicts cannot be changed.
5. Killed at every entry while requests arrive: the same requests at the same points, the same findings.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.research.journal import StudyJournal, StudyLog
from agentjet.research.launcher import SteeringFile
from agentjet.research.models import (
    AddArm,
    AddHypothesis,
    Arm,
    Cap,
    Finding,
    Hypothesis,
    Knob,
    Pause,
    Request,
    Resume,
    Study,
    Trial,
    Veto,
)
from agentjet.research.report.document import render
from agentjet.research.scheduler import StudyRun, conduct, conduct_with_annexes
from tests.research.world import STUDY, Doomed, Formula

pytestmark = pytest.mark.thorough

PLAIN = replace(
    STUDY,
    arms=(
        Arm("a", {"gain": 0.0, "lr": 16.0}),
        Arm("b", {"gain": 3.0, "lr": 16.0}),
        Arm("c", {"gain": 0.1, "lr": 16.0}),
    ),
    hypotheses=(Hypothesis("b scores higher than a", "b", "a"), Hypothesis("c scores higher than a", "c", "a")),
    budget=80.0,
)
ADDED = AddArm(arm="d", against="b", changes={"gain": 6.0, "lr": 16.0})


@dataclass
class Meddled(Formula):
    """While the n-th launch is made, somebody asks for something."""

    steering_file: SteeringFile | None = None
    requests: Mapping[int, Request] = field(default_factory=dict)
    """By the number of the launch, from 1."""

    def launch(self, key: str, trial: Trial) -> None:
        super().launch(key, trial)
        number = len(list(self.folder.glob("*-?"))) if self.folder else len(self.launched)
        if number in self.requests:
            assert self.steering_file
            self.steering_file.append(self.requests[number])


def steered(
    folder: Path, requests: Mapping[int, Request], study: Study = PLAIN
) -> tuple[dict[str, Finding], list[StudyRun]]:
    """By claim, what was found."""
    steering_file = SteeringFile(folder / "steer.jsonl")
    study_runs = conduct_with_annexes(
        study, StudyLog(), Meddled(steering_file=steering_file, requests=requests), steering_file
    )
    return {claim_of(study_run, found): found for study_run in study_runs for found in study_run.findings}, study_runs


def claim_of(study_run: StudyRun, found: Finding) -> str:
    return next(h.claim for h in study_run.study.hypotheses if h.id == found.hypothesis)


def refusals(log: StudyLog) -> list[str]:
    return [amendment.refused for amendment in log.amendments if amendment.refused]


# ---- the file -------------------------------------------------------------------------------------------------------


def test_lines_that_say_nothing_are_refused_and_the_next_is_read(tmp_path: Path) -> None:
    steering_file = SteeringFile(tmp_path / "steer.jsonl")
    assert steering_file.after(0) == []
    steering_file.append(Veto(arm="c"))
    with steering_file.path.open("ab") as file:
        file.write(b'{"kind": "cap", "ru')  # torn: whoever wrote it was killed
    assert len(steering_file.after(0)) == 1
    steering_file.append(Cap(runs=60.0))
    with steering_file.path.open("ab") as file:
        file.write(b'[]\n\n{"kind": "cap", "runs": NaN}\n\xff\n{"kind": "set", "sesoi": 9.0}\n')
    log = StudyLog()
    _, launcher = conduct(PLAIN, log, Formula(), steering_file)
    assert [amendment.asked for amendment in log.amendments if not amendment.refused] == [
        {"kind": "veto", "arm": "c"},
        {"kind": "cap", "runs": 60.0},
    ]
    assert [amendment.asked["text"] for amendment in log.amendments if amendment.refused] == [
        '{"kind": "cap", "ru',
        "[]",
        "",
        '{"kind": "cap", "runs": NaN}',
        "\ufffd",
        '{"kind": "set", "sesoi": 9.0}',
    ]
    assert launcher.spending.budget == 60.0
    assert {amendment.point for amendment in log.amendments} == {0}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"kind": "set_sesoi", "sesoi": 0.1}', "kinds"),
        ('{"kind": "veto", "arm": "a", "alpha": 0.5}', "alpha: unknown key"),
        ('{"kind": "veto", "arm": "z"}', "'z' is not an arm"),
        ('{"kind": "cap", "runs": 90.0}', "above the budget of 80"),
        ('{"kind": "cap", "runs": -1}', "it must be above 0"),
        ('{"kind": "add_arm", "arm": "b", "against": "a", "changes": {"gain": 1.0}}', "already"),
        ('{"kind": "add_arm", "arm": "d", "against": "a", "changes": {"gain": 0.0, "lr": 16.0}}', "under another name"),
        (
            '{"kind": "add_arm", "arm": "d", "against": "a", "changes": {"evaluator": "mine"}}',
            "'evaluator' is not a setting",
        ),
        ('{"kind": "add_arm", "arm": "d", "against": "a", "code": "0123"}', "keeping"),
        ('{"kind": "add_hypothesis", "arm": "c", "against": "b", "confirmatory": true}', "are exploratory"),
        ('{"kind": "add_hypothesis", "arm": "b", "against": "b"}', "with itself"),
        ('{"kind": "add_seeds", "seeds": 8}', "kinds"),
    ],
)
def test_what_decides_cannot_be_moved(tmp_path: Path, line: str, reason: str) -> None:
    quiet, _ = steered(tmp_path, {})
    (tmp_path / "steer.jsonl").write_text(line + "\n", encoding="utf-8")
    found, [study_run] = steered(tmp_path, {})
    assert len(refusals(study_run.log)) == 1 and reason in refusals(study_run.log)[0]
    assert found == quiet


# ---- what is asked --------------------------------------------------------------------------------------------------


def test_a_vetoed_arm_gets_no_further_trial_and_the_others_go_on(tmp_path: Path) -> None:
    found, _ = steered(tmp_path, {2: Veto(arm="b")})
    assert (found["b scores higher than a"].verdict, found["b scores higher than a"].reason) == (
        "supported",
        "look at 4 seeds",
    ), "the look that was under way is read"
    assert found["c scores higher than a"].verdict == "practically_equivalent"

    early = SteeringFile(tmp_path / "early")
    early.append(Veto(arm="b"))
    log = StudyLog()
    findings, _ = conduct(PLAIN, log, Formula(), early)
    assert [f.verdict for f in findings] == ["inconclusive", "practically_equivalent"]
    assert findings[0].reason == "arm 'b' was vetoed"
    assert {trial.arm for trial in log.trials.values()} == {"a", "c"}


def test_an_arm_vetoed_while_it_is_tuned_is_not_judged(tmp_path: Path) -> None:
    tuned = replace(STUDY, arms=(STUDY.arms[0], Arm("b", {"gain": 3.0, "lr": 16.0})))
    found, [study_run] = steered(tmp_path, {3: Veto(arm="a")}, tuned)
    assert found["b scores higher than a"].reason == "arm 'a' was vetoed"
    assert not [trial for trial in study_run.log.trials.values() if trial.phase == "confirm"]


def test_a_cap_is_kept_and_can_be_lifted_up_to_the_budget(tmp_path: Path) -> None:
    found, [study_run] = steered(tmp_path, {1: Cap(runs=15.0)})
    assert study_run.launcher.spending.total <= 15.0
    assert found["b scores higher than a"].verdict == "supported"
    assert "are left" in found["c scores higher than a"].reason
    (tmp_path / "steer.jsonl").unlink()
    lifted, _ = steered(tmp_path, {1: Cap(runs=15.0), 2: Cap(runs=80.0)})
    assert lifted["c scores higher than a"].verdict == "practically_equivalent"


def test_pause_waits_at_the_next_point(tmp_path: Path) -> None:
    class Patient(SteeringFile):
        """The person resumes as soon as the study waits, and vetoes an arm before."""

        waited = 0

        def wait(self, taken: int) -> None:
            self.waited += 1
            self.append(Veto(arm="c") if self.waited == 1 else Resume())

    steering_file = Patient(tmp_path / "steer.jsonl")
    runner = Meddled(steering_file=steering_file, requests={1: Pause()})
    log = StudyLog()
    findings, _ = conduct(PLAIN, log, runner, steering_file)
    assert steering_file.waited == 2
    assert [(amendment.point, amendment.asked["kind"]) for amendment in log.amendments] == [
        (1, "pause"),
        (1, "veto"),
        (1, "resume"),
    ]
    assert [found.verdict for found in findings] == ["supported", "inconclusive"]


# ---- what is added --------------------------------------------------------------------------------------------------


def test_an_added_arm_is_a_study_of_its_own(tmp_path: Path) -> None:
    quiet, _ = steered(tmp_path, {})
    found, [first, annex] = steered(tmp_path, {5: ADDED})
    assert {claim: finding for claim, finding in found.items() if claim in quiet} == quiet
    added = found["d scores higher than b"]
    assert added.verdict == "supported" and "exploratory" in added.reason
    assert added.estimate == pytest.approx(3.0, abs=0.6)
    assert first.launcher.spending.total + annex.launcher.spending.total <= PLAIN.budget
    assert annex.study.budget == PLAIN.budget - first.launcher.spending.total
    seeds = [{trial.seed for trial in study_run.log.trials.values()} for study_run in (first, annex)]
    assert not seeds[0] & seeds[1], "the score that suggested an arm does not judge it"
    assert {trial.arm for trial in annex.log.trials.values()} == {"b", "d"}


def test_an_added_arm_is_tuned_like_the_one_it_is_held_against(tmp_path: Path) -> None:
    study = replace(STUDY, budget=160.0)
    asked = AddArm(arm="d", against="b", changes={"gain": 6.0})
    found, [_, annex] = steered(tmp_path, {5: asked}, study)
    assert found["d scores higher than b"].settings == {"b": {"gain": 3.0, "lr": 16.0}, "d": {"gain": 6.0, "lr": 16.0}}
    assert {trial.arm for trial in annex.log.trials.values() if trial.phase == "explore"} == {"d"}


def test_what_a_veto_took_with_it_is_said(tmp_path: Path) -> None:
    """Without another addition no annex follows; with one, the annex lacks the vetoed arm."""
    dropped = {"d scores higher than b": "arm 'b' was vetoed"}
    _, [only] = steered(tmp_path, {2: ADDED, 3: Veto(arm="b"), 4: Veto(arm="a")})
    assert only.log.decisions["granted, and not tested"] == dropped
    assert (
        "Granted, but not part of an annex: “d scores higher than b”, because arm 'b' was vetoed."
        in render(only.log).markdown.text
    )
    (tmp_path / "steer.jsonl").unlink()
    _, [first, annex] = steered(tmp_path, {2: ADDED, 3: Veto(arm="b"), 4: AddHypothesis(arm="d", against="a")})
    assert first.log.decisions["granted, and not tested"] == dropped
    assert [claim.claim for claim in annex.study.hypotheses] == ["d scores higher than a"]


def test_what_is_added_during_an_annex_is_the_next_one(tmp_path: Path) -> None:
    _, quiet = steered(tmp_path, {})
    later = len(quiet[0].log.trials) + 2
    _, study_runs = steered(tmp_path, {1: ADDED, later: AddHypothesis(arm="d", against="b")}, PLAIN)
    assert len(study_runs) == 3
    assert [len(study_run.log.amendments) for study_run in study_runs] == [1, 1, 0]


def test_what_cannot_be_paid_is_refused(tmp_path: Path) -> None:
    _, study_runs = steered(tmp_path, {1: ADDED}, replace(PLAIN, budget=18.0))
    assert len(study_runs) == 1
    assert refusals(study_runs[0].log) == ["this takes 8 full runs at the least, and 6.00 are left"]


# ---- kills ----------------------------------------------------------------------------------------------------------

FEW = replace(
    PLAIN,
    arms=(replace(PLAIN.arms[0], changes={"gain": 0.0}, nuisance=(Knob("lr", (8.0, 16.0)),)), *PLAIN.arms[1:]),
    rungs=(1.0,),
    looks=(4, 6),
    budget=60.0,
)
MEANWHILE: dict[int, Request] = {
    3: Cap(runs=50.0),
    5: ADDED,
    12: AddArm(arm="e", against="z"),
    18: Veto(arm="c"),
    24: AddHypothesis(arm="c", against="b"),
}


def run_through(folder: Path, log: StudyJournal) -> list[StudyRun]:
    steering_file = SteeringFile(folder / "steer.jsonl")
    with log:
        return conduct_with_annexes(
            FEW, log, Meddled(folder=folder, steering_file=steering_file, requests=MEANWHILE), steering_file
        )


def until_killed(folder: Path, number: int, moment: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            run_through(folder, Doomed(folder / "journal.jsonl", number, moment))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"entry {number}: {status}"


def ending(folder: Path) -> dict[str, Any]:
    study_runs = run_through(folder, StudyJournal(folder / "journal.jsonl"))
    return {
        "findings": [[found.to_json() for found in study_run.findings] for study_run in study_runs],
        "spent": [study_run.launcher.spending.total for study_run in study_runs],
        "amendments": [[amendment.to_json() for amendment in study_run.log.amendments] for study_run in study_runs],
        "launched": {path.name for path in folder.glob("*-?")},
        "entries": [study_run.log.num_entries for study_run in study_runs],
    }


@pytest.mark.parametrize("shift", range(3))
def test_killed_at_every_entry_with_requests_coming_in(tmp_path: Path, shift: int) -> None:
    """The same journal, killed at each of its entries in turn: before, in the middle, after, before, ..."""
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    quiet.mkdir()
    stormy.mkdir()
    undisturbed = ending(quiet)
    assert [len(requests) for requests in undisturbed["amendments"]] == [4, 1]
    assert len({amendment["point"] for amendment in undisturbed["amendments"][0]}) > 1
    for number in range(sum(undisturbed["entries"])):
        until_killed(stormy, number, ("before", "torn", "after")[(number + shift) % 3])
    assert ending(stormy) == undisturbed
