"""`agentjet episodes export`: the conversations of episodes as JSON lines, from a server or from a data dir."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentjet.cli.options import Token, TokenFile, Url, connect
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from agentjet.protocol import EpisodeTree, EpisodeView

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Source:
    """Where episodes are read: newest first, a page at a time, and one by one with their calls."""

    page: Callable[[str], list[EpisodeView]]
    """The episodes before the one with this id; the newest ones for an empty id."""
    tree: Callable[[str], EpisodeTree]


def export_episodes(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to make, one JSON object a line.")],
    status: Annotated[
        Literal["finished", "aborted", "expired", "live", "prepared", "all"], typer.Option(help="Only those that are.")
    ] = "finished",
    mode: Annotated[Literal["train", "eval", "all"], typer.Option(help="Only those begun for this.")] = "all",
    min_reward: Annotated[
        float | None, typer.Option(metavar="R", help="Only conversations with at least this reward.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Read this data dir; then no server is asked.")] = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Write the conversations of episodes, with messages, tools, rewards and policy versions, oldest first.

    A server keeps messages until a checkpoint covers them: see docs/practice.md.
    """
    if min_reward is not None and not math.isfinite(min_reward):
        raise ConfigError(f"--min-reward {min_reward}: give a finite number")
    if file.exists():
        raise ConfigError(f"{file} exists: give the name of a file that does not")
    with _of_data_dir(data_dir) if data_dir is not None else _of_server(url, token, token_file) as source:
        wanted = [
            view.episode_id
            for view in _views(source)
            if status in ("all", view.status) and mode in ("all", view.mode) and view.num_calls
        ]
        num_rows, num_gone = _write(file, source, wanted[::-1], min_reward)
    gone = f"; {num_gone} more have no messages any more, since a checkpoint covers them" if num_gone else ""
    typer.echo(f"conversations: {num_rows}, of episodes: {len(wanted) - num_gone}, in {file}{gone}")


def _views(source: Source) -> Iterator[EpisodeView]:
    before = ""
    while page := source.page(before):
        yield from page
        before = page[-1].episode_id


def _write(file: Path, source: Source, episode_ids: list[str], min_reward: float | None) -> tuple[int, int]:
    """Write the rows; returns how many, and how many episodes had no calls any more. `file` is whole if it is there."""
    from agentjet.client.conversations import rows

    partial = None
    num_rows = num_gone = 0
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # For its owner only.
        with open(descriptor, "w", encoding="utf-8") as out:
            for episode_id in episode_ids:
                episode = source.tree(episode_id)
                num_gone += not episode.calls
                for row in rows(episode):
                    if min_reward is None or (row["reward"] is not None and row["reward"] >= min_reward):
                        out.write(json.dumps(row, ensure_ascii=False) + "\n")
                        num_rows += 1
        if not num_rows:
            raise ConfigError(
                f"nothing to export: of {len(episode_ids)} episodes that fit --status and --mode, {num_gone} have no "
                "messages any more (a checkpoint covers them), the others no conversation with --min-reward"
            )
        Path(partial).rename(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error}") from None
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
    return num_rows, num_gone


@contextmanager
def _of_server(url: str | None, token: str | None, token_file: Path | None) -> Iterator[Source]:
    with connect(url, token, token_file) as swarm:
        yield Source(lambda before: swarm.episodes(PAGE, before=before).episodes, swarm.episode_tree)


@contextmanager
def _of_data_dir(data_dir: Path) -> Iterator[Source]:
    from agentjet.gateway import inspection
    from agentjet.swarm import Journal

    journal = Journal.open_read_only(data_dir / "journal.sqlite")
    try:
        yield Source(
            lambda before: [inspection.view(episode) for episode in journal.recent_episodes(PAGE, before=before)],
            lambda episode_id: inspection.recorded_tree(journal, episode_id),
        )
    finally:
        journal.close()
