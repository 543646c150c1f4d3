"""The file of `--reward file:NAME` is written by the program, so it may be anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentjet.cli.run import MAX_REWARD_BYTES, NoReward, from_file
from agentjet.types import Reward

SECRET = "a-secret-of-the-user"


def _link_above(file: Path, secret: Path) -> None:
    file.parent.rmdir()
    file.parent.symlink_to(secret.parent)


LEFT: dict[str, Callable[[Path, Path], object]] = {
    "fifo": lambda file, secret: os.mkfifo(file),
    "endless": lambda file, secret: file.symlink_to("/dev/zero"),
    "link": lambda file, secret: file.symlink_to(secret),
    "hard link": lambda file, secret: file.hardlink_to(secret),
    "link above": _link_above,
    "folder": lambda file, secret: file.mkdir(),
    "long": lambda file, secret: file.write_bytes(b"1" * (MAX_REWARD_BYTES + 1)),
    "nothing": lambda file, secret: None,
}


@pytest.mark.parametrize("left", LEFT)
def test_only_a_small_file_of_the_program_is_read(tmp_path: Path, left: str) -> None:
    secret, file = tmp_path / "home" / "reward", tmp_path / "work" / "out" / "reward"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    file.parent.mkdir(parents=True)
    LEFT[left](file, secret)
    with pytest.raises(NoReward, match="the file out/reward of the reward") as raised:
        from_file(tmp_path / "work", "out/reward")
    assert SECRET not in str(raised.value)


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "reward").write_text("0.5")
    assert from_file(tmp_path, "out/reward") == Reward(0.5)
