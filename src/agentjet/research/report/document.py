"""Documents of studies and campaigns: facts in a template, as Markdown, and as one HTML file without scripts.

The same facts give the same bytes. Text is escaped where it is printed, so it cannot form markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog, write_whole
from agentjet.research.models import Study
from agentjet.research.report.facts import Facts, gather
from agentjet.research.report.figures import curves, effects
from agentjet.research.report.view import StudyView
from agentjet.research.scheduler import estimate_cost

TEMPLATES = Path(__file__).parent / "templates"
MARKUP = re.compile(r"([\\`*<>|\[\]#&]|(?<!\w)_|_(?!\w))")
FIGURE = re.compile(r'<img src="figures/(\w+)\.svg" alt="([^"]*)" />')
NOTHING = "–"
MOST_PROBLEMS = 20
LONGEST = 80
"""Maximum characters of a line in a message."""


class Code(str):
    """Text for a code span or a code block. It is printed as it is."""


def number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:{form}}"


FILTERS: Mapping[str, Callable[..., Any]] = {
    "code": lambda value: Code(" ".join(str(value).replace("`", "'").split())),
    "block": lambda value: Code(str(value)[:4000].replace("```", "'''")),
    "number": number,
    "signed": lambda value: number(value, "+.3g"),
    "p": lambda value: NOTHING if value is None else "< 0.0001" if value < 1e-4 else f"{value:.2g}",
    "share": lambda value: f"{100 * value:.3g} %",
    "shares": lambda values: ", ".join(f"{100 * value:.3g} %" for value in values),
    "words": lambda value: str(value).replace("_", " "),
}


@cache
def templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        finalize=printed,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= FILTERS
    return environment


def printed(value: object) -> str:
    """The text of a value in one line that forms no markup."""
    return value if isinstance(value, Code) else MARKUP.sub(r"\\\1", " ".join(str(value).split()) or NOTHING)


def markdown(template: str, facts: Facts) -> str:
    text = templates().get_template(template).render(facts)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html(text: str, drawings: Mapping[str, str]) -> str:
    """The page of a report. `drawings` are SVG by name."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    body = parser.render(text).replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = FIGURE.sub(
        lambda image: f'<span class="figure" role="img" aria-label="{image[2]}">{drawings[image[1]]}</span>', body
    )
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    title = escape(text.splitlines()[0].removeprefix("# ").replace("\\", ""))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def files_of(template: str, facts: Facts, drawings: Mapping[str, str]) -> dict[str, str]:
    """Files of a report by name."""
    text = markdown(template, {**facts, "figures": drawings})
    return {
        "report.html": html(text, drawings),
        "report.md": text,
        "facts.json": json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        **{f"figures/{name}.svg": drawing for name, drawing in drawings.items() if drawing},
    }


def write_files(files: Mapping[str, str], out: Path) -> Path:
    """Writes the files of a report into a folder. Returns the path of the HTML."""
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
    return out / "report.html"


# ---- studies --------------------------------------------------------------------------------------------------------


def render(log: StudyLog) -> dict[str, str]:
    """Files of a study's report by name. Raises `ConfigError` if the log holds no study."""
    facts = gather(StudyView(log))
    trials = {one["name"]: one["curve"] for one in facts["trials"]}
    along = [(arm["name"], [trials[name] for name in arm["runs"] if trials[name]]) for arm in facts["arms"]]
    drawings = {
        "effects": effects(facts["findings"], facts["study"]["sesoi"]),
        "curves": curves(along, facts["evaluation_steps"]),
    }
    return files_of("study.md.jinja", facts, drawings)


def plan_page(study: Study) -> str:
    """The page of a study before its data."""
    log = StudyLog()
    log.open_study(study)
    return markdown("study.md.jinja", {**gather(StudyView(log)), "cost": estimate_cost(study), "figures": {}})


def build(log: StudyLog, out: Path) -> Path:
    """Writes the files of the report into the folder `out`. Returns the path of the HTML."""
    return write_files(render(log), out)


def check(path: Path, log: StudyLog) -> list[str]:
    """Returns the lines in which a file of a report differs from its journal, a sentence each."""
    kinds = {".html": "report.html", ".md": "report.md", ".json": "facts.json"}
    if path.suffix not in kinds:
        raise ConfigError(f"{path}: a report is a .html, .md or .json file; name one of these")
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a report that is there") from None
    lines: Sequence[tuple[str, str]] = [
        *zip_longest(render(log)[kinds[path.suffix]].splitlines(), found.splitlines(), fillvalue="")
    ]
    return [
        f"line {number}: {there[:LONGEST]!r} stands where the journal gives {line[:LONGEST]!r}"
        for number, (line, there) in enumerate(lines, start=1)
        if line != there
    ][:MOST_PROBLEMS]
