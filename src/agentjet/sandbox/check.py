"""Whether sandboxes work on this machine: `missing`, and the way out."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agentjet.sandbox.process import bubblewrap

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
