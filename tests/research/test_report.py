"""1. A report is a function of the log: the same bytes, also in another process.
2. Each changed number of the Markdown is found, and so is a changed page or facts file.
3. The numbers are those of the outcomes, by independent arithmetic. The last interval is the one of the verdict.
4. Failures are shown: diverged and lost runs, diagnoses, an unfinished study.
5. The page needs no other file and no script. Names of arms are plain text.
6. Limitations are listed if they hold.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyFolder, StudyLog
from agentjet.research.models import Arm, Diagnosis, Outcome, Subject
from agentjet.research.report import StudyView, build, check, effects, gather, read_study, render
from agentjet.research.scheduler import conduct
from tests.research.reported import RICH, VERDICTS, Told, interrupted, rich_book
from tests.research.world import STUDY, Formula, hill

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parent.parent.parent
STUDIES = ROOT / "docs" / "studies"
PATHS = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@pytest.fixture(scope="module")
def report() -> dict[str, str]:
    return render(rich_book())


def facts_of(log: StudyLog) -> dict[str, Any]:
    return gather(StudyView(log))


def markdown(log: StudyLog) -> str:
    return " ".join(render(log)["report.md"].split())


# ---- 1: a function of the log ----------------------------------------------------------------------------------

PROGRAM = """
import sys, pathlib
from agentjet.research.report import build
from tests.research.reported import rich_book
build(rich_book(), pathlib.Path(sys.argv[1]))
"""


def test_the_same_log_gives_the_same_bytes(tmp_path: Path, report: dict[str, str]) -> None:
    environment = os.environ | PATHS | {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, env=environment)
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert texts == report
    assert {name for name in report if name.endswith("svg")} == {
        f"figures/{name}.svg" for name in ("effects", "curves")
    }


def test_a_journal_without_a_study_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        build(StudyLog(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- 2: changed afterwards --------------------------------------------------------------------------------------


def test_each_changed_number_is_found(tmp_path: Path, report: dict[str, str]) -> None:
    log = rich_book()
    page = build(log, tmp_path)
    for name in ("report.html", "report.md", "facts.json"):
        assert check(tmp_path / name, log) == []
    text = report["report.md"]
    numerals = list(re.finditer(r"\d+", text))
    assert len(numerals) > 900
    for match in numerals[:: len(numerals) // 20]:
        changed = text[: match.end() - 1] + str((int(match[0][-1]) + 1) % 10) + text[match.end() :]
        page.with_suffix(".md").write_text(changed)
        line = text.count("\n", 0, match.start()) + 1
        [problem] = check(page.with_suffix(".md"), log)
        assert problem.startswith(f"line {line}: ")
    facts = json.loads(report["facts.json"])
    facts["findings"][0]["estimate"] += 1e-9
    (tmp_path / "facts.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    [problem] = check(tmp_path / "facts.json", log)
    assert "stands where the journal gives" in problem and '"estimate": ' in problem
    page.write_text(page.read_text().replace("supported", "proven"))
    assert check(page, log)
    with pytest.raises(ConfigError, match=r"\.html, \.md or \.json"):
        check(tmp_path / "report.pdf", log)


# ---- 3: the numbers are right -----------------------------------------------------------------------------------


def test_numbers_are_those_of_the_outcomes() -> None:
    log = rich_book()
    confirming = {
        arm.name: [
            log.outcomes[t.id][-1].score for t in log.trials.values() if (t.arm, t.phase) == (arm.name, "confirm")
        ]
        for arm in RICH.arms
    }
    facts = facts_of(log)
    a, c = np.array(confirming["a"], float), np.array(confirming["c"], float)
    first, third = facts["arms"][0], facts["arms"][2]
    assert (first["mean"], first["deviation"]) == (pytest.approx(a.mean()), pytest.approx(a.std(ddof=1)))
    assert third["worst"] == c.min()
    estimates = [found["estimate"] for found in facts["findings"]]
    assert estimates[2] == pytest.approx(c.mean() - a.mean()) and estimates[1] == -estimates[0]
    assert f"by {estimates[0]:+.3g}, and the whole interval" in markdown(log)
    assert [found["verdict"] for found in facts["findings"]] == VERDICTS
    assert [found["looks"][-1]["verdict"] for found in facts["findings"]] == VERDICTS
    assert json.loads(json.dumps(facts, allow_nan=False)) == json.loads(render(log)["facts.json"])
    trials = {one["name"]: one for one in facts["trials"]}
    assert {trials[name]["phase"] for name in facts["findings"][0]["trials"]} == {"confirm"}


def test_the_ledger_is_that_of_the_launcher() -> None:
    log = StudyLog()
    _, launcher = conduct(RICH, log, Told(lost={40, 41}))
    ledger = facts_of(log)["ledger"]
    for name, spent in (("total", launcher.spending.total), ("repeated", launcher.spending.repeated)):
        assert ledger[name] == pytest.approx(spent) and spent


def flat(setting: object, fidelity: float) -> float:
    return float(setting.get("gain", 0.0))  # type: ignore[attr-defined]  # a mapping


@pytest.mark.parametrize("name", ["digits", "division", "hackable"])
def test_the_last_interval_is_the_one_of_the_verdict(name: str) -> None:
    view = read_study(StudyFolder(STUDIES / name))
    for hypothesis, recorded in view.findings.items():
        found = view.looks(hypothesis)
        assert [one.seeds for one in found] == list(view.study.looks[: len(found)])
        assert (found[-1].low, found[-1].high) == (recorded.low, recorded.high)


# ---- 4: failures and stages -------------------------------------------------------------------------------------


def test_failures_are_reported(report: dict[str, str]) -> None:
    text = " ".join(report["report.md"].split())
    assert text.count("| loss is NaN at step 7 |") == facts_of(rich_book())["arms"][3]["diverged"] > 0
    assert "3 trials were lost by the infrastructure and launched again with their seed, in 3 more launches" in text
    assert r"| policy/kl reached 7.3 | kl = 7.3 | too fast |" in text and r"| kl blow up | d\|\<i\> | T" in text
    assert "1 of 40 confirming trials have a diagnosis (1 kl blow up)." in text
    log = StudyLog()
    conduct(replace(STUDY, arms=(Arm("a"), Arm("b"))), log, Formula(flat, always_lost=True))
    text = markdown(log)
    assert "12 of 12 confirming trials of “a” were lost for all attempts" in text
    assert "There is no estimate. Reason: " in text


@pytest.mark.parametrize(
    ("outcomes", "stage", "sentence", "still_open"),
    [(1, "exploring", "Its arms are still being tuned", 5), (75, "confirming", "at least one claim is open", 2)],
)
def test_an_unfinished_study_is_marked(outcomes: int, stage: str, sentence: str, still_open: int) -> None:
    log = interrupted(RICH, outcomes)
    text = markdown(log)
    assert facts_of(log)["stage"] == stage
    assert "This study is not finished" in text and sentence in text
    assert text.count("It is not decided yet.") == still_open


def test_a_running_study_shows_its_ended_looks() -> None:
    ended = sum(one.outcome is not None for one in StudyView(rich_book()).launched)
    shown = [len(found["looks"]) for found in facts_of(interrupted(RICH, ended - 10))["findings"]]
    assert 0 < max(shown) < len(RICH.looks)


def test_a_plan_without_data(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "study")
    folder.write(RICH, "# plan")
    view = read_study(folder)
    assert (view.stage, gather(view)["trials"]) == ("planned", [])
    assert "## Answer" not in render(view.log)["report.md"]
    with pytest.raises(ConfigError, match=r"no study.json: name the folder of a study"):
        read_study(StudyFolder(tmp_path))


def test_the_subject_is_reported() -> None:
    subject = Subject("smollm2-135m", "agent.py:play", "tasks.jsonl", "held.jsonl", steps=48, code="ab12")
    log = StudyLog()
    conduct(replace(STUDY, subject=subject), log, Formula())
    text = markdown(log)
    assert "| model, if an arm sets none | `smollm2-135m` |" in text and "`agent.py:play`" in text


@pytest.mark.parametrize(
    ("cause", "gain", "said"),
    [
        ("too_hard", 0.0, True),
        ("too_hard", 2.0, False),  # the arms differ, so the setting was tested
        ("not_a_number", 2.0, True),
    ],
)
def test_a_verdict_on_untested_runs_is_qualified(cause: str, gain: float, said: bool) -> None:
    log, arms = StudyLog(), (Arm("a", {"lr": 16.0, "gain": 0.0}), Arm("b", {"lr": 16.0, "gain": gain}))
    conduct(replace(STUDY, arms=arms, sesoi=0.2), log, Formula())
    for trial in list(log.trials.values()):
        if trial.phase == "confirm" and trial.arm == "a":
            diagnosis = Diagnosis(trial.id, cause, "all earn 0", meaning="nothing was learned")
            log.entry("diagnosis", diagnosis.to_json())
    sentence = f"of “a” are diagnosed as {cause.replace('_', ' ')}, so they do not test its setting: nothing was"
    assert (sentence in markdown(log)) == said


def test_what_stopping_early_does_to_an_estimate_is_stated() -> None:
    arms = (Arm("a", {"lr": 16.0, "gain": 0.0}), Arm("b", {"lr": 16.0, "gain": 2.0}))
    for looks, early in (((4, 8, 12), True), ((6,), False)):
        log = StudyLog()
        conduct(replace(STUDY, arms=arms, sesoi=0.2, looks=looks), log, Formula(noise=0.9))
        assert ("A study that stops as soon as a difference shows overstates it" in markdown(log)) == early


# ---- 5: the page ------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_names_are_text(report: dict[str, str]) -> None:
    page = Page()
    page.feed(report["report.html"])
    assert page.addresses == [] and not page.tags & {"script", "help", "i", "link", "img", "iframe"}
    assert {"svg", "table", "details", "style"} <= page.tags
    text = "".join(page.text)
    assert "Which of b, c and d <help>, against a | alone?" in text and "b *bold*" in text and "d|<i>" in text
    assert report["report.html"].count("<svg") == 2


# ---- 6: limitations ---------------------------------------------------------------------------------------------


def limitations(log: StudyLog) -> str:
    return " ".join(facts_of(log)["limitations"])


def test_limitations_are_listed_if_they_hold(report: dict[str, str]) -> None:
    apart = StudyLog()
    arms = (STUDY.arms[0], replace(STUDY.arms[1], changes={"gain": 3.0, "shift": 1}))
    conduct(replace(STUDY, arms=arms, evaluator="1"), apart, Formula(shifted))
    text = limitations(apart)
    assert "“b” was judged at lr = 1.0, the smallest value that was tried" in text
    assert "“b” was judged at lr = 1.0 and “a” at 16.0: their difference includes that." in text
    assert "no hash of the evaluator" not in text and "without tuning" not in text

    uneven = StudyLog()
    arms = (Arm("a", {"gain": 0.0, "lr": 16.0}), Arm("b", {"gain": 3.0, "lr": 16.0, "wide": 1}))
    conduct(replace(STUDY, arms=arms, sesoi=0.1), uneven, Formula(noise=0.3, score=wide))
    text = limitations(uneven)
    assert "“a” was run at one setting, without tuning" in text and "no hash of the evaluator" in text
    assert re.search(r"Scores of “b” spread \d+\.\d times as far as those of “a”", text)
    assert "The smallest effect of interest is" in text


@dataclass(kw_only=True)
class OnMachines(Formula):
    """Runs the arms on these machines, in turns."""

    machines: dict[str, tuple[str, ...]]

    def collect(self, key: str) -> Outcome:
        arm = self.launched[key].arm
        number = [name for name, trial in self.launched.items() if trial.arm == arm].index(key)
        return replace(super().collect(key), machine={"hardware": self.machines[arm][number % len(self.machines[arm])]})


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ({"a": ("T4",), "b": ("T4",)}, ""),
        ({"a": ("T4", "H200"), "b": ("T4", "H200")}, ""),
        ({"a": ("",), "b": ("T4",)}, ""),
        ({"a": ("T4", "H200"), "b": ("H200",)}, "“a” 2 on H200 and 2 on T4; “b” 4 on H200."),
    ],
)
def test_machines_that_differ_between_arms_are_a_limitation(machines: dict[str, tuple[str, ...]], said: str) -> None:
    log, arms = StudyLog(), (Arm("a", {"gain": 0.0, "lr": 16.0}), Arm("b", {"gain": 9.0, "lr": 16.0}))
    conduct(replace(STUDY, arms=arms, looks=(4,)), log, OnMachines(machines=machines))
    begin = "Confirming trials ran on machines whose numbers are rounded differently: "
    found = [line.removeprefix(begin) for line in facts_of(log)["limitations"] if line.startswith(begin)]
    assert found == ([said] if said else [])


def shifted(setting: Any, fidelity: float) -> float:
    return -float(setting["lr"]) if setting.get("shift") else hill(setting, fidelity)


def wide(setting: Any, fidelity: float) -> float:
    wide.calls += 1  # type: ignore[attr-defined]  # a counter
    return float(setting["gain"]) + (5.0 * (wide.calls % 3) if setting.get("wide") else 0.0)  # type: ignore[attr-defined]


wide.calls = 0  # type: ignore[attr-defined]


def test_a_figure_cuts_no_name() -> None:
    claim = "pay what the judge pays + the job's length limit + ten times the learning rate"
    found = {"claim": claim, "verdict": "supported", "estimate": 0.5, "low": 0.4, "high": 0.6}
    drawn = re.findall(r">([^<]+)</text>", effects([found], 0.05))
    assert " ".join(html.unescape(text) for text in drawn if html.unescape(text) in claim) == claim
