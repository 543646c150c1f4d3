"""`agentjet checkpoints` and `agentjet export`: list, save, tag, roll back to, branch from and export checkpoints.

Rollback and branch work on the files of a stopped server.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentjet.cli import Json, Run, Token, TokenFile, Url, connect, print_text
from agentjet.cli.data_dir import JOURNAL, METRICS, run_folder
from agentjet.errors import CheckpointError, ConfigError
from agentjet.types import DEFAULT_RUN, SOLE_POLICY, CheckpointStamp

if TYPE_CHECKING:
    from agentjet.config import JobConfig
    from agentjet.gateway.checkpoints import CheckpointStore
    from agentjet.protocol import CheckpointInfo
    from agentjet.swarm import Journal
    from agentjet.swarm.batches import Rollback

app = typer.Typer(no_args_is_help=True, help="List, save and name checkpoints; go back to one, branch from one.")

Version = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Policy version of the checkpoint.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A letter, then letters, digits, dots, dashes, underscores.")]

State = dict[str, object]
"""The state of a policy in a checkpoint."""
SEAL_KEYS = frozenset({"format", "files", "digest"})
"""Keys that `seal` writes into a checkpoint's state."""


@app.command("list")
def list_checkpoints(url: Url = None, token: Token = None, token_file: TokenFile = None, as_json: Json = False) -> None:
    """List a server's checkpoints, oldest first, with their tags and held-out scores."""
    with connect(url, token, token_file) as swarm:
        found = swarm.checkpoints()
    if as_json:
        typer.echo(json.dumps([info.model_dump() for info in found], indent=2))
    elif not found:
        typer.echo("none yet; `agentjet checkpoints create` saves one")
    else:
        for info in found:
            print_text(checkpoint_line(info))


@app.command("create")
def create_checkpoint(url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Save a checkpoint of the run's policies, between two batches."""
    with connect(url, token, token_file) as swarm:
        print_text(checkpoint_line(swarm.checkpoint()))


@app.command("tag")
def tag_checkpoint(
    version: Version, name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None
) -> None:
    """Name a checkpoint. It is kept until the tag is removed."""
    with connect(url, token, token_file) as swarm:
        swarm.tag(version, name)
    print_text(f"policy version {version} is {name}; it is kept until: agentjet checkpoints untag {name}")


@app.command("untag")
def untag_checkpoint(name: Name, url: Url = None, token: Token = None, token_file: TokenFile = None) -> None:
    """Remove the name of a checkpoint. Later checkpoints may then replace it."""
    with connect(url, token, token_file) as swarm:
        swarm.untag(name)
    print_text(f"the tag {name} is removed")


@app.command("rollback")
def roll_back_to(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Policy version or tag of a checkpoint.")],
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The data dir of a stopped server.")],
    run: Run = DEFAULT_RUN,
) -> None:
    """Take the policies of a stopped run back to a checkpoint, and undo the batches learned since.

    They get a new version number, with the weights of the old one.
    """
    done, job = roll_back(data_dir, version, run)
    typer.echo(
        f"Policy version {done.policy_version} has the weights of version {done.to}. Undone: {done.batches} batches.\n"
        f"Dropped as rolled_back: {done.trained} trained episodes and {done.waiting} that waited; {done.live} live "
        f"ones are aborted."
    )
    ends = {"max_steps": job.max_steps, "optimizer.total_steps": job.optimizer.total_steps}
    ends |= {f"optimizers.{policy}.total_steps": one.total_steps for policy, one in job.optimizers.items()}
    for name, end in ends.items():
        if 0 < end <= done.policy_version:
            typer.echo(
                f"job.{name} = {end} is reached at version {done.policy_version}: raise it to continue training."
            )
    typer.echo(f"Continue with: agentjet serve --data-dir {shlex.quote(str(data_dir))}")


@app.command("branch")
def branch_from(
    source: Annotated[
        str, typer.Argument(metavar="DATA_DIR@VERSION", help="A data dir, and the version or tag of its checkpoint.")
    ],
    data_dir: Annotated[Path, typer.Argument(metavar="NEW", help="The data dir to make.")],
    run: Run = DEFAULT_RUN,
) -> None:
    """Make a new data dir whose default run starts at a checkpoint of another run. The other is only read."""
    old, at, version = source.rpartition("@")
    if not at or not old or not version:
        raise ConfigError(f"{source!r} is not of the form DATA_DIR@VERSION, such as agentjet-data@40")
    began = branch(Path(old), version, data_dir, run)
    typer.echo(
        f"{data_dir} begins at policy version {began} of {old}.\n"
        f"Continue with the same model settings: agentjet serve --data-dir {shlex.quote(str(data_dir))}"
    )


def checkpoint_line(info: CheckpointInfo) -> str:
    """A checkpoint as a line of text."""
    line = f"step {info.policy_version:6}  {datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}  {info.path}"
    line += "" if info.score is None else f"  score {info.score:.4g}"
    return line + (f"  [{', '.join(info.tags)}]" if info.tags else "")


def export(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Read this checkpoint folder instead of a server.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, as a PEFT folder, instead of the whole model.")
    ] = False,
    policy: Annotated[str, typer.Option(metavar="NAME", help="The policy, in a run that names its policies.")] = "",
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Write a policy as a Hugging Face folder: the present policy of a running server, or a checkpoint's."""
    if out.exists():
        raise ConfigError(f"{out} exists: give the name of a folder that does not")
    if checkpoint is not None:
        source, name = _saved(checkpoint, adapter, policy), str(checkpoint)
    else:
        with connect(url, token, token_file) as swarm:
            made = swarm.export(policy=policy, adapter=adapter)
        source, name = Path(made.path), f"policy version {made.policy_version}"
        if not source.is_dir():
            raise ConfigError(f"{name} was written on the server's machine, in {source}: fetch it from there")
    _copy(source, out)
    if adapter:
        typer.echo(
            f"the adapter of {name} is in {out}; load it with: PeftModel.from_pretrained(base_model, {str(out)!r})"
        )
    else:
        typer.echo(f"{name} is in {out}; score it with: agentjet eval {shlex.quote(str(out))}")


def _saved(checkpoint: Path, adapter: bool, policy: str) -> Path:
    """The folder of a checkpoint with the model of a policy, or its adapter. Raises `CheckpointError`."""
    from agentjet.gateway.checkpoints import policy_folders

    folders = policy_folders(checkpoint)
    if (policy or SOLE_POLICY) not in folders:
        which = "is of a run without named policies" if SOLE_POLICY in folders else f"has policies {', '.join(folders)}"
        raise CheckpointError(f"{checkpoint} {which}: --policy {policy!r} is not one of them")
    checkpoint = folders[policy or SOLE_POLICY]
    source = checkpoint / "policy"
    has_adapter, has_model = (source / "adapter_config.json").is_file(), (source / "config.json").is_file()
    if not has_adapter and not has_model:
        raise CheckpointError(
            f"{checkpoint} is not a whole checkpoint: it has neither policy/config.json nor policy/adapter_config.json"
        )
    if adapter and not has_adapter:
        raise CheckpointError(
            f"{checkpoint} holds all weights (model.lora.rank = 0), so it has no adapter: export it without --adapter"
        )
    if has_adapter and not adapter:
        raise CheckpointError(
            f"{checkpoint} holds a LoRA adapter, which a server has to merge: export it with --adapter, or start a "
            "server on this data dir, then run `agentjet export` without --checkpoint"
        )
    from agentjet.compute.embedded.checkpoint import verified_state  # Needs the extra `server`.

    verified_state(checkpoint)
    return source


def _copy(source: Path, out: Path) -> None:
    """Copies a folder to a temporary name, then renames it, so that `out` is complete if it exists."""
    unfinished = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        unfinished.rename(out)
    except OSError as error:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"{out} cannot be written: {error}") from None


def roll_back(data_dir: Path, version: str, run: str = DEFAULT_RUN) -> tuple[Rollback, JobConfig]:
    """Takes a stopped run back to a checkpoint, by policy version or tag; returns the rollback and the job settings in
    force.

    Raises `ConfigError` if a server uses the folder, its journal lost its end, or the checkpoint has another
    origin. Raises `CheckpointError` if the checkpoint is missing, damaged, not the journal's, or not an ancestor of
    the present weights. An error changes nothing.
    """
    from agentjet.gateway.checkpoints import CheckpointStore
    from agentjet.gateway.observability import MetricsFile
    from agentjet.swarm import Journal, SwarmState
    from agentjet.swarm.batches import check_rollback
    from agentjet.swarm.origin import policies_of

    folder = run_folder(data_dir, run)
    store = CheckpointStore(folder)
    journal = Journal.open(folder / JOURNAL)
    try:
        held, recorded = journal.job_settings(), journal.read_state()
        if held is None:
            raise ConfigError(f"{str(folder)!r} has no job settings: its server was never started by this AgentJet")
        MetricsFile(folder / METRICS).check_journal(recorded.policy_version)
        target = find_checkpoint(store, version)
        check_rollback(journal, recorded, target)
        states = _verified(store, journal, target)
        swarm = SwarmState(journal, held.given, policies=policies_of(journal.origin))
        new = swarm.policy_version + 1
        with _copied(store.path(target), store.path(new)) as copy:
            states = {policy: {**state, "policy_version": new, "metrics": {}} for policy, state in states.items()}
            return swarm.batches.roll_back(target, _sealed(copy, states, new)), held.job
    finally:
        journal.close()


def branch(source: Path, version: str, data_dir: Path, run: str = DEFAULT_RUN) -> int:
    """Makes a data dir that starts at a checkpoint of a run, by policy version or tag; returns the policy version.

    `source` is the data dir of the run; it is only read. Raises `ConfigError` for a data dir that exists and for a
    checkpoint of another origin. Raises `CheckpointError` for one that is missing, damaged, or not the journal's.
    """
    from agentjet.gateway.checkpoints import CheckpointStore
    from agentjet.swarm import Journal
    from agentjet.swarm.store import Store

    folder = run_folder(source, run)
    if data_dir.exists():
        raise ConfigError(f"{str(data_dir)!r} exists: name a folder that does not")
    store = CheckpointStore(folder)
    original = Journal.open_read_only(folder / JOURNAL)
    try:
        target = find_checkpoint(store, version)
        states, origin = _verified(store, original, target), original.origin
    finally:
        original.close()
    partial = None
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{data_dir.name}.", dir=data_dir.parent))
        begun = CheckpointStore(partial / "runs" / DEFAULT_RUN)
        begun.folder.mkdir(0o700, parents=True)
        with _copied(store.path(target), begun.path(target)) as copy:
            stamp = _sealed(copy, states, target)
        journal = Journal.open(begun.run_folder / JOURNAL)
        try:
            started = Store(journal, time.time)
            with started.transaction():
                started.start_at(target)
                journal.put_checkpoint(stamp)
                journal.branch(origin, f"{(source if run == DEFAULT_RUN else folder).resolve()}@{target}")
        finally:
            journal.close()
        partial.rename(data_dir)
    except OSError as error:
        raise ConfigError(f"{str(data_dir)!r} could not be written: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def find_checkpoint(store: CheckpointStore, version: str) -> int:
    """The policy version of a checkpoint by its number or tag. Raises `CheckpointError` with the existing ones."""
    tags = store.tags.read()
    found = [info.policy_version for info in store.listing()]
    wanted = int(version) if version.isdecimal() else tags.get(version)
    if wanted not in found:
        named = [f"{name} ({version})" for name, version in sorted(tags.items()) if version in found]
        raise CheckpointError(
            f"{str(store.run_folder)!r} has no checkpoint {version!r}; it has versions "
            f"{', '.join(map(str, found)) or 'none'} and tags {', '.join(named) or 'none'}"
        )
    return wanted


def _verified(store: CheckpointStore, journal: Journal, version: int) -> dict[str, State]:
    """The states of the policies of a complete checkpoint that belongs to its journal, without `SEAL_KEYS`."""
    from agentjet.compute.embedded.checkpoint import verified_state
    from agentjet.gateway.checkpoints import combined_stamp, policy_folders
    from agentjet.swarm.batches import check_stamp, check_state_origin

    states = {policy: verified_state(folder) for policy, folder in policy_folders(store.path(version)).items()}
    for state in states.values():
        if state["policy_version"] != version:
            raise CheckpointError(
                f"checkpoint {store.path(version)} is damaged: it has version {state['policy_version']}"
            )
    stamps = {policy: CheckpointStamp(version, state.get("digest", "")) for policy, state in states.items()}
    check_stamp(journal, journal.read_state(), combined_stamp(stamps))
    for policy, state in states.items():
        check_state_origin(journal, policy, state)
    return {
        policy: {key: value for key, value in state.items() if key not in SEAL_KEYS} for policy, state in states.items()
    }


@contextmanager
def _copied(source: Path, target: Path) -> Iterator[Path]:
    """A copy of a checkpoint. It gets its name at the end, after it is on disk; a failure leaves nothing."""
    from agentjet.gateway.checkpoints import flush

    copy = target.with_name(f".{target.name}.new")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is not a checkpoint of this run: move it away")
    try:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        yield copy
        copy.rename(target)
        flush(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _sealed(copy: Path, states: dict[str, State], version: int) -> CheckpointStamp:
    """Seals a copy and writes it to disk before the journal records it; returns its stamp."""
    from agentjet.compute.embedded.checkpoint import seal
    from agentjet.gateway.checkpoints import combined_stamp, flush, policy_folders

    folders = policy_folders(copy)
    stamps = {policy: CheckpointStamp(version, seal(folders[policy], state)) for policy, state in states.items()}
    for path in (*copy.rglob("*"), copy):
        flush(path)
    return combined_stamp(stamps)
