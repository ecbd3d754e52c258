#!/usr/bin/env bash
# The whole test suite: lint and types, then every test on JAX, then what depends on the backend on the two others.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2 TF_ENABLE_ONEDNN_OPTS=0

# Hundreds of ranks and workers compile the same small programs: each is compiled once for all of them, anew in each run.
room=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$room"' EXIT
export JAX_COMPILATION_CACHE_DIR=$room/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 TORCHINDUCTOR_CACHE_DIR=$room/inductor

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy

# Side by side, in two halves that take about as long: most tests wait for ranks to start, to meet or to time out, and
# leave the cores idle.
apart="tests/cli tests/test_examples.py tests/report tests/launch tests/runner"  # of processes and whole runs
others=$room/others
{
    failed=0
    for backend in torch tensorflow; do
        # laws 5, 7 and 8 are about processes, sockets and scripts: the same on every backend
        KERAS_BACKEND=$backend "$python" -m pytest tests/backend tests/laws tests/hvd tests/training/test_joined.py \
            --ignore=tests/laws/test_5_loud.py --ignore=tests/laws/test_7_safe.py --ignore=tests/laws/test_8_cheap.py \
            "$@" || failed=1
    done
    KERAS_BACKEND=jax "$python" -m pytest $apart "$@" || failed=1
    exit $failed
} >"$others" 2>&1 &
failed=0
KERAS_BACKEND=jax "$python" -m pytest $(printf -- '--ignore=%s ' $apart) "$@" || failed=1
wait $! || failed=1
cat "$others"
exit $failed
