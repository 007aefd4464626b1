#!/usr/bin/env bash
# The TPU backend without a TPU: the conformance kit over interpreted kernels, a race detector, and
# kernels and full steps compiled for real chips with libtpu.
#
#   .ci/lanes/tpu.sh [FOLDER]
#
# FOLDER keeps the environment of the compiler (1 GB) from one run to the next; the default is
# .venv-tpu. libtpu is proprietary (Google Cloud Platform Terms of Service): it is installed here
# and nowhere else. Without it, set NO_LIBTPU=1: steps are then lowered only, which is far weaker.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
folder=${1:-.venv-tpu}
bin=$folder/bin

dependencies() {  # no torch: this environment also shows that none is needed
  "$bin/python" - <<'PYTHON'
import pathlib, tomllib
project = tomllib.loads(pathlib.Path("core/pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["conformance"], sep="\n")
PYTHON
  grep -E '^pytest' requirements-dev.txt
  printf '%s\n' jax==0.10.2
  [ -n "${NO_LIBTPU:-}" ] || printf '%s\n' 'libtpu==0.0.42.*'
}

build() {
  "${PYTHON:-python3}" -m venv "$folder"
  "$bin/pip" install -q --upgrade pip "setuptools>=77" wheel
  dependencies >"$folder/requirements.txt"
  "$bin/pip" install -q -r "$folder/requirements.txt"
  "$bin/pip" install -q --no-deps --no-build-isolation -e core -e backends/tpu
}

stamp=$(cat "$0" {core,backends/tpu}/pyproject.toml requirements-dev.txt | sha256sum)
stamp+=${NO_LIBTPU:-}
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
  build
  echo "$stamp" >"$folder/stamp"
fi

"$bin/pytest" -q -m tpu_aot tests/backends/tpu
"$bin/leadframe" compile-check tpu --target v5e:2x2 --model smollm2-135m --step decode
"$bin/pytest" -q -m "not tpu_aot and not slow and not lane" tests/backends/tpu
report=$(mktemp -d)/tpu.json
"$bin/leadframe" conformance tpu --report "$report"
"$bin/leadframe" conformance verify "$report"
.venv/bin/pytest -q -m lane tests/backends/tpu
