"""Tokens and episode keys: access, storage.

1. Secrets are created once, written whole, and readable by the owner only.
2. A key opens its episode only as it was issued.
3. A replaced secret counts from the next request on. Only the secret of the keys revokes keys.

Rights of each token, and keys that expire: `test_control.py`, `test_operations.py`.
"""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from agentjet.errors import ConfigError, Unauthorized
from agentjet.front.keys import SECRET_FILES, Keys, SecretFile, read_secret, replace_secret
from tests.fakes import Clock
from tests.server.serving import ADMIN, serving

AGE = 10.0
LONG = 2e10
"""An age that no key reaches before the clock of this machine does."""


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def test_tokens_are_made_once_and_readable_by_the_owner_only(tmp_path: Path) -> None:
    first = Keys.open(tmp_path)
    for name in ("token", "admin-token", "viewer-token", "key-secret"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert len((tmp_path / name).read_text().strip()) >= 32
    again = Keys.open(tmp_path)
    assert again.episode(first.sign("ep1", 0.0), LONG) == "ep1"
    assert again.control((tmp_path / "token").read_text().strip()) == "client"


def test_a_given_token_is_written_down(tmp_path: Path) -> None:
    Keys.open(tmp_path)
    keys = Keys.open(tmp_path, token="given-token-given-token")
    admin = (tmp_path / "admin-token").read_text().strip()
    with pytest.raises(ConfigError, match=r"AGENTJET_TOKEN is the token in .*admin-token.*unset it"):
        Keys.open(tmp_path, token=admin)
    assert keys.control("given-token-given-token") == "client"
    assert (tmp_path / "token").read_text().strip() == "given-token-given-token"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_an_emptied_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="token"):
        Keys.open(tmp_path)


def test_keys_of_another_server_and_changed_keys_are_refused(clock: Clock) -> None:
    keys = Keys({"client": "c" * 20, "admin": "a" * 20}, clock=clock)
    other = Keys({"client": "c" * 20, "admin": "a" * 20}, clock=clock)
    key = keys.sign("ep1", 1000.0)
    forged = other.sign("ep1", 1000.0)
    for wrong in (forged, key[:-1], key + "A", "ajk-", "ajk-W10.x", "é", key.replace("ajk-", "ajk-x")):
        with pytest.raises(Unauthorized):
            keys.episode(wrong, AGE)


def test_a_replaced_token_counts_without_a_restart_and_ends_no_key(tmp_path: Path) -> None:
    keys = Keys.open(tmp_path)
    key = keys.sign("ep1", 0.0)
    for role in ("client", "admin", "viewer"):
        path = tmp_path / SECRET_FILES[role]
        before = read_secret(path)
        assert keys.control(before) == role
        replace_secret(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert keys.control(read_secret(path)) == role != before
        with pytest.raises(Unauthorized):
            keys.control(before)
        assert keys.episode(key, LONG) == "ep1"
    replace_secret(tmp_path / SECRET_FILES["keys"])
    with pytest.raises(Unauthorized) as void:
        keys.episode(key, LONG)
    assert void.value.code == "key_invalid"
    assert keys.episode(keys.sign("ep1", 0.0), LONG) == "ep1"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(SECRET_FILES.values())


@pytest.mark.parametrize("broken", ["", "short", None])
def test_a_secret_that_is_spoiled_leaves_the_last_one_in_force(tmp_path: Path, broken: str | None) -> None:
    secret = SecretFile(tmp_path / "token")
    held = secret()
    if broken is None:
        (tmp_path / "token").unlink()
    else:
        (tmp_path / "token").write_text(broken)
    assert secret() == held


def test_a_secret_others_can_read_is_logged_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text("not-so-secret-any-more\n")
    path.chmod(0o644)
    SecretFile(path)
    assert str(path) in caplog.text and "not-so-secret" not in caplog.text


KEYS = Keys({"client": "c" * 20, "admin": "a" * 20, "viewer": "v" * 20}, clock=lambda: 0.0)
KEY = KEYS.sign("ep000042", 0.0)


def test_no_key_with_one_character_changed_opens_anything() -> None:
    """Every position and every character: a decoder ignores the last bits of base64."""
    for position in range(len(KEY)):
        for character in {*string.ascii_letters, *string.digits, *"-_.=+/"} - {KEY[position]}:
            changed = KEY[:position] + character + KEY[position + 1 :]
            with pytest.raises(Unauthorized):
                KEYS.episode(changed, AGE)


@pytest.mark.anyio
async def test_the_data_dir_that_a_server_makes_is_its_owners_alone(tmp_path: Path) -> None:
    """The journal and the logs contain conversations of agents."""
    async with serving(tmp_path / "data"):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


@pytest.mark.anyio
async def test_what_a_server_writes_is_its_owners_alone_wherever_it_is_put(tmp_path: Path) -> None:
    """Also in an existing folder that others can read."""
    (tmp_path / "data").mkdir(0o755)
    async with serving(tmp_path / "data") as served:
        await served.run.batch()
        answer = await served.http.put("/swarm/v1/runs/other", json={}, headers={"Authorization": f"Bearer {ADMIN}"})
        assert answer.status_code == 200
        found = [path for path in (tmp_path / "data" / "runs").rglob("*") if "checkpoints" not in path.parts]
        modes = {str(path.relative_to(tmp_path / "data")): path.stat().st_mode & 0o777 for path in found}
        files = {path for path in modes if (tmp_path / "data" / path).is_file()}
    assert files >= {"runs/default/journal.sqlite-wal", "runs/default/metrics.jsonl"}
    assert files >= {"runs/other/journal.sqlite", "runs/other/run.json", "runs/other/token", "runs/other/key-secret"}
    assert {modes[path] for path in files} == {0o600} and {modes[path] for path in modes.keys() - files} == {0o700}
