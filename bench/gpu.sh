#!/usr/bin/env bash
# The checks for a CUDA GPU: `bench/gpu.sh [FOLDER]`, after `make setup` and `.venv/bin/pip install -e '.[bench]'`.
# `bench/gpu.sh --quick --cpu` does the same in miniature without one. See bench/gpu.py.
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-.venv/bin/python}" -m bench.gpu "$@"
