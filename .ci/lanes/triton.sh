#!/usr/bin/env bash
# The CUDA and ROCm backends without a GPU: the conformance kit over interpreted kernels, and every
# kernel compiled for real chips, with registers, spills and shared memory printed.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
reports=$(mktemp -d)
for device in cuda rocm; do
  .venv/bin/leadframe conformance "$device" --report "$reports/$device.json"
  .venv/bin/leadframe conformance verify "$reports/$device.json"
done
for platform in cuda rocm; do
  .venv/bin/leadframe compile-check "$platform" --matrix "${MATRIX:-standard}" --jobs 2
done
