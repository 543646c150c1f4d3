"""`agentjet checkpoints`, `export` and `merge`: list, save, tag, roll back to, branch from, export and merge policies.

Rollback and branch work on the files of a stopped server.
"""

from __future__ import annotations

import shlex
import shutil
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from agentjet.cli import Json, Policy, Run, Server, new_path, print_text, progress, run_folder, show, work_of
from agentjet.errors import CheckpointError, ConfigError
from agentjet.types import DEFAULT_RUN, JOURNAL, CheckpointStamp

if TYPE_CHECKING:
    from agentjet.config import JobConfig
    from agentjet.protocol import CheckpointInfo
    from agentjet.server.checkpoints import CheckpointStore
    from agentjet.swarm import Journal
    from agentjet.swarm.batches import Rollback

METRICS = "metrics.jsonl"
app = typer.Typer(
    name="checkpoints", no_args_is_help=True, help="List, save and name checkpoints; go back to one, branch from one."
)

Version = Annotated[int, Argument(metavar="VERSION", min=0, help="Policy version of the checkpoint.")]
Name = Annotated[str, Argument(metavar="NAME", help="A letter, then letters, digits, dots, dashes, underscores.")]


@app.command("list")
def list_checkpoints(server: Server, as_json: Json = False) -> None:
    """List a server's checkpoints, oldest first, with their tags and held-out scores."""
    with server.connect() as swarm:
        found = swarm.checkpoints()
    nothing = "none yet; `agentjet checkpoints create` saves one"
    show(found, as_json, lambda found: map(checkpoint_line, found) if found else [nothing])


@app.command("create")
def create_checkpoint(server: Server) -> None:
    """Save a checkpoint of the run's policies, between two batches."""
    with server.connect() as swarm:
        with progress("waiting for the end of the batch, to save a checkpoint", work_of(swarm)):
            saved = swarm.checkpoint()
        print_text(checkpoint_line(saved))


@app.command("tag")
def tag_checkpoint(version: Version, name: Name, server: Server) -> None:
    """Name a checkpoint. It is kept until the tag is removed."""
    with server.connect() as swarm:
        swarm.tag(version, name)
    print_text(f"policy version {version} is {name}; it is kept until: agentjet checkpoints untag {name}")


@app.command("untag")
def untag_checkpoint(name: Name, server: Server) -> None:
    """Remove the name of a checkpoint. Later checkpoints may then replace it."""
    with server.connect() as swarm:
        swarm.untag(name)
    print_text(f"the tag {name} is removed")


@app.command("rollback")
def roll_back_to(
    version: Annotated[str, Argument(metavar="VERSION", help="Policy version or tag of a checkpoint.")],
    data_dir: Annotated[Path, Option("--data-dir", help="The data dir of a stopped server.")],
    run: Run = DEFAULT_RUN,
) -> None:
    """Take the policies of a stopped run back to a checkpoint, and undo the batches learned since.

    They get a new version number, with the weights of the old one.
    """
    with progress(f"copying and verifying the checkpoint {version}"):
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
        str, Argument(metavar="DATA_DIR@VERSION", help="A data dir, and the version or tag of its checkpoint.")
    ],
    data_dir: Annotated[Path, Argument(metavar="NEW", help="The data dir to make.")],
    run: Run = DEFAULT_RUN,
) -> None:
    """Make a new data dir whose default run starts at a checkpoint of another run. The other is only read."""
    old, at, version = source.rpartition("@")
    if not at or not old or not version:
        raise ConfigError(f"{source!r} is not of the form DATA_DIR@VERSION, such as agentjet-data@40")
    with progress(f"copying and verifying the checkpoint {version}"):
        began = branch(Path(old), version, data_dir, run)
    typer.echo(
        f"{data_dir} begins at policy version {began} of {old}.\n"
        f"Continue with the same model settings: agentjet serve --data-dir {shlex.quote(str(data_dir))}"
    )


def checkpoint_line(info: CheckpointInfo) -> str:
    line = f"step {info.policy_version:6}  {datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}  {info.path}"
    line += "" if info.score is None else f"  score {info.score:.4g}"
    return line + (f"  [{', '.join(info.tags)}]" if info.tags else "")


def export(
    server: Server,
    out: Annotated[Path, Argument(help="The folder to make.")],
    adapter: Annotated[
        bool, Option("--adapter", help="The LoRA adapter alone, as a PEFT folder, instead of the whole model.")
    ] = False,
    policy: Policy = "",
) -> None:
    """Write the present policy of a running server as a Hugging Face folder.

    The folder `policy` in a checkpoint is such a folder, too, or with LoRA a PEFT folder: copy it.
    """
    with new_path(out) as unfinished, server.connect() as swarm:
        with progress("waiting for the end of the batch, to export the policy", work_of(swarm)):
            made = swarm.export(policy=policy, adapter=adapter)
        name = f"policy version {made.policy_version}"
        if not Path(made.path).is_dir():
            raise ConfigError(f"{name} was written on the server's machine, in {made.path}: fetch it from there")
        with progress(f"copying {made.path} to {out}"):
            shutil.copytree(made.path, unfinished)
    if adapter:
        typer.echo(
            f"the adapter of {name} is in {out}; load it with: PeftModel.from_pretrained(base_model, {str(out)!r})"
        )
    else:
        typer.echo(f"{name} is in {out}; score it with: agentjet eval {shlex.quote(str(out))}")


def merge(
    out: Annotated[Path, Argument(help="The folder to make.")],
    folders: Annotated[
        list[Path],
        Argument(
            metavar="FOLDER...", help="Exports, adapters, or folders `policy` of checkpoints, from one base model."
        ),
    ],
    base: Annotated[
        str, Option(metavar="MODEL", help="The base model, as in model.name; default: that of the adapters.")
    ] = "",
    rescale: Annotated[
        float, Option(min=1, help="RAM+: largest factor for weights that one model alone changed, such as 1.2. 1: RAM.")
    ] = 1.0,
) -> None:
    """Merge policies that were trained from one base model into a Hugging Face folder (RAM).

    A weight that several models changed gets the mean of their changes. A weight that a single model changed keeps its
    change whole, where averaging would shrink it.
    """
    from agentjet.compute.merging import merge_folders

    if len(folders) < 2:
        raise ConfigError(f"{folders[0]} alone: give two or more folders to merge")
    for folder in folders:
        if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(f"{folder} is not the folder of a model or an adapter: it has no config.json")
    with new_path(out) as unfinished, progress(f"merging {len(folders)} models"):
        shares = merge_folders(unfinished, folders, base, rescale)
    for folder, found in zip(folders, shares, strict=True):
        total = max(1, found.shared + found.unique)
        print_text(f"{folder}: {found.shared + found.unique} weights changed, {found.unique / total:.0%} by it alone")
    typer.echo(f"the merged model is in {out}; score it with: agentjet eval {shlex.quote(str(out))}")


def roll_back(data_dir: Path, version: str, run: str = DEFAULT_RUN) -> tuple[Rollback, JobConfig]:
    """Takes a stopped run back to a checkpoint, by policy version or tag; returns the rollback and the job settings in
    force.

    Raises `ConfigError` if a server uses the folder, its journal lost its end, the file of a front is missing, or the
    checkpoint has another origin. Raises `CheckpointError` if the checkpoint is missing, damaged, not the journal's, or
    not an ancestor of the present weights. An error changes nothing.
    """
    from agentjet.compute.checkpoint import seal
    from agentjet.server.checkpoints import CheckpointStore, combined_stamp, policy_folders
    from agentjet.server.monitoring import MetricsFile
    from agentjet.swarm import Journal, SwarmState
    from agentjet.swarm.batches import check_rollback

    folder = run_folder(data_dir, run)
    store = CheckpointStore(folder)
    with closing(Journal.open(folder / JOURNAL)) as journal:
        held, recorded = journal.job_settings(), journal.read_state()
        if held is None:
            raise ConfigError(f"{str(folder)!r} has no job settings: its server was never started by this AgentJet")
        MetricsFile(folder / METRICS).check_journal(recorded.policy_version)
        target = store.find(version)
        check_rollback(journal, recorded, target)
        states, _ = _verified(store, journal, target)
        journal.file.open_segments(0)  # Transcripts of episodes whose calls fronts have are kept, too.
        swarm = SwarmState(journal, held.given, policies=journal.origin.named)
        new = swarm.state.next_unused_version
        # The journal records the checkpoint when its files are on disk. After a kill before it gets its name, servers
        # refuse to start until the rollback is repeated.
        with new_path(store.path(new)) as copy:
            shutil.copytree(store.path(target), copy)
            stamps = {}
            for policy, place in policy_folders(copy).items():
                digest = seal(place, {**states[policy], "policy_version": new, "metrics": {}})
                stamps[policy] = CheckpointStamp(new, digest)
            _flush(copy)
            return swarm.batches.roll_back(target, combined_stamp(stamps)), held.job


def branch(source: Path, version: str, data_dir: Path, run: str = DEFAULT_RUN) -> int:
    """Makes a data dir that starts at a checkpoint of a run, by policy version or tag; returns the policy version.

    `source` is the data dir of the run; it is only read. Raises `ConfigError` for a data dir that exists or is inside
    another one, and for a checkpoint of another origin. Raises `CheckpointError` for one that is missing, damaged, or
    not the journal's.
    """
    from agentjet.server.checkpoints import CheckpointStore
    from agentjet.server.run_policies import FIRST_WEIGHTS
    from agentjet.swarm import Journal
    from agentjet.swarm.state import Store

    folder = run_folder(source, run)
    for parent in data_dir.resolve().parents:
        if any(parent.glob(f"runs/*/{JOURNAL}")):
            raise ConfigError(f"{data_dir} would be inside the data dir {parent}: give a folder outside it")
    store = CheckpointStore(folder)
    with closing(Journal.open_read_only(folder / JOURNAL)) as original:
        target = store.find(version)
        _, stamp = _verified(store, original, target)
        origin = original.origin
    with new_path(data_dir) as unfinished:
        unfinished.mkdir(0o700)
        begun = CheckpointStore(unfinished / "runs" / DEFAULT_RUN)
        shutil.copytree(store.path(target), begun.path(target))
        if (folder / FIRST_WEIGHTS).is_dir():
            shutil.copytree(folder / FIRST_WEIGHTS, begun.run_folder / FIRST_WEIGHTS)
        _flush(begun.run_folder)
        with closing(Journal.open(begun.run_folder / JOURNAL)) as journal:
            started = Store(journal, time.time)
            with started.transaction():
                started.start_at(target)
                journal.put_checkpoint(stamp)
                journal.branch(origin, f"{(source if run == DEFAULT_RUN else folder).resolve()}@{target}")
    return target


def _verified(
    store: CheckpointStore, journal: Journal, version: int
) -> tuple[dict[str, dict[str, Any]], CheckpointStamp]:
    """The states of the policies of a checkpoint, without digests, and its stamp. It is whole, and the journal's."""
    from agentjet.compute.checkpoint import verified_state
    from agentjet.server.checkpoints import combined_stamp, policy_folders
    from agentjet.swarm.batches import check_stamp, check_state_origin

    states = {policy: verified_state(folder) for policy, folder in policy_folders(store.path(version)).items()}
    stamps = {policy: CheckpointStamp(version, state.pop("digest", "")) for policy, state in states.items()}
    stamp = combined_stamp(stamps)
    check_stamp(journal, journal.read_state(), stamp)
    for policy, state in states.items():
        if state["policy_version"] != version:
            raise CheckpointError(
                f"checkpoint {store.path(version)} is damaged: it has version {state['policy_version']}"
            )
        check_state_origin(journal, policy, state)
    return states, stamp


def _flush(folder: Path) -> None:
    from agentjet.server.checkpoints import flush

    for path in (*folder.rglob("*"), folder):
        flush(path)
