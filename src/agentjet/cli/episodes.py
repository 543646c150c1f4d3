"""`agentjet episodes`: list, show, begin, finish, abort and export episodes."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from agentjet.cli import Json, Token, TokenFile, Url, connect, new_path, one_line, print_text, printable
from agentjet.cli.overlays import BY_AGENT, BY_POLICY, LEGENDS, ORPHAN, EpisodeAdvantages, Overlay, overlaid
from agentjet.errors import ConfigError
from agentjet.protocol import EpisodeFilters, EpisodeQuery
from agentjet.types import Mode, Reward

if TYPE_CHECKING:
    from rich.text import Text

    from agentjet.protocol import CallView, EpisodeTree

NOTE = "dim"
NO_ADVANTAGES = EpisodeAdvantages()
UNTRAINED = {"retry": "sent again", "undelivered": "not delivered", "side": "a side call by job.side_calls"}

app = typer.Typer(name="episodes", help="Look at episodes; begin, end and export them.", no_args_is_help=True)


def with_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with an option for the order and for each filter, which it takes as keyword arguments."""
    own = [one for one in signature(command, eval_str=True).parameters.values() if one.kind is not one.VAR_KEYWORD]
    parameters = [*map(_filter_option, ("sort", *EpisodeQuery.filters())), *own]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _filter_option(name: str) -> Parameter:
    field, kind = EpisodeQuery.model_fields[name], get_type_hints(EpisodeFilters)[name]
    annotation = Annotated[kind, typer.Option(help=field.description)]  # type: ignore[valid-type]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=annotation)


@app.command("list")
@with_filters
def list_episodes(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most episodes of a page.")] = 20,
    before: Annotated[str, typer.Option(metavar="ID", help="The page that follows this episode.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
    **filters: Any,
) -> None:
    """List the episodes that match every filter, newest first."""
    with connect(url, token, token_file) as swarm:
        found = swarm.episodes(limit, before=before, **filters)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    if not found.episodes:
        given = before or any(value not in (None, "", "newest") for value in filters.values())
        typer.echo("no further episodes match" if before else "no episode matches" if given else "none yet")
    for e in found.episodes:
        reward = "" if e.reward is None else f"reward {e.reward:g}"
        why = one_line(e.reason)[:60]
        trained = e.mode if e.mode == "eval" else why if e.trained_in is None else f"batch {e.trained_in}"
        task_id = one_line(e.task_id)
        typer.echo(f"{e.episode_id}  {e.status:8}  {task_id:20.20}  {e.num_calls:3} calls  {reward:12}  {trained}")
    if found.next is not None:
        typer.echo(f"next page: --before {found.next}", err=True)


@app.command("show")
def show_episode(
    episode_id: Annotated[str, typer.Argument(metavar="ID", help="As `agentjet episodes list` prints it.")],
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    overlay: Annotated[
        Overlay, typer.Option(help="Meaning of the colours of tokens; marks in the text have the same meaning.")
    ] = "author",
    as_json: Json = False,
) -> None:
    """Print an episode's calls. Colours show the author of each token, or what `--overlay` names."""
    with connect(url, token, token_file) as swarm:
        tree = swarm.episode_tree(episode_id)
        group_id = tree.group_id if overlay == "advantage" and not as_json else None
        group = None if group_id is None else swarm.group(group_id)
    if as_json:
        typer.echo(tree.model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in episode_lines(tree, overlay, EpisodeAdvantages.of(tree, group)):
        console.print(line, soft_wrap=True)


@app.command("begin")
def begin_episode(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A name for the task of the episode.")],
    group: Annotated[str, typer.Option(help="Episodes of a group are compared; default: the task.")] = "",
    task_set: Annotated[str, typer.Option(help="The task set it belongs to.")] = "",
    client_id: Annotated[str, typer.Option(help="Name of the client; groups are kept apart by client.")] = "shell",
    only_eval: Annotated[bool, typer.Option("--eval", help="The episode is not trained on.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for room in the present batch.")] = 0.0,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Begin an episode, and print the address and key for its agent as shell variables.

    The episode lives until it is finished or aborted, or its lease runs out.
    """
    with connect(url, token, token_file, client_id=client_id) as swarm:
        mode: Mode = "eval" if only_eval else "train"
        begun = swarm.begin(task, group=group, task_set=task_set, mode=mode, wait=wait).begun
    if as_json:
        typer.echo(begun.model_dump_json(indent=2))
        return
    root = begun.base_url.removesuffix("/v1")
    for name, value in (
        ("AGENTJET_EPISODE", begun.episode_id),
        ("AGENTJET_POLICIES", ",".join(begun.policies)),
        ("OPENAI_BASE_URL", begun.base_url),
        ("OPENAI_API_KEY", begun.api_key),
        ("OPENAI_MODEL", begun.model),
        ("ANTHROPIC_BASE_URL", root),
        ("ANTHROPIC_API_KEY", begun.api_key),
        ("ANTHROPIC_MODEL", begun.model),
    ):
        if value:  # A run has a model's name or policies.
            typer.echo(f"export {name}={shlex.quote(value)}")


@app.command("finish")
def finish_episode(
    episode_id: Annotated[str, typer.Argument(metavar="ID", help="As `agentjet episodes begin` prints it.")],
    reward: Annotated[float, typer.Option(help="Reward of the episode.")],
    text: Annotated[str, typer.Option(help="The reason for the reward, for people.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """End an episode with its reward."""
    with connect(url, token, token_file) as swarm:
        print_text(f"{episode_id}: {swarm.finish(episode_id, Reward(reward, text=text)).status}, reward {reward:g}")


@app.command("abort")
def abort_episode(
    episode_id: Annotated[str, typer.Argument(metavar="ID", help="As `agentjet episodes begin` prints it.")],
    reason: Annotated[str, typer.Option(help="The reason, for people.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """End an episode without a reward: it is not trained on."""
    with connect(url, token, token_file) as swarm:
        print_text(f"{episode_id}: {swarm.abort(episode_id, reason).status}")


@app.command("export")
def export_episodes(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to make, one JSON object a line.")],
    status: Annotated[
        Literal["finished", "aborted", "expired", "live", "all"], typer.Option(help="Only episodes of this status.")
    ] = "finished",
    mode: Annotated[Literal["train", "eval", "all"], typer.Option(help="Only episodes of this mode.")] = "all",
    min_reward: Annotated[
        float | None, typer.Option(metavar="R", help="Only conversations with at least this reward.")
    ] = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Write the conversations of episodes, with messages, tools, rewards and policy versions, oldest first.

    A server keeps messages until a checkpoint covers them: see docs/practice.md.
    """
    from agentjet.client.report import rows

    if min_reward is not None and not math.isfinite(min_reward):
        raise ConfigError(f"--min-reward {min_reward}: give a finite number")
    num_rows = num_gone = 0
    with new_path(file) as unfinished, connect(url, token, token_file) as swarm:
        views = swarm.all_episodes(
            sort="oldest", status=None if status == "all" else status, mode=None if mode == "all" else mode
        )
        wanted = [view.episode_id for view in views if view.num_calls]
        unfinished.touch(0o600)
        with unfinished.open("w", encoding="utf-8") as out:
            for episode_id in wanted:
                episode = swarm.episode_tree(episode_id)
                num_gone += not episode.calls
                for row in rows(episode):
                    if min_reward is None or (row["reward"] is not None and row["reward"] >= min_reward):
                        out.write(json.dumps(row, ensure_ascii=False) + "\n")
                        num_rows += 1
        if not num_rows:
            raise ConfigError(
                f"nothing to export: of {len(wanted)} episodes with this --status and --mode, {num_gone} have no "
                "messages (a checkpoint covers them), the others no conversation with --min-reward"
            )
    gone = f"; {num_gone} more have no messages, since a checkpoint covers them" if num_gone else ""
    typer.echo(f"conversations: {num_rows}, of episodes: {len(wanted) - num_gone}, in {file}{gone}")


def episode_lines(
    tree: EpisodeTree, overlay: Overlay = "author", advantages: EpisodeAdvantages = NO_ADVANTAGES
) -> list[Text]:
    """An episode as coloured lines."""
    from rich.text import Text

    facts = [tree.status, *(["eval"] if tree.mode == "eval" else []), f"task {one_line(tree.task_id)}"]
    facts += [] if tree.reward is None else [f"reward {tree.reward:g}"]
    facts += [] if tree.trained_in is None else [f"trained in batch {tree.trained_in}"]
    facts += ["unscorable: a request was refused"] if tree.unscorable else []
    facts += [printable(tree.reason)] if tree.reason else []
    lines = [Text(f"{tree.episode_id}: {', '.join(facts)}", "bold")]
    lines += [Text(f"reward text: {printable(tree.reward_text)}")] if tree.reward_text else []
    for title, counts in (("noted", tree.noted), ("refused", tree.refused)):
        if counts:
            shown = ", ".join(f"{one_line(name)} ({count})" for name, count in sorted(counts.items()))
            lines.append(Text(f"{title}: {shown}", NOTE))
    if not tree.calls:
        calls = "not kept, since a checkpoint covers them" if tree.num_calls else "none"
        return [*lines, Text(f"calls: {calls}", NOTE)]
    if overlay == "author":
        lines.append(Text.assemble("written by ", *((f" {author} ", style) for author, style in _legend(tree))))
    else:
        lines.append(Text(LEGENDS[overlay], NOTE))
    numbers = {call.call_id: i for i, call in enumerate(tree.calls, 1)}
    for call in tree.calls:
        lines += [Text(""), Text(_heading(call, numbers), NOTE)]
        lines += [Text(one_line(advantages.heading(call)), NOTE)] if overlay == "advantage" else []
        lines.append(overlaid(call, overlay, advantages.of_call(call)))
    return lines


def _legend(tree: EpisodeTree) -> list[tuple[str, str]]:
    """Authors of tokens and their styles, with the state of training."""
    ended_untrained = tree.trained_in is None and (tree.reason or tree.status in ("aborted", "expired"))
    trained = "never trained" if tree.mode == "eval" or ended_untrained else "trained"
    return [("the agent and the template", BY_AGENT), (f"the policy, {trained}", BY_POLICY), ("not trained", ORPHAN)]


def _heading(call: CallView, numbers: dict[str, int]) -> str:
    sampled = sum(version is not None for version in call.versions)
    parts = [f"call {numbers[call.call_id]}" + (f" as {call.role!r}" if call.role else "")]
    if call.parent is not None:
        how = f"a fork ({call.fork}) of" if call.fork else "continues"
        parts.append(f"{how} call {numbers[call.parent]}, whose first {call.kept} tokens it keeps")
    elif call.fork:
        parts.append(f"a tree of its own ({call.fork})")
    parts.append(f"{len(call.tokens) - sampled} new context tokens, {sampled} sampled")
    versions = sorted({version for version in call.versions if version is not None})
    parts.append(f"policy {', '.join(map(str, versions))}" if versions else "nothing sampled")
    parts += [call.finish_reason, f"id {call.call_id}"]
    if call.orphan:
        parts.append(f"not trained: {UNTRAINED.get(call.orphan, call.orphan)}")
    return "; ".join(parts)
