"""The figures of one CUDA GPU, in pieces of at most ten minutes: `bench/gpu.sh FOLDER [--only PIECE ...]`.

`docs/benchmarks.md` has what ran on one: an earlier form of these pieces, and none of them in this form.

* `sampler`: tests marked `gpu`, the ceilings of the card, and the embedded sampler at 64, 256 and 512 rows;
* `vllm`: vLLM alone, as a replica uses it, and as that with seeds; needs an environment of the samplers, which may have
  vLLM 0.26 for PyTorch 2.11 (`bench/vllm026`);
* `learning`: tokens a second and MFU beside `transformers` with packed rows, with Liger's kernels, and compiled;
* `forest`: forests against rows with 1.4 billion parameters; the demo;
* `cluster`: a replica, and one that shares its GPU: seconds of a publish, log-probabilities; the colocated demo.

A contender is a process with a time limit, and two logs in FOLDER. The next one runs also after a failure. FOLDER keeps
the model of random weights, and `gpu.json` with the figures of all pieces so far, which is also the last line. With
`--small` every piece runs in miniature on a CPU, in less than a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentjet.compute.backend import WORKER_VARIABLES
from agentjet.compute.samplers import vllm_version
from bench.machine import CASES
from bench.random_model import FILES, make_model
from tests.cluster.local_replica import sampler_python

PIECE_SECONDS, SMALL_SECONDS = 600.0, 600.0
"""Limits of a piece, and of a contender in miniature, which may share its machine with other programs."""
VOCABULARY = 49_152  # All ids of SmolLM2's tokenizer
OLDER_VLLM = Path(__file__).parent / "vllm026" / "python"
NEEDS_VLLM = (
    "Needs vLLM 0.32 or later, and {found}: run `agentjet cluster install`, or set AGENTJET_SAMPLER_PYTHON to an "
    "interpreter that has it. Where PyTorch must stay 2.11, vllm==0.26.0 does, too"
)
WHOLE = {"small": "", "quick": "", "demo": "", "device": "cuda", "threads": "8"}
WHOLE |= {"size": "1.4B", "forests": "turns8_large turns20_large shared_prompt_large"}
SMALL = {"small": "--small", "quick": "--quick", "device": "cpu", "threads": "1", "forests": "turns8_large"}
SMALL |= {"size": "tiny", "demo": "--model {model} --steps 1 --tasks 4 --set job.batch_size=2 --set job.group_size=2"}
"""Words of the commands, by what stands in their place."""

Contender = tuple[str, float, str]  # A name, the most seconds, and a command of `python -m`
PIECES: dict[str, list[Contender]] = json.loads((CASES / "gpu.json").read_text(encoding="utf-8"))


def different(contenders: Sequence[Contender]) -> list[Contender]:
    """The first of those whose commands differ in numbers only: a miniature shows that each kind runs."""
    kinds = {re.sub(r"\d", "", command): (name, seconds, command) for name, seconds, command in reversed(contenders)}
    return list(kinds.values())[::-1]


def replica_python() -> tuple[str, str]:
    """The interpreter of the samplers and the version of its vLLM; for 0.26 with the layer. Raises `LookupError`."""
    python = sampler_python()
    version = python and vllm_version(python)
    if not python or not version:
        raise LookupError(NEEDS_VLLM.format(found=f"{python} has none" if python else "there is none"))
    release = version.split(".")[:2]
    if release == ["0", "26"]:
        if python != str(OLDER_VLLM):
            os.environ["VLLM026_PYTHON"] = python
        return str(OLDER_VLLM), version
    if [*map(int, release)] < [0, 32]:
        raise LookupError(NEEDS_VLLM.format(found=f"{python} has {version}"))
    return python, version


def words(command: str, out: Path, *, small: bool) -> list[str]:
    """The command line of a contender. Raises `LookupError` if it needs a vLLM that is missing."""
    sampler = replica_python()[0] if "{sampler}" in command else ""
    values = SMALL if small else WHOLE
    places = {"out": out, "model": out / values["size"], "sampler": sampler}
    values = values | {name: shlex.quote(str(path)) for name, path in places.items()}
    line = shlex.split(command.format_map(values | {"demo": values["demo"].format_map(values)}))
    return [line[0], "-m", *line[1:]] if command.startswith("{sampler}") else [sys.executable, "-m", *line]


def run(contender: Contender, out: Path, left: float, *, small: bool) -> dict[str, Any]:
    """Returns exit code, seconds and result of a contender. After its time, ends it with its children: code 124."""
    name, seconds, command = contender
    print(f"{name}: {command}", file=sys.stderr, flush=True)
    try:
        line = words(command, out, small=small)
    except LookupError as error:
        return {"exit_code": 2, "seconds": 0.0, "result": error.args[0]}
    environment = {**os.environ, **WORKER_VARIABLES}
    if small:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "GPU_TESTS_DEVICE": "cpu"}
    began = time.monotonic()
    log, errors = out / f"{name}.log", out / f"{name}.err"
    with log.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(line, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        try:
            code = process.wait(SMALL_SECONDS if small else max(1.0, min(seconds, left)))
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = out / name / "result.json"
    last = result.read_text() if result.exists() else _last_line(log)
    figures: Any = (_last_line(errors) if code else "") or last
    with contextlib.suppress(json.JSONDecodeError):
        figures = json.loads(figures)
    return {"exit_code": code, "seconds": round(time.monotonic() - began, 1), "result": figures}


def _last_line(path: Path) -> str:
    """The last JSON object of a log, after which vLLM may print more, or else its last line."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("{")), lines[-1] if lines else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="agentjet-gpu", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=[*PIECES], help="these pieces")
    parser.add_argument("--small", action="store_true", help="in miniature, on a CPU")
    given = parser.parse_args()
    if not given.small and not torch.cuda.is_available():
        print(f"bench/gpu.sh needs a CUDA GPU, and the PyTorch of {sys.executable} sees none.", file=sys.stderr)
        return 2
    ends, out = time.monotonic() + PIECE_SECONDS, given.folder.absolute()  # The first piece makes the model.
    out.mkdir(parents=True, exist_ok=True)
    size = (SMALL if given.small else WHOLE)["size"]
    if not (out / size / FILES[-1]).exists():  # The last one that is written
        make_model(out / size, VOCABULARY, size=size)
    kept = out / "gpu.json"
    card = torch.cuda.get_device_properties(0) if not given.small else None
    report = json.loads(kept.read_text()) if kept.exists() else {"bench": "gpu", "pieces": {}}
    report |= {"device": card.name if card else "cpu", "device_gb": card and round(card.total_memory / 1e9, 1)}
    report |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    with contextlib.suppress(LookupError):
        report["vllm"] = replica_python()[1]
    failed = False
    for piece in given.only:
        found = report["pieces"].setdefault(piece, {})
        for contender in different(PIECES[piece]) if given.small else PIECES[piece]:
            found[contender[0]] = one = run(contender, out, ends - time.monotonic(), small=given.small)
            kept.write_text(json.dumps(report, indent=1) + "\n")  # Kept if a later one ends the machine.
            if one["exit_code"]:
                failed = True
                print(f"{piece}: {contender[0]} failed: {one['result']}", file=sys.stderr, flush=True)
        ends = time.monotonic() + PIECE_SECONDS
    print(json.dumps(report))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
