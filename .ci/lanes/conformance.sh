#!/usr/bin/env bash
# The full tier of the conformance kit on every backend that needs no silicon, and some fuzzing.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
reports=$(mktemp -d)
for device in reference cpu sim sim:compile sim:nograph; do
  .venv/bin/leadframe conformance "$device" --tier full --fuzz 10s --report "$reports/$device.json"
  .venv/bin/leadframe conformance verify "$reports/$device.json"
done
