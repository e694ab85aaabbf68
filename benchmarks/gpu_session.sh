#!/usr/bin/env bash
# All that wants a GPU in one run of ten minutes at most, for machines that are lent by the minute: tests, then figures.
#
#   benchmarks/gpu_session.sh FOLDER              # logs and JSON go there; wheels of missing packages come from .whl
#   DEVICE=cpu benchmarks/gpu_session.sh FOLDER   # a dry run on a core
#
# A part that fails does not keep the others from running; the exit status is the number of those that did.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1") device=${DEVICE:-cuda} python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=0

part() { # NAME SECONDS COMMAND...
    echo "== $1"
    timeout "$2" "${@:3}" 2>&1 | tee "$out/$1.log"
    local status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || { echo "== $1 failed with $status"; failed=$((failed + 1)); }
}

[ -d .whl ] && part wheels 30 "$python" -m pip install --quiet --no-index --no-deps .whl/*.whl
size=(--tiny)
[ "$device" = cuda ] && size=(--sizes 0.4B,1.5B)
part tests 60 "$python" -m pytest -q -p no:cacheprovider tests/execution/test_cuda_graph.py tests/values/test_lowering.py -k "gpu or cuda"
part gpu 360 "$python" benchmarks/gpu.py --device "$device" "${size[@]}" --json "$out/gpu.json"
part two-ranks 90 "$python" benchmarks/gpu.py --device "$device" --tiny --two-ranks --json "$out/gpu-two-ranks.json"
part overhead 40 "$python" benchmarks/overhead.py --device "$device" --size M --ranks 1 --contenders fzero-3
exit "$failed"
