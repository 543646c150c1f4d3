"""Runs a command that can write to one folder only, and read that folder and the system's programs only.

    python landlock.py FOLDER READABLE... -- COMMAND...

Landlock (Linux 5.13 and later): the kernel enforces the limits for the command and its children, without privileges.
This file is run by its path, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SET_NO_NEW_PRIVS = 38
PATH_BENEATH = 1
RIGHTS_BY_VERSION = (13, 14, 15, 15, 16)
"""Number of file rights in Landlock versions 1, 2, ...: so many lowest bits are set."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
SIGNALS = 2
"""Blocks signals to processes outside, on kernels that support it."""
LONGEST_FILE = 64 << 20
SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib64", "/usr", "/etc", "/opt", "/proc", "/sys", "/run/systemd/resolve"),
    sys.base_prefix,
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/tty")


def version() -> int:
    """Landlock version of the kernel; 0 if it has none."""
    return max(0, int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)))


def restrict(folder: Path, readable: list[Path]) -> None:
    """Restricts this process and its children for good. Raises `OSError`."""
    kernel = ctypes.CDLL(None, use_errno=True)
    known = version()
    if not known:
        raise OSError("this kernel has no Landlock")
    everything = (1 << RIGHTS_BY_VERSION[min(known, len(RIGHTS_BY_VERSION)) - 1]) - 1
    handled = struct.pack("QQQ", everything, 0, SIGNALS)  # landlock_ruleset_attr: files, ports, scopes
    size = len(handled) if known >= 6 else 8  # earlier kernels support the first field only
    ruleset = checked(kernel.syscall(CREATE_RULESET, handled, size, 0))

    def allow(path: Path, rights: int) -> None:
        if not path.exists():
            return
        if not path.is_dir():
            rights &= EXECUTE | WRITE_FILE | READ_FILE
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, parent)  # landlock_path_beneath_attr, which is packed
        checked(kernel.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
        os.close(parent)

    for path in (*map(Path, SYSTEM), *readable):
        allow(path, EXECUTE | READ_FILE | READ_DIR)
    for path in map(Path, DEVICES):
        allow(path, READ_FILE | WRITE_FILE)
    allow(folder, everything)
    checked(kernel.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(kernel.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def sandboxed(command: Sequence[str], folder: Path, readable: Iterable[Path]) -> list[str]:
    """The command that runs `command` with these limits."""
    return [sys.executable, "-I", __file__, str(folder), *map(str, readable), "--", *command]


def checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def main(arguments: list[str]) -> None:
    folder, *rest = arguments
    split = rest.index("--")
    resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST_FILE, LONGEST_FILE))
    restrict(Path(folder), [Path(path) for path in rest[:split]])
    command = rest[split + 1 :]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
