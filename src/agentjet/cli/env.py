"""`agentjet env`: list kinds of environments, show one, play one episode. `run` and `eval` share its options."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from agentjet.cli import Json, Server, aligned, print_text
from agentjet.errors import AgentJetError, ConfigError

if TYPE_CHECKING:
    from agentjet.environments import Environment, EnvironmentMixture, Kind, Played
    from agentjet.protocol import EpisodeTree
    from agentjet.types import Reward, Task

app = typer.Typer(name="env", help="List kinds of environments; show one, play one episode.", no_args_is_help=True)
Name = Annotated[str, Argument(metavar="NAME", help="KIND:TARGET, such as gymnasium:FrozenLake-v1.")]
Settings = Annotated[
    list[str] | None,
    Option(
        "--env-set",
        metavar="[NAME.]KEY=VALUE",
        help="A setting of the environment, as `agentjet env show NAME` lists them; can be repeated.",
    ),
]
NUM_TASKS_SHOWN = 5
MAX_SHOWN_ACTIONS = 20


@dataclass(frozen=True)
class Environments:
    """The options that name environments."""

    env: Annotated[
        list[str] | None,
        Option(
            "--env",
            metavar="KIND:TARGET",
            help="An environment, which has tasks, agent and reward; can be repeated: docs/environments.md.",
        ),
    ] = None
    env_set: Settings = None

    def check(self, others: Mapping[str, object]) -> None:
        """Raises `ConfigError` for options that an environment has no use for, or that need one."""
        if self.env is None and self.env_set:
            raise ConfigError(f"--env-set {self.env_set[0]}: there is no --env that it belongs to")
        if self.env is not None and (given := [name for name, value in others.items() if value]):
            raise ConfigError(f"--env and {given[0]} exclude each other: an environment has tasks, agent and reward")

    def load(self, stack: ExitStack) -> EnvironmentMixture:
        """The environments. `stack` ends their processes."""
        from agentjet import environments

        names = self.env or []
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ConfigError(f"--env {twice[0]} is given twice: give it once")
        settings = environment_settings(names, self.env_set or [])
        made = [stack.enter_context(environments.load(name, **settings[name])) for name in names]
        return environments.mixture(made)


def environment_settings(names: Sequence[str], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of each environment by `--env-set`. Raises `ConfigError`."""
    from agentjet.config.loader import parse_value

    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--env-set {text!r} is not of the form KEY=VALUE or NAME.KEY=VALUE")
        # The longest name first: one name may begin another.
        name = next((name for name in sorted(names, key=len, reverse=True) if key.startswith(f"{name}.")), "")
        if not name and ":" in key:
            raise ConfigError(f"--env-set {text}: it names none of the environments {', '.join(names)}")
        for one in [name] if name else names:
            *sections, last = key.removeprefix(f"{name}.").strip().split(".")
            values = found[one]
            for section in sections:
                values = values.setdefault(section, {})
                if not isinstance(values, dict):
                    raise ConfigError(f"--env-set {text}: {section} is set to {values!r} already")
            values[last] = parse_value(value)
    return found


def split_of(mixed: EnvironmentMixture, split: str) -> list[Task]:
    """The tasks of `--split`. Raises `ConfigError` if there are none."""
    if split not in SPLITS:
        raise ConfigError(f"--split {split!r}: give {' or '.join(SPLITS)}")
    tasks = mixed.tasks if split == "train" else mixed.held_out
    if not tasks:
        names = ", ".join(environment.name for environment in mixed.environments)
        other = "--split train" if split == "held_out" else "--env-set held_out=0"
        raise ConfigError(f"{names}: there are no tasks of the split {split}; give {other}")
    return tasks


SPLITS = ("held_out", "train")


# ---- list and show ---------------------------------------------------------------------------------------------------


@app.command("list")
def list_kinds(as_json: Json = False) -> None:
    """List the kinds of environments: what the target is, and the installed version or the install command."""
    rows = list(kinds())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for line in aligned([(row["name"], row["target"], row["problem"] or row["installed"] or "ready") for row in rows]):
        print_text(line)
    typer.echo("agentjet env show KIND:TARGET prints settings and tasks; docs/environments.md has all")


def kinds() -> Iterator[dict[str, str]]:
    """Yields the built-in kinds and those of installed packages, with the problem that keeps one from use."""
    from agentjet.environments import registry

    for name in (*registry.KINDS, *registry.installed()):
        row = {"name": name, "target": "", "requires": "", "installed": "", "problem": ""}
        try:
            kind = registry.find(name)
            row |= {"target": kind.about, "requires": kind.requires, "installed": registry.versions(kind).strip()}
            registry.check_installed(name, kind)
        except ConfigError as error:  # One kind is unusable; the others work.
            row |= {"problem": str(error)}
        yield row


@app.command("show")
def show_environment(name: Name, env_set: Settings = None, as_json: Json = False) -> None:
    """Show an environment: its settings with their meaning, the number of its tasks, and the first ones."""
    from agentjet import environments

    with environments.load(name, **environment_settings([name], env_set or [])[name]) as environment:
        names = [key for key in type(environment.kind).model_fields if key != "target"]
        document: dict[str, Any] = {
            "name": name,
            "about": cleandoc(type(environment.kind).__doc__ or "").partition("\n")[0],
            "settings": {key: setting(environment.kind, key) for key in names},
            "tasks": len(environment.tasks),
            "held_out": len(environment.held_out),
            "first_tasks": [{"id": task.id, "payload": task.payload} for task in environment.tasks[:NUM_TASKS_SHOWN]],
        }
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    print_text(f"{name}: {document['about']}")
    print_text(f"tasks: {document['tasks']} to train on, {document['held_out']} held out; the first:")
    for task in document["first_tasks"]:
        print_text(f"  {task['id']}  {shortened(json.dumps(task['payload'], ensure_ascii=False))}")
    print_text("settings (--env-set KEY=VALUE):")
    for key, facts in document["settings"].items():
        written = f"{key} = {json.dumps(facts['value'])}"
        print_text(f"  {written:<34} # {facts['meaning']}")


def setting(kind: Kind, key: str) -> dict[str, Any]:
    field = type(kind).model_fields[key]
    default = field.get_default(call_default_factory=True, validated_data={})
    meaning = " ".join((field.description or "").split())
    return {"value": kind.model_dump(mode="json")[key], "default": default, "meaning": meaning}


def shortened(text: str) -> str:
    from agentjet.types import beginning

    return beginning(" ".join(text.split()), 100)


# ---- play ------------------------------------------------------------------------------------------------------------


@app.command("play")
def play(
    server: Server,
    name: Name,
    env_set: Settings = None,
    task: Annotated[str | None, Option("--task", metavar="ID", help="The task; default: the first one.")] = None,
    held_out: Annotated[bool, Option("--held-out", help="Take the first held-out task.")] = False,
    as_json: Json = False,
) -> None:
    """Play one episode with the server's policy, and show it turn by turn. It is not trained on.

    A turn has the observation, the valid actions, the answer and the reward of the turn.
    """
    from agentjet import environments
    from agentjet.client.threads import raise_on_signals

    with (
        raise_on_signals(),
        environments.load(name, **environment_settings([name], env_set or [])[name]) as environment,
    ):
        chosen = chosen_task(environment, task, held_out)
        tree, played, reason = asyncio.run(played_once(server, environment, chosen))
    document = {
        "environment": name,
        "task": chosen.id,
        "episode_id": tree.episode_id,
        "turns": list(turns(tree, played)),
        "reward": None if played is None else played.reward.value,
        "metrics": {} if played is None else dict(played.reward.metrics),
        "text": "" if played is None else played.reward.text,
        "reason": reason,
    }
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        for line in played_lines(document):
            print_text(line)
    if reason:
        raise typer.Exit(1)


def chosen_task(environment: Environment, task_id: str | None, held_out: bool) -> Task:
    """The task with this id, or the first one of a split. Raises `ConfigError`."""
    tasks = environment.held_out if held_out else environment.tasks
    if task_id is None:
        if not tasks:
            raise ConfigError(f"{environment.name} has no {'held-out tasks' if held_out else 'tasks to train on'}")
        return tasks[0]
    tasks = tasks if held_out else [*environment.tasks, *environment.held_out]
    if (found := next((task for task in tasks if task.id == task_id), None)) is None:
        from agentjet.errors import did_you_mean

        way_out = did_you_mean(task_id, [task.id for task in tasks], f"the first is {tasks[0].id if tasks else ''!r}")
        raise ConfigError(f"--task {task_id!r}: {environment.name} has no such task; {way_out}")
    return found


async def played_once(server: Server, environment: Environment, task: Task) -> tuple[EpisodeTree, Played | None, str]:
    """Plays an episode. Returns it as the server recorded it, its reward, and the reason if it was aborted."""
    from agentjet.client import AsyncSwarm
    from agentjet.client.episode import abort_reason

    played, reason = None, ""
    async with AsyncSwarm(server.url, server.read_token(), instance_id="") as swarm:
        async with swarm.episode(task.id, task_set=task.task_set, mode="eval") as episode:
            try:
                played = await environment.play(task, episode, with_actions=True)
                await episode.finish(played.reward)
            except AgentJetError as error:
                played, reason = None, abort_reason(error)
                await episode.abort(reason)
        return await swarm.episode_tree(episode.id), played, reason


def turns(tree: EpisodeTree, played: Played | None) -> Iterator[dict[str, Any]]:
    """Yields the calls of an episode with the messages that are new, the valid actions and the reward of the turn."""
    numbers: Counter[str] = Counter()
    for index, call in enumerate(sorted(tree.calls, key=lambda call: call.created)):  # The tree has role by role.
        actions = played.actions[index] if played is not None and index < len(played.actions) else None
        yield {
            "role": call.role,
            "messages": call.messages,
            "actions": actions,
            "answer": call.response,
            "reward": None if played is None else turn_reward(played.reward, call.role, numbers[call.role]),
        }
        numbers[call.role] += 1


def turn_reward(reward: Reward, role: str, number: int) -> float | None:
    """The reward of the call with this number of a role; None if the environment gives none."""
    rewards = reward.by_turn.get(role, ()) if isinstance(reward.by_turn, Mapping) else reward.by_turn
    return rewards[number] if number < len(rewards) else None


def played_lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"{document['environment']}, task {document['task']}, episode {document['episode_id']}"
    for number, turn in enumerate(document["turns"], 1):
        yield f"---- turn {number}" + (f" of {turn['role']}" if turn["role"] else "")
        for message in turn["messages"]:
            yield f"{message['role']}: {text_of(message)}"
        if turn["actions"] is not None:
            yield f"valid actions: {actions_text(turn['actions'])}"
        yield f"answer: {text_of(turn['answer'])}"
        if turn["reward"] is not None:
            yield f"reward of the turn: {turn['reward']:g}"
    yield "----"
    if document["reason"]:
        yield f"aborted: {document['reason']}"
        return
    yield f"reward {document['reward']:g}" + (f": {document['text']}" if document["text"] else "")
    for name, value in document["metrics"].items():
        yield f"  {name}: {value:g}"


def text_of(message: Mapping[str, Any]) -> str:
    calls = [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls") or ()]
    parts = [message.get("content") or "", *(f"calls {call}" for call in calls)]
    return "\n".join(filter(None, parts))


def actions_text(actions: Any) -> str:
    if not isinstance(actions, list):
        return json.dumps(actions, ensure_ascii=False)
    more = len(actions) - MAX_SHOWN_ACTIONS
    return ", ".join(map(str, actions[:MAX_SHOWN_ACTIONS])) + (f", and {more} more" if more > 0 else "")
