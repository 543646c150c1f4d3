"""`agentjet episodes`: list, show, begin, finish, abort and export episodes.

Tokens are shown in colours of 256: a sequence like cividis for probabilities, purple and orange for the signs of
advantages. Marks in the text mean the same without colours.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer import Argument, Option

from agentjet.cli import Json, Server, new_path, one_line, print_text, printable, show
from agentjet.errors import ConfigError
from agentjet.protocol import EpisodeFilters, EpisodeQuery
from agentjet.types import Mode, Reward

if TYPE_CHECKING:
    from rich.text import Text

    from agentjet.protocol import CallView, EpisodeTree, EpisodeView, GroupView

EpisodeId = Annotated[str, Argument(metavar="ID", help="As `agentjet episodes list` prints it.")]
Overlay = Literal["author", "logprob", "version", "advantage"]
app = typer.Typer(name="episodes", help="Look at episodes; begin, end and export them.", no_args_is_help=True)


def with_filters(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with an option for the order and for each filter, which it takes as keyword arguments."""
    own = [one for one in signature(command, eval_str=True).parameters.values() if one.kind is not one.VAR_KEYWORD]
    parameters = [*own, *map(_filter_option, ("sort", *EpisodeQuery.filters()))]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _filter_option(name: str) -> Parameter:
    field, kind = EpisodeQuery.model_fields[name], get_type_hints(EpisodeFilters)[name]
    annotation = Annotated[kind, Option(help=field.description)]  # type: ignore[valid-type]
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=annotation)


@app.command("list")
@with_filters
def list_episodes(
    server: Server,
    limit: Annotated[int, Option(min=1, max=1000, help="Most episodes of a page.")] = 20,
    before: Annotated[str, Option(metavar="ID", help="The page that follows this episode.")] = "",
    as_json: Json = False,
    **filters: Any,
) -> None:
    """List the episodes that match every filter, newest first."""
    with server.connect() as swarm:
        found = swarm.episodes(limit, before=before, **filters)
    given = before or any(value not in (None, "", "newest") for value in filters.values())
    nothing = "no further episodes match" if before else "no episode matches" if given else "none yet"
    show(found, as_json, lambda found: map(_row, found.episodes) if found.episodes else [nothing])
    if found.next is not None and not as_json:
        typer.echo(f"next page: --before {found.next}", err=True)


def _row(episode: EpisodeView) -> str:
    reward = "" if episode.reward is None else f"reward {episode.reward:g}"
    trained = one_line(episode.reason)[:60] if episode.trained_in is None else f"batch {episode.trained_in}"
    return (
        f"{episode.episode_id}  {episode.status:8}  {one_line(episode.task_id):20.20}  {episode.num_calls:3} calls  "
        f"{reward:12}  {'eval' if episode.mode == 'eval' else trained}"
    )


@app.command("show")
def show_episode(
    server: Server,
    episode_id: EpisodeId,
    overlay: Annotated[
        Overlay, Option(help="Meaning of the colours of tokens; marks in the text have the same meaning.")
    ] = "author",
    as_json: Json = False,
) -> None:
    """Print an episode's calls. Colours show the author of each token, or what `--overlay` names."""
    with server.connect() as swarm:
        tree = swarm.episode_tree(episode_id)
        group_id = tree.group_id if overlay == "advantage" and not as_json else None
        group = None if group_id is None else swarm.group(group_id)
    if as_json:
        typer.echo(tree.model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in episode_lines(tree, overlay, group):
        console.print(line, soft_wrap=True)


@app.command("begin")
def begin_episode(
    server: Server,
    task: Annotated[str, Argument(metavar="TASK", help="A name for the task of the episode.")],
    group: Annotated[str, Option(help="Episodes of a group are compared; default: the task.")] = "",
    task_set: Annotated[str, Option(help="The task set it belongs to.")] = "",
    client_id: Annotated[str, Option(help="Name of the client; groups are kept apart by client.")] = "shell",
    only_eval: Annotated[bool, Option("--eval", help="The episode is not trained on.")] = False,
    wait: Annotated[float, Option(min=0, help="Seconds to wait for room in the present batch.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Begin an episode, and print the address and key for its agent as shell variables.

    The episode lives until it is finished or aborted, or its lease runs out.
    """
    with server.connect(client_id=client_id) as swarm:
        mode: Mode = "eval" if only_eval else "train"
        begun = swarm.begin(task, group=group, task_set=task_set, mode=mode, wait=wait).begun
    variables = {
        "AGENTJET_EPISODE": begun.episode_id,
        "AGENTJET_POLICIES": ",".join(begun.policies),
        "OPENAI_BASE_URL": begun.base_url,
        "OPENAI_API_KEY": begun.api_key,
        "OPENAI_MODEL": begun.model,
        "ANTHROPIC_BASE_URL": begun.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": begun.api_key,
        "ANTHROPIC_MODEL": begun.model,
    }  # A run has a model's name or policies, so one of these is empty.
    show(begun, as_json, lambda _: [f"export {name}={shlex.quote(text)}" for name, text in variables.items() if text])


@app.command("finish")
def finish_episode(
    server: Server,
    episode_id: EpisodeId,
    reward: Annotated[float, Option(help="Reward of the episode.")],
    text: Annotated[str, Option(help="The reason for the reward, for people.")] = "",
) -> None:
    """End an episode with its reward."""
    with server.connect() as swarm:
        print_text(f"{episode_id}: {swarm.finish(episode_id, Reward(reward, text=text)).status}, reward {reward:g}")


@app.command("abort")
def abort_episode(
    server: Server, episode_id: EpisodeId, reason: Annotated[str, Option(help="The reason, for people.")] = ""
) -> None:
    """End an episode without a reward: it is not trained on."""
    with server.connect() as swarm:
        print_text(f"{episode_id}: {swarm.abort(episode_id, reason).status}")


@app.command("export")
def export_episodes(
    server: Server,
    file: Annotated[Path, Argument(metavar="FILE", help="The file to make, one JSON object a line.")],
    status: Annotated[
        Literal["finished", "aborted", "expired", "live", "all"], Option(help="Only episodes of this status.")
    ] = "finished",
    mode: Annotated[Literal["train", "eval", "all"], Option(help="Only episodes of this mode.")] = "all",
    min_reward: Annotated[
        float | None, Option(metavar="R", help="Only conversations with at least this reward.")
    ] = None,
) -> None:
    """Write the conversations of episodes, with messages, tools, rewards and policy versions, oldest first.

    A server keeps messages until a checkpoint covers them: see docs/practice.md.
    """
    from agentjet.client.report import rows

    if min_reward is not None and not math.isfinite(min_reward):
        raise ConfigError(f"--min-reward {min_reward}: give a finite number")
    num_rows = num_gone = 0
    with new_path(file) as unfinished, server.connect() as swarm:
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
                f"messages ({NOT_KEPT}), the others no conversation with --min-reward"
            )
    gone = f"; {num_gone} more have no messages: {NOT_KEPT}" if num_gone else ""
    typer.echo(f"conversations: {num_rows}, of episodes: {len(wanted) - num_gone}, in {file}{gone}")


# ---- the tokens of an episode ----------------------------------------------------------------------------------------

NOTE = "dim"
NOT_KEPT = "a checkpoint covers them, or the file of their front is gone"
"""The reason for missing calls of an episode."""
UNTRAINED = {"retry": "sent again", "undelivered": "not delivered", "side": "a side call by job.side_calls"}
PROBABILITIES = (
    (0.01, "color(226) underline"),
    (0.1, "color(220) underline"),
    (0.3, "color(178)"),
    (0.5, "color(144)"),
    (0.7, "color(103)"),
    (0.9, "color(67)"),
    (1.01, "color(25)"),
)
"""Upper bounds of probabilities, with their styles. Unlikely tokens are the brightest."""
MARKED = 0.1
"""Probability below which a token has a mark."""
VERSIONS = ("color(32)", "color(172)", "color(71)", "color(169)")
"""Styles of successive policy versions, in turn."""
POSITIVE, NEGATIVE = "color(208)", "color(141)"
"""Styles of tokens of calls by the sign of their advantages."""
BY_AGENT, BY_POLICY, ORPHAN = "cyan", "bold green", "strike red"
"""Styles of the overlay `author`."""
FULL_BAR = 3.0
"""Advantage of a full bar."""
BAR_CELLS = 12
LEGENDS: Mapping[Overlay, str] = {
    "logprob": f"probability of each sampled token: bright is unlikely; ⟨%⟩ follows a token below {MARKED:.0%}",
    "version": "policy version of each sampled token: ⟨v⟩ stands where it changes",
    "advantage": "advantage of each call: orange is above 0, purple below; context is dim",
}


def episode_lines(tree: EpisodeTree, overlay: Overlay = "author", group: GroupView | None = None) -> list[Text]:
    """An episode as coloured lines. `group` is that of the episode, for its advantages."""
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
        calls = f"not kept: {NOT_KEPT}" if tree.num_calls else "none"
        return [*lines, Text(f"calls: {calls}", NOTE)]
    if overlay == "author":
        lines.append(Text.assemble("written by ", *((f" {author} ", style) for author, style in _legend(tree))))
    else:
        lines.append(Text(LEGENDS[overlay], NOTE))
    advantages, unknown = advantages_of(tree, group)
    numbers = {call.call_id: i for i, call in enumerate(tree.calls, 1)}
    for call in tree.calls:
        advantage = advantages.get(call.role, advantages.get(call.role.partition("/")[0], advantages.get("")))
        lines += [Text(""), Text(_heading(call, numbers), NOTE)]
        if overlay == "advantage":
            why = f": {unknown}" if advantage is None and unknown else ""
            lines.append(Text(one_line(advantage_bar(advantage) + why), NOTE))
        lines.append(overlaid(call, overlay, advantage))
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


def advantages_of(tree: EpisodeTree, group: GroupView | None) -> tuple[dict[str, float | None], str]:
    """The advantages of an episode by role or policy, with that of the episode at ''; and why some are unknown."""
    if group is None:
        return {}, "an episode of an evaluation has no advantage"
    member = next((one for one in group.episodes if one.episode_id == tree.episode_id), None)
    return ({} if member is None else {"": member.advantage, **member.advantages}), group.advantages_note


def overlaid(call: CallView, overlay: Overlay, advantage: float | None = None) -> Text:
    """The tokens of a call, in the colours of an overlay. `advantage` is that of the call, if it is known."""
    from rich.text import Text

    body, known = Text(), -1
    context, orphan = (BY_AGENT, ORPHAN) if overlay == "author" else (NOTE, "strike dim")
    texts = call.texts or [f"<{token}>" for token in call.tokens]
    for text, version, logprob in zip(texts, call.versions, call.logprobs, strict=True):
        if version is None:
            body.append(printable(text), context)
            continue
        style, mark = "", ""
        if overlay == "author":
            style = BY_POLICY
        elif overlay == "version":
            if version != known:
                body.append(f"⟨v{version}⟩", "bold")
            style, known = VERSIONS[version % len(VERSIONS)], version
        elif overlay == "advantage" and advantage:
            style = POSITIVE if advantage > 0 else NEGATIVE
        elif overlay == "logprob" and logprob is not None:
            share = math.exp(min(0.0, logprob))
            style = next(style for bound, style in PROBABILITIES if share < bound)
            mark = (f"⟨{share:.1%}⟩" if share < 0.01 else f"⟨{share:.0%}⟩") if share < MARKED else ""
        body.append(printable(text), orphan if call.orphan else style)
        body.append(mark, NOTE)
    return body


def advantage_bar(advantage: float | None) -> str:
    """The advantage with a bar, such as `advantage +1.23 ▇▇▇▇▇`."""
    if advantage is None:
        return "advantage unknown"
    cells = min(BAR_CELLS, round(BAR_CELLS * abs(advantage) / FULL_BAR))
    return f"advantage {advantage:+.3g} {('▇' if advantage > 0 else '░') * cells}".rstrip()
