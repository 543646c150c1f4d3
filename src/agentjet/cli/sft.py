"""`agentjet sft`: trains the policy of a running server on conversations with given answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, print_text
from agentjet.errors import ConfigError


def sft(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.jsonl",
            help="A conversation a line: messages in OpenAI's chat format, tool calls included, and perhaps tools.",
        ),
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the file.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations in a batch: one optimiser step.")] = 16,
    lr: Annotated[float | None, typer.Option(help="Constant learning rate; default: that of the job.")] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="The policy, in a run that names its policies.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the order of the conversations.")] = 0,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Train the server's policy on the assistant messages of conversations (supervised fine-tuning).

    Every conversation is checked before the first batch. A message with "weight": 0 is context only.
    """
    from agentjet.client.sft import read_demonstrations

    if lr is not None and not 0 < lr < math.inf:
        raise ConfigError(f"--lr {lr}: give a number above 0")
    found, ignored = read_demonstrations(file)
    if ignored and not as_json:
        print_text(f"ignored keys: {', '.join(sorted(map(str, ignored)))}")
    options = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "policy": policy, "seed": seed}
    with connect(url, token, token_file) as swarm:
        report = swarm.sft(found, progress=not as_json, **options)  # type: ignore[arg-type]
    first, last, version = report.losses[0], report.losses[-1], report.steps[-1].policy_version
    if as_json:
        facts = {"batches": len(report.steps), "policy_version": version, "first_loss": first, "last_loss": last}
        counts = {"demonstrations": report.num_demonstrations, "answers": report.num_answers}
        typer.echo(json.dumps({**facts, **counts, "tokens": report.num_tokens, "losses": report.losses}, indent=2))
    else:
        typer.echo(f"policy version {version}: cross-entropy {first:.3f} in the first batch, {last:.3f} in the last")
