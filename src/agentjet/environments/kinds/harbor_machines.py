"""Machines on which a Harbor task is played: `Sandboxes` of this machine, or a `Container` of docker or podman.

Both have the same four operations. The verifier gets another machine, after the agent's has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from agentjet.environments.kind import EnvironmentFailed
from agentjet.environments.kinds.harbor_folder import HarborTask, special
from agentjet.errors import ConfigError
from agentjet.sandbox import Limits, Sandbox, missing

MIB = 2**20
PATH = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_OUTPUT = 16 * MIB
"""Bytes that a command may print."""
KEPT_OUTPUT = 64 * 1024
"""Bytes of the beginning, and of the end, of an output that are kept."""
LINKED = ("bin", "lib", "lib32", "lib64", "sbin", "usr")
"""Folders of the system to which a link of the agent may lead."""
NOT_STARTED = ("bwrap: ", "the sandbox could not be closed: ")
"""Beginnings of an output that is the sandbox's, not the program's."""
MAX_DEPTH = 100
"""Deepest folder that is kept: a path has 4096 bytes at most, and copies are recursive."""
DEFAULT_MEMORY_MB, DEFAULT_STORAGE_MB = 2048, 1024
CONTAINER_SECONDS = 60.0
"""Time of a command of docker that starts, copies or removes."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a command."""

    output: str
    code: int | None
    """Exit code; None if it was ended."""
    excess: str = ""
    """The limit that ended it, such as "ran longer than 30 s and was ended"."""


class TaskMachine(Protocol):
    """A place with the task's files. Commands run in its working directory."""

    def run(self, command: Sequence[str], seconds: float, variables: Mapping[str, str]) -> Ran:
        """Runs a command. No process of it is left afterwards."""
        ...

    def put(self, source: Path, target: str) -> None:
        """Copies a folder of this machine to an absolute path."""
        ...

    def get(self, source: str, target: Path) -> None:
        """Copies a folder to a new folder of this machine, with files, folders and links only."""
        ...

    def verifier(self) -> TaskMachine:
        """Ends this machine; returns another one with the same files."""
        ...

    def close(self) -> None: ...


# ---- sandboxes -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sandboxes:
    """One sandbox for each command, on the same folders. The folders lie below `root`, which is empty at first."""

    task: HarborTask
    root: Path
    seen: tuple[Path, ...] = ()
    """Other folders that the programs may read."""
    model_url: str = ""
    """Empty: no network."""
    paths: tuple[str, ...] = ()
    """Paths of the model's server."""
    logs: tuple[str, ...] = ("agent", "artifacts")
    own: str = "tmp"
    """A folder that the other machine does not have."""
    home: str = "/root"

    def __post_init__(self) -> None:
        if not any(self.root.iterdir()):
            self.task.layout.write(self.root)
        for name in self.logs:
            (self.root / "logs" / name).mkdir(parents=True, exist_ok=True)
        for name in ("root", self.own):
            (self.root / name).mkdir(exist_ok=True)

    def run(self, command: Sequence[str], seconds: float, variables: Mapping[str, str]) -> Ran:
        process = self._sandbox(seconds, variables).start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(self.task.layout.workdir),
        )
        assert process.stdout is not None
        try:
            output = Output(process.stdout, process.kill)
            code = process.wait()
        finally:
            process.kill()
        ran = output.ran(code, process.exceeded)
        if ran.code and ran.output.startswith(NOT_STARTED):
            raise EnvironmentFailed(f"the sandbox could not be started: {ran.output.strip()[:500]}")
        return ran

    def _sandbox(self, seconds: float, variables: Mapping[str, str]) -> Sandbox:
        tops = dict.fromkeys((*self.task.layout.tops(), "root", self.own))
        places = {self.root / top: f"/{top}" for top in tops}
        places |= {self.root / "logs" / name: f"/logs/{name}" for name in self.logs}
        own = {"PATH": PATH, "HOME": self.home} | self.task.variables
        limits = Limits(
            memory=(self.task.memory_mb or DEFAULT_MEMORY_MB) * MIB,
            disk=(self.task.storage_mb or DEFAULT_STORAGE_MB) * MIB,
            wall_seconds=seconds,
        )
        folder, *others = places
        return Sandbox(
            folder=folder,
            writable=tuple(others),
            readable=self.seen,
            places=places,
            network="model" if self.model_url else "none",
            model_url=self.model_url,
            paths=self.paths,
            limits=limits,
            variables=own | dict(variables),
        )

    def put(self, source: Path, target: str) -> None:
        place = self.root / target.strip("/")
        remove(place)
        # Links stay links, as in `docker cp`: they must not lead to files of this machine.
        shutil.copytree(source, place, symlinks=True, ignore=special)

    def get(self, source: str, target: Path) -> None:
        shutil.copytree(self.root / source.strip("/"), target, symlinks=True, ignore=special)

    def verifier(self) -> Sandboxes:
        """The agent's `/root` is left out unless the task's files are there: Python and shells read files of HOME."""
        clean(self.root, self.task.layout.tops())
        if "root" not in self.task.layout.tops():
            remove(self.root / "root")
        return Sandboxes(self.task, self.root, logs=(*self.logs, "verifier"), own="tests", home="/tmp")

    def close(self) -> None:
        remove(self.root)


class Output:
    """Reads a program's output in a thread. A program that prints too much is ended."""

    def __init__(self, pipe: IO[bytes], kill: Callable[[], Any]) -> None:
        self._pipe, self._kill = pipe, kill
        self._first, self._last = bytearray(), bytearray()
        self.num_bytes = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        with self._pipe:
            while content := os.read(self._pipe.fileno(), 1 << 16):
                self.num_bytes += len(content)
                room = KEPT_OUTPUT - len(self._first)
                self._first += content[:room]
                self._last += content[room:]
                del self._last[:-KEPT_OUTPUT]
                if self.num_bytes > MAX_OUTPUT:
                    self._kill()
                    return

    def ran(self, code: int | None, excess: str) -> Ran:
        """The result, after the program's end."""
        self._reading.join()
        cut = self.num_bytes - len(self._first) - len(self._last)
        middle = f"\n[{cut} bytes]\n" if cut > 0 else ""
        output = self._first.decode(errors="replace") + middle + self._last.decode(errors="replace")
        if self.num_bytes > MAX_OUTPUT:
            excess = f"printed more than {MAX_OUTPUT // MIB} MiB and was ended"
        return Ran(output, None if excess else code, excess)


def clean(root: Path, tops: Sequence[str]) -> None:
    """Removes what an agent may have left to mislead a verifier: pipes, and links to its tests or its rewards.

    Files become readable. The caller has ended all programs that could change the folders.
    """
    allowed = (*tops, *LINKED)
    waiting = [root / top for top in (*tops, "logs")]
    while waiting:
        folder = waiting.pop()
        if len(folder.parts) - len(root.parts) > MAX_DEPTH:
            remove(folder)
            continue
        folder.chmod(folder.stat().st_mode & 0o777 | 0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    if not leads_into(PurePosixPath("/", path.parent.relative_to(root)), os.readlink(path), allowed):
                        path.unlink()
                elif entry.is_dir():
                    waiting.append(path)
                elif entry.is_file():
                    path.chmod(entry.stat().st_mode & 0o777 | 0o600)
                else:
                    path.unlink()


def leads_into(folder: PurePosixPath, target: str, tops: Sequence[str]) -> bool:
    """True if a link in `folder` leads to one of the top-level folders. A ".." behind a name may lead anywhere."""
    parts = list(PurePosixPath(target).parts)
    place = ["/"] if target.startswith("/") else list(folder.parts)
    parts = parts[1:] if target.startswith("/") else parts
    while parts[:1] == [".."]:
        place = place[:1] if len(place) == 1 else place[:-1]
        del parts[0]
    place += parts
    return ".." not in parts and len(place) > 1 and place[1] in tops


def remove(folder: Path) -> None:
    """Removes a folder of any depth, which `shutil.rmtree` does not."""
    if folder.exists():
        subprocess.run(["rm", "-rf", "--", folder], check=False)


# ---- containers ------------------------------------------------------------------------------------------------------


@functools.cache
def container_program() -> str:
    """The program `docker` or `podman` that works here; "" without one. Asks once in each process."""
    for name in ("docker", "podman"):
        if path := shutil.which(name):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                if not subprocess.run([path, "info"], capture_output=True, timeout=10, check=False).returncode:
                    return path
    return ""


@dataclass(slots=True)
class Container:
    """A container of the task's image. It ends by itself after `seconds`, if this process is killed."""

    task: HarborTask
    seconds: float
    image: str = ""
    """Empty: `docker_image`, or what is built from `environment/`."""
    owned: list[str] = field(default_factory=list)
    """Images to remove at the end."""
    id: str = ""

    def __post_init__(self) -> None:
        own = self.task.table.environment
        if not self.image:
            self.image = own.docker_image or self._built(own.build_timeout_sec)
        limits = ["--cpus", f"{own.cpus:g}"] if own.cpus else []
        limits += ["--memory", f"{self.task.memory_mb}m"] if self.task.memory_mb else []
        if own.network_mode == "no-network" or own.allow_internet is False:
            limits += ["--network", "none"]
        variables = [word for name, value in own.env.items() for word in ("-e", f"{name}={value}")]
        workdir = ["-w", own.workdir] if own.workdir else []
        sleep = ["sleep", str(int(self.seconds))]
        start = ["run", "-d", "--rm", "--init", "--pids-limit", "512", *limits, *variables, *workdir]
        self.id = asked([*start, "--entrypoint", "", self.image, *sleep], own.build_timeout_sec).strip()
        self._shell("mkdir -p /logs/agent /logs/artifacts")

    def _built(self, seconds: float) -> str:
        image = asked(["build", "-q", str(self.task.folder / "environment")], seconds)
        return image.strip()

    def _shell(self, script: str) -> str:
        return asked(["exec", "-u", "0", self.id, "sh", "-c", script])

    def run(self, command: Sequence[str], seconds: float, variables: Mapping[str, str]) -> Ran:
        words = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
        with subprocess.Popen(
            [container_program(), "exec", *words, self.id, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            output, excess, code = Output(process.stdout, process.kill), "", None
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                excess = f"ran longer than {seconds:g} s and was ended"
            finally:
                process.kill()
                self._end_processes()
            return output.ran(code, excess)

    def _end_processes(self) -> None:
        with contextlib.suppress(EnvironmentFailed):  # The shell ends itself, too.
            self._shell("kill -9 -1")

    def put(self, source: Path, target: str) -> None:
        self._shell(f"rm -rf {target}")
        asked(["cp", str(source), f"{self.id}:{target}"])

    def get(self, source: str, target: Path) -> None:
        asked(["cp", f"{self.id}:{source}", str(target)])

    def verifier(self) -> Container:
        image = asked(["commit", self.id]).strip()
        self.close()
        container = Container(self.task, self.seconds, image, [image])
        container._shell("rm -rf /logs/verifier; mkdir -p /logs/verifier")
        return container

    def close(self) -> None:
        for words in (["rm", "-f", self.id], *(["rmi", "-f", image] for image in self.owned)):
            with contextlib.suppress(EnvironmentFailed):
                asked(words)


def asked(words: Sequence[str], seconds: float = CONTAINER_SECONDS) -> str:
    """The output of a command of docker. Raises `EnvironmentFailed` with its error."""
    name = Path(container_program()).name
    command = [container_program(), *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"{name} {words[0]} did not end within {seconds:g} s") from None
    if done.returncode:
        raise EnvironmentFailed(f"{name} {words[0]} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode(errors="replace")


# ---- the choice ------------------------------------------------------------------------------------------------------


def check(tasks: Sequence[HarborTask]) -> None:
    """Raises `ConfigError` if a task cannot be played on this machine."""
    in_containers = [task for task in tasks if task.needs_container]
    if in_containers and not container_program():
        task = in_containers[0]
        count = f"{len(in_containers)} of {len(tasks)} tasks need" if len(tasks) > 1 else "the task needs"
        raise ConfigError(
            f"{count} an image, which docker or podman have: {task.folder.name} ({task.needs_container}); start docker "
            "or podman here, or leave these tasks out"
        )
    if len(in_containers) < len(tasks) and (reason := missing()):
        raise ConfigError(reason)
