"""The tables of docs/models.md, made of models and completions: `python -m tests.model_page` writes them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from agentjet.compute.model import WITHOUT_OUT_PROJ
from agentjet.rendering import Renderer
from tests.compute.architectures import EVERY, make_architecture
from tests.compute.conftest import make_policy
from tests.rendering.families import ENTRIES, FAMILIES, model_info, separates_reasoning, tools_of

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
FAMILY, ARCHITECTURE = "| family | architecture |", "| architecture | class |"
"""How the header of each table begins."""


def architecture_row(kind: str, folder: Path) -> str:
    """Returns the row of an architecture, whose tiny model is written to the folder and loaded with an adapter."""
    policy = make_policy(make_architecture(folder, kind), rank=2)
    base = cast(Any, policy.model).get_base_model()
    cells = ["yes" if shares else "no" for shares in (policy.learns_forests, policy.info.shares_prefixes)]
    without = ["`out_proj`"] if policy.config.model_type in WITHOUT_OUT_PROJ else []
    routed = [part for name, part in base.named_modules() if name.endswith("experts")]
    if any(parameter.ndim == 3 for part in routed for parameter in part.parameters(recurse=False)):
        without.append("experts")
    adapters = "all but " + " and ".join(without) if without else "all"
    return _row(kind, f"`{type(base).__name__}`", *cells, adapters)


def family_rows(page: str) -> list[str]:
    """Returns the rows of all families. Their trees are those of the page's rows of architectures."""
    trees = {line.split(" | ")[0].strip("| "): line.split(" | ")[2:4] for line in rows_of(page, ARCHITECTURE)}
    with tempfile.TemporaryDirectory() as folder:
        renderers = {name: Renderer(model_info(Path(folder) / name, name)) for name in ENTRIES}
        cells = {name: _cells(renderer) for name, renderer in renderers.items()}
    return [
        _row(family, about["architecture"], *trees.get(about["architecture"], ("", "")), *cells[about["template"]])
        for family, about in FAMILIES.items()
    ]


def _cells(renderer: Renderer) -> tuple[str, str]:
    style, separates = ENTRIES[renderer.model.name]["reasoning"], separates_reasoning(renderer)
    found = tools_of(renderer)
    tools = {"work": f"yes: `{renderer.model.tool_format}`", "wrong": "some calls", "silent": "offered, not read"}
    reasoning = f"yes: `{(style['open'] or style['close']).strip()}`" if style else "none"
    return tools.get(found, found), "in the answer" if separates is False else reasoning


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def rows_of(page: str, header: str) -> list[str]:
    """Returns the rows of the table whose header begins so."""
    table = page[page.index(header) :].split("\n\n")[0].strip()
    return table.splitlines()[2:]


def with_rows(page: str, header: str, rows: Iterable[str]) -> str:
    """Returns the page with other rows in a table."""
    old: Sequence[str] = rows_of(page, header)
    return page.replace("\n".join(old), "\n".join(rows)) if old else re.sub(
        rf"({re.escape(header)}.*\n\|[-|]+\|\n)", lambda found: found[1] + "\n".join(rows) + "\n", page
    )  # fmt: skip


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        page = with_rows(page, ARCHITECTURE, [architecture_row(kind, Path(folder) / kind) for kind in EVERY])
    PAGE.write_text(with_rows(page, FAMILY, family_rows(page)), encoding="utf-8")


if __name__ == "__main__":
    main()
