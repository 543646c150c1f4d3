"""`agentjet episodes`: which there were, one of them token by token; and begin or end one from a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli.episode_export import export_episodes
from agentjet.cli.options import Json, Token, TokenFile, Url, connect
from agentjet.cli.printing import one_line, printable, say

if TYPE_CHECKING:
    from rich.text import Text

    from agentjet.protocol import CallView, EpisodeTree
    from agentjet.types import Mode

CONTEXT, SAMPLED, ORPHAN, NOTE = "cyan", "bold green", "strike red", "dim"

UNTRAINED = {"retry": "sent again", "undelivered": "not delivered", "side": "a side call by job.side_calls"}

app = typer.Typer(help="Look at episodes; begin, end and export them.", no_args_is_help=True)
app.command("export")(export_episodes)


@app.command("list")
def list_episodes(
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many at most.")] = 20,
    as_json: Json = False,
) -> None:
    """List the newest episodes, newest first."""
    with connect(url, token, token_file) as swarm:
        found = swarm.episodes(limit)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    elif not found.episodes:
        typer.echo("none yet")
    else:
        for e in found.episodes:
            reward = "" if e.reward is None else f"reward {e.reward:g}"
            why = one_line(e.reason)[:60]
            trained = e.mode if e.mode == "eval" else why if e.trained_in is None else f"batch {e.trained_in}"
            task = one_line(e.task_id)
            typer.echo(f"{e.episode_id}  {e.status:8}  {task:20.20}  {e.num_calls:3} calls  {reward:12}  {trained}")


@app.command("show")
def show_episode(
    episode_id: Annotated[str, typer.Argument(metavar="ID", help="As `agentjet episodes list` prints it.")],
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Print an episode's calls, coloured by who wrote each token."""
    with connect(url, token, token_file) as swarm:
        tree = swarm.episode_tree(episode_id)
    if as_json:
        typer.echo(tree.model_dump_json(indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in described(tree):
        console.print(line, soft_wrap=True)


@app.command("begin")
def begin_episode(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What the episode is about: a name of your own.")],
    group: Annotated[str, typer.Option(help="Episodes of a group are compared; default: those of the task.")] = "",
    task_set: Annotated[str, typer.Option(help="The task set it belongs to.")] = "",
    client_id: Annotated[str, typer.Option(help="Groups are those of a client.")] = "shell",
    only_eval: Annotated[bool, typer.Option("--eval", help="Nothing of it is trained on.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for room in the present batch.")] = 0.0,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Begin an episode, and print what its agent needs as variables of a shell.

    It stays until somebody finishes or aborts it, or its lease runs out.
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
        ("OPENAI_BASE_URL", begun.base_url),
        ("OPENAI_API_KEY", begun.api_key),
        ("OPENAI_MODEL", begun.model),
        ("ANTHROPIC_BASE_URL", root),
        ("ANTHROPIC_API_KEY", begun.api_key),
        ("ANTHROPIC_MODEL", begun.model),
    ):
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command("finish")
def finish_episode(
    episode_id: Annotated[str, typer.Argument(metavar="ID", help="As `agentjet episodes begin` prints it.")],
    reward: Annotated[float, typer.Option(help="How well it went.")],
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """End an episode with its reward."""
    with connect(url, token, token_file) as swarm:
        say(f"{episode_id}: {swarm.finish(episode_id, reward).status}, reward {reward:g}")


@app.command("abort")
def abort_episode(
    episode_id: Annotated[str, typer.Argument(metavar="ID", help="As `agentjet episodes begin` prints it.")],
    reason: Annotated[str, typer.Option(help="Why, for whoever looks at it.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """End an episode without a score: it is not trained on."""
    with connect(url, token, token_file) as swarm:
        say(f"{episode_id}: {swarm.abort(episode_id, reason).status}")


def described(tree: EpisodeTree) -> list[Text]:
    """An episode as coloured lines for people."""
    from rich.text import Text

    facts = [tree.status, *(["eval"] if tree.mode == "eval" else []), f"task {one_line(tree.task_id)}"]
    facts += [] if tree.reward is None else [f"reward {tree.reward:g}"]
    facts += [] if tree.trained_in is None else [f"trained in batch {tree.trained_in}"]
    facts += ["unscorable: a request was refused"] if tree.unscorable else []
    facts += [printable(tree.reason)] if tree.reason else []
    lines = [Text(f"{tree.episode_id}: {', '.join(facts)}", "bold")]
    for what, counts in (("noted", tree.noted), ("refused", tree.refused)):
        if counts:
            shown = ", ".join(f"{one_line(name)} ({count})" for name, count in sorted(counts.items()))
            lines.append(Text(f"{what}: {shown}", NOTE))
    if not tree.calls:
        gone = "a checkpoint covers them: they are not kept" if tree.num_calls else "none"
        return [*lines, Text(f"calls: {gone}", NOTE)]
    lines.append(Text.assemble("written by ", *((f" {who} ", style) for who, style in _legend(tree))))
    numbers = {call.call_id: i for i, call in enumerate(tree.calls, 1)}
    for call in tree.calls:
        lines += [Text(""), Text(_heading(call, numbers), NOTE), _body(call)]
    return lines


def _legend(tree: EpisodeTree) -> list[tuple[str, str]]:
    """Who wrote what, and whether that is, will or would be trained."""
    ended_untrained = tree.trained_in is None and (tree.reason or tree.status in ("aborted", "expired"))
    trained = "never trained" if tree.mode == "eval" or ended_untrained else "trained"
    return [("the agent and the template", CONTEXT), (f"the policy, {trained}", SAMPLED), ("not trained", ORPHAN)]


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


def _body(call: CallView) -> Text:
    from rich.text import Text

    texts = call.texts or [f"<{token}>" for token in call.tokens]
    body = Text()
    for text, version in zip(texts, call.versions, strict=True):
        body.append(printable(text), CONTEXT if version is None else ORPHAN if call.orphan else SAMPLED)
    return body
