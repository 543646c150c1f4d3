"""Authentication: three tokens for programs of people, and a signed key for the agent of each episode. Each run has its
own, in its folder; those of the default run are in the data dir.

* The **viewer token** (`viewer-token`) reads status, events, episodes, the job, checkpoints and metrics of the run.
* The **client token** (`token`) also starts and ends episodes and saves checkpoints.
* The **admin token** (`admin-token`) also configures, starts and stops the run. That of the default run opens every
  run.
* An **episode key** opens the inference routes and the control routes of its episode, nothing else. It expires after
  the present `job.max_episode_seconds`.
* A **session key** opens for twelve hours what the token of its role opens. The page has one. It gets it for a one-time
  code of `agentjet open`, which opens one session, within a minute.

Episode keys and session keys are signed with `key-secret`. Replacing a token revokes no key; replacing this
secret revokes all.

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
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

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
    """A secret in a file, which is created if it is missing. Calling it returns the present content of the file."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file does not contain a usable secret."""
        self._path = path
        if not path.exists():
            replace_secret(path)
        if path.stat().st_mode & OTHERS:
            log.warning("%s is readable by other users of this machine: run chmod 600 on it, or rotate it", path)
        self._stamp = self._present_stamp()
        self._secret = read_secret(path)

    def __call__(self) -> str:
        """Returns the secret. If the file is unreadable or invalid, logs an error and returns the last valid secret."""
        stamp = self._present_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._secret = read_secret(self._path)
                log.info("%s was replaced", self._path)
            except ConfigError as error:
                log.error("%s; the previous secret stays valid until the server restarts", error)
        return self._secret

    def _present_stamp(self) -> tuple[int, int, int] | None:
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


Bearer = Literal["viewer", "client", "admin"]
LEVELS: tuple[Bearer, ...] = ("viewer", "client", "admin")
"""Each token opens what those before it open."""
TOO_LOW: dict[Bearer, str] = {
    "client": "The viewer token only reads: use the token in the file 'token' beside it.",
    "admin": "Configuring, scaling, starting and stopping need the token in the file 'admin-token', beside the file "
    "'token'.",
}
Secret = str | Callable[[], str]
"""A secret, or a function that returns the present one."""
KEY_PREFIX = "ajk-"
SESSION_PREFIX = "ajs-"
SESSION_SECONDS = 12 * 3600
MAX_KEY_LENGTH = 512


class Keys:
    """Creates and checks tokens and episode keys."""

    def __init__(
        self,
        given: Mapping[SecretName, Secret],
        *,
        server: Keys | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A secret that is not given is random, and lost with this process. `server` are the keys of the default run:
        its admin administers this run, too."""
        self._secrets = {name: given.get(name) or secrets.token_urlsafe(24) for name in SECRET_FILES}
        self._server = server
        self.clock = clock

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        token: str | None = None,
        server: Keys | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Keys:
        """Reads the secrets of a data dir, or of the folder of a run, and creates missing ones. Raises `ConfigError`.

        If `token` is given, it replaces the client token, in its file as well.
        """
        path = folder / SECRET_FILES["client"]
        for other in (folder / SECRET_FILES[name] for name in ("admin", "viewer")):
            if token is not None and other.exists() and read_secret(other) == token:  # It would lose its level.
                raise ConfigError(
                    f"AGENTJET_TOKEN is the token in {other}, and it becomes that of the clients: unset it, or give "
                    f"the content of {path}"
                )
        if token is not None and not (path.exists() and read_secret(path) == token):
            replace_secret(path, token)
        held = {name: SecretFile(folder / file) for name, file in SECRET_FILES.items()}
        return cls(held, server=server, clock=clock)

    def sign(self, episode_id: str, begun: float) -> str:
        """Returns the key of an episode that started at `begun` (Unix seconds)."""
        return KEY_PREFIX + str(_signer(self._secrets["keys"], "episode").dumps([episode_id, round(begun, 3)]))

    def sign_session(self, role: Bearer) -> tuple[str, float]:
        """Returns the key of a new session, and its end in Unix seconds."""
        expires = math.floor(self.clock()) + SESSION_SECONDS
        return SESSION_PREFIX + str(_signer(self._secrets["keys"], "session").dumps([role, expires])), float(expires)

    def session(self, key: str) -> tuple[Bearer, float]:
        """Returns the role and the end of a session, ended or not. Raises `Unauthorized`."""
        try:
            role, expires = self._loaded(key, SESSION_PREFIX, "session")
            return LEVELS[LEVELS.index(role)], float(expires)
        except (ValueError, TypeError):
            raise Unauthorized(
                "This session is unknown: the keys of the server were replaced. Run `agentjet open` again.",
                code="session_invalid",
            ) from None

    def episode(self, key: str, max_age: float) -> str:
        """Returns the episode id of a key, which is valid for `max_age` seconds from the start of its episode.

        Raises `Unauthorized`, or `Forbidden` for one of the server's tokens.
        """
        try:
            episode_id, begun = self._opened(key)
        except Unauthorized:
            if self.bearer(key) is not None:
                raise Forbidden(
                    "This is a token of the server. Model requests need the api_key of an episode.",
                    code="episode_key_needed",
                ) from None
            if not key:
                raise Unauthorized(
                    "The key is missing: send `Authorization: Bearer <api_key of the episode>`.", code="key_missing"
                ) from None
            raise
        if self.clock() >= begun + max_age:
            raise Unauthorized(f"The key of episode {episode_id} has expired.", code="key_expired")
        return episode_id

    def control(
        self, token: str, needed: Bearer = "viewer", *, episode_id: str = "", max_age: float = math.inf
    ) -> Bearer | Literal["episode"]:
        """Returns the owner of a token of level `needed` or above, or of a key of the episode `episode_id`.

        Raises `Unauthorized` or `Forbidden` for any other.
        """
        bearer = self.bearer(token)
        if bearer is None and token.startswith(SESSION_PREFIX):
            self.session(token)
            raise Unauthorized("This session has ended: run `agentjet open` again.", code="session_expired")
        if bearer is not None:
            if LEVELS.index(bearer) < LEVELS.index(needed):
                raise Forbidden(TOO_LOW[needed], code=f"{needed}_token_needed")
            return bearer
        if not token.startswith(KEY_PREFIX):
            why = "is missing" if not token else "is not a token of this server"
            raise Unauthorized(
                f"The token {why}: send `Authorization: Bearer <token>` with the content of the file "
                f"{SECRET_FILES['admin' if needed == 'admin' else 'client']!r} in the server's data dir.",
                code="token_missing" if not token else "token_invalid",
            )
        own = self.episode(token, max_age)
        if own != episode_id:
            raise Forbidden(f"The key of episode {own} opens that episode only.", code="not_your_episode")
        return "episode"

    def bearer(self, token: str) -> Bearer | None:
        """Returns the level of a token or of a session that has not ended; None for any other text."""
        if self._server is not None and self._server.bearer(token) == "admin":
            return "admin"
        if token.startswith(SESSION_PREFIX):
            try:
                role, expires = self.session(token)
            except Unauthorized:
                return None
            return role if self.clock() < expires else None
        given = token.encode(errors="replace")
        for level in LEVELS:
            if hmac.compare_digest(given, _present(self._secrets[level]).encode()):
                return level
        return None

    def knows(self, token: str) -> bool:
        """True for a token of the run and for a key that it signed, expired or not."""
        try:
            if token.startswith(SESSION_PREFIX):
                return bool(self.session(token))
            return self.bearer(token) is not None or bool(self._opened(token))
        except Unauthorized:
            return False

    def _opened(self, key: str) -> tuple[str, float]:
        """Returns the episode id and the start time that this server signed. Raises `Unauthorized`."""
        try:
            episode_id, begun = self._loaded(key, KEY_PREFIX, "episode")
            return str(episode_id), float(begun)
        except (ValueError, TypeError):
            raise Unauthorized("This key was not issued by this server.", code="key_invalid") from None

    def _loaded(self, key: str, prefix: str, kind: Literal["episode", "session"]) -> Any:
        """Returns the signed content of a key. Raises `ValueError` if it was not signed here, or not in this text."""
        if not key.startswith(prefix) or len(key) > MAX_KEY_LENGTH:
            raise ValueError(key)
        return _content(key.removeprefix(prefix), _present(self._secrets["keys"]), kind)


def _signer(secret: Secret, kind: Literal["episode", "session"]) -> URLSafeSerializer:
    return URLSafeSerializer(_present(secret), salt=f"agentjet-{kind}-key")


@lru_cache(4096)  # An agent sends its key with each call. Errors are not kept.
def _content(signed: str, secret: str, kind: Literal["episode", "session"]) -> tuple[Any, ...]:
    """Returns the signed content. Raises `ValueError` if it was not signed with this secret, or not in this text."""
    signer = _signer(secret, kind)
    try:
        content = signer.loads(signed)
    except BadSignature as error:
        raise ValueError(signed) from error
    # Several Base64 texts decode to the same bytes; only the issued one is valid.
    if str(signer.dumps(content)) != signed:
        raise ValueError(signed)
    return tuple(content)


def _present(secret: Secret) -> str:
    return secret if isinstance(secret, str) else secret()


CODE_SECONDS = 60
MAX_CODES = 100
"""Codes of one role that are kept. A newer one replaces the oldest of its role in its run."""


class SessionCodes:
    """The one-time codes of `agentjet open`. They are in memory only: a restart of the server ends them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[str, Bearer, float]] = {}

    def create(self, run: str, role: Bearer) -> str:
        """Returns a code for a session with `role` in a run."""
        # A limit for all roles together would let a viewer remove the code of an admin.
        same = [code for code, held in self._held.items() if held[:2] == (run, role)]
        if len(same) >= MAX_CODES:
            del self._held[same[0]]
        code = secrets.token_urlsafe(24)
        self._held[code] = run, role, self._clock() + CODE_SECONDS
        return code

    def redeem(self, code: str) -> tuple[str, Bearer]:
        """Returns the run and the role of a code, which is then used up. Raises `Unauthorized`."""
        run, role, expires = self._held.pop(code, ("", "viewer", 0.0))
        if self._clock() >= expires:
            raise Unauthorized(
                f"This link was used already, or is older than {CODE_SECONDS} s: run `agentjet open` again.",
                code="code_invalid",
            )
        return run, role
