"""Fetches the JavaScript libraries of the page with npm, and joins them with esbuild as `page/vendor/ui.js`.

For maintainers: `python tools/vendor.py` fetches the versions of `LIBRARIES`. Neither an installation nor a test needs
Node. `MANIFEST.toml` then lists versions, licences and SHA-256; `tests/page/test_sources.py` compares them.

`python tools/vendor.py --join FOLDER` joins the modules of a copy of the page: one file for each view, and what they
share. `make wheel` does this where npx is installed. From a checkout the page has plain modules.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "agentjet" / "page" / "vendor"
LIBRARIES = {
    "preact": ("11.2.0", "MIT"),
    "@preact/signals-core": ("1.14.5", "MIT"),
    "@preact/signals": ("2.11.4", "MIT"),
    "htm": ("3.1.1", "Apache-2.0"),
    "uplot": ("1.6.32", "MIT"),
}
ESBUILD = "0.28.2"
EXPORTS = """
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
export { h, render, Fragment, createContext } from "preact";
export {
  useCallback, useContext, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "preact/hooks";
export { batch, computed, effect, signal, untracked, useComputed, useSignal, useSignalEffect } from "@preact/signals";
export { default as uPlot } from "uplot";
"""
"""The names that the page imports."""


def run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True)


def join(page: Path) -> None:
    """Replaces the modules of a copy of the page. `filters.js` is made by the server, so it stays apart."""
    entries = ["app.js", "first.js", *(path.relative_to(page).as_posix() for path in sorted(page.glob("views/*.js")))]
    options = ["--bundle", "--splitting", "--minify", "--format=esm", "--external:*/filters.js", "--outdir=joined"]
    run(["npx", "--yes", f"esbuild@{ESBUILD}", *entries, *options], page)
    for path in (path for path in page.rglob("*.js") if page / "joined" not in path.parents):
        path.unlink()
    shutil.copytree(page / "joined", page, dirs_exist_ok=True)
    shutil.rmtree(page / "joined")


def vendor() -> None:
    """Writes the file, the style sheet of uPlot, the licences and the manifest."""
    for path in VENDOR.iterdir():
        path.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packages = [f"{name}@{version}" for name, (version, _) in LIBRARIES.items()]
        run(["npm", "install", "--no-fund", "--no-audit", *packages, f"esbuild@{ESBUILD}"], folder)
        (folder / "ui.js").write_text(EXPORTS, encoding="utf-8")
        run(
            ["npx", "esbuild", "ui.js", "--bundle", "--minify", "--format=esm", f"--outfile={VENDOR / 'ui.js'}"],
            folder,
        )
        modules = folder / "node_modules"
        style = (modules / "uplot/dist/uPlot.min.css").read_text(encoding="utf-8")
        (VENDOR / "uplot.css").write_text(f"{style.strip()}\n", encoding="utf-8")
        texts = {name: (modules / name / "LICENSE").read_text(encoding="utf-8").strip() for name in LIBRARIES}
    manifest = ["# Written by tools/vendor.py. Do not edit the files listed here.\n\n[sha256]\n"]
    for name in ("ui.js", "uplot.css"):
        manifest.append(f'"{name}" = "{hashlib.sha256((VENDOR / name).read_bytes()).hexdigest()}"\n')
    for name, (version, licence) in LIBRARIES.items():
        manifest.append(f'\n[[library]]\nname = "{name}"\nversion = "{version}"\nlicence = "{licence}"\n')
    (VENDOR / "MANIFEST.toml").write_text("".join(manifest), encoding="utf-8")
    licences = [f"{name} {version}\n\n{texts[name]}\n" for name, (version, _) in LIBRARIES.items()]
    (VENDOR / "LICENSES.txt").write_text(("\n" + "-" * 80 + "\n\n").join(licences), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--join", type=Path, metavar="FOLDER")
    folder = parser.parse_args().join
    join(folder) if folder else vendor()
