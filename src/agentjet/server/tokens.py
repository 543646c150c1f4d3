"""The secrets of a data dir, one file each, readable by its owner only: three tokens and what episode keys are signed
with.

Invariants: a file appears whole or not at all; a server that runs reads a replaced file on its next request, so a
rotation needs no restart; a secret is never part of a message.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Literal

from agentjet.errors import ConfigError

SecretName = Literal["client", "admin", "viewer", "keys"]
FILES: dict[SecretName, str] = {
    "client": "token",
    "admin": "admin-token",
    "viewer": "viewer-token",
    "keys": "key-secret",
}
MIN_LENGTH = 16
OTHERS = 0o077

log = logging.getLogger(__name__)


class SecretFile:
    """A secret that is kept in a file. Calling it returns the file's present content."""

    def __init__(self, path: Path) -> None:
        """Makes the file where it is missing. Raises `ConfigError` when it holds nothing usable."""
        self._path = path
        if not path.exists():
            replace_secret(path)
        if path.stat().st_mode & OTHERS:
            log.warning("%s can be read by other users of this machine: chmod 600 it, or rotate it", path)
        self._stamp = self._now()
        self._held = read_secret(path)

    def __call__(self) -> str:
        """The secret. One that cannot be read, or is no secret, leaves the last one in force, and is logged."""
        stamp = self._now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._held = read_secret(self._path)
                log.info("%s was replaced", self._path)
            except ConfigError as error:
                log.error("%s; the secret it had before stays in force until the server restarts", error)
        return self._held

    def _now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def read_secret(path: Path) -> str:
    """What a file of secrets holds. Raises `ConfigError`."""
    try:
        held = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: a server makes it when it starts on this data dir") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    if len(held) < MIN_LENGTH:
        raise ConfigError(
            f"{path} holds no usable token: remove the file, and the server makes a new one when it starts"
        )
    return held


def replace_secret(path: Path, secret: str | None = None) -> None:
    """Put a new secret (`secret`, or a random one) in the place of whatever the file holds, in one step."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write((secret or secrets.token_urlsafe(24)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
