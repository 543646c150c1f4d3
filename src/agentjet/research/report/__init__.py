"""The report of a study: one facts object, and one template for its Markdown and its HTML.

    log ─► StudyView ─► facts ─► report.md ─► report.html      the same facts are the page's, and facts.json
                          └────► figures (SVG)

The same facts give the same bytes, so no library draws the figures. Text is escaped where it is printed, so it cannot
form markup. The HTML is one file without scripts. `research.campaign.report` prints the facts of a campaign in the same
way.
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

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog, write_whole
from agentjet.research.models import Study
from agentjet.research.report.facts import Facts, StudyView, gather
from agentjet.research.scheduler import estimate_cost
from agentjet.types import beginning

# ---- figures ---------------------------------------------------------------------------------------------------------

WIDTH, LEFT, ROW = 860, 240, 46
"""In pixels: the figure, its column of names, and a row."""
COLOURS = ("#0072b2", "#c45100", "#008a63", "#b8578d", "#8a6d00", "#4b5fb3")
"""Near those of Okabe and Ito (2008), which most colour-blind people can distinguish."""
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#22303c}.soft{fill:#5b6975}.line{stroke:#d9dfe4}.band{fill:#eaeef1}
@media (prefers-color-scheme:dark){text{fill:#e3e9ee}.soft{fill:#9fadb9}.line{stroke:#36424d}.band{fill:#26323c}}
</style>"""
FARTHEST = 3.0
"""A point farther from the middle half than this many times its width is drawn at the margin."""


def svg(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}">{STYLE}\n{body}\n</svg>\n'


def label(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {look}>{escape(text)}</text>'


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A function from values to pixels. Values outside are at the margin."""
    width = (high - low) or 1.0
    return lambda value: start + (end - start) * min(1.0, max(0.0, (value - low) / width))


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Range of the values without those far from the middle half."""
    low, high = np.quantile(values, [0.25, 0.75])
    room = FARTHEST * (high - low) or max(1e-9, 0.1 * abs(high))
    inside = [value for value in values if low - room <= value <= high + room]
    margin = 0.06 * (max(inside) - min(inside)) or room
    return min(inside) - margin, max(inside) + margin


def effects(findings: Sequence[Mapping[str, Any]], sesoi: float) -> str:
    """Estimates with intervals over the band of differences that do not matter; empty without any."""
    rows = [found for found in findings if found["estimate"] is not None]
    if not rows:
        return ""
    reach = 1.1 * max(1.2 * sesoi, *(abs(row[end]) for row in rows for end in ("low", "high")))
    at, height = scale(-reach, reach, LEFT, WIDTH - 170), ROW * len(rows) + 30
    parts = [
        f'<rect class="band" x="{at(-sesoi):.1f}" y="20" width="{at(sesoi) - at(-sesoi):.1f}" height="{height - 20}"/>',
        f'<path class="line" d="M{at(0):.1f} 20V{height}"/>',
        label(at(0), 13, f"± {sesoi:g} does not matter", 'class="soft"', "middle"),
    ]
    for number, row in enumerate(rows):
        y, (low, middle, high) = 20 + ROW * (number + 0.5), (at(row[n]) for n in ("low", "estimate", "high"))
        interval = f"{row['estimate']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})"
        parts += [
            label(0, y + 4, beginning(row["claim"], 34)),
            f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{COLOURS[0]}" stroke-width="3"/>',
            f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="{COLOURS[0]}"/>',
            label(WIDTH - 160, y - 3, row["verdict"].replace("_", " "), 'font-weight="bold"'),
            label(WIDTH - 160, y + 13, interval, 'font-size="11"'),
        ]
    return svg(height, parts)


def curves(named: Sequence[tuple[str, Sequence[Sequence[float]]]], steps: Sequence[int] = ()) -> str:
    """A thick line for the mean of the curves of a name, and a thin one for each. Empty without a curve.

    `steps` are those of the longest curve; without them values are numbered.
    """
    every = [curve for _, found in named for curve in found]
    longest = max(map(len, every), default=0)
    if longest < 2:
        return ""
    steps = steps if len(steps) == longest else range(1, longest + 1)
    low, high = usual_range([value for curve in every for value in curve])
    x, y = scale(steps[0], steps[-1], 60, WIDTH - 190), scale(high, low, 10, 270)
    parts = [f'<path class="line" d="M60 {y(value):.1f}H{WIDTH - 190}"/>' for value in (low, high)]
    parts += [label(54, y(value) + 4, f"{value:.3g}", 'class="soft"', "end") for value in (low, high)]
    parts += [label(x(step), 290, str(step), 'class="soft"', "middle") for step in (steps[0], steps[-1])]
    for number, (name, found) in enumerate(named):
        colour = COLOURS[number % len(COLOURS)]
        means = [float(np.mean([c[i] for c in found if len(c) > i])) for i in range(max(map(len, found), default=0))]
        for curve, width in (*((one, 0.7) for one in found), (means, 3)):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, curve, strict=False))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(label(WIDTH - 180, 20 + 20 * number, beginning(name, 24), f'style="fill:{colour}"'))
    return svg(300, parts)


# ---- documents -------------------------------------------------------------------------------------------------------

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
