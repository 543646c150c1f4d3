"""The shared parts of the commands: options, output, progress, folders, and the examples that commands run.

`demo`, `eval` and `research demo` run code from `examples/`. The wheel has copies of those folders in
`agentjet/examples/` (`pyproject.toml`); an editable install uses the repository's own.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, get_type_hints

import typer
from typer import Option

import agentjet
from agentjet.errors import AgentJetError, ConfigError
from agentjet.types import JOURNAL, beginning

if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentjet.client import Retry, Swarm

    Answer = TypeVar("Answer", bound=BaseModel | Sequence[BaseModel])

# ---- options ---------------------------------------------------------------------------------------------------------

Token = Annotated[str | None, Option("--token", help="The server's token; default: AGENTJET_TOKEN.")]
TokenFile = Annotated[
    Path | None, Option("--token-file", help="File with the token: `token` in the server's data dir.")
]
Override = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.SETTING=VALUE", help="Override a setting of the server; can be repeated."),
]
Config = Annotated[Path | None, Option("--config", "-c", help="Settings file (TOML).")]
Run = Annotated[str, Option("--run", metavar="NAME", help="A run of the data dir.")]
Policy = Annotated[str, Option("--policy", metavar="NAME", help="The policy, in a run that names its policies.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document, for programs.")]


@dataclass(frozen=True)
class Server:
    """The options that name a server and its token."""

    url: Annotated[
        str | None,
        Option("--url", help="Address of the server, or ADDRESS/runs/NAME; default: AGENTJET_URL, then port 8400."),
    ] = None
    token: Token = None
    token_file: TokenFile = None

    def read_token(self) -> str | None:
        """The token that the options give, if any. Raises `ConfigError` if the file cannot be read."""
        if self.token_file is None:
            return self.token
        if self.token is not None:
            raise ConfigError("--token and --token-file exclude each other")
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--token-file {self.token_file}: {error.strerror}") from None

    def connect(self, *, client_id: str | None = None, retry: Retry | None = None) -> Swarm:
        """Raises `ConfigError` if the address is malformed or the token file cannot be read."""
        from agentjet.client import Swarm

        # Each command is a separate process.
        return Swarm(self.url, self.read_token(), client_id=client_id, instance_id="", retry=retry)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that has, behind its own options, those of its parameters that are dataclasses: a `Server`."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    own = [one for name, one in signature(command).parameters.items() if name not in groups]
    options = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name]) for one in own
    ]
    for kind in groups.values():
        kinds = get_type_hints(kind, include_extras=True)
        options += [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
            for one in fields(kind)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        command(**given, **made)

    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


# ---- output ----------------------------------------------------------------------------------------------------------

JOINERS = "\u200c\u200d"
"""Invisible characters that join letters and emoji."""


def show(answer: Answer, as_json: bool, lines: Callable[[Answer], Iterable[str]]) -> None:
    """Prints one or more models of the API: as one JSON document, or as `lines` of text."""
    if not as_json:
        for line in lines(answer):
            print_text(line)
    elif isinstance(answer, Sequence):
        typer.echo(json.dumps([one.model_dump(mode="json") for one in answer], indent=2))
    else:
        typer.echo(answer.model_dump_json(indent=2))


def aligned(rows: Iterable[Sequence[str]], *, right: bool = False) -> list[str]:
    """Returns rows as lines with columns of one width. With `right`, all columns but the first are right-aligned."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<", *(">" if right else "<") * (len(widths) - 1)]
    each = [zip(row, sides, widths, strict=True) for row in cells]
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in row).rstrip() for row in each]


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


# ---- progress --------------------------------------------------------------------------------------------------------

PATIENCE = 2.0
"""Seconds before anything is shown."""
LOOK_SECONDS = 1.0
FILE_SECONDS = 10.0
"""Seconds between two lines in a file."""


class ProgressLine:
    """One line on standard error about work that takes long. Call `show` each second, and `clear` at the end.

    A terminal has the line in place, and it is removed at the end. A file gets a line now and then.
    """

    def __init__(self, out: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._is_terminal = self._out.isatty()
        self._begun = clock()
        self._printed = self._begun - FILE_SECONDS
        self._is_shown = False

    def show(self, text: str) -> None:
        """Shows a text, with the time so far unless the text has times. Nothing before `PATIENCE`."""
        from agentjet.protocol import duration

        now = self._clock()
        elapsed = now - self._begun
        if elapsed < PATIENCE or not text:
            return
        line = one_line(text if " so far" in text or " left" in text else f"{text}: {duration(elapsed)} so far")
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._is_shown = True
            self._write(f"\r\x1b[K{beginning(line, width)}")
        elif now - self._printed >= FILE_SECONDS:
            self._printed = now
            self._write(f"{line}\n")

    def clear(self) -> None:
        """Removes the line from a terminal."""
        if self._is_shown:
            self._is_shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # A closed terminal or a full disk must not end the work that is shown.
            self._out.write(text)
            self._out.flush()


@contextmanager
def progress(text: str, doing: Callable[[], str] = lambda: "", *, line: ProgressLine | None = None) -> Iterator[None]:
    """Context of work that may take long. `doing` returns a better text than `text`, or ''; a thread calls it."""
    shown, ended = line or ProgressLine(), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            found = doing() or text
            if not ended.is_set():
                shown.show(found)

    thread = threading.Thread(target=look, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LOOK_SECONDS)
        shown.clear()


def work_of(swarm: Swarm) -> Callable[[], str]:
    """Returns a function that returns what the engine of a server does, while it does slow work, else ''."""

    def doing() -> str:
        with suppress(AgentJetError):
            text = swarm.status().waiting_for
            return text if " so far" in text or " left" in text else ""
        return ""

    return doing


# ---- folders ---------------------------------------------------------------------------------------------------------


def run_folder(data_dir: Path, run: str) -> Path:
    """The folder of a run in a data dir. Raises `ConfigError`, and `InvalidRequest` for a wrong name."""
    from agentjet.protocol import check_run_name

    check_run_name(run)
    folder = data_dir / "runs" / run
    if (folder / JOURNAL).is_file():
        return folder
    if found := sorted(path.parent.name for path in data_dir.glob(f"runs/*/{JOURNAL}")):
        raise ConfigError(f"{str(data_dir)!r} has no run {run!r}; its runs are {', '.join(found)} (--run NAME)")
    what = f"it has no runs/{run}/{JOURNAL}" if data_dir.is_dir() else "there is no such folder"
    raise ConfigError(
        f"{str(data_dir)!r} is not a data dir of AgentJet: {what}. Name the folder that `agentjet serve` was given as "
        "--data-dir (agentjet-data by default)"
    )


def folder_of(place: Path, run: str) -> Path:
    """The folder of a run, from that folder or from its data dir. Raises as `run_folder` does."""
    return place if (place / JOURNAL).is_file() else run_folder(place, run)


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
