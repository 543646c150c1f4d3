#!/usr/bin/env bash
# The figures of a CUDA GPU: `bench/gpu.sh [FOLDER] [--only PIECE ...]`, after `make setup` and `.venv/bin/pip install -e '.[bench]'`.
# `bench/gpu.sh --small` does the same in miniature without one. See bench/gpu.py.
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-.venv/bin/python}" -m bench.gpu "$@"
