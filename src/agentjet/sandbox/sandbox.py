"""`Sandbox`: an untrusted program sees, reaches and uses only what is named here.

bubblewrap separates its file systems, processes and network; Landlock, a seccomp filter and resource limits
lie beneath (`inside.py`, `filter.py`). `process.py` starts and watches it, `proxy.py` is its only way to a network.

* It sees programs of the system, few files of `/etc`, Python's environment and the named folders. A server's data dir
  in them is empty.
* Started by root it runs as an unprivileged user, which owns the writable folders while it runs.
* Its environment has the given variables and those in `INHERITED`.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import functools
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal
from urllib.parse import urlsplit

from agentjet.errors import ConfigError
from agentjet.sandbox.check import missing
from agentjet.sandbox.process import PORT, USER, USERS, AsyncProcess, SandboxProcess, Streams, launch
from agentjet.types import DEFAULT_RUN

GIB = 2**30
INHERITED = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM")
OURS = Path(__file__).parents[1]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "pki", "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf"),
    *("crypto-policies", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "hosts", "host.conf", "resolv.conf", "gai.conf"),
    *("nsswitch.conf", "protocols", "services", "localtime", "timezone", "locale.alias", "mime.types", "magic"),
    *("fonts", "inputrc", "terminfo", "os-release", "debian_version", "java", "java-17-openjdk", "java-21-openjdk"),
    *("python3", "python3.11", "perl", "R", "bash.bashrc", "profile", "gitconfig", "selinux/config", "papersize"),
)
"""Files of `/etc` that programs need. None holds a secret of the machine."""
CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run")
"""Folders of which nothing may be named."""
WHOLE = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp", "/usr", "/var", "/var/lib", "/var/tmp")
"""Folders that may not be named as a whole: they hold files of others."""
MAX_LOOKED_AT = 20_000
"""Entries of the named folders among which data dirs and sockets are found, nearest first."""
MAX_PRIVATE_BYTES = GIB
"""Largest size of `/tmp`, and of `/dev/shm`. Both are memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a sandbox as a whole. None: without a limit."""

    memory: int | None = 4 * GIB
    """Bytes of all processes together, with `/tmp` and `/dev/shm`."""
    cpu_seconds: float | None = None
    wall_seconds: float | None = None
    processes: int | None = 256
    """Processes and threads at the same time."""
    disk: int | None = 8 * GIB
    """Bytes by which the writable folders may grow."""
    output: int | None = 256 * 2**20
    """Bytes of each output, for readers such as `CapturedProcess`."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**63:
                raise ConfigError(
                    f"the sandbox's limit {name} = {value!r}: give a number above 0 and below 2**63, or None"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The rights of a program. `start` raises `ConfigError` for what cannot be given."""

    folder: Path
    """The working directory, writable. HOME, unless `variables` has another."""
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    places: Mapping[Path, str] = field(default_factory=dict)
    """Absolute paths that named folders have inside. Default: the same as outside."""
    network: Literal["none", "model", "open"] = "none"
    """`model`: requests below `model_url` only. `open`: the machine's network, for programs that need a provider."""
    model_url: str = ""
    paths: tuple[str, ...] = ()
    """Beginnings of the paths of `model_url`'s server that get through. Default: that of `model_url`."""
    limits: Limits = Limits()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment of the program. URLs of `model_url`'s server lead to the proxy."""

    def start(
        self,
        command: Sequence[str | Path],
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        cwd: Path | None = None,
    ) -> SandboxProcess:
        """Starts `command`; the streams are those of `Popen`. Raises `ConfigError` if the sandbox cannot be made."""
        if reason := missing():
            raise ConfigError(reason)
        if not command:
            raise ConfigError("sandbox: the command is empty: give a program and its arguments")
        self.check()
        place = Path(os.path.abspath(cwd or self.folder))
        return launch(self, [os.fspath(word) for word in command], Streams(stdin, stdout, stderr), place)

    def inside(self, path: Path) -> Path:
        """The path that a named folder has inside."""
        return Path(self.places.get(path, path))

    async def start_async(self, command: Sequence[str | Path], *, cwd: Path | None = None, limit: int) -> AsyncProcess:
        """The same for a coroutine, with three pipes. `limit` is the longest line of an output in bytes."""
        pipe = subprocess.PIPE
        starting = asyncio.ensure_future(
            asyncio.to_thread(self.start, command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd)
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:

            def end(started: asyncio.Future[SandboxProcess]) -> None:
                if not started.cancelled() and started.exception() is None:
                    started.result().kill()

            starting.add_done_callback(end)
            raise
        return await AsyncProcess.of(process, limit)

    def inside_url(self, url: str) -> str:
        """The address of a server's URL inside. Addresses of other servers are returned as they are."""
        origin = origin_of(self.model_url)
        if self.network != "model" or not (url == origin or url.startswith(f"{origin}/")):
            return url
        return f"http://127.0.0.1:{PORT}{url[len(origin) :]}"

    def environment(self) -> dict[str, str]:
        """The environment of the program."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        home = os.path.abspath(self.inside(self.folder))
        own = {"HOME": home, "TMPDIR": "/tmp", "USER": USER, "LOGNAME": USER}
        given = {name: self.inside_url(value) for name, value in self.variables.items()}
        return {"LANG": "C.UTF-8", **inherited, **own, **given}

    def allowed_paths(self) -> tuple[str, ...]:
        return self.paths or (urlsplit(self.model_url).path or "/",)

    def writables(self) -> list[Path]:
        return [Path(os.path.abspath(path)) for path in dict.fromkeys((self.folder, *self.writable))]

    def readables(self) -> list[Path]:
        """The named paths that are read only, and Python's environment."""
        return [*(Path(os.path.abspath(path)) for path in self.readable), *python_paths()]

    def check(self) -> None:
        """Raises `ConfigError` for a folder that may not be named, or a network without a model."""
        for name in ("folder", "writable", "readable"):
            value = getattr(self, name)
            for path in (value,) if isinstance(value, Path) else value:
                check_named(name, path)
        for path, inside in self.places.items():
            if path not in (*self.writables(), *self.readable) or not is_free(inside):
                raise ConfigError(f"sandbox: {path} at {inside!r}: name the folder, and a place outside of the system")
        for path in self.writables():
            if not path.is_dir():
                raise ConfigError(f"sandbox: {path} is not a folder: name a folder to write to")
        if os.getuid() == 0:
            check_accessible(self.readables())
        if self.network not in ("none", "model", "open"):
            raise ConfigError(f"sandbox: network = {self.network!r}: expected none, model or open")
        parts = urlsplit(self.model_url)
        if self.network == "model" and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ConfigError(
                f"sandbox: model_url = {self.model_url!r}: network = 'model' needs the http or https URL of the model"
            )

    def mounts(self) -> list[str]:
        """The arguments of bubblewrap that make the file system."""
        size = min(MAX_PRIVATE_BYTES, (self.limits.memory or GIB * 4) // 4)
        words = list(system_mounts(os.getpid()))
        words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(size), "--tmpfs", "/dev/shm"]
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", "/tmp"]
        binds = dict.fromkeys(self.readables(), "--ro-bind") | dict.fromkeys(self.writables(), "--bind")
        # Both names of a link's target.
        real = {path.resolve(): kind for path, kind in binds.items() if path not in self.places}
        sources = {self.inside(path): path for path in {**real, **binds}}
        binds = {self.inside(path): kind for path, kind in {**real, **binds}.items()}
        # Folders above them would be closed to other users if the bound folder is.
        above = {parent for path in binds for parent in path.parents} - {Path("/"), Path("/tmp"), Path("/usr")}
        for path in sorted(binds.keys() | above, key=lambda path: (len(path.parts), path)):
            bind = [binds[path], str(sources[path])] if path in binds else ["--perms", "0755", "--dir"]
            words += [*bind, str(path)]
        for place, source in sources.items():
            for path in hidden([source]) if source not in self.places else ():
                inside = str(place / path.relative_to(source))
                words += ["--perms", "0000", "--tmpfs", inside] if path.is_dir() else ["--ro-bind", "/dev/null", inside]
        return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]


@functools.cache
def python_paths() -> tuple[Path, ...]:
    """Python's environment: its folders, those of packages that a `.pth` file adds, and AgentJet's source."""
    packages = [Path(place) for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    wanted = [path for path in (Path(sys.prefix), Path(sys.base_prefix), OURS, *packages) if path.is_dir()]
    system = Path("/usr")
    return tuple(path for path in dict.fromkeys(wanted) if not {system, *wanted}.intersection(path.parents))


@functools.cache
def system_mounts(process: int) -> tuple[str, ...]:
    """The arguments for programs and files of the system, which are the same for all sandboxes of a process."""
    words = ["--ro-bind", str(etc_copy(process)), "/etc"]
    for path in SYSTEM:
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    return tuple(words)


def etc_copy(process: int) -> Path:
    """A folder with what programs need of `/etc`: each mount costs more than all of these copies."""
    begin = "agentjet-sandbox-etc-"
    for left in Path(tempfile.gettempdir()).glob(f"{begin}*"):  # By processes that were killed.
        owner = left.name.removeprefix(begin).partition("-")[0]
        with suppress(OSError):  # Another process may have removed it.
            if left.stat().st_uid == os.getuid() and not Path("/proc", owner).exists():
                os.close(locked(left))
                shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"{begin}{process}-"))
    with suppress(OSError):  # A file system without locks.
        locked(place)  # Until this process ends.

    def remove() -> None:
        if os.getpid() == process:  # Not in a fork.
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(remove)
    for name in ETC:
        with suppress(OSError, shutil.Error):
            copy_public(Path("/etc", name), place / name)
    users = [*USERS, 0] if os.getuid() == 0 else [os.getuid()]
    users_of = {uid: USER if uid else "root" for uid in users} | {65534: "nobody"}
    (place / "passwd").write_text("".join(f"{name}:x:{uid}:{uid}::/tmp:/bin/sh\n" for uid, name in users_of.items()))
    (place / "group").write_text("".join(f"{name}:x:{uid}:\n" for uid, name in users_of.items()))
    for path in (place, *(path for path in place.rglob("*") if not path.is_symlink())):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def locked(folder: Path) -> int:
    """A descriptor that locks a folder. Raises `OSError` if another one does.

    It keeps away processes in other containers with the same `/tmp`, and systemd, which removes old files there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def copy_public(source: Path, target: Path) -> None:
    """Copies what every user may read: root could read private keys, such as those below `/etc/pki`."""

    def closed(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if not Path(folder, name).lstat().st_mode & stat.S_IROTH}

    if not source.stat().st_mode & stat.S_IROTH:
        return
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=closed)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def is_free(path: str) -> bool:
    """True if a folder may appear there: neither in the system nor above it."""
    taken = [Path(name) for name in (*SYSTEM, "/etc", "/proc", "/dev", "/sys")]
    place = Path(path)
    is_plain = place.is_absolute() and ".." not in place.parts and len(place.parts) > 1
    return is_plain and not any(place.is_relative_to(folder) for folder in taken)


def origin_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def programs(name: str) -> tuple[Path, ...]:
    """The paths that a program needs besides the system: its file, or its installation.

    `name` is that of the program, or its path. A program that is not found needs nothing.
    """
    found = shutil.which(name)
    if found is None:
        return ()
    path = Path(os.path.abspath(found))
    real = path.resolve()
    environment = next((folder for folder in path.parents if (folder / "pyvenv.cfg").is_file()), None)
    if environment is not None:
        return (environment, *installation(real))
    return tuple(one for one in dict.fromkeys((path, *installation(real))) if not one.is_relative_to("/usr"))


def installation(program: Path) -> tuple[Path, ...]:
    """The prefix of a program with libraries beside `bin/`; the program alone if the prefix may not be named."""
    if program.is_relative_to("/usr") or program.is_relative_to(sys.base_prefix):
        return ()
    prefix = program.parent.parent
    # ~/.local has files of many programs, with secrets among them.
    if program.parent.name == "bin" and (prefix / "lib").is_dir() and prefix.name != ".local":
        with suppress(ConfigError):
            check_named("program", prefix)
            return (prefix,)
    return (program,)


def check_named(name: str, path: Path) -> None:
    """Raises `ConfigError` for a path that a sandbox must not show."""
    real = Path(os.path.abspath(path)).resolve()
    if not real.exists():
        raise ConfigError(f"sandbox: {name} {path}: no such file or folder")
    homes = {Path(os.path.expanduser("~")).resolve()}
    with suppress(KeyError):  # A user of a container may have no entry.
        homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))
    whole = next((place for place in map(Path, (*WHOLE, *CLOSED)) if place.is_relative_to(real)), None)
    home = next((place for place in homes if place.is_relative_to(real)), None)
    closed = next((place for place in map(Path, CLOSED) if real.is_relative_to(place)), None)
    if home is not None and real != Path("/"):
        raise ConfigError(
            f"sandbox: {name} {path} is or holds the home folder {home}, with its keys: name a folder in it"
        )
    if whole is not None:
        raise ConfigError(f"sandbox: {name} {path} is or holds {whole}, with files of others: name a folder in it")
    if closed is not None:
        raise ConfigError(f"sandbox: {name} {path} lies in {closed}, which a sandbox does not show: copy what it needs")


def check_accessible(paths: Sequence[Path]) -> None:
    """Raises `ConfigError` for a readable path that the sandbox's user cannot read."""
    for path in paths:
        status = path.stat()
        needed = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(status.st_mode) else stat.S_IROTH
        if status.st_mode & needed != needed:
            raise ConfigError(
                f"sandbox: {path} is readable by its owner only (mode {stat.S_IMODE(status.st_mode):o}), and a sandbox "
                f"that root starts runs as another user: chmod o+rX {path}, or copy what it needs"
            )


def hidden(roots: Sequence[Path]) -> Iterator[Path]:
    """Data dirs of servers, and sockets, below the named folders. Looks at `MAX_LOOKED_AT` entries, nearest first."""
    waiting, looked_at = deque(path for path in roots if path not in python_paths()), 0
    while waiting and looked_at < MAX_LOOKED_AT:
        folder = waiting.popleft()
        if (folder / "runs" / DEFAULT_RUN).is_dir():
            yield folder
            continue
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError:
            continue
        looked_at += len(entries)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False) and stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                yield Path(entry.path)
