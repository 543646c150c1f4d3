"""The secrets of a data dir, one file each, readable by its owner only: three tokens and what episode keys are signed
with.

Invariants: a file appears whole or not at all; a server that runs reads a replaced file on its next request, so a
rotation needs no restart; a secret is never part of a message.

Who may do what: three tokens for people's programs, one signed key for each episode's agent.

* the **viewer token** (`DATA_DIR/viewer-token`) reads: status, events, episodes, the job, checkpoints, metrics;
* the **client token** (`DATA_DIR/token`) does that too, begins and ends episodes, and saves checkpoints;
* the **admin token** (`DATA_DIR/admin-token`) does all that, and configures, starts and stops the server;
* an **episode key** opens the inference routes and its own episode's control routes, for as long as the present
  `job.max_episode_seconds` allows the episode to live, and nothing else.

Keys are signed with a secret of their own (`DATA_DIR/key-secret`): replacing a token revokes no key, replacing that
secret revokes every key there is. Replaced files count from the next request on: see `tokens`.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from itsdangerous import BadSignature, URLSafeSerializer

from agentjet.errors import ConfigError, Forbidden, Unauthorized

SecretName = Literal["client", "admin", "viewer", "keys"]
SECRET_FILES: dict[SecretName, str] = {
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


Bearer = Literal["admin", "client", "viewer"]
Secret = str | Callable[[], str]
"""A secret, or what returns the present one."""
KEY_PREFIX = "ajk-"
MAX_KEY_LENGTH = 512


class Keys:
    """Makes and checks tokens and keys."""

    def __init__(
        self,
        *,
        token: Secret,
        admin_token: Secret,
        viewer_token: Secret | None = None,
        key_secret: Secret | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A viewer token or key secret that is not given is made up, and lost with this process."""
        self._tokens: dict[Bearer, Callable[[], str]] = {
            "admin": _source(admin_token),
            "client": _source(token),
            "viewer": _source(viewer_token),
        }
        self._key_secret = _source(key_secret)
        self.clock = clock

    @classmethod
    def open(cls, data_dir: Path, *, token: str | None = None, clock: Callable[[], float] = time.time) -> Keys:
        """Read the secrets of a data dir, making them (readable by the owner only) where they are missing.

        A `token` given replaces the client token, and is written down in its place. Raises `ConfigError`.
        """
        path = data_dir / SECRET_FILES["client"]
        if token is not None and not (path.exists() and read_secret(path) == token):
            replace_secret(path, token)
        return cls(
            token=SecretFile(path),
            admin_token=SecretFile(data_dir / SECRET_FILES["admin"]),
            viewer_token=SecretFile(data_dir / SECRET_FILES["viewer"]),
            key_secret=SecretFile(data_dir / SECRET_FILES["keys"]),
            clock=clock,
        )

    def sign(self, episode_id: str, begun: float) -> str:
        """The key of an episode that began at `begun` (Unix seconds)."""
        return KEY_PREFIX + str(self._signer().dumps([episode_id, round(begun, 3)]))

    def episode(self, key: str, max_age: float) -> str:
        """The episode a key opens, for `max_age` seconds from the episode's beginning.

        Raises `Unauthorized`, or `Forbidden` for one of the server's tokens.
        """
        if self._bearer(key) is not None:
            raise Forbidden(
                "This is the server's token; the model is asked with the api_key of an episode.",
                code="episode_key_needed",
            )
        if not key:
            raise Unauthorized(
                "No key was given: send `Authorization: Bearer <api_key of the episode>`.", code="key_missing"
            )
        episode_id, begun = self._opened(key)
        if self.clock() >= begun + max_age:
            raise Unauthorized(f"The key of episode {episode_id} has expired.", code="key_expired")
        return episode_id

    def control(self, token: str, *, episode_id: str = "", max_age: float = math.inf) -> Bearer | Literal["episode"]:
        """Who is asking on a control route, `episode_id` being the episode it is about.

        Raises `Unauthorized` or `Forbidden`.
        """
        bearer = self._bearer(token)
        if bearer is not None:
            return bearer
        if not token.startswith(KEY_PREFIX):
            why = "is missing" if not token else "is not this server's"
            raise Unauthorized(
                f"The token {why}: send `Authorization: Bearer <token>`; the server keeps it in the file "
                "'token' of its data dir.",
                code="token_missing" if not token else "token_invalid",
            )
        own = self.episode(token, max_age)
        if own != episode_id:
            raise Forbidden(f"The key of episode {own} opens that episode only.", code="not_your_episode")
        return "episode"

    def client(self, token: str, *, episode_id: str = "", max_age: float = math.inf) -> None:
        """Raises for a viewer: whatever changes something takes more. See `control` for the rest."""
        if self.control(token, episode_id=episode_id, max_age=max_age) == "viewer":
            raise Forbidden(
                "The viewer token only reads: this takes the token in the file 'token' of the server's data dir.",
                code="client_token_needed",
            )

    def admin(self, token: str) -> None:
        """Raises unless this is the admin token."""
        if self.control(token) != "admin":
            raise Forbidden(
                "Configuring, starting and stopping the server takes the token in the file 'admin-token' of its data "
                "dir.",
                code="admin_token_needed",
            )

    def _bearer(self, token: str) -> Bearer | None:
        given = token.encode(errors="replace")
        for role, held in self._tokens.items():
            if hmac.compare_digest(given, held().encode()):
                return role
        return None

    def _opened(self, key: str) -> tuple[str, float]:
        """Episode and the time it began as this server signed them. Raises `Unauthorized`."""
        try:
            if not key.startswith(KEY_PREFIX) or len(key) > MAX_KEY_LENGTH:
                raise ValueError
            episode_id, begun = self._signer().loads(key.removeprefix(KEY_PREFIX))
            opened = str(episode_id), float(begun)
            # Base64 may be written in several ways; only the one that was given out counts.
            if self.sign(*opened) != key:
                raise ValueError
        except (BadSignature, ValueError, TypeError):
            raise Unauthorized("This key was not made by this server.", code="key_invalid") from None
        return opened

    def _signer(self) -> URLSafeSerializer:
        return URLSafeSerializer(self._key_secret(), salt="agentjet-episode-key")


def _source(secret: Secret | None) -> Callable[[], str]:
    if secret is None:
        secret = secrets.token_urlsafe(24)
    if isinstance(secret, str):
        fixed = secret
        return lambda: fixed
    return secret
