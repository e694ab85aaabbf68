#!/usr/bin/env bash
# What wants a GPU, in three calls of at most nine minutes each, for machines that are lent by the minute.
#
#   benchmarks/gpu_session.sh FOLDER 1                # is fzero right on it? tests, then tiny models
#   benchmarks/gpu_session.sh FOLDER 2                # figures of a GPT of 0.4 billion parameters, and a profile
#   benchmarks/gpu_session.sh FOLDER 3                # of 1.5 billion
#   DEVICE=cpu benchmarks/gpu_session.sh FOLDER 1     # a dry run on a core, with tiny models and jobs that fail
#
# FOLDER gets at most three files a call. Wheels of missing packages come from .whl. What is known is in the JSON at any
# time. The exit status is the number of jobs that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1") call=$2 device=${DEVICE:-cuda} python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
[ -d .whl ] && "$python" -m pip install --quiet --no-index --no-deps .whl/*.whl
how=(--device "$device")
[ "$device" = cpu ] && how+=(--tiny --broken)

case $call in
1)
    timeout --kill-after 5 90 "$python" -m pytest -q -p no:cacheprovider tests/execution/test_cuda_graph.py \
        tests/values/test_lowering.py tests/state/test_partition.py -k "gpu or cuda or pinned" >"$out/1-tests.log" 2>&1
    tests=$?
    "$python" benchmarks/gpu.py checks "${how[@]}" --seconds 440 --json "$out/1.json" 2>&1 | tee "$out/1.log"
    exit $((PIPESTATUS[0] + (tests != 0)))
    ;;
2)
    "$python" benchmarks/gpu.py 0.4B "${how[@]}" --json "$out/2.json" --trace "$out/2-trace.json.gz" 2>&1 |
        tee "$out/2.log"
    ;;
3) "$python" benchmarks/gpu.py 1.5B "${how[@]}" --json "$out/3.json" 2>&1 | tee "$out/3.log" ;;
esac
exit "${PIPESTATUS[0]}"
