"""The kernel's own out-of-memory killer takes a worker: needs root, for a memory limit that only this worker has."""

import os
import pathlib
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import choros
from choros.errors import WorkerFailedError

LIMIT = 256 << 20  # bytes that the worker may take from the moment it is moved


@pytest.fixture
def hierarchy(tmp_path):
    """Return the folder of memory limits: mounted control groups of either version, else version 1, mounted here."""
    root = pathlib.Path("/sys/fs/cgroup")
    for place in (root / "memory", root):
        if (place / "cgroup.procs").exists():
            yield place
            return
    subprocess.run(["mount", "-t", "cgroup", "-o", "memory", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.fixture
def group(hierarchy):
    """A control group of this test's own with a memory limit and no swap."""
    room = hierarchy / f"choros-test-{os.getpid()}"
    room.mkdir()
    first = (room / "memory.limit_in_bytes").exists()
    (room / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(LIMIT))
    swap = room / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
    if swap.exists():
        swap.write_text(str(LIMIT if first else 0))
    yield room
    deadline = time.monotonic() + 10
    while (room / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.05)
    room.rmdir()


class Hungry(keras.utils.PyDataset):
    """Batches that at one step of rank 1 take all the memory there is."""

    def __init__(self, room):
        super().__init__()
        self.room, self.done = str(room), 0

    def __len__(self):
        return 400

    def __getitem__(self, index):
        self.done += 1
        if self.done == 12 and os.environ.get("CHOROS_WORKER") and int(sys.argv[-2]) == 1:
            print("about to eat", flush=True)
            (pathlib.Path(self.room) / "cgroup.procs").write_text(str(os.getpid()))
            eaten = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 16)]
            print("ate", len(eaten))
        time.sleep(0.002)
        rng = np.random.default_rng(index)
        return rng.normal(size=(8, 8)).astype("float32"), rng.integers(0, 3, 8)


@pytest.mark.parametrize("algorithm", ["allreduce", "aeasgd"])
def test_the_caller_hears_that_memory_ran_out(algorithm, group, children):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    inputs, already = [np.array(w) for w in model.get_weights()], children()
    with pytest.raises(WorkerFailedError, match="out-of-memory") as caught:
        choros.Trainer(model, algorithm, workers=2, echo=False).fit(Hungry(group), epochs=1, verbose=0)
    error = caught.value
    assert (error.rank, error.signal) == (1, "SIGKILL")
    assert error.peak_memory > LIMIT
    assert "about to eat" in error.output
    assert "ate" not in error.output.replace("about to eat", "")
    for old, new in zip(inputs, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert any(np.abs(w - old).max() > 0 for w, old in zip(error.weights, inputs, strict=True))
    assert children() <= already
