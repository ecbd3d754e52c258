"""Models and data that the laws are held on, and plain Keras on the same global batches."""

import contextlib
import gc
import inspect
import os
import pathlib
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest

import choros
import choros.algorithms
from choros.algorithms import ExchangeInfo
from choros.comm.bootstrap.select import ENTRY_POINT_GROUP
from choros.comm.shm.group import SharedGroup
from choros.comm.single_rank_group import SingleRankGroup
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.worker.exchange import InMemoryParameterServer


def _data(rows=100, features=8, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    y = rng.integers(0, classes, rows)
    x[:, 0] += y
    return x, y


@pytest.fixture
def data():
    return _data


@pytest.fixture
def make_mlp():
    """A small classifier; weights depend only on the seed."""

    def make(optimizer=None, metrics=("accuracy",), weighted_metrics=None, l2=0.0, loss=None, classes=3, seed=0, **how):
        import keras

        keras.utils.set_random_seed(seed)
        regularizer = keras.regularizers.L2(l2) if l2 else None
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "relu", kernel_regularizer=regularizer),
                keras.layers.Dense(classes, "softmax" if classes > 1 else "sigmoid"),
            ]
        )
        model.compile(
            optimizer or keras.optimizers.Adam(1e-2),
            loss or ("sparse_categorical_crossentropy" if classes > 1 else "binary_crossentropy"),
            metrics=list(metrics),
            weighted_metrics=weighted_metrics,
            **how,
        )
        return model

    return make


@pytest.fixture
def plain_fit():
    """``model.fit`` in this process on the global batches that a Trainer would make; returns the history's figures."""

    def fit(model, x, y, *, epochs, batch_size, seed, sample_weight=None, class_weight=None, shuffle=True, **kwargs):
        import keras

        from choros.data import make_source

        source = make_source(x, y, sample_weight, class_weight)

        class Batches(keras.utils.PyDataset):
            def __init__(self, epoch):
                super().__init__()
                how = dict(seed=seed, epoch=epoch, shuffle=shuffle)
                made = source.epoch(rank=0, size=1, synchronous=True, batch_size=batch_size, **how)
                self.batches = [tuple(part for part in (b.x, b.y, b.sample_weight) if part is not None) for b in made]

            def __len__(self):
                return len(self.batches)

            def __getitem__(self, index):
                return self.batches[index]

        history = {}
        for epoch in range(epochs):
            how = dict(initial_epoch=epoch, epochs=epoch + 1, shuffle=False, verbose=0)
            for name, figures in model.fit(Batches(epoch), **how, **kwargs).history.items():
                history.setdefault(name, []).extend(figures)
        return history

    return fit


@pytest.fixture
def same_weights():
    def check(a, b, tolerance):
        worst = max(
            float(np.max(np.abs(np.asarray(v) - np.asarray(w)), initial=0))
            for v, w in zip(a.trainable_variables, b.trainable_variables, strict=True)
        )
        assert worst <= tolerance, f"weights differ by {worst}"
        return worst

    return check


def _segments():
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists():
        return []
    open_here = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            open_here.append(os.readlink(f"/proc/self/fd/{name}"))
    return [line for line in [*open_here, *maps.read_text().splitlines()] if "memfd:choros" in line]


@pytest.fixture(autouse=True)
def _no_segment_stays():
    """Law 6, after every test of the laws, so for every algorithm: no segment is open or mapped."""
    before = set(_segments())
    yield
    if not set(_segments()) <= before:
        gc.collect()
    assert set(_segments()) <= before


# -- the lists: one of algorithms, one of centers, one of groups; the backend is the process' own (tests/run.sh)
@pytest.fixture(params=[kind.__name__ for kind in choros.algorithms.ALL])
def kind(request):
    """Every algorithm's class."""
    return getattr(choros, request.param)


MEETING = [k.__name__ for k in choros.algorithms.ALL if k.level == "parameters" and k.mode is not None]


@pytest.fixture(params=MEETING)
def sync_kind(request):
    """Every algorithm that exchanges parameters."""
    return getattr(choros, request.param)


@pytest.fixture(params=[name for name in MEETING if not getattr(choros, name).weighted])
def async_kind(request):
    """Every algorithm that can meet a center alone (a mean weighted over all workers cannot, and is refused)."""
    return getattr(choros, request.param)


@pytest.fixture(params=["memory", "shared"])
def make_center(request):
    """Every center, as its first worker meets it: ``make(algorithm, start, others)``."""
    made = []

    def make(algorithm, start, others):
        if request.param == "memory":
            return InMemoryParameterServer(algorithm, start, workers=1, statistics=others).at(0)
        segment = SharedMemoryParameterServer.create(start, others, algorithm.start(start, 1), workers=1)
        made.append(segment)
        return SharedMemoryParameterServer(segment, algorithm, 0, workers=1)

    yield make
    for segment in made:
        segment.close()


@pytest.fixture(params=["local", "shared", *sorted(entry_points(group=ENTRY_POINT_GROUP).names)])
def make_group(request):
    """Every group, of one rank; with what installed packages add.

    Those that take more ranks (MPI, TCP, several hosts, sums by PyTorch and by JAX) are in ``tests/transport``.
    """
    made = []

    def make():
        if request.param == "local":
            return SingleRankGroup()
        if request.param != "shared":
            (point,) = entry_points(group=ENTRY_POINT_GROUP, name=request.param)
            return point.load()(0, 1, 30.0) or pytest.skip(f"{point.value} takes no job of one rank")
        made.append(SharedGroup.create(1, 1 << 16))
        return SharedGroup(made[-1], 0)

    yield make
    for segment in made:
        segment.close()


# -- a model whose every step is known, and that counts its rows
def make_ledger(rows, rate):
    """A model of one weight, from 0, whose loss is its output: each SGD step on x = 1 moves it by just -rate.

    Row i's target is i; the metric ``missed`` is 0 when each of the ``rows`` has been trained exactly once.
    """
    import keras

    class Missed(keras.metrics.Metric):
        def __init__(self, rows, name="missed", **kwargs):
            super().__init__(name=name, **kwargs)
            self.rows = rows
            self.counts = self.add_weight(shape=(rows,), initializer="zeros", name="counts")

        def update_state(self, y_true, y_pred, sample_weight=None):
            ids = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
            self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(ids, self.rows, dtype="float32"), axis=0))

        def result(self):
            return keras.ops.max(keras.ops.abs(self.counts - 1.0))

        def get_config(self):
            return {**super().get_config(), "rows": self.rows}

    def output(y_true, y_pred):
        return y_pred * 1.0

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(rate), output, metrics=[Missed(rows)])
    return model


def walk(algorithm, steps, epochs, rate, workers=1):
    """Return the final center if all workers make the same steps, by the algorithm's formulas alone."""
    x, center, seen, velocity = (np.zeros(1) for _ in range(4))
    memory, pending = algorithm.start(center, workers), 0
    for epoch in range(epochs):
        for step in range(steps):
            velocity = algorithm.momentum * velocity - rate
            x, pending = x + velocity, pending + 1
            over = step + 1 == steps and (algorithm.window == 0 or epoch + 1 == epochs)
            if pending == algorithm.window or over:
                message = algorithm.propose(x, seen, pending)
                after, memory = algorithm.merge(center, message, ExchangeInfo(workers=workers), memory)
                seen = center if algorithm.shows == "before" else after
                x, center, pending = algorithm.adopt(x, seen), after, 0
    return float(center[0])


@pytest.fixture
def ledger():
    return make_ledger


@pytest.fixture
def ledger_source():
    """Its text, for a script."""
    return inspect.getsource(make_ledger)


@pytest.fixture
def center_walks():
    return walk


@pytest.fixture
def clean_python(tmp_path):
    """Run Python text in a process of its own, outside this folder; returns the finished process."""

    def run(text, *, before=(), timeout=120, **environment):
        script = tmp_path / "script.py"
        script.write_text(text)
        command = [sys.executable, *before, str(script)]
        there = {**os.environ, **environment}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, env=there, check=False
        )

    return run


@pytest.fixture
def train_both(pools, plain_fit):
    """Train one model in one process and one by AllReduce; return both models and both histories."""

    def train(make, x, y, workers, *, epochs=3, batch_size=16, **kwargs):
        reference, model = make(), make()
        expected = plain_fit(reference, x, y, epochs=epochs, batch_size=batch_size, seed=5, **kwargs)
        trainer = choros.Trainer(model, "allreduce", workers=workers, pool=pools(workers))
        result = trainer.fit(x, y, epochs=epochs, batch_size=batch_size, seed=5, verbose=0, **kwargs).history
        return reference, model, expected, result

    return train
