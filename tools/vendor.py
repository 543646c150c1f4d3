"""Fetches the JavaScript libraries of the page with `npm pack` and writes them to `src/agentjet/page/vendor`.

For maintainers: `python tools/vendor.py` fetches the versions of `LIBRARIES`. Neither an installation nor a test needs
Node. `MANIFEST.toml` then lists version, licence and SHA-256 of each file; `tests/page/test_vendor.py` compares them.
Imports become relative, because an import map in the page would be an inline script.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "agentjet" / "page" / "vendor"
RELATIVE = {
    "preact": "./preact.js",
    "preact/hooks": "./hooks.js",
    "@preact/signals-core": "./signals-core.js",
}


@dataclass(frozen=True)
class Library:
    """An npm package: the files to take, by the names they get here."""

    name: str
    version: str
    licence: str
    files: dict[str, str]


LIBRARIES = (
    Library("preact", "11.2.0", "MIT", {"preact.js": "dist/preact.mjs", "hooks.js": "hooks/dist/hooks.mjs"}),
    Library("@preact/signals-core", "1.14.5", "MIT", {"signals-core.js": "dist/signals-core.module.js"}),
    Library("@preact/signals", "2.11.4", "MIT", {"signals.js": "dist/signals.module.js"}),
    Library("htm", "3.1.1", "Apache-2.0", {"htm.js": "dist/htm.module.js"}),
)


def fetch(library: Library, folder: Path) -> tarfile.TarFile:
    """Downloads a package as npm would install it."""
    packed = subprocess.run(
        ["npm", "pack", "--silent", f"{library.name}@{library.version}"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return tarfile.open(folder / packed.stdout.split()[-1])


def read(package: tarfile.TarFile, name: str) -> str:
    """Returns a file of a package."""
    file = package.extractfile(f"package/{name}")
    assert file is not None, name
    return file.read().decode()


def as_module(text: str) -> str:
    """Returns the script with relative imports, without a source map."""
    text = re.sub(r"\n?//# sourceMappingURL=\S+\s*$", "", text)
    text = re.sub(r'(from\s*)"([^"]+)"', lambda found: f'{found[1]}"{RELATIVE[found[2]]}"', text)
    return text + "\n"


def main() -> None:
    """Writes the files, their licences and the manifest."""
    VENDOR.mkdir(parents=True, exist_ok=True)
    manifest, licences = ["# Written by tools/vendor.py. Do not edit the files listed here.\n"], []
    with tempfile.TemporaryDirectory() as temporary:
        for library in LIBRARIES:
            with fetch(library, Path(temporary)) as package:
                manifest += ["\n[[library]]\n", f'name = "{library.name}"\n', f'version = "{library.version}"\n']
                manifest += [f'licence = "{library.licence}"\n', "\n[library.sha256]\n"]
                for name, source in library.files.items():
                    text = as_module(read(package, source))
                    (VENDOR / name).write_text(text, encoding="utf-8")
                    manifest.append(f'"{name}" = "{hashlib.sha256(text.encode()).hexdigest()}"\n')
                licences.append(f"{library.name} {library.version}\n\n{read(package, 'LICENSE').strip()}\n")
    (VENDOR / "MANIFEST.toml").write_text("".join(manifest), encoding="utf-8")
    (VENDOR / "LICENSES.txt").write_text(("\n" + "-" * 80 + "\n\n").join(licences), encoding="utf-8")


if __name__ == "__main__":
    main()
