"""Rules that hold for every command: an option with one value is given once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.errors import ConfigError, nearest_name


def options(group: object, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path of each command with one of its options that has one value."""
    for name, command in getattr(group, "commands", {}).items():
        yield from options(command, (*names, name))
    for parameter in getattr(group, "params", []) if not hasattr(group, "commands") else []:
        if parameter.param_type_name == "option" and not parameter.multiple and not parameter.is_flag:
            yield names, parameter.opts[0]
            return


EVERY = list(options(typer.main.get_command(app)))


@pytest.mark.parametrize(("names", "option"), EVERY, ids=[" ".join(names) for names, _ in EVERY])
def test_an_option_that_is_given_twice_is_refused(names: tuple[str, ...], option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is given 2 times and has one value: give it once"):
        CliRunner().invoke(app, [*names, option, "1", f"{option}=2"], catch_exceptions=False)


def test_options_of_all_commands_are_tried() -> None:
    assert (("track",), "--to") in EVERY and len(EVERY) > 20


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpro", "grpo"),
        ("gsop", "gspo"),
        ("ppoo", "ppo"),
        ("drgrpo", "dr_grpo"),
        ("GRPO", "grpo"),
        ("wholly different", None),
    ],
)
def test_the_nearest_name_is_the_one_with_the_fewest_edits(typed: str, meant: str | None) -> None:
    assert nearest_name(typed, ["gspo", "ppo", "grpo", "dr_grpo", "dapo"]) == meant
