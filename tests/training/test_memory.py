"""Memory of large models: the caller holds the shared weights once, and a worker frees a model before the next one."""

import pathlib
import re

import keras
import numpy as np

import choros

MB = 160  # above the size from which a worker collects garbage after a job


def resident(pid, kind):
    """Return the MB of a process that are anonymous (``RssAnon``) or were resident at most (``VmHWM``)."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+) kB", text)[1]) >> 10


def large_model():
    table = keras.layers.Embedding(MB * 1024, 256, embeddings_initializer="zeros", trainable=False)
    model = keras.Sequential([keras.Input((4,)), table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_worker_frees_a_large_model_before_the_next_one():
    x, y = np.zeros((8, 4), "int32"), np.zeros((8, 1), "float32")
    with choros.WorkerPool(1) as pool:
        trainer = choros.Trainer(large_model(), workers=1, pool=pool)
        trainer.fit(x, y, batch_size=8, verbose=0)
        (pid,) = pool.start().pids
        first = resident(pid, "RssAnon")
        for _ in range(3):
            trainer.fit(x, y, batch_size=8, verbose=0)
        assert resident(pid, "RssAnon") < first + 1.5 * MB


def test_the_caller_makes_no_copy_of_frozen_weights_but_the_shared_one():
    x, y = np.zeros((8, 4), "int32"), np.zeros((8, 1), "float32")
    with choros.WorkerPool(1) as pool:
        trainer = choros.Trainer(large_model(), workers=1, pool=pool)
        trainer.fit(x, y, batch_size=8, verbose=0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted anew
        before = resident("self", "VmRSS")
        trainer.fit(x, y, batch_size=8, verbose=0)
        assert resident("self", "VmHWM") < before + 1.5 * MB
