"""Who may do what: two tokens for people's programs, one signed key for each episode's agent.

* the **client token** (`DATA_DIR/token`) begins and ends episodes and reads everything;
* the **admin token** (`DATA_DIR/admin-token`) does that too, and configures, starts and stops the server;
* an **episode key** opens the inference routes and its own episode's control routes, until it expires, and nothing
  else.

Keys are signed with the admin token, so replacing that file and restarting revokes every key there is.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from itsdangerous import BadSignature, URLSafeSerializer

from agentjet.errors import ConfigError, Forbidden, Unauthorized

Bearer = Literal["admin", "client"]
KEY_PREFIX = "ajk-"


class Keys:
    """Makes and checks tokens and keys."""

    def __init__(self, *, token: str, admin_token: str, clock: Callable[[], float] = time.time) -> None:
        self._token = token
        self._admin_token = admin_token
        self._clock = clock
        self._signer = URLSafeSerializer(admin_token, salt="agentjet-episode-key")

    @classmethod
    def open(cls, data_dir: Path, *, token: str | None = None, clock: Callable[[], float] = time.time) -> Keys:
        """Read the tokens of a data dir, making them (readable by the owner only) where they are missing.

        A `token` given replaces the client token, and is written down in its place.
        """
        path = data_dir / "token"
        if token is not None and (not path.exists() or path.read_text().strip() != token):
            path.unlink(missing_ok=True)
            _write_secret(path, token)
        return cls(token=_secret(path), admin_token=_secret(data_dir / "admin-token"), clock=clock)

    def sign(self, episode_id: str, expires_at: float) -> str:
        """The key of an episode, good until `expires_at` (Unix seconds)."""
        return KEY_PREFIX + str(self._signer.dumps([episode_id, round(expires_at, 3)]))

    def episode(self, key: str) -> str:
        """The episode a key opens. Raises `Unauthorized`, or `Forbidden` for one of the server's tokens."""
        if self._bearer(key) is not None:
            raise Forbidden(
                "This is the server's token; the model is asked with the api_key of an episode.",
                code="episode_key_needed",
            )
        if not key:
            raise Unauthorized(
                "No key was given: send `Authorization: Bearer <api_key of the episode>`.", code="key_missing"
            )
        try:
            episode_id, expires_at = self._signer.loads(key.removeprefix(KEY_PREFIX))
        except (BadSignature, ValueError, TypeError):
            raise Unauthorized("This key was not made by this server.", code="key_invalid") from None
        if self._clock() >= expires_at:
            raise Unauthorized(f"The key of episode {episode_id} has expired.", code="key_expired")
        return str(episode_id)

    def control(self, token: str, *, episode_id: str = "") -> Bearer | Literal["episode"]:
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
        own = self.episode(token)
        if own != episode_id:
            raise Forbidden(f"The key of episode {own} opens that episode only.", code="not_your_episode")
        return "episode"

    def admin(self, token: str) -> None:
        """Raises unless this is the admin token."""
        if self.control(token) != "admin":
            raise Forbidden(
                "Configuring, starting and stopping the server takes the token in the file 'admin-token' of its data "
                "dir.",
                code="admin_token_needed",
            )

    def _bearer(self, token: str) -> Bearer | None:
        given = token.encode()
        if hmac.compare_digest(given, self._admin_token.encode()):
            return "admin"
        if hmac.compare_digest(given, self._token.encode()):
            return "client"
        return None


def _secret(path: Path) -> str:
    try:
        held = path.read_text().strip()
    except FileNotFoundError:
        return _write_secret(path, secrets.token_urlsafe(24))
    if len(held) < 16:
        raise ConfigError(f"{path} holds no usable token: remove the file, and the server makes a new one.")
    return held


def _write_secret(path: Path, secret: str) -> str:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
    return secret
