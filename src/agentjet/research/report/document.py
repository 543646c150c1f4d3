"""The document of a report: from a log to files, and a check of files against the log.

Prose is Markdown in which every number is a reference, `{{F1.estimate}}`. The template `report.md.jinja` and the
narration are prose. The linter refuses prose with literal numbers, unknown references, or claims beyond the verdicts.
Its rules match words and prefer to refuse. Narration, which a language model may write, is plain sentences.

Printing replaces references by facts and remembers the places. The Markdown escapes names. The HTML is one file without
scripts, in a light and a dark scheme, and keeps the reference and the unrounded value of each number.

The same log gives the same bytes, with the same version of matplotlib.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog
from agentjet.research.report.facts import Fact, Facts, Group, StudyView
from agentjet.research.report.study_facts import gather

TEMPLATES = Path(__file__).parent / "templates"
REFERENCE = re.compile(r"\{\{\s*([A-Za-z]\w*\.\w+)\s*\}\}")


class Prose(str):
    """Linted text with references from outside the template."""


@dataclass(frozen=True, slots=True)
class Printed:
    text: str
    spans: tuple[tuple[int, int, str], ...]
    """Start, end and reference of each printed fact."""

    def reference_at(self, start: int, end: int) -> str | None:
        """Returns the reference printed within the characters `start` to `end`."""
        return next((ref for first, last, ref in self.spans if first < end and start < last), None)


def compose(facts: Facts, narration: str = "") -> str:
    """Renders the whole report as prose."""
    text = templates().get_template("report.md.jinja").render(facts.groups, narration=Prose(narration))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        finalize=as_reference,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def as_reference(value: object) -> str:
    """Checks that the template prints only facts and linted prose."""
    if isinstance(value, Prose):
        return value
    assert isinstance(value, Fact), f"the template prints {value!r}, which is not a fact"
    return f"{{{{{value.ref}}}}}"


def fill(prose: str, facts: Facts, printed_as: Callable[[Fact], str]) -> Printed:
    """Replaces each reference by `printed_as(fact)`. Raises `KeyError` for an unknown reference."""
    pieces: list[str] = []
    spans: list[tuple[int, int, str]] = []
    length = last = 0
    for match in REFERENCE.finditer(prose):
        between, printed = prose[last : match.start()], printed_as(facts.known[match[1]])
        pieces += [between, printed]
        spans.append((length + len(between), length + len(between) + len(printed), match[1]))
        length, last = length + len(between) + len(printed), match.end()
    return Printed("".join([*pieces, prose[last:]]), tuple(spans))


VOCABULARY = tomllib.loads((Path(__file__).parent / "vocabulary.toml").read_text(encoding="utf-8"))
NUMBER_WORDS = frozenset(VOCABULARY["numbers"].split())
OVERSTATED = frozenset(VOCABULARY["overstated"].split())
CLAIMS = {verdict: frozenset(words.split()) for verdict, words in VOCABULARY["claims"].items()}
NUMBER_PHRASE = re.compile(r"\borders?\s+of\s+magnitude\b|\bscores?\s+of\s+times\b|\bper\s+cent\b")
NO_DIFFERENCE = re.compile(
    r"\bno (?:real |measurable )?(?:difference|effect|influence)\b|\bas (?:good|bad) as\b|\bon (?:a )?par\b"
)
TOUCHING = r"[\w+\-−–/^%×·]"
GLUED = re.compile(rf"{TOUCHING}{REFERENCE.pattern}|{REFERENCE.pattern}(?:{TOUCHING}|[.,:]?\{{\{{|[.,:]\w)")
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=[-|>#])|\|")
ARM_NAME = re.compile(r"A\d+\.name")
WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
MARKUP = re.compile(r"[<>\[\]|`#*]|^\s*[-+=~]|\{%|\{#", re.MULTILINE)
TAG = re.compile(r"</?\w+[^>]*>")


def lint(prose: str, facts: Facts) -> list[str]:
    """Returns one sentence per problem."""
    verdicts = {group["name"].text: group for group in facts.groups["findings"]}
    problems = []
    for sentence in filter(str.strip, SENTENCE_ENDS.split(TAG.sub("", prose))):
        found = [
            *unresolved(sentence, facts),
            *glued(sentence),
            *numerals(sentence),
            *overclaims(sentence, verdicts),
        ]
        problems += [f"{problem}, in: {' '.join(sentence.split())}" for problem in found]
    return problems


def lint_narration(prose: str, facts: Facts) -> list[str]:
    """Lints narration and refuses markup in it."""
    marks = sorted(set(MARKUP.findall(prose)))
    return [f"markup {mark.strip()!r}: narration is plain sentences" for mark in marks] + lint(prose, facts)


def demand_clean(problems: list[str], what: str) -> None:
    if problems:
        raise ConfigError(f"{what} is refused: " + "; ".join(problems))


def unresolved(sentence: str, facts: Facts) -> Iterator[str]:
    for ref in REFERENCE.findall(sentence):
        if ref not in facts.known:
            yield f"{{{{{ref}}}}} is not a fact of this study"
    if "{{" in REFERENCE.sub("", sentence):
        yield "a reference is written {{F1.estimate}}"


def glued(sentence: str) -> Iterator[str]:
    """Finds references that form another number with an adjacent sign, digit, letter or reference."""
    for match in GLUED.finditer(sentence):
        yield f"{match[0]!r} forms another number: separate the reference from it"


def numerals(sentence: str) -> Iterator[str]:
    """Finds digits of any script and numbers written as words."""
    rest = REFERENCE.sub(" ", sentence)
    for token in rest.split():
        if any(character.isnumeric() for character in token):
            yield f"{token!r} is a numeral and no reference"
    for word in WORD.findall(rest.lower()):
        if any(part.removesuffix("fold") in NUMBER_WORDS for part in word.split("-")) or word.endswith("-fold"):
            yield f"{word!r} is a number and no reference"
    for phrase in NUMBER_PHRASE.findall(rest.lower()):
        yield f"{phrase!r} is a number and no reference"


def overclaims(sentence: str, findings: dict[str, Group]) -> Iterator[str]:
    """A sentence with a claim must refer to findings, and each of these must have the matching verdict."""
    text = REFERENCE.sub(" ", sentence).lower()
    words = set(WORD.findall(text))
    for word in sorted(words & OVERSTATED):
        yield f"{word!r} is stronger than any verdict"
    refs = REFERENCE.findall(sentence)
    about = {ref.split(".")[0] for ref in refs} & findings.keys()
    for verdict, vocabulary in CLAIMS.items():
        claimed = sorted(words & vocabulary)
        if verdict == "practically_equivalent":
            claimed += NO_DIFFERENCE.findall(text)
        if not claimed:
            continue
        if not about:
            yield f"{claimed[0]!r} is a claim that refers to no finding"
        if any(ARM_NAME.fullmatch(ref) for ref in refs):
            yield f"{claimed[0]!r} names an arm by itself: in a claim it is {{{{F1.arm}}}} or {{{{F1.against}}}}"
        for name in sorted(about):
            if findings[name]["verdict_is"] != verdict:
                yield f"{claimed[0]!r} needs a verdict of {verdict!r}, and {name} is {findings[name]['verdict_is']!r}"
            elif findings[name]["exploratory"] and "exploratory" not in words:
                yield f"{claimed[0]!r} of {name}, which is exploratory: add the word exploratory to the sentence"
            elif verdict != "practically_equivalent" and is_turned_round(refs, name):
                yield f"{claimed[0]!r} is about {name}.against: name {name}.arm first"


def is_turned_round(refs: list[str], name: str) -> bool:
    """True if the claim is about the arm that the finding compares with."""
    sides = [ref for ref in refs if ref in (f"{name}.arm", f"{name}.against")]
    return sides[:1] == [f"{name}.against"]


SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)")


def as_markdown(fact: Fact) -> str:
    match fact.kind:
        case "verbatim":
            return fact.text
        case "figure":
            return f"![{escaped(fact.text)}]({fact.value})"
        case _:
            return escaped(fact.text)


def escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\g<0>", text)


def as_html(fact: Fact, figures: Mapping[str, str]) -> str:
    text = escape(fact.text)
    match fact.kind:
        case "verbatim":
            return text
        case "figure":
            return f'<span class="figure" role="img" aria-label="{text}">{figures[str(fact.value)]}</span>'
        case "verdict":
            return f'<data class="verdict" value="{fact.value}" title="{fact.ref}">{text}</data>'
        case _ if fact.value is not None:
            return f'<data value="{fact.value}" title="{fact.ref} = {fact.value}">{text}</data>'
        case _:
            return text


def page(prose: str, facts: Facts, figures: Mapping[str, str]) -> Printed:
    """Renders the page. `figures` are SVG by file name."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse(prose)
    sections = anchor(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True)
    whole = environment.get_template("page.html.jinja").render(
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        sections=sections,
        body=body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"),
    )
    return fill(whole, facts, lambda fact: as_html(fact, figures))


def anchor(tokens: list[Token]) -> list[tuple[str, str]]:
    """Gives every section an id. Returns ids and titles of the sections."""
    sections = []
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2" and not REFERENCE.search(content.content):
            name = re.sub(r"\W+", "-", content.content.lower()).strip("-")
            token.attrSet("id", name)
            sections.append((name, content.content))
    return sections


TOKEN = re.compile(r"[+\N{MINUS SIGN}-]?\d[\w.,\N{NARROW NO-BREAK SPACE}]*|\w+|[^\w\s]")
SHOWN = 60
"""Maximum characters of a token in a message."""


def compare(expected: Printed, found: str) -> list[str]:
    """Returns one sentence per difference."""
    if found == expected.text:
        return []
    old, new = expected.text.splitlines(keepends=True), found.splitlines(keepends=True)
    head = shared(old, new)
    tail = shared(old[head:][::-1], new[head:][::-1])
    middle = old[head : len(old) - tail], new[head : len(new) - tail]
    problems: list[str] = []
    for tag, i, i_end, j, j_end in SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if tag != "equal":
            start = sum(map(len, old[: head + i]))
            end = start + sum(map(len, middle[0][i:i_end]))
            problems += changes(expected, start, end, "".join(middle[1][j:j_end]), line=head + j + 1)
    return problems


def shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Number of equal lines at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def changes(expected: Printed, start: int, end: int, found: str, *, line: int) -> Iterator[str]:
    """Compares token by token within a part of the expected text."""
    old = list(TOKEN.finditer(expected.text, start, end))
    new = list(TOKEN.finditer(found))
    matcher = SequenceMatcher(None, [m[0] for m in old], [m[0] for m in new], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        where = f"line {line + (found.count(chr(10), 0, new[j].start()) if j < len(new) else 0)}"
        changed = shown(found[new[j].start() : new[j_end - 1].end()]) if j_end > j else "nothing"
        if i_end == i:
            yield f"{where}: {changed} is in no fact of the study"
            continue
        first, last = old[i].start(), old[i_end - 1].end()
        ref = expected.reference_at(first, last)
        yield f"{where}: {changed} stands where {ref or 'the report'} says {shown(expected.text[first:last])}"


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


NARRATION = "narration"
"""Name of the decision that holds the narration."""


@dataclass(frozen=True)
class Report:
    """A report as text. `figures` are SVG by file, relative to the report."""

    html: Printed
    markdown: Printed
    figures: dict[str, str]


def build(log: StudyLog, out: Path) -> Path:
    """Writes `report.html`, which needs no other file, `report.md` and its `figures/` into the folder `out`.

    Returns the path of the HTML. Raises `ConfigError` if the log holds no study.
    """
    report = render(log)
    for name, text in {"report.html": report.html.text, "report.md": report.markdown.text, **report.figures}.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return out / "report.html"


def build_all(logs: Sequence[StudyLog], folder: Path) -> list[Path]:
    """Writes the report of a study into its folder, and those of its annexes into `annex-1`, `annex-2` and so on."""
    begun = [log for number, log in enumerate(logs) if log.study or not number]
    return [build(log, folder / f"annex-{number}" if number else folder) for number, log in enumerate(begun)]


def log_of(report: Path, logs: Sequence[StudyLog]) -> StudyLog:
    """Returns the log whose study id is in the report, or the study's log if none is."""
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    return next((log for log in logs if log.study and log.study.id in text), logs[0])


def check(path: Path, log: StudyLog) -> list[str]:
    """Returns the differences between a report and its log; empty if there are none.

    `path` is the HTML of a report, or its Markdown, which is checked with its figures.
    """
    if path.suffix not in (".html", ".md"):
        raise ConfigError(f"{path}: a report is a .html or a .md file; name one of these")
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a report that is there") from None
    report = render(log)
    if path.suffix == ".html":
        return compare(report.html, found)
    problems = compare(report.markdown, found)
    for name, drawing in report.figures.items():
        figure = path.parent / name
        if not figure.is_file():
            problems.append(f"{name}: is not beside the report; copy the report's figures along with it")
        elif figure.read_text(encoding="utf-8") != drawing:
            problems.append(f"{name}: differs from the study's figure, with this version of matplotlib")
    return problems


def narrate(log: StudyLog, prose: str) -> None:
    """Adds sentences to the report, once. Raises `ConfigError` with what the linter refuses.

    Numbers are written as references, `{{F1.estimate}}`; `facts_of` lists them all.
    """
    demand_clean(lint_narration(prose, facts_of(log)), "the narration")
    log.decide(NARRATION, prose)


def facts_of(log: StudyLog) -> Facts:
    return gather(StudyView(log))


def render(log: StudyLog) -> Report:
    view = StudyView(log)
    facts = gather(view)
    figures = draw(view, facts)
    narration = str(log.decisions.get(NARRATION, ""))
    demand_clean(lint_narration(narration, facts), "the journal's narration")
    prose = compose(facts, narration)
    demand_clean(lint(prose, facts), "the template's prose")
    return Report(page(prose, facts, figures), fill(prose, facts, as_markdown), figures)


def draw(view: StudyView, facts: Facts) -> dict[str, str]:
    """Draws the figures that have content, by file, and adds them to the facts as `figures`."""
    from agentjet.research.report.figures import effects_figure, ledger_figure, styled, to_svg
    from agentjet.research.report.score_figures import curves_figure, scores_figure, tuning_figure

    drawn: dict[str, str] = {}
    shown: dict[str, Fact] = {}
    with styled():
        for name, alt, figure in (
            ("effects", "Estimate and interval of each claim", effects_figure(view)),
            ("curves", "Score along the run, by arm", curves_figure(view)),
            ("scores", "Final scores of every confirming run, by arm", scores_figure(view)),
            ("tuning", "Scores while tuning, by the value of the knob", tuning_figure(view)),
            ("ledger", "Cost in full runs, beside the whole grid", ledger_figure(view, facts)),
        ):
            if figure is not None:
                drawn[f"figures/{name}.svg"] = to_svg(figure)
                shown[name] = Fact(alt, f"figures/{name}.svg", kind="figure")
    missing: Group = dict.fromkeys(("effects", "curves", "scores", "tuning", "ledger"))
    facts.groups["figures"] = missing | facts.group("figures", shown)
    return drawn
