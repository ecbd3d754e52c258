#!/usr/bin/env bash
# The whole test suite: lint and types, then every test on JAX, then what depends on the backend on the two others.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
unset PYTHONDONTWRITEBYTECODE  # a thousand processes would compile all of Choros each
export OMP_NUM_THREADS=1 TF_CPP_MIN_LOG_LEVEL=2 TF_ENABLE_ONEDNN_OPTS=0

# Hundreds of ranks and workers compile the same small programs: each is compiled once for all of them, anew in each run.
room=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$room"' EXIT
export JAX_COMPILATION_CACHE_DIR=$room/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 TORCHINDUCTOR_CACHE_DIR=$room/inductor
# Programs here run for a few steps: their compilation costs more. The long tests of the laws in .ci/run compile as users do.
export JAX_DISABLE_MOST_OPTIMIZATIONS=true

# It takes 30 s, so the other checks run beside it. The variable: it asks no server for its newest version.
PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$python" -m pyright --pythonpath "$("$python" -c 'import sys; print(sys.executable)')" \
    >"$room/pyright" 2>&1 &
pyright=$!
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -c "from importlinter.cli import lint_imports_command; lint_imports_command()" >/dev/null
wait $pyright || { cat "$room/pyright"; exit 1; }

# Three lanes side by side, since most tests wait for ranks to start, to meet or to time out and leave the cores idle. Each
# takes the next piece of work when it has done one; the long ones come first, so that all end at about the same time. The
# seconds of a piece are its share of about 20 minutes: a slow machine leaves tests out (--within of tests/conftest.py).
# Laws 5 to 8 are about processes, sockets and scripts: the same on every backend. Law 2 is about the division of data, whose
# code no backend has a part in: PyTorch and JAX show it.
depends="tests/backend tests/laws tests/hvd tests/parallel tests/training/test_joined.py tests/training/test_devices.py
    tests/training/test_frozen.py tests/training/test_hooks_as_in_keras.py tests/training/test_kept_replica.py
    tests/training/test_recorded_steps.py tests/training/test_sent_weights.py tests/training/test_shard_optimizer.py
    tests/training/test_special_inputs.py $(printf -- '--ignore=tests/laws/test_%s.py ' 5_loud 6_clean 7_safe 8_cheap)"
apart="tests/training tests/laws tests/hvd tests/launch tests/cli tests/test_examples.py tests/report tests/runner"
work=(  # seconds, backend, tests
    "730 jax $(printf -- '--ignore=%s ' $apart)"
    "650 jax tests/training/test_[a-l]*.py"
    "640 tensorflow $depends --ignore=tests/laws/test_2_every_batch.py"
    "440 jax tests/training/test_[m-z]*.py"
    "340 jax tests/launch tests/cli tests/test_examples.py tests/report tests/runner"
    "290 torch $depends"
    "220 jax tests/laws tests/hvd"
)

lane() {
    local piece limit backend what
    for piece in "${!work[@]}"; do
        mkdir "$room/$piece" 2>/dev/null || continue
        read -r -d '' limit backend what <<<"${work[$piece]}" || true
        if [[ $backend == tensorflow ]]; then  # what JAX_DISABLE_MOST_OPTIMIZATIONS does, and Choros' own setting
            local -x XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
        else
            unset XLA_FLAGS
        fi
        KERAS_BACKEND=$backend "$python" -m pytest --durations=15 --durations-min=4 --within "$limit" $what "$@" \
            >"$room/$piece/said" 2>&1 && touch "$room/$piece/passed"
        touch "$room/$piece/ended"
    done
}

for _ in 1 2 3; do lane "$@" & done
for piece in "${!work[@]}"; do
    until [[ -e $room/$piece/ended || -z $(jobs -r) ]]; do sleep 0.5; done
    cat "$room/$piece/said"
done
wait
for piece in "${!work[@]}"; do [[ -e $room/$piece/passed ]]; done  # also where a lane was killed
