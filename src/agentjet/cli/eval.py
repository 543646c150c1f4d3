"""`agentjet eval`: score a model, or the policy of a running server, on the demo's held-out sums."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli.options import Json, Override, Token, TokenFile, connect
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.client import Swarm


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="MODEL_OR_URL", help="A model folder or name, or the address of a running server.")
    ],
    tasks: Annotated[int, typer.Option(min=1, max=500, help="How many of the 500 held-out sums.")] = 500,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token: temperature 0.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Sums asked at the same time.")] = 64,
    token: Token = None,
    token_file: TokenFile = None,
    override: Override = None,
    as_json: Json = False,
) -> None:
    """Score a model on sums that the demo does not train on: the share of first answers that are right.

    For a model folder (such as the one the demo exports) or a model name a server is started and ended again.
    """
    from agentjet.cli.scoring import score_policy

    with _server(target, token, token_file, override or []) as swarm:
        score = score_policy(
            swarm,
            tasks=tasks,
            temperature=0.0 if greedy else temperature,
            seed=seed,
            concurrency=concurrency,
            progress=not as_json,
        )
    typer.echo(json.dumps({"target": target, **score.to_json()}, indent=2) if as_json else f"{target}: {score}")


@contextmanager
def _server(target: str, token: str | None, token_file: Path | None, overrides: list[str]) -> Iterator[Swarm]:
    """A client of the server named, or of one started for the model named."""
    if target.startswith(("http://", "https://")):
        if overrides:
            raise ConfigError("--set is for a server that eval starts; this one runs already")
        with connect(target, token, token_file) as swarm:
            yield swarm
        return
    from agentjet.cli.arithmetic import SETTINGS
    from agentjet.cli.child import ChildServer, signals_unwind

    if "/" in target and target.count("/") != 1 and not Path(target).is_dir():
        raise ConfigError(f"{target!r} is neither a folder nor an address (http://...)")
    name = str(Path(target).resolve()) if Path(target).is_dir() else target
    with (
        tempfile.TemporaryDirectory(prefix="agentjet-eval-") as folder,
        signals_unwind(),
        ChildServer(SETTINGS, [f"model.name={json.dumps(name)}", *overrides], Path(folder)) as server,
        server.connect() as swarm,
    ):
        yield swarm
