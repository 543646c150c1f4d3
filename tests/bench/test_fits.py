"""The table of docs/cluster.md is that of the arithmetic of `agentjet doctor`."""

from __future__ import annotations

from pathlib import Path

from bench.fits import table

PAGE = Path(__file__).parent.parent.parent / "docs" / "cluster.md"


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "write the output of `python -m bench.fits` into the page"
