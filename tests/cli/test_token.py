"""`agentjet token`: prints a token and nothing else, replaces one while a server runs, and prints the consequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.errors import ConfigError, InvalidRequest, Unauthorized
from agentjet.front.keys import Keys


def token(*arguments: str, data_dir: Path) -> str:
    done = CliRunner().invoke(app, ["token", *arguments, "--data-dir", str(data_dir)], catch_exceptions=True)
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.output


@pytest.mark.parametrize("role", ["client", "admin", "viewer"])
def test_shown_and_replaced_while_a_server_runs(role: str, tmp_path: Path) -> None:
    running = Keys.open(tmp_path)
    key = running.sign("ep1", 0.0)
    before = token("show", role, data_dir=tmp_path).strip()
    assert running.control(before) == role
    said = token("rotate", role, data_dir=tmp_path)
    after = token("show", role, data_dir=tmp_path).strip()
    assert f"agentjet token show {role} --data-dir {tmp_path}" in said
    assert after != before and before not in said and after not in said
    assert running.control(after) == role and running.episode(key, 2e10) == "ep1"
    with pytest.raises(Unauthorized):
        running.control(before)


def test_rotating_the_keys_ends_them_and_no_token(tmp_path: Path) -> None:
    running = Keys.open(tmp_path)
    key = running.sign("ep1", 0.0)
    held = token("show", "client", data_dir=tmp_path).strip()
    assert "invalid" in token("rotate", "keys", data_dir=tmp_path)
    assert running.control(held) == "client"
    with pytest.raises(Unauthorized):
        running.episode(key, 2e10)


def test_the_tokens_of_a_run(tmp_path: Path) -> None:
    Keys.open(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "journal.sqlite").touch()
    other = Keys.open(tmp_path / "runs" / "other")
    for role in ("client", "admin", "viewer"):
        held = token("show", role, "--run", "other", data_dir=tmp_path).strip()
        assert other.control(held) == role and held != token("show", role, data_dir=tmp_path).strip()
    said = token("rotate", "client", "--run", "other", data_dir=tmp_path)
    assert "--run other" in said and "AGENTJET_TOKEN" not in said
    assert token("show", "client", "--run", "other", data_dir=tmp_path).strip() not in said
    with pytest.raises(ConfigError, match="has no run 'nope'; its runs are other"):
        token("show", "client", "--run", "nope", data_dir=tmp_path)
    with pytest.raises(InvalidRequest, match="is not the name of a run"):
        token("show", "client", "--run", "..", data_dir=tmp_path)


def test_the_secret_of_the_keys_is_never_shown(tmp_path: Path) -> None:
    Keys.open(tmp_path)
    done = CliRunner().invoke(app, ["token", "show", "keys", "--data-dir", str(tmp_path)])
    assert done.exit_code == 2 and (tmp_path / "key-secret").read_text().strip() not in done.output


def test_a_folder_without_a_server(tmp_path: Path) -> None:
    for command in ("show", "rotate"):
        with pytest.raises(ConfigError, match=r"token (is not there|does not exist)"):
            token(command, "client", data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
