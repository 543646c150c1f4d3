"""`report.html`: what a demo run did, on one page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from agentjet.cli.arithmetic import held_out_tasks
from agentjet.cli.arithmetic.agent import is_right
from agentjet.cli.scoring import Score

NUM_EXAMPLES = 12

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>AgentJet: the demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #22303c; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #d7dde2; vertical-align: top; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.right {{ color: #1b7f5c; font-weight: 600; }} code {{ background: #f2f4f6; padding: .1rem .3rem; }}
</style>
<h1>{model} learned to add in {minutes}</h1>
<p>Success on {tasks} held-out sums, first answers only, sampled at temperature 1:
<strong>{before:.1%}</strong> before, <strong>{after:.1%}</strong> after {steps} batches.</p>
<img alt="Reward of each batch, and held-out success before and after" src="data:image/png;base64,{picture}">
<h2>Held-out evaluation</h2>
<table><tr><th><th>before<th>after{scores}</table>
<h2>What the model answered</h2>
<table><tr><th>task<th>before<th>after{examples}</table>
<h2>The run</h2>
<table>{facts}</table>
</html>
"""


def write_report(path: Path, model: str, result: Mapping[str, Any], before: Score, after: Score, picture: Path) -> None:
    """Write the page. `result` is what `result.json` holds."""
    facts = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
    facts |= {f"seconds: {phase}": seconds for phase, seconds in result["timings"].items()}
    page = PAGE.format(
        model=escape(model),
        minutes=f"{result['seconds'] / 60:.1f} minutes",
        tasks=after.tasks,
        before=before.success,
        after=after.success,
        steps=result["steps"],
        picture=base64.b64encode(picture.read_bytes()).decode(),
        scores=_rows(
            [
                (
                    "right",
                    _share(before.success, before.success_interval),
                    _share(after.success, after.success_interval),
                ),
                (
                    "well formed",
                    _share(before.well_formed, before.well_formed_interval),
                    _share(after.well_formed, after.well_formed_interval),
                ),
            ]
        ),
        examples=_examples(before, after),
        facts=_rows([(key, _number(value)) for key, value in facts.items()]),
    )
    path.write_text(page, encoding="utf-8")


def _examples(before: Score, after: Score) -> str:
    rows = []
    for task in held_out_tasks(min(NUM_EXAMPLES, after.tasks)):
        a, b = task.payload
        cells = [
            f'<td class="right">{escape(answer)}' if is_right(answer, a, b) else f"<td>{escape(answer)}"
            for answer in (before.answers[task.id], after.answers[task.id])
        ]
        rows.append(f"<tr><td>{a} + {b}{''.join(cells)}")
    return "\n".join(rows)


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)


def _share(share: float, interval: tuple[float, float]) -> str:
    return f"{share:.1%} (95 % interval {interval[0]:.1%} to {interval[1]:.1%})"


def _number(value: Any) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
