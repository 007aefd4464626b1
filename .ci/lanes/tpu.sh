#!/usr/bin/env bash
# The TPU backend without a TPU: kernels and full steps compiled for real chips with libtpu, and the
# conformance kit over interpreted kernels.
#
#   .ci/lanes/tpu.sh [FOLDER]
#
# FOLDER keeps the environment from one run to the next; the default is .venv-tpu. libtpu is
# proprietary (Google Cloud Platform Terms of Service), so it lives in this lane's environment only.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
folder=${1:-.venv-tpu}
bin=$folder/bin

if [ ! -e "$folder/ready" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
  "$bin/pip" install -q --upgrade pip "setuptools>=77" wheel
  grep -E '^(httpx|hypothesis|pytest|jax)' requirements-dev.txt >"$folder/requirements.txt"
  "$bin/pip" install -q -r "$folder/requirements.txt" "libtpu==0.0.42.*"
  "$bin/pip" install -q --no-build-isolation -e "core[conformance]" -e backends/tpu
  touch "$folder/ready"
fi

"$bin/pytest" -q -m tpu_aot tests/backends/tpu
"$bin/leadframe" compile-check tpu --target v5e:2x2
