"""`agentjet eval`: score a model, or the policy of a running server, on the demo's held-out sums."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli import Json, Override, Token, TokenFile, connect, printable
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.client import Endpoint, Swarm


def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODEL_OR_URL", help="A model folder or name, or the address of a running server."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, max=500, help="How many of the 500 held-out sums.")] = 500,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is asked.")] = 1,
    pass_at: Annotated[
        str, typer.Option(metavar="K,K,...", help="Also the chance that one of K answers is right; K up to --repeats.")
    ] = "",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token: temperature 0.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Sums asked at the same time.")] = 64,
    at_version: Annotated[
        str | None,
        typer.Option(
            metavar="N|newest",
            help="Policy version that answers throughout: learning waits. Default: any.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask any OpenAI-compatible endpoint instead: http://.../v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name there.")] = None,
    endpoint_key_file: Annotated[Path | None, typer.Option(help="File with the endpoint's API key.")] = None,
    token: Token = None,
    token_file: TokenFile = None,
    override: Override = None,
    as_json: Json = False,
) -> None:
    """Score a model on sums that the demo does not train on: the share of first answers that are right.

    For a model folder (such as the one the demo exports) or a model name a server is started and ended again. With
    --repeats the interval is over sums, not answers.
    """
    from agentjet.cli.scoring import Exam, score_policy

    outside = _endpoint(endpoint, endpoint_model, endpoint_key_file)
    if (target is None) == (outside is None):
        raise ConfigError("name what to score: MODEL_OR_URL, or --endpoint with --endpoint-model")
    exam = Exam(
        tasks=tasks,
        temperature=0.0 if greedy else temperature,
        seed=seed,
        concurrency=concurrency,
        repeats=repeats,
        pass_at=_pass_at(pass_at, repeats),
        at_version=_at_version(at_version, outside),
        endpoint=outside,
    )
    with _server(target, token, token_file, override or []) as swarm:
        score = score_policy(swarm, exam, progress=not as_json)
    name = target or f"{endpoint_model} at {endpoint}"
    typer.echo(json.dumps({"target": name, **score.to_json()}, indent=2) if as_json else printable(f"{name}: {score}"))


def _endpoint(url: str | None, model: str | None, key_file: Path | None) -> Endpoint | None:
    from agentjet.client import Endpoint

    if url is None:
        if model is not None or key_file is not None:
            raise ConfigError("--endpoint-model and --endpoint-key-file are for an --endpoint")
        return None
    if not url.startswith(("http://", "https://")) or model is None:
        raise ConfigError("--endpoint is an address (http://.../v1), and needs --endpoint-model")
    if key_file is None:
        return Endpoint(url, model)
    try:
        return Endpoint(url, model, key_file.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise ConfigError(f"--endpoint-key-file {key_file}: {error.strerror}") from None


def _pass_at(text: str, repeats: int) -> tuple[int, ...]:
    try:
        wanted = tuple(int(k) for k in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--pass-at {text!r}: give numbers with commas between them, such as 1,4") from None
    if wrong := [k for k in wanted if not 1 <= k <= repeats]:
        raise ConfigError(f"--pass-at {wrong[0]} needs --repeats {max(1, wrong[0])} at least; it is {repeats}")
    return wanted


def _at_version(text: str | None, outside: Endpoint | None) -> int | Literal["newest"] | None:
    if text is None:
        return None
    if outside is not None:
        raise ConfigError("--at-version is for the policy of a server: an endpoint has no versions")
    if text == "newest":
        return "newest"
    if not text.isdecimal():
        raise ConfigError(f"--at-version {text!r}: give a policy version, or newest")
    return int(text)


@contextmanager
def _server(target: str | None, token: str | None, token_file: Path | None, overrides: list[str]) -> Iterator[Swarm]:
    """A client of the server named, or of one started for the model named; of any, where none is to be asked."""
    if target is None or target.startswith(("http://", "https://")):
        if overrides:
            raise ConfigError("--set is for a server that eval starts; none is started here")
        with connect(target, token, token_file) as swarm:
            yield swarm
        return
    from agentjet.cli.arithmetic import SETTINGS
    from agentjet.cli.serve import ChildServer
    from agentjet.client.threads import raise_on_signals

    if "/" in target and target.count("/") != 1 and not Path(target).is_dir():
        raise ConfigError(f"{target!r} is neither a folder nor an address (http://...)")
    name = str(Path(target).resolve()) if Path(target).is_dir() else target
    with (
        tempfile.TemporaryDirectory(prefix="agentjet-eval-") as folder,
        raise_on_signals(),
        ChildServer(SETTINGS, [f"model.name={json.dumps(name)}", *overrides], Path(folder)) as server,
        server.connect() as swarm,
    ):
        yield swarm
