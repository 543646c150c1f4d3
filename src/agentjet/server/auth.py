"""Authentication: three tokens for programs of people, and a signed key for the agent of each episode. Each run has its
own, in its folder; those of the default run are in the data dir.

* The **viewer token** (`viewer-token`) reads status, events, episodes, the job, checkpoints and metrics of the run.
* The **client token** (`token`) also starts and ends episodes and saves checkpoints.
* The **admin token** (`admin-token`) also configures, starts and stops the run. That of the default run opens every
  run.
* An **episode key** opens the inference routes and the control routes of its episode, nothing else. It expires after
  the present `job.max_episode_seconds`.

Episode keys are signed with `key-secret`. Replacing a token revokes no key; replacing this secret revokes all.

Invariants: a secret file is readable by its owner only, and is written whole or not at all. A running server uses a
replaced file from the next request on. A secret is never part of a message.
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
    """A secret in a file. Calling it returns the present content of the file."""

    def __init__(self, path: Path) -> None:
        """Creates the file if it is missing. Raises `ConfigError` if it does not contain a usable secret."""
        self._path = path
        if not path.exists():
            replace_secret(path)
        if path.stat().st_mode & OTHERS:
            log.warning("%s is readable by other users of this machine: run chmod 600 on it, or rotate it", path)
        self._stamp = self._now()
        self._held = read_secret(path)

    def __call__(self) -> str:
        """Returns the secret. If the file is unreadable or invalid, logs an error and returns the last valid secret."""
        stamp = self._now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._held = read_secret(self._path)
                log.info("%s was replaced", self._path)
            except ConfigError as error:
                log.error("%s; the previous secret stays valid until the server restarts", error)
        return self._held

    def _now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def read_secret(path: Path) -> str:
    """Returns the secret in a file. Raises `ConfigError`."""
    try:
        held = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: the server creates it when it starts on this data dir") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    if len(held) < MIN_LENGTH:
        raise ConfigError(
            f"{path} does not contain a usable token: remove the file, and the server creates a new one at its start"
        )
    return held


def replace_secret(path: Path, secret: str | None = None) -> None:
    """Replaces the content of the file atomically by `secret`, or by a random secret. Raises `ConfigError`."""
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
"""A secret, or a function that returns the present one."""
KEY_PREFIX = "ajk-"
MAX_KEY_LENGTH = 512


class Keys:
    """Creates and checks tokens and episode keys."""

    def __init__(
        self,
        *,
        token: Secret,
        admin_token: Secret,
        viewer_token: Secret | None = None,
        key_secret: Secret | None = None,
        server_admin: Secret | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A missing viewer token or key secret is replaced by a random one, which is lost with this process.

        `server_admin` is a second admin token, if given.
        """
        self.admin_token = _source(admin_token)
        self._tokens: list[tuple[Bearer, Callable[[], str]]] = [
            ("admin", self.admin_token),
            ("client", _source(token)),
            ("viewer", _source(viewer_token)),
        ]
        if server_admin is not None:
            self._tokens.append(("admin", _source(server_admin)))
        self._key_secret = _source(key_secret)
        self.clock = clock

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        token: str | None = None,
        server_admin: Secret | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Keys:
        """Reads the secrets of a data dir, or of the folder of a run, and creates missing ones. Raises `ConfigError`.

        If `token` is given, it replaces the client token, in its file as well.
        """
        path = folder / SECRET_FILES["client"]
        if token is not None and not (path.exists() and read_secret(path) == token):
            replace_secret(path, token)
        return cls(
            token=SecretFile(path),
            admin_token=SecretFile(folder / SECRET_FILES["admin"]),
            viewer_token=SecretFile(folder / SECRET_FILES["viewer"]),
            key_secret=SecretFile(folder / SECRET_FILES["keys"]),
            server_admin=server_admin,
            clock=clock,
        )

    def sign(self, episode_id: str, begun: float) -> str:
        """Returns the key of an episode that started at `begun` (Unix seconds)."""
        return KEY_PREFIX + str(self._signer().dumps([episode_id, round(begun, 3)]))

    def episode(self, key: str, max_age: float) -> str:
        """Returns the episode id of a key, which is valid for `max_age` seconds from the start of its episode.

        Raises `Unauthorized`, or `Forbidden` for one of the server's tokens.
        """
        if self._bearer(key) is not None:
            raise Forbidden(
                "This is a token of the server. Model requests need the api_key of an episode.",
                code="episode_key_needed",
            )
        if not key:
            raise Unauthorized(
                "The key is missing: send `Authorization: Bearer <api_key of the episode>`.", code="key_missing"
            )
        episode_id, begun = self._opened(key)
        if self.clock() >= begun + max_age:
            raise Unauthorized(f"The key of episode {episode_id} has expired.", code="key_expired")
        return episode_id

    def control(self, token: str, *, episode_id: str = "", max_age: float = math.inf) -> Bearer | Literal["episode"]:
        """Returns the owner of a token or key on a control route of the episode `episode_id`.

        Raises `Unauthorized` or `Forbidden`.
        """
        bearer = self._bearer(token)
        if bearer is not None:
            return bearer
        if not token.startswith(KEY_PREFIX):
            why = "is missing" if not token else "is not a token of this server"
            raise Unauthorized(
                f"The token {why}: send `Authorization: Bearer <token>` with the content of the file 'token' in the "
                "server's data dir.",
                code="token_missing" if not token else "token_invalid",
            )
        own = self.episode(token, max_age)
        if own != episode_id:
            raise Forbidden(f"The key of episode {own} opens that episode only.", code="not_your_episode")
        return "episode"

    def client(self, token: str, *, episode_id: str = "", max_age: float = math.inf) -> None:
        """As `control`, but raises `Forbidden` for the viewer token: use it for requests that change something."""
        if self.control(token, episode_id=episode_id, max_age=max_age) == "viewer":
            raise Forbidden(
                "The viewer token only reads: use the token in the file 'token' beside it.",
                code="client_token_needed",
            )

    def admin(self, token: str) -> None:
        """Raises `Unauthorized` or `Forbidden` unless this is the admin token."""
        if self.control(token) != "admin":
            raise Forbidden(
                "Configuring, starting and stopping needs the token in the file 'admin-token', which is beside the "
                "file 'token'.",
                code="admin_token_needed",
            )

    def is_admin(self, token: str) -> bool:
        return self._bearer(token) == "admin"

    def knows(self, token: str) -> bool:
        """True for a token of the run and for a key that it signed, expired or not."""
        if self._bearer(token) is not None:
            return True
        try:
            self._opened(token)
        except Unauthorized:
            return False
        return True

    def _bearer(self, token: str) -> Bearer | None:
        given = token.encode(errors="replace")
        for role, held in self._tokens:
            if hmac.compare_digest(given, held().encode()):
                return role
        return None

    def _opened(self, key: str) -> tuple[str, float]:
        """Returns the episode id and the start time that this server signed. Raises `Unauthorized`."""
        try:
            if not key.startswith(KEY_PREFIX) or len(key) > MAX_KEY_LENGTH:
                raise ValueError
            episode_id, begun = self._signer().loads(key.removeprefix(KEY_PREFIX))
            opened = str(episode_id), float(begun)
            # Several Base64 texts decode to the same bytes; only the issued one is valid.
            if self.sign(*opened) != key:
                raise ValueError
        except (BadSignature, ValueError, TypeError):
            raise Unauthorized("This key was not issued by this server.", code="key_invalid") from None
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
