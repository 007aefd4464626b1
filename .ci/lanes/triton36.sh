#!/usr/bin/env bash
# The same kernels under Triton 3.6, which is in the field too and spills where 3.9 does not.
#
#   .ci/lanes/triton36.sh [FOLDER]
#
# FOLDER keeps the environment (2 GB) from one run to the next; the default is .venv-triton36.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
folder=${1:-.venv-triton36}
bin=$folder/bin

dependencies() {
  "$bin/python" - <<'PYTHON'
import pathlib, tomllib
project = tomllib.loads(pathlib.Path("core/pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["conformance"], sep="\n")
PYTHON
  grep -E '^torch' requirements.txt
  grep -E '^(hypothesis|pytest)' requirements-dev.txt
  # the interpreter of 3.6 converts arrays of one element, which NumPy 2.4 refuses
  printf "%s\n" triton==3.6.0 "numpy<2.4"
}

build() {
  "${PYTHON:-python3}" -m venv "$folder"
  "$bin/pip" install -q --upgrade pip "setuptools>=77" wheel
  dependencies >"$folder/requirements.txt"
  "$bin/pip" install -q -r "$folder/requirements.txt"
  "$bin/pip" install -q --no-deps --no-build-isolation -e core -e backends/torch \
    -e backends/triton -e backends/cuda -e backends/rocm
}

stamp=$(cat "$0" core/pyproject.toml backends/{cuda,rocm}/pyproject.toml requirements*.txt | sha256sum)
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
  build
  echo "$stamp" >"$folder/stamp"
fi

TRITON_INTERPRET=1 "$bin/pytest" -q -m triton_interp tests/backends/triton \
  -W "ignore:Conversion of an array with ndim:DeprecationWarning"
"$bin/pytest" -q -m triton_aot tests/backends/triton
for platform in cuda rocm; do
  "$bin/leadframe" compile-check "$platform" --matrix "${MATRIX:-standard}" --jobs 2
done
