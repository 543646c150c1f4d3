"""Tokens and episode keys: what they open, for how long, and how they are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.errors import ConfigError, Forbidden, Unauthorized
from agentjet.server import Keys
from tests.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def test_tokens_are_made_once_and_readable_by_the_owner_only(tmp_path: Path) -> None:
    first = Keys.open(tmp_path)
    for name in ("token", "admin-token"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert len((tmp_path / name).read_text().strip()) >= 32
    again = Keys.open(tmp_path)
    assert again.episode(first.sign("ep1", 2e10)) == "ep1"
    assert again.control((tmp_path / "token").read_text().strip()) == "client"


def test_a_given_token_is_written_down(tmp_path: Path) -> None:
    Keys.open(tmp_path)
    keys = Keys.open(tmp_path, token="given-token-given-token")
    assert keys.control("given-token-given-token") == "client"
    assert (tmp_path / "token").read_text().strip() == "given-token-given-token"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_an_emptied_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="token"):
        Keys.open(tmp_path)


def test_a_key_opens_its_episode_until_it_expires(clock: Clock) -> None:
    keys = Keys(token="c" * 20, admin_token="a" * 20, clock=clock)
    key = keys.sign("ep1", 1010.0)
    assert keys.episode(key) == "ep1" and keys.control(key, episode_id="ep1") == "episode"
    with pytest.raises(Forbidden):
        keys.control(key, episode_id="ep2")
    clock.advance(10)
    with pytest.raises(Unauthorized) as expired:
        keys.episode(key)
    assert expired.value.code == "key_expired"


def test_keys_of_another_server_and_changed_keys_are_refused(clock: Clock) -> None:
    keys = Keys(token="c" * 20, admin_token="a" * 20, clock=clock)
    other = Keys(token="c" * 20, admin_token="b" * 20, clock=clock)
    key = keys.sign("ep1", 2000.0)
    forged = other.sign("ep1", 2000.0)
    for wrong in (forged, key[:-1], key + "A", "ajk-", "ajk-W10.x", "é", key.replace("ajk-", "ajk-x")):
        with pytest.raises(Unauthorized):
            keys.episode(wrong)


def test_only_the_admin_token_administers() -> None:
    keys = Keys(token="c" * 20, admin_token="a" * 20)
    keys.admin("a" * 20)
    with pytest.raises(Forbidden):
        keys.admin("c" * 20)
    with pytest.raises(Unauthorized):
        keys.admin("x" * 20)
    with pytest.raises(Unauthorized):
        keys.admin("")
