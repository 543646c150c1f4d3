"""Gathers the pages of the documentation site for Sphinx: `python docs/site/gather.py FOLDER`. `make site` runs both.

The site has the pages that one reads on GitHub, with the same relative paths, and three that are made from the program.
`index.md` names those of the sidebar, at most 30, and `BELOW` those below one of these. Each page is named once.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")

BELOW = {
    "examples/README.md": ("examples/*/README.md",),
    "docs/which-recipe.md": ("docs/warm-starts.md",),
    "docs/research.md": ("docs/campaigns.md", "docs/studies/README.md"),
    "docs/studies/README.md": ("docs/studies/*/*.md",),
    "docs/dialects.md": ("docs/constraints.md", "docs/compatibility.md"),
    "docs/architecture.md": ("docs/timelines.md",),
    "docs/cluster.md": ("docs/scaling.md",),
    "CONTRIBUTING.md": ("CHANGELOG.md", "docs/log.md"),
}
"""Patterns of the pages below a page of the sidebar. GitHub shows no such lists, so the copies get them."""


def below(page: str) -> list[Path]:
    """Returns the pages below a page, relative to the repository."""
    return [path.relative_to(ROOT) for pattern in BELOW[page] for path in sorted(ROOT.glob(pattern))]


def pages() -> list[Path]:
    """Returns the pages for readers, relative to the repository."""
    patterns = ("*.md", "docs/*.md", "docs/studies/**/*.md", "examples/*.md", "examples/*/*.md")
    return sorted({path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)})


def gather(folder: Path) -> None:
    """Copies the pages, and the files that they link to, into an empty folder. Writes the other pages."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages():
        _copy(page, folder)
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            linked = (ROOT / page.parent / target).resolve()
            if "://" not in target and linked.is_file() and linked.suffix != ".md":
                _copy(linked.relative_to(ROOT), folder)
    for page in BELOW:
        lines = "".join(f"/{path.with_suffix('')}\n" for path in below(page))
        with (folder / page).open("a", encoding="utf-8") as copy:
            copy.write(f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{lines}```\n")
    for name, place in (("conf.py", "."), ("index.md", "."), ("python.md", "reference")):
        (folder / place).mkdir(exist_ok=True)
        shutil.copy2(SITE / name, folder / place)
    from reference import commands_page, http_page

    (folder / "reference" / "commands.md").write_text(commands_page(), encoding="utf-8")
    (folder / "reference" / "http.md").write_text(http_page(), encoding="utf-8")


def _copy(path: Path, folder: Path) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(ROOT / path, folder / path)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
