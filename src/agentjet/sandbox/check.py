"""The test of this machine: `missing` and the way out, `attempts` to leave a sandbox, its layers (`holds`)."""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from agentjet.errors import ConfigError
from agentjet.sandbox.filter import filter_program
from agentjet.sandbox.process import bubblewrap, interpreter
from agentjet.sandbox.usage import Cgroup

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora), apk add bubblewrap (Alpine)"
LEAST_VERSION = (0, 8)
SWITCHES = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}
"""Settings of kernels that forbid user namespaces, each with the value that forbids and one that allows."""
FLAGS = "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt systempaths=unconfined"


@functools.cache
def missing() -> str:
    """Returns "" if sandboxes work here, else one sentence with the way out. Tries it once per process."""
    if not sys.platform.startswith("linux"):
        return f"sandboxes need Linux, and this is {sys.platform}: use a Linux machine or container"
    path = bubblewrap()
    if not path:
        return reason_of("", "", {}, is_root=False, in_container=False)
    user = ["--unshare-user", "--disable-userns"] if os.getuid() else ["--cap-add", "CAP_SETUID"]
    mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    version = _output([path, "--version"])[1]
    code, output = _output([path, *user, *spaces, *mounts, "--", "/bin/true"])
    if code == 0 and version_of(version) >= LEAST_VERSION:
        return ""
    values = {}
    for name in SWITCHES:
        with suppress(OSError):
            values[name] = Path("/proc/sys", *name.split(".")).read_text().strip()
    in_container = any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    return reason_of(version, output or "bwrap failed", values, is_root=not os.getuid(), in_container=in_container)


def reason_of(version: str, output: str, values: Mapping[str, str], *, is_root: bool, in_container: bool) -> str:
    """The sentence for what was observed: bubblewrap's version and errors, the kernel's settings, the place."""
    if not version:
        return f"sandboxes need bubblewrap, which is not installed: {INSTALL}"
    if version_of(version) < LEAST_VERSION:
        return (
            f"sandboxes need bubblewrap 0.8, and {version.strip()} is installed: install a newer one from its releases"
        )
    said = f"bubblewrap cannot make a sandbox here ({' '.join(output.split())[:200]})"
    for name, (forbids, allows) in SWITCHES.items():
        if not is_root and values.get(name) == forbids:
            return f"{said}, because {name} = {forbids} forbids user namespaces: sudo sysctl -w {name}={allows}"
    if in_container or is_root:
        return f"{said}, because the container forbids namespaces: start it with {FLAGS} (docker, podman)"
    return f"{said}: check that unprivileged user namespaces are allowed, by the kernel and by a container around it"


def version_of(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0,)


def _output(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


# ---- attempts --------------------------------------------------------------------------------------------------------

ATTEMPTS = {
    "write outside": 'open(outside + "/file", "r+")',
    "read a secret of another process": 'open(f"/proc/{pid}/environ", "rb").read()',
    "connect to a UNIX socket": "socket.socket(socket.AF_UNIX).connect(there)",
    "chmod a file of the user": 'os.chmod(outside + "/file", 0o777)',
    "reach the network": 'socket.create_connection(("127.0.0.1", port), 2)',
}
"""By name, a line of Python that raises `OSError` where a sandbox holds."""
SURVIVOR = "survive its end"
PROGRAM = """
import json, os, socket, subprocess, sys
outside, there, pid, port, lines, seconds = json.loads(sys.argv[1])
got = []
for name, line in lines.items():
    try: exec(line)
    except OSError: continue
    got.append(name)
subprocess.Popen(["sleep", seconds], stdin=-3, stdout=-3, stderr=-3, start_new_session=True)
print(json.dumps(got), flush=True)
"""


def attempts() -> dict[str, bool]:
    """Really tries to leave a sandbox. Returns what was tried, True where it got through. Raises `ConfigError`."""
    from agentjet.sandbox.sandbox import Limits, Sandbox

    seconds = f"30.{os.getpid()}{secrets.randbelow(10**6)}"  # By which the survivor would be found.
    with ExitStack() as stack:
        outside, folder = (Path(stack.enter_context(TemporaryDirectory(prefix="agentjet-doctor-"))) for _ in range(2))
        (outside / "file").touch()
        there = stack.enter_context(socket.socket(socket.AF_UNIX))
        there.bind(str(outside / "socket"))
        there.listen()
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = stack.enter_context(subprocess.Popen(["sleep", "60"], env={"PATH": os.defpath, "SECRET": "1"}))
        stack.callback(other.kill)
        facts = [str(outside), str(outside / "socket"), other.pid, server.getsockname()[1], ATTEMPTS, seconds]
        program = [interpreter(), "-I", "-S", "-c", PROGRAM, json.dumps(facts)]
        sandbox = Sandbox(folder=folder, readable=(), limits=Limits(wall_seconds=30.0))
        process = sandbox.start(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stderr is not None
        with process.stdout, process.stderr:
            output, errors = process.stdout.read(), process.stderr.read()
        code = process.wait()
        if code:
            text = process.exceeded or errors.decode(errors="replace").strip()[-300:]
            raise ConfigError(f"the sandbox's attempts could not be made (exit code {code}): {text}")
        got = json.loads(output)
        survived = any(seconds.encode() in command for command in _commands())
        return {name: name in got for name in ATTEMPTS} | {SURVIVOR: survived}


def _commands() -> Iterator[bytes]:
    """The command lines of this machine's processes that are `sleep`."""
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if place.name.isdecimal() and (command := (place / "cmdline").read_bytes()).startswith(b"sleep\0"):
                yield command


def holds() -> str:
    """The layers of sandboxes on this machine, for a report."""
    from agentjet.sandbox.inside import landlock_version

    version = landlock_version()
    landlock = f"Landlock {version}" if version else "no Landlock"
    filtered = "a filter of system calls" if filter_program(deny_unmapped=False) else "no filter of system calls"
    group = Cgroup.make(2**30)
    if group is not None:
        group.remove()
    memory = "a cgroup" if group is not None else "samples of its processes"
    return f"bubblewrap, {landlock}, {filtered}; memory limited by {memory}"
