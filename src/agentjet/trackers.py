"""Copies the steps of a run to trackers: TensorBoard, Weights & Biases, MLflow, Trackio, files, or a class of yours.

`open_tracker` finds the tracker of `--to KIND:TARGET`. A built-in kind is a function: the context in which a run is
open there. It imports its library itself, so this module needs none of them.

A `Follower` reads the steps from a `Source` and writes them to a `Tracker`, each step once, also after a kill at any
moment. It runs in a separate process, so a tracker that is slow, down or wrong cannot delay training. At its start it
asks the tracker which steps it has. Steps are written in rising order, so the newest version is enough. A `Cursor` is a
small file with the run of a tracker and its newest written version.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentjet.errors import AgentJetError, ConfigError, TrackerError, did_you_mean, failure, install_extra, nearest_name


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """The metrics of a learned batch."""

    version: int
    """The policy version after the step. Versions rise; a rollback never uses one again."""
    time: float
    """Unix seconds."""
    metrics: Mapping[str, float]
    """Finite values only."""

    @property
    def row(self) -> dict[str, float]:
        """The step as one line of `metrics.jsonl` has it."""
        return {"step": self.version, "time": self.time, **self.metrics}


@dataclass(frozen=True, slots=True)
class Run:
    """The run whose steps are copied."""

    id: str
    """Made from the first step, so it is the same from a server and from the files, on every machine."""
    name: str
    settings: Mapping[str, Any]
    """Settings by dotted name."""


def id_of_run(first: TrackedStep) -> str:
    """Identifies the run with this first step. A journal keeps its steps for ever."""
    facts = json.dumps([first.version, sorted(first.metrics.items())])
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


Written = tuple[int | None, Callable[[Sequence[TrackedStep]], None]]
"""The newest policy version that an opened tracker has, 0 if it has none, and the function that writes further steps.

The version is None if the tracker cannot be asked: then the newest step that was written counts. Steps are written in
rising order. They are stored when the function returns.
"""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker, or a file."""

    label: str
    """`KIND:TARGET`, or `module:Class`."""
    open: Callable[[Run], AbstractContextManager[Written]]
    """The context in which a run is open there. It may be opened again."""
    path: Path | None = None
    """The file or folder of this machine that it writes, which belongs to one run."""


class Sink(Protocol):
    """A tracker of yours: a class with these three methods, which is constructed without arguments.

    If it writes one file or folder of this machine, `path` is that path.
    """

    def begin(self, run: Run) -> int | None:
        """Opens the run in the tracker, or creates it.

        Returns the newest policy version that the tracker has, 0 if it has none. None if the tracker cannot be asked:
        then the newest version that `write` returned from counts.
        """

    def write(self, steps: Sequence[TrackedStep]) -> None:
        """Writes the steps, in rising order. They are stored when this returns."""

    def end(self) -> None:
        """Closes the run in the tracker. It may begin again."""


@contextmanager
def opened(sink: Sink, run: Run) -> Iterator[Written]:
    yield sink.begin(run), sink.write
    sink.end()


# ---- files: the file itself shows which steps it has ----------------------------------------------------------------


@contextmanager
def jsonl_file(target: str, run: Run) -> Iterator[Written]:
    """`jsonl:FILE`: one JSON object a step, as in `metrics.jsonl`."""
    path = Path(target)
    *_, newest = ["", *_complete_text(path).splitlines()]
    version = _version_of(path, lambda: json.loads(newest)["step"]) if newest else 0
    yield version, lambda steps: _append(path, "".join(json.dumps(step.row) + "\n" for step in steps))


@contextmanager
def csv_file(target: str, run: Run) -> Iterator[Written]:
    """`csv:FILE`: one row a step and one column a metric. A new metric adds a column: then the file is replaced."""
    path = Path(target)
    rows = _csv_rows(path)
    columns = next(rows, [])  # The header is complete, because a new one comes with a new file.
    if columns and columns[:2] != ["step", "time"]:
        raise ConfigError(f"{path} does not begin with the columns step and time: name another file")
    newest = deque(rows, maxlen=1)

    def write(steps: Sequence[TrackedStep]) -> None:
        known = set(columns)
        if new := dict.fromkeys(name for step in steps for name in step.row if name not in known):
            columns.extend(new)
            _replace_header(path, columns)
        _append(path, _csv_text(columns, (step.row for step in steps)))

    yield _version_of(path, lambda: int(newest[0][0])) if newest else 0, write


def _csv_rows(path: Path) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(_complete_text(path), newline=""))


def _csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _replace_header(path: Path, columns: Sequence[str]) -> None:
    """Replaces the file by one with these columns, of which it has the first ones."""
    rows = _csv_rows(path)
    before = next(rows, [])
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    header = _csv_text(columns, [dict(zip(columns, columns, strict=True))])
    _append(unfinished, header + _csv_text(columns, (dict(zip(before, row, strict=False)) for row in rows)))
    unfinished.replace(path)


def _complete_text(path: Path) -> str:
    """The text of a file, after the file was cut behind its last line break. Empty if there is no file."""
    try:
        with path.open("r+b") as file:
            text = file.read()
            end = text.rfind(b"\n") + 1
            file.truncate(end)
            return text[:end].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _version_of(path: Path, version: Callable[[], object]) -> int:
    """Returns the version of the last line of a file, which `version` reads. Raises `ConfigError`."""
    try:
        found = version()
    except (ValueError, LookupError, TypeError, RecursionError):
        found = None
    if isinstance(found, int) and found > 0:
        return found
    raise ConfigError(f"the last line of {path} is not a step: name another file, or remove this one")


def _append(path: Path, text: str) -> None:
    """Appends text. It is on disk when this returns."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# ---- TensorBoard ----------------------------------------------------------------------------------------------------


@contextmanager
def tensorboard(target: str, run: Run) -> Iterator[Written]:
    """`tensorboard:DIR`: event files, written by `tensorboardX`, which needs no torch. TensorBoard stores float32.

    A step is one record, so a killed process leaves it whole or not at all. Each process writes a new file, because
    TensorBoard reads a file only up to a torn record.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import text

    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("*.tfevents.*"))
    newest = max((event.step for file in files for event in tensorboard_events(file)), default=0)
    # The names of two processes of the same second differ by the number of files.
    writer = EventsWriter(str(folder / "events"), f".{len(files)}.agentjet")
    table = "\n".join(f"    {name} = {json.dumps(value)}" for name, value in run.settings.items())
    unwritten = [] if newest else [text("settings", f"    run {run.name} ({run.id})\n{table}")]

    def write(steps: Sequence[TrackedStep]) -> None:
        for step in steps:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=v) for name, v in step.metrics.items()])
            if unwritten:  # The first step of the run has its settings.
                summary.MergeFrom(unwritten.pop())
            writer.write_event(Event(wall_time=step.time, step=step.version, summary=summary))
        writer.flush()

    yield newest, write
    writer.close()


def tensorboard_events(file: Path) -> Iterator[Any]:
    """The complete records of an event file: length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content, start = file.read_bytes(), 0
    while start + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        end = start + 12 + length
        if end + 4 > len(content):
            return  # The last record is torn.
        try:
            yield Event.FromString(content[start + 12 : end])
        except Exception as error:  # protobuf's own class differs between its implementations.
            raise ConfigError(f"{file} is damaged ({error}): choose another folder") from None
        start = end + 4


# ---- MLflow ---------------------------------------------------------------------------------------------------------

RUN_TAG, VERSION_TAG = "agentjet.run", "agentjet.version"
METRICS_A_CALL, PARAMS_A_CALL = 1000, 100
"""Limits of MLflow."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000
FORBIDDEN = re.compile(r"[^/\w.\- :]", re.ASCII)


@contextmanager
def mlflow(target: str, run: Run) -> Iterator[Written]:
    """`mlflow:URI`: a tracking server, or a database such as `mlflow:sqlite:///mlflow.db`. Settings are parameters.

    MLflow ignores a metric that it has with the same key, step, time and value, so a step that was half written is
    written again as a whole. The tag `agentjet.version` follows the metrics.
    """
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=target)
    found = client.get_experiment_by_name("agentjet")
    experiment = found.experiment_id if found else client.create_experiment("agentjet")
    held = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
    mine = held[0] if held else client.create_run(experiment, tags={RUN_TAG: run.id}, run_name=run.name)
    run_id = mine.info.run_id
    client.update_run(run_id, status="RUNNING")
    values = ((mlflow_name(name), str(value)[:LONGEST_VALUE]) for name, value in run.settings.items())
    new = (Param(name, value) for name, value in values if name not in mine.data.params)
    while some := list(islice(new, PARAMS_A_CALL)):
        client.log_batch(run_id, params=some)

    def write(steps: Sequence[TrackedStep]) -> None:
        metrics = mlflow_metrics(steps)
        while some := list(islice(metrics, METRICS_A_CALL)):
            client.log_batch(run_id, metrics=some)
        client.set_tag(run_id, VERSION_TAG, str(steps[-1].version))

    yield int(mine.data.tags.get(VERSION_TAG, 0)), write
    client.set_terminated(run_id)


def mlflow_metrics(steps: Sequence[TrackedStep]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for step in steps:
        for name, value in step.metrics.items():
            yield Metric(mlflow_name(name), value, int(step.time * 1000), step.version)


def mlflow_name(name: str) -> str:
    """The name with the characters that MLflow allows. A changed one ends with a hash, so that two stay different."""
    allowed = FORBIDDEN.sub("_", name)[:LONGEST_NAME]
    if allowed == name:
        return name
    return f"{allowed[: LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


# ---- Trackio --------------------------------------------------------------------------------------------------------


@contextmanager
def trackio(target: str, run: Run) -> Iterator[Written]:
    """`trackio:PROJECT`: Trackio's database on this machine. `trackio sync` sends it to a Space.

    The rows are written as Trackio's own importers do, because `trackio.log` stores them later, in a thread. Each row
    has a key, so Trackio ignores a step that it has.
    """
    from trackio.sqlite_storage import SQLiteStorage

    def write(steps: Sequence[TrackedStep]) -> None:
        SQLiteStorage.bulk_log(
            target,
            run.name,
            [dict(step.metrics) for step in steps],
            steps=[step.version for step in steps],
            timestamps=[datetime.fromtimestamp(step.time, UTC).isoformat() for step in steps],
            config=dict(run.settings),
            log_ids=[f"agentjet-{run.id}-{step.version}" for step in steps],
            run_id=run.id,
        )

    SQLiteStorage.validate_project_name(target)
    yield SQLiteStorage.get_max_step_for_run(target, run.name, run_id=run.id) or 0, write


# ---- Weights & Biases -----------------------------------------------------------------------------------------------

FILE_HEADER, BLOCK, CHUNK_HEADER = 7, 32_768, 7
"""Bytes. A `.wandb` file has the format of LevelDB's log: blocks of chunks with checksum, length and type."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@contextmanager
def wandb(target: str, run: Run) -> Iterator[Written]:
    """`wandb:PROJECT` or `wandb:ENTITY/PROJECT`: Weights & Biases, online, or offline with WANDB_MODE=offline.

    The library writes and sends in a second process, so a kill loses steps that were given to it. Which ones arrived is
    asked at the next start: online from W&B, offline from the files of the run.
    """
    *entity, project = target.split("/")
    if len(entity) > 1 or not project:
        raise ConfigError(f"wandb:{target} is not wandb:PROJECT or wandb:ENTITY/PROJECT")
    import wandb as library

    # The folder of the run is named after the second. A killed process of this second has left one.
    time.sleep(1 - time.time() % 1)
    held = library.init(
        entity=entity[0] if entity else None,
        project=project,
        id=run.id,
        name=run.name,
        config=dict(run.settings),
        resume="allow",
        settings=library.Settings(console="off", x_disable_stats=True),  # The machine is not that of the training.
    )
    if held.offline:
        files = Path(held.settings.wandb_dir).glob(f"*run-*-{run.id}/run-{run.id}.wandb")
        newest = max((version for file in files for version in _wandb_versions(file)), default=0)
    else:
        newest = max(0, int(held.starting_step) - 1)

    def write(steps: Sequence[TrackedStep]) -> None:
        for step in steps:
            held.log({**step.metrics, "_timestamp": step.time}, step=step.version, commit=True)

    yield newest, write
    held.finish()


def _wandb_versions(file: Path) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    records = map(Record.FromString, wandb_records(file.read_bytes()))
    return (record.history.step.num for record in records if record.HasField("history"))


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The complete records of a `.wandb` file."""
    record, start = b"", FILE_HEADER
    while start + CHUNK_HEADER <= len(content):
        left = BLOCK - start % BLOCK
        if left < CHUNK_HEADER:  # Such a rest of a block is empty.
            start += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, start)
        end = start + CHUNK_HEADER + length
        if kind == 0 or end > len(content):
            return
        piece = content[start + CHUNK_HEADER : end]
        record = piece if kind in (FULL, FIRST) else record + piece
        if kind in (FULL, LAST):
            yield record
        start = end


# ---- the tracker of a label -----------------------------------------------------------------------------------------


class TrackerKind(NamedTuple):
    """A built-in kind: the name of the part behind the colon, the function, and the package that it imports."""

    target: str
    open: Callable[[str, Run], AbstractContextManager[Written]]
    package: str = ""


KINDS = {
    "tensorboard": TrackerKind("DIR", tensorboard, "tensorboardX"),
    "wandb": TrackerKind("PROJECT", wandb, "wandb"),
    "mlflow": TrackerKind("URI", mlflow, "mlflow"),
    "trackio": TrackerKind("PROJECT", trackio, "trackio"),
    "csv": TrackerKind("FILE", csv_file),
    "jsonl": TrackerKind("FILE", jsonl_file),
}
FORMS = ", ".join(f"{name}:{kind.target}" for name, kind in KINDS.items())


def open_tracker(label: str) -> Tracker:
    """Returns the tracker of `KIND:TARGET` or `module:Class`. Raises `ConfigError`."""
    name, _, target = label.partition(":")
    if not target:
        raise ConfigError(f"--to {label} has no target: give one of {FORMS}, or module:Class")
    kind = KINDS.get(name)
    if kind is None:
        sink = _own_sink(label, name, target)
        path = getattr(sink, "path", None)
        return Tracker(label, partial(opened, sink), path if isinstance(path, Path) else None)
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise ConfigError(f"--to {label} needs the package {kind.package!r}: {install_extra(name)}")
    return Tracker(label, partial(kind.open, target), Path(target) if kind.target in ("DIR", "FILE") else None)


def _own_sink(label: str, place: str, name: str) -> Sink:
    try:
        module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # The boundary: the user's module may raise anything.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{place}.".startswith(f"{missing}."):  # Not a module that the file imports.
            raise ConfigError(f"--to {label}: importing {place!r} failed at {failure(error)}") from error
        near = nearest_name(place, KINDS)
        hint = f"did you mean {near}:{KINDS[near].target}?" if near else "put its folder on PYTHONPATH"
        raise ConfigError(f"--to {label}: there is no tracker and no module {missing!r}; {hint}") from None
    kind = getattr(module, name, None)
    if not callable(kind):
        own = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        classes = [key for key, value in own.items() if value.__module__ == place]
        way_out = did_you_mean(name, classes, f"it has {', '.join(classes) or 'none'}")
        raise ConfigError(f"--to {label}: the module {place!r} has no such class; {way_out}")
    try:
        sink: Sink = kind()
    except (Exception, SystemExit) as error:  # The boundary: so may its class.
        raise ConfigError(f"--to {label}: {name}() failed at {failure(error)}") from error
    if absent := [one for one in ("begin", "write", "end") if not callable(getattr(sink, one, None))]:
        raise ConfigError(f"--to {label} has no method {absent[0]!r}: a sink has begin, write and end")
    return sink


# ---- the follower ----------------------------------------------------------------------------------------------------

PAGE = 200
"""Steps that are read and written together."""
REPORT_SECONDS = 2.0
"""Seconds between two lines about a long backfill."""
LENGTH = 128
"""Bytes of a cursor. Always one write of the same length, so that a killed process leaves no half of it."""


class Source(Protocol):
    """Where steps come from: a server, or the files of a run."""

    @property
    def title(self) -> str:
        """The address or the folder."""

    def settings(self) -> Mapping[str, Any]:
        """The settings of the run, by dotted name."""

    def steps(self, after: int, limit: int) -> list[TrackedStep]:
        """The oldest `limit` steps with a version above `after`."""

    def progress(self) -> tuple[int, int]:
        """The present policy version, and the one at which the job ends; 0 if it has no end."""


@dataclass(frozen=True)
class Follower:
    """`name` is that of the run in the tracker. `folder` has the cursor, if the tracker is not a file of this machine.

    `pause` waits for new steps, `say` shows a line.
    """

    source: Source
    tracker: Tracker
    name: str
    folder: Path
    say: Callable[[str], None]
    pause: Callable[[], None]
    clock: Callable[[], float] = time.monotonic

    def run(self, *, stay: bool) -> None:
        """Copies all steps. With `stay`, goes on with new ones until the job ends.

        Raises `ConfigError` if the target belongs to another run or, without `stay`, if the run has no step. Raises
        `TrackerError`.
        """
        run_id = id_of_run(self._first_step(stay))
        run = Run(run_id, self.name or f"agentjet-{run_id}", self.source.settings())
        with open_cursor(self._cursor_path(run), run.id) as cursor, ExitStack() as stack:
            if cursor.is_new:
                if _has_content(self.tracker.path):
                    raise ConfigError(f"{self.tracker.label} has content of another program: choose another target")
                cursor.advance(0)  # From here on the target belongs to this run.
            with self._library():
                held, write = stack.enter_context(self.tracker.open(run))
            try:
                version = cursor.version if held is None else held
                place = f"{self.source.title} -> {self.tracker.label}"
                self.say(f"{place}: run {run.name}, written up to step {version}")
                while True:
                    newest, end = self.source.progress()
                    for steps in self._new_steps(run, version, newest):
                        with self._library():
                            write(steps)
                        version = steps[-1].version
                        cursor.advance(version)
                    if not stay or newest >= end > 0:
                        self.say(f"{self.tracker.label} has all steps up to {version}")
                        return
                    self.pause()
            finally:
                with self._library():
                    stack.close()

    def _first_step(self, stay: bool) -> TrackedStep:
        is_told = False
        while not (found := self.source.steps(0, 1)):
            if not stay:
                raise ConfigError(f"{self.source.title} has no step yet, so there is nothing to track")
            if not is_told:
                self.say(f"{self.source.title} has no step yet: waiting for the first one")
            is_told = True
            self.pause()
        return found[0]

    def _cursor_path(self, run: Run) -> Path:
        label, path = self.tracker.label, self.tracker.path
        if path is not None:
            return path.with_name(f"{path.name}.cursor")
        target = hashlib.sha256(label.encode()).hexdigest()[:6]
        return self.folder / f"{label.partition(':')[0]}-{run.id}-{target}.cursor"

    def _new_steps(self, run: Run, version: int, newest: int) -> Iterator[list[TrackedStep]]:
        """Yields all steps above `version`, some at a time. Earlier ones are written before the next are requested."""
        started = told = self.clock()
        first = version
        while steps := self.source.steps(version, PAGE):
            if id_of_run(self.source.steps(0, 1)[0]) != run.id:
                raise ConfigError(f"{self.source.title} has another run now: start `agentjet track` again")
            yield steps
            version = steps[-1].version
            if (now := self.clock()) - told >= REPORT_SECONDS:
                told = now
                left = (now - started) / (version - first) * max(0, newest - version)
                self.say(f"step {version} of {newest}, {left:.0f} s left")

    @contextmanager
    def _library(self) -> Iterator[None]:
        """The boundary to the tracker's library. Raises `TrackerError`."""
        try:
            yield
        except (AgentJetError, OSError):
            raise
        except Exception as error:
            failed = f"{self.tracker.label} failed ({type(error).__name__}: {error})"
            raise TrackerError(f"{failed}. Start it again: it goes on where it was") from error


def _has_content(path: Path | None) -> bool:
    if path is None or not path.exists():
        return False
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0


@contextmanager
def open_cursor(path: Path, run_id: str) -> Iterator[Cursor]:
    """Context in which no other process has the cursor of a tracker.

    Raises `ConfigError` if another process has it, or if it belongs to another run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path} is held by another `agentjet track`: that process writes these steps already; end it, or "
                "choose another target"
            ) from None
        held = os.pread(file, LENGTH, 0)
        try:
            found: Any = json.loads(held) if held else {"run": run_id, "version": 0}
            owner, version = str(found["run"]), int(found["version"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{path} is not a cursor of `agentjet track`: choose another target") from None
        if owner != run_id:
            raise ConfigError(
                f"{path} belongs to another run ({owner}, this one is {run_id}): choose another target, or "
                "remove what that run wrote, and this file"
            )
        yield Cursor(file, run_id, version, is_new=not held)
    finally:
        os.close(file)


@dataclass
class Cursor:
    """The cursor of a tracker, of an open and locked file."""

    file: int
    run_id: str
    version: int
    is_new: bool
    """True until the first `advance`."""

    def advance(self, version: int) -> None:
        """Records that the tracker has the steps up to this version."""
        text = json.dumps({"run": self.run_id, "version": version})
        os.pwrite(self.file, f"{text:{LENGTH - 1}}\n".encode(), 0)
        os.fsync(self.file)
        self.is_new, self.version = False, version
