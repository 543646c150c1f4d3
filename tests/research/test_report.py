"""1. A report is a function of the log: the same bytes, also in another process.
2. Each changed number, in Markdown or HTML, is found and named, and so is a changed figure.
3. The numbers are those of the outcomes, by independent arithmetic.
4. Failures are shown: diverged and lost runs, diagnoses, an unfinished study.
5. The page needs no other file and no script. Names of arms are plain text.
6. Limitations are listed if they hold.
7. Figures: outliers do not compress the rest, points do not hide points, an arm keeps its colour.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog
from agentjet.research.models import Amendment, Arm, Diagnosis, Exchange, Finding, Outcome, Study, Subject, Trial
from agentjet.research.report import build, check, facts_of
from agentjet.research.report.document import Printed, Report, compare, render
from agentjet.research.report.figures import effect_range as widest
from agentjet.research.report.figures import looks, wrapped
from agentjet.research.report.score_figures import STEP, is_geometric, stacked
from agentjet.research.scheduler import conduct, settings
from tests.research.reported import RICH, Told, interrupted, rich_book
from tests.research.world import KNOB, STUDY, Formula, hill

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parent.parent.parent
PATHS = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@pytest.fixture(scope="module")
def report() -> Report:
    return render(rich_book())


def said(log: StudyLog, ref: str) -> str:
    return facts_of(log).known[ref].text


# ---- 1: a function of the log ----------------------------------------------------------------------------------

PROGRAM = """
import sys, pathlib
from agentjet.research.report import build
from tests.research.reported import rich_book
build(rich_book(), pathlib.Path(sys.argv[1]))
"""


def test_the_same_book_gives_the_same_bytes(tmp_path: Path, report: Report) -> None:
    environment = os.environ | PATHS | {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, env=environment)
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert texts == {"report.html": report.html.text, "report.md": report.markdown.text, **report.figures}
    assert set(report.figures) == {
        f"figures/{name}.svg" for name in ("effects", "curves", "scores", "tuning", "ledger")
    }


def test_it_loads_matplotlib_when_it_draws() -> None:
    program = "import sys, agentjet.research.report; print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | PATHS
    )
    assert done.stdout.strip() == "False"


def test_a_journal_without_a_study_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        build(StudyLog(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- 2: changed afterwards --------------------------------------------------------------------------------------

NUMERAL = re.compile(r"\d+(?:[.,]\d+)*")


def mutated(numeral: str) -> str:
    """With another last digit."""
    return numeral[:-1] + str((int(numeral[-1]) + 1) % 10)


def visible(page: str) -> list[tuple[int, int]]:
    """Where a page's text is: outside of tags, figures and style."""
    hidden = re.compile(r"<svg.*?</svg>|<head>.*?</head>|<[^>]*>", re.DOTALL)
    ends = [0, *(place for match in hidden.finditer(page) for place in match.span()), len(page)]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


@pytest.mark.parametrize("form", ["html", "markdown"])
def test_each_changed_number_is_found(report: Report, form: str) -> None:
    printed: Printed = getattr(report, form)
    text = printed.text
    places = visible(text) if form == "html" else [(0, len(text))]
    numerals = [match for a, b in places for match in NUMERAL.finditer(text, a, b)]
    assert len(numerals) > 900
    assert compare(printed, text) == []
    for match in numerals:
        problems = compare(printed, text[: match.start()] + mutated(match[0]) + text[match.end() :])
        assert problems, f"{match[0]} at {match.start()} could be changed"
        reference = printed.reference_at(*match.span())
        line = text.count("\n", 0, match.start()) + 1
        if reference:
            assert any(f"line {line}:" in problem and reference in problem for problem in problems), problems
        else:  # the name of a file or a heading's level in the example of code
            assert "figures/" in text or "```" in text


def test_each_changed_number_of_a_figure_is_found(report: Report) -> None:
    page = report.html.text
    written = [match.span(1) for match in re.finditer(r"<text[^>]*>([^<]*)</text>", page)]
    numerals = [match for a, b in written for match in NUMERAL.finditer(page, a, b)]
    assert len(numerals) > 80
    for match in numerals:
        assert compare(report.html, page[: match.start()] + mutated(match[0]) + page[match.end() :]), match[0]


def test_what_was_added_or_left_out_is_found(report: Report) -> None:
    text = report.markdown.text
    [problem] = compare(report.markdown, text.replace("## Answer", "It gained 99 points.\n\n## Answer"))
    assert problem.startswith("line 6: 'It gained 99 points.' is in no fact")
    lines = text.splitlines(keepends=True)
    failed = next(i for i, line in enumerate(lines) if "| diverged | loss is NaN" in line)
    [problem] = compare(report.markdown, "".join([*lines[:failed], *lines[failed + 1 :]]))
    assert f"line {failed + 1}: nothing stands where" in problem


def test_files_are_held_against_their_book(tmp_path: Path) -> None:
    log = rich_book()
    page = build(log, tmp_path)
    assert (page, check(page, log), check(page.with_suffix(".md"), log)) == (tmp_path / "report.html", [], [])
    figure = tmp_path / "figures" / "effects.svg"
    figure.write_text(figure.read_text(encoding="utf-8").replace("+3.22", "+4.22"), encoding="utf-8")
    [problem] = check(page.with_suffix(".md"), log)
    assert problem.startswith("figures/effects.svg: differs from the study's figure")
    figure.unlink()
    assert check(page.with_suffix(".md"), log) == [
        "figures/effects.svg: is not beside the report; copy the report's figures along with it"
    ]
    page.write_text(page.read_text(encoding="utf-8").replace("[+2.20,", "[+0.20,"), encoding="utf-8")
    assert check(page, log)
    with pytest.raises(ConfigError, match=r"\.html or a \.md"):
        check(tmp_path / "report.pdf", log)


def test_the_report_of_another_book_is_found(report: Report) -> None:
    other = StudyLog()
    conduct(replace(RICH, seed=1), other, Told())
    assert len(compare(render(other).markdown, report.markdown.text)) > 20


# ---- 3: the numbers are right -----------------------------------------------------------------------------------


def test_numbers_are_those_of_the_outcomes() -> None:
    log = rich_book()
    confirming = {
        arm.name: [
            log.outcomes[t.id][-1].score for t in log.trials.values() if (t.arm, t.phase) == (arm.name, "confirm")
        ]
        for arm in RICH.arms
    }
    a, c = np.array(confirming["a"], float), np.array(confirming["c"], float)
    assert said(log, "A1.mean") == f"{a.mean():.2f}"
    assert said(log, "A1.deviation") == f"{a.std(ddof=1):.2f}"
    assert said(log, "A3.worst") == f"{c.min():.2f}"
    assert said(log, "F3.estimate") == f"+{c.mean() - a.mean():.2f}"
    assert said(log, "F2.estimate") == said(log, "F1.estimate").replace("+", "\N{MINUS SIGN}")
    assert (said(log, "F3.seeds"), said(log, "A1.num"), said(log, "A3.num")) == ("12", "12", "12")
    number = list(log.trials).index(Finding.from_json(log.decisions[f"finding {RICH.hypotheses[0].id}"]).trials[0]) + 1
    assert said(log, f"T{number}.phase") == "confirm"


def test_both_chances_of_a_wrong_call_are_said(report: Report) -> None:
    text = " ".join(report.markdown.text.split())
    assert (
        "the chance is about 0.05 that any confirmatory claim is wrongly supported or refuted, and about the same that"
        in text
    )
    assert "of interest is at least 20 % of the spread between seeds" in text
    assert "at most 0.06 if arms spread alike, and 0.1 otherwise; with a finer effect of interest" in text
    assert "only one of the errors, several together to both: about 0.1." in text


def test_what_stopping_early_does_to_an_estimate_is_said_where_it_was_done() -> None:
    """With a single look nothing can stop early, with or without a lost seed."""
    arms = (Arm("a", {"lr": 16.0, "gain": 0.0}), Arm("b", {"lr": 16.0, "gain": 2.0}))
    study = replace(STUDY, arms=arms, sesoi=0.2)
    for declared, lost, seeds, early in (
        ((4, 8, 12), set(), 4, True),
        ((6,), set(), 6, False),
        ((6,), {1, 13, 14}, 5, False),
    ):
        log = StudyLog()
        [finding], _ = conduct(replace(study, looks=declared), log, Formula(noise=0.9, lost=lost))
        assert (finding.verdict, finding.seeds) == ("supported", seeds)
        text = render(log).markdown.text
        assert ("A study that stops as soon as a difference shows overstates it" in text) == early
        assert (f"probably closer to none than {said(log, 'F1.estimate')}." in text) == early


def test_the_ledger_is_the_desks_and_the_grid_is_counted() -> None:
    log = StudyLog()
    _, launcher = conduct(RICH, log, Told(lost={40, 41}))
    known = facts_of(log).known
    assert known["ledger.total"].value == pytest.approx(launcher.spending.total)
    assert known["ledger.repeated"].value == pytest.approx(launcher.spending.repeated)
    assert known["ledger.repeated"].value
    assert known["ledger.explore"].value == pytest.approx(launcher.spending.spent["explore"])
    assert known["ledger.grid"].value == (8 + 8 + 8 + 1) * 12
    assert known["ledger.of_grid"].text == f"{100 * launcher.spending.total / 300:.3g} %"


@pytest.mark.parametrize(("sesoi", "text"), [(2.0, "+1.2"), (1.0, "+1.23"), (0.02, "+1.235"), (50.0, "+1")])
def test_scores_are_rounded_by_what_matters(sesoi: float, text: str) -> None:
    log = StudyLog()
    conduct(replace(STUDY, sesoi=sesoi, arms=(Arm("a"), Arm("b", {"gain": 1.23456}))), log, Formula(flat, noise=0.0))
    assert said(log, "F1.estimate") == text


def flat(setting: object, fidelity: float) -> float:
    return float(setting.get("gain", 0.0))  # type: ignore[attr-defined]  # a mapping


# ---- 4: failures are told ---------------------------------------------------------------------------------------


def test_failures_are_told(report: Report) -> None:
    text = report.markdown.text
    diverged = said(rich_book(), "A4.diverged")
    assert int(diverged) > 0
    assert f"{diverged} diverged" in report.figures["figures/scores.svg"]
    assert text.count("| diverged | loss is NaN at step 7 |") == int(diverged)
    assert "launched again with their seed: 3, with\n  3 more launches" in text
    assert (
        "| kl blow up | d\\|\\<i\\> | 1 | policy/kl reached 7.3 | at half of lr it stayed at 0.02 | too fast |" in text
    )
    assert "| kl blow up | 7 | policy/kl reached 7.3 | at half of lr it stayed at 0.02 | kl = 7.3 |" in text
    assert f"diagnosis, above: 1 of {len([t for t in rich_book().trials.values() if t.phase == 'confirm'])}." in text


def test_lost_for_good_is_a_limitation(tmp_path: Path) -> None:
    log = StudyLog()
    conduct(replace(STUDY, arms=(Arm("a"), Arm("b"))), log, Formula(hill_or_flat, always_lost=True))
    build(log, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "12 of 12 confirming trials of “a” were lost for all attempts" in text
    assert "the remaining scores flatter their arm" in text
    assert "There is no estimate. Reason: " in text


def hill_or_flat(setting: object, fidelity: float) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("outcomes", "stage", "sentence", "still_open"),
    [(1, "exploring", "Its arms are still being tuned", 5), (75, "confirming", "at least one claim is open", 2)],
)
def test_an_unfinished_study_says_so(outcomes: int, stage: str, sentence: str, still_open: int) -> None:
    log = interrupted(RICH, outcomes)
    text = render(log).markdown.text
    assert facts_of(log).groups["stage"] == stage
    assert "This study is not finished" in text and sentence in text
    assert text.count("It is not decided yet.") == still_open


def test_what_a_look_called_is_told_before_the_study_ends() -> None:
    """Stopped within the second look: b against a was decided at the first one, by four seeds."""
    whole = StudyLog()
    conduct(RICH, whole, Told())
    exploring = sum(trial.phase == "explore" for trial in whole.trials.values())
    log = interrupted(RICH, exploring + 4 * 4 + 2)
    first = f"finding {RICH.hypotheses[0].id}"
    assert log.decisions[first] == whole.decisions[first]
    text = render(log).markdown.text
    assert facts_of(log).groups["stage"] == "confirming"
    assert "> **b scores higher than a**: supported." in text and "Verdicts of looks are final" in text
    assert 0 < text.count("It is not decided yet.") < len(RICH.hypotheses)
    unended = sum(trial not in log.outcomes for trial in log.trials)
    assert unended and f"trials; {unended} of these have not ended" in text
    ended = [
        log.outcomes[t.id] for t in log.trials.values() if (t.arm, t.phase) == ("a", "confirm") and t.id in log.outcomes
    ]
    assert f"None of {len(ended)} confirming runs of “a” that ended diverged" in text
    assert "as many as this study needed" not in text and "of the smaller one" not in text


def test_a_plan_without_trials_has_a_report_too() -> None:
    log = StudyLog()
    log.open_study(RICH)
    report = render(log)
    assert "Nothing was launched yet" in report.markdown.text
    assert report.figures == {}


def test_what_was_asked_later_is_told() -> None:
    log = StudyLog()
    conduct(STUDY, log, Formula())
    asked = {"kind": "add_arm", "arm": "c", "against": "a", "changes": {"gain": 7.0}, "why": "", "code": ""}
    log.append("amendment", Amendment(3, "human", asked).to_json())
    log.append(
        "refusal", Amendment(4, "llm", {"text": "set alpha to 0.5"}, "alpha is fixed before the data.").to_json()
    )
    log.append("exchange", Exchange("advice", "what next?", "set alpha to 0.5").to_json())
    text = " ".join(render(log).markdown.text.split())
    assert "add arm (against: a, arm: c, changes: gain = 7). Requested by a person, taken at point 3, granted" in text
    assert "set alpha to 0.5. Requested by a language model, taken at point 4, refused: alpha is fixed" in text
    assert "Exchanges with a language model or a coding agent, all in the journal: 1." in text
    assert "None: the study was conducted as declared" not in text


def test_what_was_trained_is_told() -> None:
    subject = Subject(
        "smollm2-135m", "agent.py:play", "tasks.jsonl", "held.jsonl", steps=48, evaluations=11, code="ab12"
    )
    log = StudyLog()
    conduct(replace(RICH, subject=subject), log, Told())
    report = render(log)
    assert "| steps of a full run | 48 |" in report.markdown.text
    assert "The plan names the model `smollm2-135m`" in report.markdown.text
    assert "gives other scores, because sampling is not replayed" in report.markdown.text
    assert "agentjet research run FOLDER" in report.markdown.text and "runner" not in report.markdown.text
    assert ">step</text>" in report.figures["figures/curves.svg"]
    assert ">40</text>" in report.figures["figures/curves.svg"], "twelve values, of steps 0 to 48"


def test_a_verdict_on_untested_runs_says_so() -> None:
    """Seven or more of twelve runs of a side. Printed beside the verdict and among the limitations."""
    for ill, told in ((6, False), (7, True)):
        log = StudyLog()
        conduct(RICH, log, Told())
        runs = [trial.id for trial in log.trials.values() if (trial.arm, trial.phase) == ("c", "confirm")]
        assert len(runs) == 12
        for run in runs[:ill]:
            meaning = "nobody succeeds: the setting was not tested"
            log.append("diagnosis", Diagnosis(run, "too_hard", "all earn the same", meaning=meaning).to_json())
        answer, rest = render(log).markdown.text.split("## Before the data")
        sentence = (
            "> But 7 of 12 confirming runs of “c” are diagnosed as too hard: nobody succeeds: the setting was not"
        )
        assert (sentence in answer) == told
        assert ("The finding F3 rests on runs of “c” that tested little: 7 of 12" in rest) == told


# ---- 5: a page that needs nothing -------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags, references to elsewhere, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.elsewhere: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = {"src", "href", "xlink:href", "data", "srcset"}
        self.elsewhere += [v for name, v in attrs if name in names and v and not v.startswith("#")]

    def handle_data(self, text: str) -> None:
        self.text += text


def test_the_page_is_whole_and_names_are_text(report: Report) -> None:
    page = Page()
    page.feed(report.html.text)
    assert page.elsewhere == []
    assert not page.tags & {"script", "link", "iframe", "img", "i", "help"}
    assert "url(http" not in report.html.text and "@import" not in report.html.text
    assert "Which of b, c and d <help>, against a | alone?" in page.text
    assert "b *bold*" in page.text and "d|<i>" in page.text
    assert "{{" not in page.text and "{{" not in report.markdown.text
    assert report.html.text.count("<svg") == 5
    ids = re.findall(r' id="([^"]+)"', report.html.text)
    assert len(ids) == len(set(ids)) > 20, "five drawings on a page"
    assert "d\\|\\<i\\>" in report.markdown.text


def test_a_name_that_looks_like_a_reference_is_a_name() -> None:
    log = StudyLog()
    log.open_study(replace(RICH, topic="what is {{F1.estimate}}?"))
    report = render(log)
    assert "# what is {{F1.estimate}}?" in report.markdown.text
    assert "<title>what is {{F1.estimate}}?</title>" in report.html.text


# ---- 6: limitations ---------------------------------------------------------------------------------------------


def limits(study: Study, runner: Formula) -> tuple[dict[str, object], str]:
    log = StudyLog()
    conduct(study, log, runner)
    return facts_of(log).groups["limits"], render(log).markdown.text


def steep(setting: object, fidelity: float) -> float:
    """The larger the rate the better; for the second arm the smaller."""
    rate = np.log2(float(setting["lr"]))  # type: ignore[index]  # a mapping
    return float(fidelity * rate * (-1 if setting["gain"] else 1))  # type: ignore[index]


def test_knobs_at_their_ends_and_apart_are_said() -> None:
    found, text = limits(STUDY, Formula(steep))
    assert [(edge["arm"].text, edge["value"].text, edge["end"].text) for edge in found["edges"]] == [  # type: ignore[attr-defined]
        ("a", "128", "largest"),
        ("b", "1", "least"),
    ]
    assert "“a” was judged at lr = 128, the largest value that was tried" in text
    assert "“b” was judged at lr = 1 and “a” at lr = 128: their difference includes that" in text


def test_where_they_do_not_hold_they_are_not_said() -> None:
    found, text = limits(replace(STUDY, evaluator="abc"), Formula(hill))
    assert not any(
        found[name] for name in ("edges", "apart", "unequal", "fine", "untuned", "lost", "repeated", "unpinned")
    )
    for sentence in (
        "beyond it are unknown",
        "their difference includes",
        "without tuning",
        "has no hash of the evaluator",
    ):
        assert sentence not in text
    assert "None of 4 confirming runs of “a” diverged. Up to 53 % of its seeds may fail nevertheless." in text
    assert "None: the study was conducted as declared." in text


def test_unequal_spreads_and_untuned_arms_are_said() -> None:
    arms = (Arm("quiet", {"lr": 1.0, "gain": 0.0}), Arm("loud", {"lr": 1.0, "gain": 9.0}))
    hypotheses = (replace(STUDY.hypotheses[0], arm="loud", against="quiet"),)
    found, text = limits(replace(STUDY, arms=arms, hypotheses=hypotheses, budget=90.0, sesoi=0.5), Uneven())
    assert found["unequal"] and "Scores of “loud” spread" in text
    assert "it was up to 0.068 with unequal spreads, and 0.057 with equal ones; with several" in text
    [fine] = found["fine"]  # type: ignore[misc]  # one claim
    assert f"of interest is {fine['of'].text} of the spread between seeds of “loud” and “quiet”, which is less" in text
    assert "“quiet” was run at one setting, gain = 0, lr = 1, without tuning" in text
    assert "No arm has knobs" in text


class Uneven(Formula):
    def collect(self, key: str) -> Outcome:
        outcome = super().collect(key)
        trial: Trial = self.launched[key]
        rng = np.random.default_rng(trial.seed)
        return replace(outcome, score=float(rng.normal() * (9.0 if trial.arm == "loud" else 0.1)))


def test_every_setting_of_the_grid_is_in_the_table() -> None:
    table = facts_of(rich_book()).groups["tuned"]
    assert len(table) == sum(len(settings(arm)) for arm in RICH.arms if arm.nuisance) == 3 * len(KNOB.values)
    assert [row["outcome"].text for row in table].count("chosen") == 3


# ---- 7: figures -------------------------------------------------------------------------------------------------


def test_points_that_would_touch_stand_apart() -> None:
    places = [0.0, 0.0, 0.0, 0.5, 5.0, 5.2, 9.0]
    heights = stacked(places, 1.0)
    assert heights == [0.0, -STEP, STEP, -2 * STEP, 0.0, -STEP, 0.0]


def test_an_interval_far_wider_than_the_others_does_not_flatten_them() -> None:
    found = [Finding("h", "inconclusive", "", estimate=0.0, low=-reach, high=reach) for reach in (1.0, 2.0, 400.0)]
    assert widest(found, 0.5) == pytest.approx(1.06 * 2.0)
    assert widest(found[:1], 3.0) == pytest.approx(1.06 * 3.75)
    assert widest(found[2:], 0.5) == pytest.approx(1.06 * 400.0)


def test_axes_are_logarithmic_where_values_are() -> None:
    assert is_geometric((1e-6, 3e-6, 1e-5)) and is_geometric(KNOB.values)
    assert not is_geometric((0.0, 0.1, 1.0)) and not is_geometric((2.0, 4.0, 6.0, 8.0)) and not is_geometric((1.0, 9.0))


def test_labels_are_never_cut_off(report: Report) -> None:
    """Long names are broken into lines; the words of all lines are there."""
    long = "a claim that is so long that three lines of thirty-four characters do not hold it all, up to its last word"
    assert " ".join(wrapped(long, 34).split("\n")) == long and max(map(len, wrapped(long, 34).split("\n"))) <= 34
    assert not [name for name, figure in report.figures.items() if "…" in figure]


def test_an_arm_keeps_its_colour() -> None:
    colours = [look.colour for look in looks(RICH).values()]
    assert len(set(colours)) == len(RICH.arms)
    assert [*looks(replace(RICH, topic="another")).values()] == [*looks(RICH).values()]
