"""Memory of workers: frozen weights exist once, models are freed, and freed memory is used again."""

import os
import pathlib
import platform
import re
import resource
import time

import keras
import numpy as np
import pytest

import choros

MB = 160  # above the size from which a worker collects garbage after a job


def resident(pid, kind):
    """Return the MB of a process that are anonymous (``RssAnon``) or were resident at most (``VmHWM``)."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+) kB", text)[1]) >> 10


def model_with_table(megabytes, trainable=False):
    table = keras.layers.Embedding(megabytes * 1024, 256, embeddings_initializer="zeros", trainable=trainable)
    model = keras.Sequential([keras.Input((4,)), table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(pool, model):
    x, y = np.zeros((8, 4), "int32"), np.zeros((8, 1), "float32")
    choros.Trainer(model, workers=1, pool=pool).fit(x, y, batch_size=8, verbose=0)


def test_a_worker_frees_a_large_model_before_the_next_one():
    with choros.WorkerPool(1) as pool:
        model = model_with_table(MB, trainable=True)
        fit(pool, model)
        (pid,) = pool.start().pids
        time.sleep(1)
        first = resident(pid, "RssAnon")
        for _ in range(3):
            fit(pool, model)
        end = time.monotonic() + 30
        while resident(pid, "RssAnon") >= first + 1.5 * MB:  # the worker frees the model after it has sent its result
            assert time.monotonic() < end
            time.sleep(0.05)


def test_nobody_copies_frozen_weights_but_into_the_memory_that_all_share():
    with choros.WorkerPool(1) as pool:
        model = model_with_table(MB)
        fit(pool, model_with_table(1))
        processes = ["self", *pool.start().pids]
        before = [resident(process, "VmRSS") for process in processes]
        for process in processes:
            pathlib.Path(f"/proc/{process}/clear_refs").write_text("5")  # the most memory is counted anew
        fit(pool, model)
        for process, least in zip(processes, before, strict=True):
            assert resident(process, "VmHWM") < least + 0.5 * MB


class CountsPages(keras.utils.PyDataset):
    """Batches, each made beside a large object. Writes how many pages the kernel gave for the last of these objects."""

    def __init__(self, path, **settings):
        super().__init__(**settings)
        self.path, self.size = path, 300_000_000

    def __len__(self):
        return 6

    def __getitem__(self, index):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        len(b"x" * self.size)
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        pathlib.Path(self.path).write_text(f"{pages}")
        return np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_worker_uses_freed_memory_again_in_the_next_step(tmp_path, monkeypatch):
    """New pages from the kernel took 15 to 40 % of a CNN's step on JAX."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    path = tmp_path / "pages"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    choros.Trainer(model, workers=1, echo=False).fit(CountsPages(str(path)), verbose=0)
    assert int(path.read_text()) < 30_000_000 // os.sysconf("SC_PAGE_SIZE")
