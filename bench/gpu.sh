#!/usr/bin/env bash
# The checks for a CUDA GPU: `bench/gpu.sh [FOLDER]`, on a machine with one, after `make setup`.
#
# Runs the tests marked `gpu`, the demo, `bench.step` and `bench.merge`, each with its log in FOLDER, and continues after a
# failure. The last line is one JSON object: exit codes, seconds, and the benches' own figures. It has never run.
set -u
cd "$(dirname "$0")/.."
out=${1:-agentjet-gpu}
python=${PYTHON:-.venv/bin/python}
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # sums that are equal in every run
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}

if ! "$python" -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "bench/gpu.sh needs a CUDA GPU and a PyTorch build that sees it: $python sees none." >&2
    exit 2
fi
mkdir -p "$out"
: >"$out/runs.txt"

run() {
    local name=$1 started=$SECONDS code=0
    shift
    echo "$name: $*" >&2
    "$@" >"$out/$name.log" 2>"$out/$name.err" || code=$?
    echo "$name $code $((SECONDS - started))" >>"$out/runs.txt"
}

run tests "$python" -m pytest -q -m gpu tests
run demo "$python" -m agentjet.cli demo --out "$out/demo" --set model.device=cuda
run step "$python" -m bench.step --without-shared
run merge "$python" -m bench.merge --dtype bfloat16

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
report = {"bench": "gpu", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": {}}
for line in (out / "runs.txt").read_text().splitlines():
    name, code, seconds = line.split()
    report["runs"][name] = {"exit_code": int(code), "seconds": int(seconds)}
    last = ((out / f"{name}.log").read_text().strip().splitlines() or [""])[-1]
    report["runs"][name]["result"] = json.loads(last) if last.startswith("{") else last
result = out / "demo" / "result.json"
if result.exists():
    report["runs"]["demo"]["result"] = json.loads(result.read_text())
print(json.dumps(report))
PYTHON
