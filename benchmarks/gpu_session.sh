#!/usr/bin/env bash
# What wants a GPU, in three calls of at most nine minutes each, for machines that are lent by the minute.
#
#   benchmarks/gpu_session.sh FOLDER 1                # is fzero right on it? tiny models; torch's database; the tests
#   benchmarks/gpu_session.sh FOLDER 2                # figures of a GPT of 0.4 billion parameters, and a profile
#   benchmarks/gpu_session.sh FOLDER 3                # of 1.5 billion
#   DEVICE=cpu benchmarks/gpu_session.sh FOLDER 1     # a dry run on a core, with tiny models and jobs that fail
#
# FOLDER gets at most six files a call. Wheels of missing packages come from .whl. What is known is in the files at any
# time. The exit status is the number of jobs that failed. The first call wants 16 cores.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1") call=$2 device=${DEVICE:-cuda} python=${PYTHON:-python3}
site=$(mktemp -d)
export PYTHONPATH=$site:$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
[ -d .whl ] && "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .whl/*.whl
how=(--device "$device")
[ "$device" = cpu ] && how+=(--tiny --broken)

# Runs a command on one thread a process, for at most so many seconds. Its output goes to a file.
background() {
    OMP_NUM_THREADS=1 timeout --kill-after 5 "$2" "${@:3}" >"$out/$1" 2>&1
}

case $call in
1)
    pytest=("$python" -m pytest -q -p no:cacheprovider --dist loadfile --no-loadscope-reorder)
    background 1-hf.log 510 "${pytest[@]}" -n 3 tests/hf tests/execution tests/tracing tests/values --tier=quick &
    tests=$!
    CUDA_VISIBLE_DEVICES= background 1-tests.log 510 "${pytest[@]}" -n 4 tests property_tests --tier=quick &
    all=$!
    CONFORMANCE_DEVICE=$device background 1-conformance.log 510 "$python" -m conformance --samples 1 --workers 6 &
    conformance=$!
    "$python" benchmarks/gpu.py checks "${how[@]}" --seconds 480 --json "$out/1.json" 2>&1 | tee "$out/1.log"
    failed=${PIPESTATUS[0]}
    for job in $tests $all $conformance; do
        wait "$job" || failed=$((failed + 1))
    done
    tail -n 25 "$out"/1-hf.log "$out"/1-tests.log
    grep -E "is (raw|wrong)|^[0-9]+ equal" "$out"/1-conformance.log
    exit "$failed"
    ;;
2)
    "$python" benchmarks/gpu.py 0.4B "${how[@]}" --json "$out/2.json" --trace "$out/2-trace.json.gz" 2>&1 |
        tee "$out/2.log"
    ;;
3) "$python" benchmarks/gpu.py 1.5B "${how[@]}" --json "$out/3.json" 2>&1 | tee "$out/3.log" ;;
esac
exit "${PIPESTATUS[0]}"
