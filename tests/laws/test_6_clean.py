"""Law 6: clean. After a run, however it ended, no process, thread, descriptor, segment or temporary file is left.

That no segment stays mapped or open is checked after every test of the laws (``conftest.py``), so for every algorithm.
"""

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

import choros
from choros.errors import WorkerFailedError


def temporary(room):
    """Return the temporary files and named segments that carry Choros' name.

    The folder is the test's own: tests of another lane, which run meanwhile, leave theirs in the common ones.
    """
    return {
        f"{place}/{name}"
        for place in (room, "/dev/shm")
        if os.path.isdir(place)
        for name in os.listdir(place)
        if "choros" in name
    }


def descriptors():
    """Return what the open descriptors of this process refer to; the numbers alone do not identify a leak."""
    results = []
    for name in os.listdir("/proc/self/fd"):
        try:
            results.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    actual = [
        result for result in results if not result.startswith("/proc/")
    ]  # a pool looks up its workers' memory there
    return sorted(result.split(":")[0] for result in actual)


@pytest.fixture
def nothing_left(children, tmp_path, monkeypatch):
    """Compares with how it was before; the frameworks' own threads and files have come with a first fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("WHOLE_KERAS", "1")  # workers end as those of users do
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def look():
        gc.collect()
        return children(), {thread.ident for thread in threading.enumerate()}, descriptors(), temporary(tmp_path)

    def check(before):
        names = ("child processes", "threads", "descriptors", "temporary files")
        for what, old, new in zip(names, before, look(), strict=True):
            more = set(new) - set(old) if isinstance(new, set) else new if len(new) > len(old) else []
            assert not more, f"{what} left: {more} (before: {old})"

    return look, check


# What is left to the kernel is the same on every backend.
KILLED = ["allreduce", "aeasgd"] if os.environ["KERAS_BACKEND"] == "jax" else ["allreduce"]


@pytest.mark.parametrize("algorithm", ["allreduce", "localsgd", "aeasgd", "ensemble"])
def test_after_runs_by_each_way_to_meet(algorithm, pools, make_mlp, data, nothing_left):
    look, check = nothing_left
    pool, (x, y), model = pools(2), data(rows=32), make_mlp()
    pool.start()
    model.predict(x, verbose=0)
    before = look()
    workers = pool.start().pids
    there = [len(os.listdir(f"/proc/{pid}/fd")) for pid in workers]
    for _ in range(2):
        choros.Trainer(model, algorithm, workers=2, pool=pool).fit(x, y, batch_size=8, verbose=0)
    check(before)
    assert pool.start().pids == workers
    end = time.monotonic() + 10  # a worker closes what it has shared after its report
    while True:
        after = [len(os.listdir(f"/proc/{pid}/fd")) for pid in workers]
        if all(new - old < 4 for old, new in zip(there, after, strict=True)):
            break
        assert time.monotonic() < end, (there, after)
        time.sleep(0.05)


@pytest.mark.parametrize("algorithm", KILLED)
def test_after_all_workers_were_killed(algorithm, make_mlp, data, nothing_left):
    import keras

    look, check = nothing_left
    x, y = data(rows=64)
    model = make_mlp()
    model.predict(x, verbose=0)
    before = look()
    trainer = choros.Trainer(model, algorithm, workers=2, echo=False)

    killed = []

    def kill(epoch, logs):
        if not killed:  # a second epoch's end may have been on its way: start() would then start new workers
            killed.extend(trainer._local.pool.start().pids)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(WorkerFailedError, match="SIGKILL") as caught:
        trainer.fit(
            x, y, batch_size=8, epochs=50, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=kill)]
        )
    assert caught.value.signal == "SIGKILL"
    del caught
    check(before)


CALLER = """
import json, sys
import choros, keras, numpy as np
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
trainer = choros.Trainer(model, sys.argv[1], workers=2)
def told(epoch, logs):
    if epoch == 0:
        print(json.dumps(trainer._local.pool.start().pids), flush=True)
trainer.fit(np.zeros((64, 8), "float32"), np.zeros(64, "int32"), batch_size=8, epochs=10**6, verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=told)])
"""


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("algorithm", KILLED)
def test_after_the_caller_was_killed(algorithm, tmp_path):
    before = temporary(tmp_path)
    (tmp_path / "caller.py").write_text(CALLER)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "caller.py", algorithm]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment, text=True) as caller:
        pids = json.loads(caller.stdout.readline())
        assert not any(gone(pid) for pid in pids)
        caller.kill()
    limit = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < limit, f"workers {pids} outlived their caller"
        time.sleep(0.02)
    assert temporary(tmp_path) <= before
