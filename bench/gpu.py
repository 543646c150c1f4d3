"""The checks for a CUDA GPU, within 20 minutes: `bench/gpu.sh [FOLDER]`. `docs/benchmarks.md` has what ran on one.

Each piece is a separate process with its log in FOLDER and a time limit. The next piece runs also after a failure:

* `tests`: those marked `gpu`, which compare CUDA with the CPU;
* `large`: sampling, learning and memory of a model of 1.4 billion random weights, and where the time goes;
* `sampler`: our sampler against `transformers`' continuous batching;
* `step`: one step against TRL; `merge`: forests against rows; `demo`: the whole program.

Writes `gpu.json` into FOLDER and prints it as the last line. `--quick` takes tiny models and a few steps, and `--cpu`
hides the GPU: together they show on any machine that every piece runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentjet.compute.backend import WORKER_VARIABLES
from bench.machine import CASES
from bench.random_model import make_model
from bench.workload import Workload

TOTAL_SECONDS, QUICK_SECONDS = 1200.0, 3600.0
"""Limits of all pieces together. A quick run may share its machine with other programs."""
VOCABULARY = 49_152  # All ids of SmolLM2's tokenizer


Piece = tuple[str, float, list[str]]  # A name, the most seconds, and a command of `python -m`


def pieces(kind: str, out: Path, model: str) -> list[Piece]:
    """The pieces of `cases/gpu.json`, the most important first. The quick ones use the tiny model in a folder."""
    small = Workload(model, num_prompts=2, repeats=2, new_tokens=3, steps=1, warmup=1, threads=1)
    given = {"{out}": str(out), "{model}": model, "{workload}": small.to_json()}
    found = []
    for name, seconds, command in json.loads((CASES / "gpu.json").read_text(encoding="utf-8"))[kind]:
        words = shlex.split(command)
        for place, value in given.items():
            words = [word.replace(place, value) for word in words]
        found.append((name, seconds, words))
    return found


def run(piece: Piece, out: Path, environment: dict[str, str], left: float) -> dict[str, Any]:
    """Returns exit code, seconds and result of a piece. After its time, ends it with its children: code 124."""
    name, seconds, command = piece
    print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
    began = time.monotonic()
    log, errors = out / f"{name}.log", out / f"{name}.err"
    with log.open("w") as stdout, errors.open("w") as stderr:
        line = [sys.executable, "-m", *command]
        process = subprocess.Popen(line, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        try:
            code = process.wait(max(1.0, min(seconds, left)))
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"exit_code": code, "seconds": round(time.monotonic() - began, 1)}
    result = out / name / "result.json"
    last = result.read_text() if result.exists() else _last_line(log)
    with contextlib.suppress(json.JSONDecodeError):
        return {**found, "result": json.loads(last)}
    return {**found, "result": last or _last_line(errors)}


def _last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or [""])[-1]


def check(chosen: Sequence[Piece], out: Path, seconds: float, *, cpu: bool) -> dict[str, Any]:
    """Runs the pieces, which share the seconds."""
    environment = {**os.environ, **WORKER_VARIABLES}
    if cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "GPU_TESTS_DEVICE": "cpu"}
    device = torch.cuda.get_device_properties(0) if not cpu else None
    report: dict[str, Any] = {
        "bench": "gpu",
        "device": device.name if device else "cpu",
        "device_gb": round(device.total_memory / 1e9, 1) if device else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "runs": {},
    }
    ends = time.monotonic() + seconds
    for piece in chosen:
        report["runs"][piece[0]] = run(piece, out, environment, ends - time.monotonic())
        (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")  # Kept if a later piece ends the machine.
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="agentjet-gpu", type=Path, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="tiny models and a few steps")
    parser.add_argument("--cpu", action="store_true", help="without the GPU; only with --quick")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these pieces")
    chosen = parser.parse_args()
    if chosen.cpu and not chosen.quick:
        parser.error("--cpu needs --quick: the full sizes would take hours")
    if not chosen.cpu and not torch.cuda.is_available():
        print(f"bench/gpu.sh needs a CUDA GPU, and the PyTorch of {sys.executable} sees none.", file=sys.stderr)
        return 2
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as model:
        out = chosen.folder.absolute()
        tiny = str(make_model(Path(model), VOCABULARY, quick=True)) if chosen.quick else ""
        all_of_them = pieces("quick" if chosen.quick else "whole", out, tiny)
        wanted = [piece for piece in all_of_them if not chosen.only or piece[0] in chosen.only]
        report = check(wanted, out, QUICK_SECONDS if chosen.quick else TOTAL_SECONDS, cpu=chosen.cpu)
    print(json.dumps(report))
    return int(any(run["exit_code"] for run in report["runs"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
