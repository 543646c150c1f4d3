"""The files of the page, without a browser.

1. No file makes HTML or code from text, and nothing has an inline style or script: the policy would block it.
2. Files are small, and all of them together fit into 350 kB, 115 kB compressed.
3. The vendored libraries are those of the manifest, byte by byte.
4. Nothing names another origin.
5. A class has its rules in one style sheet.
"""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentjet.server.app import FILTERS, IMPORT, MEDIA_TYPES, PAGE_FOLDER, Page

VENDOR = PAGE_FOLDER / "vendor"
MANIFEST = tomllib.loads((VENDOR / "MANIFEST.toml").read_text(encoding="utf-8"))
VENDORED = MANIFEST["sha256"]
OWN = [
    path for path in sorted(PAGE_FOLDER.rglob("*")) if path.suffix in MEDIA_TYPES and path.name not in VENDORED
]  # fmt: skip
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|DOMParser|createContextualFragment|"
    r"srcdoc|\beval\(|new Function|setAttribute\(\s*[\"']style|style=[\"']|style=\$\{`|\son[a-z]+=[\"']|javascript:|"
    r"https?://(?!www\.w3\.org/2000/svg)"
)
MAX_LINES, MAX_VIEW_LINES = 500, 300
MAX_BYTES, MAX_COMPRESSED = 350_000, 115_000


@pytest.mark.parametrize("path", OWN, ids=[str(path.relative_to(PAGE_FOLDER)) for path in OWN])
def test_a_file_is_small_and_makes_nothing_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [found[0] for found in FORBIDDEN.finditer(text)] == []
    assert len(text.splitlines()) <= (MAX_VIEW_LINES if path.parent.name == "views" else MAX_LINES)
    if path.suffix == ".html":
        assert not re.search(r"<style|<script(?![^>]*\ssrc=)", text)


def test_all_files_together_are_small() -> None:
    page = Page()
    files = [*page.files.values(), page.index]
    assert sum(len(file.content) for file in files) <= MAX_BYTES
    assert sum(len(gzip.compress(file.content, 9)) for file in files) <= MAX_COMPRESSED


def test_vendored_libraries_are_those_of_the_manifest() -> None:
    licences = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    assert all(f"{library['name']} {library['version']}" in licences for library in MANIFEST["library"])
    found = {path.name for path in VENDOR.iterdir()} - {"MANIFEST.toml", "LICENSES.txt"}
    assert found == set(VENDORED)
    for name, digest in VENDORED.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name


def test_every_import_names_a_file_of_the_page() -> None:
    for path in OWN:
        for name in re.findall(r'(?:from|import)\s*\(?"(\.[^"]+)"', path.read_text(encoding="utf-8")):
            file = (path.parent / name).resolve()
            assert file.is_file() or file.name == FILTERS, f"{path.relative_to(PAGE_FOLDER)} imports {name}"


def test_a_class_has_its_rules_in_one_style_sheet() -> None:
    """Style sheets become one file, where a later rule of the same name would change another view."""
    found: dict[str, set[str]] = {}
    for path in sorted((PAGE_FOLDER / "style").glob("*.css")):
        for name in re.findall(r"^\.([\w-]+)(?= \{|,)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, set()).add(path.name)
    assert {name: sheets for name, sheets in found.items() if len(sheets) > 1} == {}


@pytest.mark.thorough
@pytest.mark.needs("node")
def test_the_page_of_a_wheel_has_its_modules_joined(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PAGE_FOLDER, tmp_path / "page"))
    subprocess.run([sys.executable, PAGE_FOLDER.parents[2] / "tools" / "vendor.py", "--join", folder], check=True)
    joined = Page(folder)
    assert len(joined.files) < len(Page().files) and not any(name.startswith("parts/") for name in joined.files)
    for name, file in joined.files.items():
        for path in IMPORT.findall(file.content.decode()) if name.endswith(".js") else []:
            assert posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) in joined.files, name
