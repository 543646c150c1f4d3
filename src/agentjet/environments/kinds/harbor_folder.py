"""A task folder in Harbor's format, version 1.0 to 1.4: `task.toml`, `instruction.md`, `environment/`, `tests/`.

A Dockerfile that only copies files describes a `Layout`, which a sandbox can show. Anything else in a task needs a
container: `HarborTask.needs_container` is the reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import string
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentjet.errors import ConfigError
from agentjet.types import shown

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
SYSTEM_FOLDERS = (
    *("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "proc", "run", "sbin", "solution", "sys"),
    *("tests", "tmp", "usr", "var"),
)
"""Top-level folders that a sandbox takes from the machine, or that Harbor uses."""
BASES = ("ubuntu", "debian", "python", "bash", "buildpack-deps")
ARCHIVES = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst")
IGNORED = ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "STOPSIGNAL")
"""Instructions without an effect: Harbor replaces the command of an image."""
INSTALLS = re.compile(r"\b(apt-get|apt|apk|curl|wget|uvx|uv|pip3? install|npm (install|i|ci)|git clone)\b")
COPIED = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Name of a variable."""
CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


class _Table(BaseModel):
    """A table of `task.toml`. Like Harbor, it ignores unknown keys."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def _are_names(variables: dict[str, str]) -> dict[str, str]:
    if wrong := [name for name in variables if not NAME.fullmatch(name)]:
        raise ValueError(f"{wrong[0]!r} is not a name of a variable: use letters, digits and _")
    return variables


Variables = Annotated[dict[str, str], AfterValidator(_are_names)]


class AgentTable(_Table):
    timeout_sec: float | None = Field(None, gt=0)
    network_mode: str | None = None
    user: str | int | None = None


class EnvironmentTable(_Table):
    build_timeout_sec: float = Field(600, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None
    network_mode: str | None = None
    allow_internet: bool | None = None

    @field_validator("memory", "storage")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\s*\d+(\.\d+)?\s*[KMGkmg]\s*", value):
            raise ValueError("give a size such as 512M or 2G")
        return value


class VerifierTable(_Table):
    timeout_sec: float = Field(600, gt=0)
    env: Variables = {}
    network_mode: str | None = None
    environment: EnvironmentTable | None = None
    collect: list[Any] = []
    user: str | int | None = None


class AgentJetTable(_Table):
    commands: list[str] = []


class MetadataTable(_Table):
    agentjet: AgentJetTable = AgentJetTable()


class TaskTable(_Table):
    schema_version: str = "1.4"
    metadata: MetadataTable = MetadataTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    steps: list[Any] | None = None

    @field_validator("schema_version")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in VERSIONS:
            raise ValueError(f"expected one of the versions {', '.join(VERSIONS)}")
        return value


def special(folder: str, names: list[str]) -> list[str]:
    """The names that are neither files, folders nor links: reading them could wait for ever."""
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [name for name, mode in modes.items() if not any(is_kind(mode) for is_kind in COPIED)]


@dataclass(frozen=True, slots=True)
class Layout:
    """The files that a Dockerfile copies, and its working directory."""

    workdir: str = "/"
    copies: tuple[tuple[tuple[Path, ...], str], ...] = ()
    """Sources, and where they go: a folder if it ends with a slash."""
    variables: Mapping[str, str] = field(default_factory=dict)
    needs_container: str = ""

    def tops(self) -> list[str]:
        """The top-level folders that the task has, such as "app"."""
        paths = [self.workdir, *(target for _, target in self.copies)]
        return list(dict.fromkeys(PurePosixPath(path).parts[1] for path in paths))

    def write(self, root: Path) -> None:
        """Makes the files below `root`. Raises `ConfigError` for a copy that leads out of it."""
        for sources, target in self.copies:
            is_folder = target.endswith("/") or len(sources) > 1
            for source in sources:
                place = root / target.strip("/")
                place = place / source.name if is_folder and source.is_file() else place
                if not place.resolve().is_relative_to(root.resolve()):
                    raise ConfigError(f"{source} is copied to {target}, through a link that leads out of the task")
                place.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, place, symlinks=True, ignore=special, dirs_exist_ok=True)
                else:
                    shutil.copy(source, place / source.name if place.is_dir() else place)
        for path in (*self.tops(), self.workdir.strip("/")):
            (root / path).mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class HarborTask:
    folder: Path
    table: TaskTable
    instruction: str
    layout: Layout
    needs_container: str
    """The reason why a sandbox cannot play the task; "" if it can."""

    @property
    def memory_mb(self) -> int | None:
        return self.table.environment.memory_mb or _megabytes(self.table.environment.memory)

    @property
    def storage_mb(self) -> int | None:
        return self.table.environment.storage_mb or _megabytes(self.table.environment.storage)

    @property
    def variables(self) -> dict[str, str]:
        return dict(self.layout.variables) | self.table.environment.env


def read(folder: Path) -> HarborTask:
    """Reads a task. Raises `ConfigError` that names the file, the key and the value."""
    table = _table(folder)
    instruction = _text(folder / "instruction.md")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder} has no tests/test.sh: add the script that writes the reward")
    if key := unsupported(table):
        raise ConfigError(f"{folder / 'task.toml'}: {key} is not supported here: Harbor's own backends have it")
    lines = instruction.splitlines()
    while lines and (CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    if not lines:
        raise ConfigError(f"{folder / 'instruction.md'} is empty: write what the agent must do")
    layout = _layout(folder, table)
    return HarborTask(folder, table, "\n".join(lines).strip(), layout, needs_container(folder, table, layout))


def _table(folder: Path) -> TaskTable:
    path = folder / "task.toml"
    try:
        content = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if "version" in content:
        content.setdefault("schema_version", content.pop("version"))
    try:
        return TaskTable.model_validate(content)
    except ValidationError as error:
        wrong = error.errors()[0]
    key, message = ".".join(map(str, wrong["loc"])), wrong["msg"].removeprefix("Value error, ")
    raise ConfigError(f"{path}: {key} = {shown(wrong['input'])}: {message}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: a task of Harbor needs one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _megabytes(size: str | None) -> int | None:
    if size is None:
        return None
    factor = {"K": 1 / 1024, "M": 1, "G": 1024}[size.strip()[-1].upper()]
    return max(1, int(float(size.strip()[:-1]) * factor))


# ---- what a sandbox cannot do ----------------------------------------------------------------------------------------


def unsupported(table: TaskTable) -> str:
    """The first key that neither sandboxes nor containers of this kind honour; "" if there is none."""
    own, verifier = table.environment, table.verifier
    allowlists = [part.network_mode for part in (own, table.agent, verifier)].count("allowlist")
    keys = {
        "steps": table.steps,
        "environment.os": own.os.lower() != "linux",
        "environment.gpus": own.gpus,
        "environment.tpu": own.tpu,
        "environment.mcp_servers": own.mcp_servers,
        "environment.skills_dir": own.skills_dir,
        "environment.healthcheck": own.healthcheck,
        "verifier.collect": verifier.collect,
        "verifier.environment": verifier.environment,
        "network_mode = 'allowlist'": allowlists,
    }
    keys |= {
        f"{name}.env, which reads variables of this machine": any("${" in text for text in part.env.values())
        for name, part in (("environment", own), ("verifier", verifier))
    }
    return next((key for key, value in keys.items() if value), "")


def needs_container(folder: Path, table: TaskTable, layout: Layout) -> str:
    """The reason why a sandbox cannot play the task; "" if it can."""
    own = table.environment
    if layout.needs_container:
        return layout.needs_container
    if own.network_mode == "public" or own.allow_internet or table.agent.network_mode == "public":
        return "task.toml asks for a network"
    if table.verifier.network_mode == "public":
        return "task.toml asks for a network of the verifier"
    for number, line in enumerate(_text(folder / "tests" / "test.sh").splitlines(), 1):
        if not line.lstrip().startswith("#") and (match := INSTALLS.search(line)):
            return f"tests/test.sh line {number} needs a network: {match[0]}"
    return ""


def _layout(folder: Path, table: TaskTable) -> Layout:
    """The layout of `environment/Dockerfile`."""
    context = folder / "environment"
    if any(context.glob("*compose.y*ml")):
        return Layout(needs_container="environment/ has a compose file")
    if not (context / "Dockerfile").is_file():
        if table.environment.docker_image is None:
            raise ConfigError(f"{folder} has neither environment/Dockerfile nor environment.docker_image: give one")
        return Layout(needs_container=f"docker_image = {table.environment.docker_image!r}")
    if (context / ".dockerignore").exists():
        return Layout(needs_container="environment/ has a .dockerignore")
    reader = _Reader(context)
    for number, line in instructions(_text(context / "Dockerfile")):
        name, _, rest = line.partition(" ")
        if reason := reader.read(name.upper(), rest.strip()):
            return Layout(needs_container=f"environment/Dockerfile line {number}: {reason}")
    workdir = _absolute("/", table.environment.workdir or reader.workdir)
    layout = Layout(workdir, tuple(reader.copies), reader.variables)
    for path in (workdir, *(target for _, target in layout.copies)):
        top = PurePosixPath(path).parts[1:2]
        if not top:
            return Layout(needs_container="the task works in /: no WORKDIR is set")
        if top[0] in SYSTEM_FOLDERS:
            return Layout(needs_container=f"the task has files in /{top[0]}, which sandboxes take from the machine")
    return layout


def instructions(dockerfile: str) -> Iterator[tuple[int, str]]:
    """Yields the instructions with the number of their first line; continued lines are joined."""
    whole, first = "", 0
    for number, line in enumerate(dockerfile.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        first = first if whole else number
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        yield first, (whole + line).strip()
        whole = ""
    if whole:
        yield first, whole.strip()


def _absolute(workdir: str, path: str) -> str:
    """A path of the image without `.` and `..`, with the slash at its end if it has one."""
    parts: list[str] = []
    for part in PurePosixPath(workdir, path).parts[1:]:
        if part == "..":
            del parts[-1:]
        else:
            parts.append(part)
    ending = "/" if parts and (path.endswith("/") or path in (".", "./")) else ""
    return "/" + "/".join(parts) + ending


class _Reader:
    """Reads a Dockerfile's instructions one after the other."""

    def __init__(self, context: Path) -> None:
        self.context = context.resolve()
        self.workdir = "/"
        self.copies: list[tuple[tuple[Path, ...], str]] = []
        self.variables: dict[str, str] = {}
        self.is_first = True

    def read(self, name: str, rest: str) -> str:
        """The reason why a sandbox cannot follow the instruction; "" if it can."""
        is_first, self.is_first = self.is_first, False
        rest = rest if name == "RUN" else string.Template(rest).safe_substitute(self.variables)
        if name == "FROM":
            return base_refused(rest) if is_first else "a second FROM"
        if name == "WORKDIR":
            self.workdir = _absolute(self.workdir, rest.strip("\"'")).rstrip("/") or "/"
        elif name == "ENV":
            variables = _assignments(rest)
            if not variables or not all(map(NAME.fullmatch, variables)):
                return shown_instruction(name, rest)
            self.variables |= variables
        elif name in ("COPY", "ADD"):
            return self._copy(name, rest)
        elif name not in IGNORED and not (name == "USER" and rest in ("root", "0")):
            return shown_instruction(name, rest)
        return ""

    def _copy(self, name: str, rest: str) -> str:
        try:
            words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        except ValueError:
            words = []
        if len(words) < 2 or not all(isinstance(word, str) for word in words):
            return shown_instruction(name, rest)
        if any(word.startswith(("--", "<<", "http:", "https:", "git@")) for word in words):
            return shown_instruction(name, rest)
        *names, target = words
        sources: list[Path] = []
        for pattern in names:
            pattern = pattern.strip("/") or "."
            try:
                found = [self.context] if pattern in (".", "./") else sorted(self.context.glob(pattern))
            except ValueError:  # A pattern that Python does not have.
                return shown_instruction(name, rest)
            sources += [path.resolve() for path in found]
            if not found or not all(path.is_relative_to(self.context) for path in sources):
                return f"{shown_instruction(name, rest)}: environment/ has no {pattern}"
        if name == "ADD" and any(path.suffix in ARCHIVES for path in sources):  # It would be unpacked.
            return shown_instruction(name, rest)
        self.copies.append((tuple(sources), _absolute(self.workdir, target)))
        return ""


def _assignments(rest: str) -> dict[str, str]:
    """The variables of `ENV A=1 B=2`, or of the old form `ENV A 1`; none if it cannot be read."""
    try:
        words = shlex.split(rest)
    except ValueError:
        return {}
    if words and "=" not in words[0]:
        return {words[0]: rest.partition(" ")[2].strip()}
    return dict(word.split("=", 1) for word in words if "=" in word)


def shown_instruction(name: str, rest: str) -> str:
    return shown(f"{name} {rest}").strip("'\"")


def base_refused(rest: str) -> str:
    """The reason why the programs of this machine cannot stand for a base image; "" if they can."""
    image = rest.split()[0] if rest else ""
    name, _, tag = image.removeprefix("docker.io/").removeprefix("library/").partition(":")
    if name not in BASES or rest.startswith("--"):
        return f"FROM {rest}"
    version = re.match(r"3\.\d+", tag)
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if name == "python" and version and version[0] != ours:
        return f"FROM {rest}, and this machine's Python is {ours}"
    return ""
