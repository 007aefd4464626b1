#!/usr/bin/env bash
# Proves the CUDA or ROCm backend on the GPU of this machine, in about three minutes.
#
#   bench/gpu_check.sh [--device cuda|rocm] [--seconds 180] [--stages kit,roofline,...]
#   bench/gpu_check.sh --dry-run        the same stages in Triton's interpreter, at toy sizes
#
# Results: bench/results/gpu_check.json, written anew after every stage, so that what was measured
# survives a stage that fails or a limit that ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3
exec "$python" bench/gpu_check.py "$@"
