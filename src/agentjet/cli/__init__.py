"""Options and output that the commands share, and the examples that commands run.

`demo`, `eval` and `research demo` run code from `examples/`. The wheel has copies of those folders in
`agentjet/examples/` (`pyproject.toml`); an editable install uses the repository's own.
"""

from __future__ import annotations

import importlib
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import agentjet
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.client import Retry, Swarm

Url = Annotated[
    str | None,
    typer.Option("--url", help="Address of the server, or ADDRESS/runs/NAME; default: AGENTJET_URL, then port 8400."),
]
Token = Annotated[str | None, typer.Option("--token", help="The server's token; default: AGENTJET_TOKEN.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="File with the token: `token` in the server's data dir.")
]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.SETTING=VALUE", help="Override a setting of the server; can be repeated."),
]
Run = Annotated[str, typer.Option("--run", metavar="NAME", help="A run of the data dir.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]

JOINERS = "\u200c\u200d"
"""Invisible characters that join letters and emoji."""


def connect(
    url: str | None,
    token: str | None,
    token_file: Path | None,
    *,
    client_id: str | None = None,
    retry: Retry | None = None,
) -> Swarm:
    """A client of the server that the options name. Raises `ConfigError` if the token file cannot be read."""
    from agentjet.client import Swarm

    # Each command is a separate process.
    return Swarm(url, read_token(token, token_file), client_id=client_id, instance_id="", retry=retry)


def read_token(token: str | None, token_file: Path | None) -> str | None:
    """The token that the options give, if any. Raises `ConfigError` if the file cannot be read."""
    if token_file is None:
        return token
    if token is not None:
        raise ConfigError("--token and --token-file exclude each other")
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"--token-file {token_file}: {error.strerror}") from None


def example(name: str) -> Path:
    """The folder of an example: the wheel's copy, otherwise `examples/` of the repository. Raises `ConfigError`."""
    package = Path(agentjet.__file__).parent
    places = [package / "examples" / name, package.parents[1] / "examples" / name]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"the example {name!r} is missing; expected {places[0]}: install the package again")


def load_example(name: str, module: str) -> Any:
    """A module of an example, imported as part of the package `agentjet_example_NAME`."""
    package = f"agentjet_example_{name}"
    if package not in sys.modules:
        folder = ModuleType(package)
        folder.__path__ = [str(example(name))]
        sys.modules[package] = folder
    return importlib.import_module(f"{package}.{module}")


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """A name in a new hidden folder for a file or folder, which becomes `path` at the end. An error removes it.

    Raises `ConfigError` if `path` exists or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists: move it away, or give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as folder:
            unfinished = Path(folder, path.name)
            yield unfinished
            unfinished.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def print_text(text: str) -> None:
    """Prints one or more lines; escapes control sequences in ids, names, reasons and sampled tokens.

    JSON output does not need this: JSON escapes them itself.
    """
    typer.echo(printable(text))


def printable(text: str, *, keep: str = "\n\t") -> str:
    """`text` in which characters that control a terminal or reverse its text are escaped as Python does.

    Control characters in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if _controls_terminal(c) and c not in keep else c for c in text)


def one_line(text: str) -> str:
    """`printable` text without line breaks."""
    return printable(text, keep="")


def _controls_terminal(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in JOINERS
