"""The memory, CPU time, processes and disk that a sandbox uses: by a cgroup, or by a look at its processes."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = 4096
"""Bytes that an entry of a folder counts at least: an empty file takes an inode."""
NUMBERS = itertools.count()
NAME = "agentjet-sandbox-"
REMOVE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The folders of one sandbox: one with version 2; one for memory and one for CPU time with version 1."""

    folders: dict[str, Path]
    version: int

    @classmethod
    def make(cls, memory: int) -> Cgroup | None:
        """Returns None where this process may not make one that limits memory."""
        remove_left(os.getpid())
        name = f"{NAME}{os.getpid()}-{next(NUMBERS)}"
        for version, parents in places():
            made = cls({}, version)
            for kind, parent in parents.items():
                with suppress(OSError):
                    (parent / name).mkdir()
                    made.folders[kind] = parent / name
            with suppress(OSError, KeyError):
                made.limit(memory)
                return made
            made.remove()
        return None

    def limit(self, memory: int) -> None:
        """Raises `OSError` or `KeyError` if memory cannot be limited."""
        folder = self.folders["memory"]
        write(folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"), str(memory))
        with suppress(OSError):  # A kernel without accounting of swap.
            if self.version == 2:
                write(folder / "memory.swap.max", "0")
                write(folder / "memory.oom.group", "1")
            else:
                write(folder / "memory.kmem.tcp.limit_in_bytes", str(memory))  # Buffers of TCP count apart.
                write(folder / "memory.memsw.limit_in_bytes", str(memory))

    def add(self, pid: int) -> None:
        for folder in self.folders.values():
            write(folder / "cgroup.procs", str(pid))

    def is_out_of_memory(self) -> bool:
        """True if the kernel ended a process because of the limit."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", (self.folders["memory"] / name).read_text(), re.M)
            return found is not None and found[1] != "0"
        return False

    def cpu_seconds(self) -> float | None:
        with suppress(OSError, KeyError):
            if self.version == 2:
                text = (self.folders["memory"] / "cpu.stat").read_text()
                return int(text.split("usage_usec ")[1].split()[0]) / 1e6
            return int((self.folders["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
        return None

    def remove(self) -> None:
        deadline = time.monotonic() + REMOVE_SECONDS
        for folder in self.folders.values():
            while folder.exists() and time.monotonic() < deadline:
                try:
                    folder.rmdir()
                except OSError:
                    time.sleep(0.005)


def write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


@functools.cache
def places() -> list[tuple[int, dict[str, Path]]]:
    """Version and parent folders of cgroups that this process may be able to make."""
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return []
    points: dict[str, tuple[str, str]] = {}
    for head, tail in mounts:
        kind, _, options = tail.split(" ", 2)
        if kind == "cgroup":
            points |= {name: (head.split()[3], head.split()[4]) for name in options.split(",")}
        elif kind == "cgroup2":
            points[""] = (head.split()[3], head.split()[4])
    paths = {name: path for _, names, path in own for name in names.split(",")}

    def place(name: str) -> Path:
        root, point = points[name]
        path = paths[name]
        inner = path[len(root) :] if root != "/" and path.startswith(root) else path
        return Path(point, inner.lstrip("/"))

    if "memory" in points and "memory" in paths:
        return [(1, {name: place(name) for name in ("memory", "cpuacct") if name in points and name in paths})]
    if "" in points and "" in paths:
        # A group with processes has no groups with controllers below it, so the one above is tried, too.
        folders = (place(""), place("").parent)
        return [(2, {"memory": folder}) for folder in folders if (folder / "cgroup.procs").exists()]
    return []


@functools.cache
def remove_left(process: int) -> None:
    """Removes the folders of processes that were killed, once in each process. Folders in use cannot be removed."""
    for _, parents in places():
        for left in (left for parent in parents.values() for left in parent.glob(f"{NAME}*")):
            owner = left.name.removeprefix(NAME).partition("-")[0]
            with suppress(OSError):
                if not Path("/proc", owner).exists():
                    left.rmdir()


def descendants(first: int) -> list[int]:
    """The processes below `first`, without it."""
    found: list[int] = []
    waiting = [first]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                waiting += children
    return found


def memory_of(pids: Iterable[int], *, shared_once: bool) -> int:
    """Bytes in memory of these processes. Shares of forked processes count once with `shared_once`, which is slow."""
    every = [("status", ("VmPTE:", "VmSwap:"))]  # Page tables, and what is swapped out.
    every += [("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) if shared_once else ("status", ("RssAnon:", "RssShmem:"))]
    total = 0
    for pid, (name, fields) in itertools.product(pids, every):
        with suppress(OSError), open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(fields))
    return total * 1024


def cpu_of(pids: Iterable[int]) -> float:
    """CPU seconds of these processes, and of those that they waited for."""
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            total += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return total / TICKS


def disk_bytes(folders: Sequence[Path], pids: Iterable[int] = (), most: float = math.inf) -> float:
    """Bytes of the files below `folders`, and of removed files that processes hold open. Stops above `most`.

    Infinite if a folder cannot be read: it is closed, or its path is too long.
    """
    total, waiting = 0, [str(folder) for folder in folders]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if total > most:
                        return total
                    status = entry.stat(follow_symlinks=False)
                    total += max(PAGE, status.st_blocks * 512)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # Removed or replaced since.
            continue
        except OSError:
            return math.inf
    return total + sum(removed_files(pids).values())


def removed_files(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """Bytes of files without a name that processes hold open."""
    sizes = {}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes
