"""Kinds of damage that a disk, a copy, or an operator does to the checkpoints of a data dir.

Each function gets the folder `checkpoints/` of a server that has stopped, with two checkpoints or more.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentjet.compute.embedded.checkpoint import STATE_FILE, seal
from bench.breaking.victims import ROOT, environment

WEIGHTS = "policy/model.safetensors"
CONFIG = "policy/config.json"
TRAINER = "trainer.pt"
CODER = "coder"
"""A policy of the run that has two."""
Damage = Callable[[Path], None]


def ordered(checkpoints: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return sorted(path for path in checkpoints.glob("step_*") if path.is_dir())


def _newest(checkpoints: Path) -> Path:
    return ordered(checkpoints)[-1]


def _flip(file: str, place: float, checkpoints: Path) -> None:
    """Flip one bit; `place` is a fraction of the file's length."""
    path = _newest(checkpoints) / file
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x04
    path.write_bytes(content)


def _truncate(file: str, checkpoints: Path) -> None:
    path = _newest(checkpoints) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(file: str, checkpoints: Path) -> None:
    """As a file system leaves a file that was never flushed: as long as it was, without its content."""
    path = _newest(checkpoints) / file
    path.write_bytes(bytes(path.stat().st_size))


def _empty(file: str, checkpoints: Path) -> None:
    (_newest(checkpoints) / file).write_bytes(b"")


def _delete(file: str, checkpoints: Path) -> None:
    (_newest(checkpoints) / file).unlink()


def _edit(checkpoints: Path, **changes: object) -> None:
    """Change the state and leave its digest; a value of None takes the key away."""
    path = _newest(checkpoints) / STATE_FILE
    state = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))


def _off_by(versions: int, checkpoints: Path) -> None:
    _edit(
        checkpoints,
        policy_version=json.loads((_newest(checkpoints) / STATE_FILE).read_text())["policy_version"] + versions,
    )


def _sealed_again(folder: Path, policy_version: int) -> None:
    """Gives a checkpoint another version and digests that match: only the journal shows the difference."""
    state = json.loads((folder / STATE_FILE).read_text())
    (folder / STATE_FILE).unlink()
    seal(folder, {**_bare(state), "policy_version": policy_version})


def _bare(state: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in state.items() if key not in ("format", "files", "digest")}


def _older_one_renamed(checkpoints: Path) -> None:
    older, newest = ordered(checkpoints)[-2:]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)


def _of_another_run(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    _older_one_renamed(checkpoints)
    _sealed_again(newest, int(newest.name.removeprefix("step_")))


def _of_the_future(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    version = int(newest.name.removeprefix("step_")) + 5
    shutil.copytree(newest, newest.with_name(f"step_{version:06d}"))
    _sealed_again(newest.with_name(f"step_{version:06d}"), version)


def _without_files(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    shutil.rmtree(newest)
    newest.mkdir()


def _half_written(checkpoints: Path) -> None:
    """Adds leftovers of a crash beside the newest checkpoint: one with a temporary name, one with a checkpoint's."""
    newest = _newest(checkpoints)
    later = f"step_{int(newest.name.removeprefix('step_')) + 1:06d}"
    for name in (f".{later}.new", f"..{later}.new.partial", later):
        shutil.copytree(newest / "policy", checkpoints / name / "policy")


def _every(damage: Damage, checkpoints: Path) -> None:
    """The same to every checkpoint, oldest first."""
    aside = checkpoints.with_name("aside")
    aside.mkdir()
    for path in ordered(checkpoints):
        path.rename(aside / path.name)
    for path in ordered(aside):
        path.rename(checkpoints / path.name)
        damage(checkpoints)
    aside.rmdir()


def _gone(checkpoints: Path) -> None:
    shutil.rmtree(_newest(checkpoints))


NEWEST: dict[str, Damage] = {
    "a bit of the weights": partial(_flip, WEIGHTS, 0.7),
    "a bit of the weights' header": partial(_flip, WEIGHTS, 0.001),
    "a bit of the model's config": partial(_flip, CONFIG, 0.5),
    "a bit of the optimiser's tensors": partial(_flip, TRAINER, 0.2),
    "a bit of the optimiser's pickle": partial(_flip, TRAINER, 0.0005),
    "a bit of the optimiser's index": partial(_flip, TRAINER, 0.9995),
    "a bit of the state": partial(_flip, STATE_FILE, 0.1),
    "a bit of the state's digest": partial(_flip, STATE_FILE, 0.99),
    "weights cut": partial(_truncate, WEIGHTS),
    "optimiser cut": partial(_truncate, TRAINER),
    "state cut": partial(_truncate, STATE_FILE),
    "weights zeroed": partial(_zero, WEIGHTS),
    "optimiser zeroed": partial(_zero, TRAINER),
    "state zeroed": partial(_zero, STATE_FILE),
    "optimiser empty": partial(_empty, TRAINER),
    "weights gone": partial(_delete, WEIGHTS),
    "optimiser gone": partial(_delete, TRAINER),
    "state gone": partial(_delete, STATE_FILE),
    "version too low": partial(_off_by, -1),
    "version too high": partial(_off_by, 1),
    "state without a version": partial(_edit, policy_version=None),
    "state without digests": partial(_edit, files=None, digest=None),
    "another format": partial(_edit, format=9),
    "an older one under its name": _older_one_renamed,
    "one of another run": _of_another_run,
    "folder empty": _without_files,
    "folder gone": _gone,
    "later ones half written": _half_written,
}
"""Done to the newest checkpoint: the one before must lead to the same weights."""
REFUSED: dict[str, Damage] = {
    "a bit of every optimiser": partial(_every, partial(_flip, TRAINER, 0.5)),
    "every state gone": partial(_every, partial(_delete, STATE_FILE)),
    "every folder gone": partial(_every, _gone),
    "one of another run with a later version": _of_the_future,
}
"""Done to every checkpoint, or as if the journal had lost its end: the start must be refused."""


def _gone_policy(checkpoints: Path) -> None:
    shutil.rmtree(_newest(checkpoints) / CODER)


def _older_policy(checkpoints: Path) -> None:
    older, newest = ordered(checkpoints)[-2:]
    _gone_policy(checkpoints)
    shutil.copytree(older / CODER, newest / CODER)


def _policy_of_another_run(checkpoints: Path) -> None:
    newest = _newest(checkpoints)
    _older_policy(checkpoints)
    _sealed_again(newest / CODER, int(newest.name.removeprefix("step_")))


TEAM_NEWEST: dict[str, Damage] = {
    "a bit of one policy's weights": partial(_flip, f"{CODER}/{WEIGHTS}", 0.7),
    "one policy gone": _gone_policy,
    "one policy's state gone": partial(_delete, f"{CODER}/{STATE_FILE}"),
    "one policy of an older one": _older_policy,
    "one policy of another run": _policy_of_another_run,
}
"""Done to one policy of the newest checkpoint of a run that has two: the one before must lead to the same weights."""


async def verdicts(
    settings: Path, exports: Mapping[str, Mapping[str, Path]], number: int | None
) -> list[dict[str, Any]]:
    """Runs `bench.breaking.recovery` in a separate process, so that this process never loads torch.

    `exports` are the folders of the undisturbed policies by run and policy.
    """
    few = [] if number is None else [str(number)]
    folders = {run: {policy: str(path) for policy, path in of_run.items()} for run, of_run in exports.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.breaking.recovery", str(settings), json.dumps(folders), *few),
        cwd=ROOT,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"bench.breaking.recovery ended with exit code {process.returncode}"
    judged: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return judged
