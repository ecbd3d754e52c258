"""Models over several CPU devices beside plain Keras, in processes of their own: a CPU is cut before it is first used.

``python conftest.py FILE DEVICES CASE ...`` calls functions of a test file, each with what stands here, and prints what
each of them raised as one line of JSON.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import pytest

from choros import parallel

ROWS, BATCH = 61, 10  # the last batch has one row
RNG = np.random.default_rng(5)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = (X[:, :3] > 0.2).sum(1, keepdims=True).astype("float32")
WEIGHT = RNG.uniform(0.2, 3, ROWS).astype("float32")
TOKENS = RNG.integers(1, 9, (ROWS, 5)) * (np.arange(5) < RNG.integers(1, 6, (ROWS, 1)))
HOW = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
CHECKED = {"validation_data": (X[:17], Y[:17]), "validation_batch_size": 4}


def make(inner=lambda: [keras.Input((6,)), keras.layers.Dense(7, "tanh")], optimizer=None):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([*inner(), keras.layers.Dense(4, "softmax")], name="serial")
    model.compile(optimizer or keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def pair(count, build=make, **more):
    """Plain Keras' model, and the same over devices."""
    return build(), parallel.make_parallel(build(), devices=count, **more)


def near(ours, plain, atol=2e-6):
    """Check that two lists of arrays hold the same numbers."""
    for value, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(value, other, atol=atol, rtol=1e-6)


def same(model, plain, atol=1e-6):
    """Check that the parallel model, and the serial model in it, hold plain Keras' weights."""
    near(model.get_weights(), plain.get_weights(), atol)
    assert all(map(np.array_equal, model.get_weights(), model.serial.get_weights()))


def fitted(count, build=make, x=X, y=Y, times=1, atol=1e-6, **more):
    """Plain Keras' model and the same over devices, after the same fits, found to be the same."""
    plain, model = pair(count, build)
    for _ in range(times):
        expected, history = (result.fit(x, y, **HOW | more) for result in (plain, model))
        same_history(history, expected, max(atol, 2e-6))
        same(model, plain, atol)
    return plain, model


def same_history(history, expected, atol=2e-6):
    """Check that two histories have the same keys, epochs and figures."""
    assert list(history.history) == list(expected.history)
    assert history.epoch == expected.epoch
    near(history.history.values(), expected.history.values(), atol)


class Batches(keras.utils.PyDataset):
    """The weighted rows, batch by batch."""

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, number):
        where = slice(number * BATCH, number * BATCH + BATCH)
        return X[where], Y[where], WEIGHT[where]


class Raise(keras.callbacks.Callback):
    """Raises after five batches."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            raise ZeroDivisionError("in a callback")


def count_bytes(replica):
    """Note the bytes of each batch that come to each device: a list, to be filled, of a list for each device."""
    if keras.backend.backend() == "jax":
        spread = replica.spread
        scatter, counted = spread.scatter, [[] for _ in range(spread.parts)]

        def scattering(array):
            placed = scatter(array)
            for held, part in zip(counted, placed.addressable_shards, strict=True):
                held.append(part.data.nbytes)
            return placed

        spread.scatter = scattering
        return counted

    def count_at(actual):
        gradients, held = actual.gradients, []

        def taking(batch, out):
            held.extend([batch.x.nbytes, batch.y.nbytes] if batch.rows else [0, 0])
            gradients(batch, out)

        actual.gradients = taking
        return held

    return [count_at(actual) for actual in replica.replicas]


def main(path, count, *names):
    parallel.logical_devices(int(count))
    spec = importlib.util.spec_from_file_location("cases", path)
    spec.loader.exec_module(cases := importlib.util.module_from_spec(spec))
    lab, raised = types.SimpleNamespace(**globals(), count=int(count)), {}
    for name in names:
        try:
            getattr(cases, name)(lab)
        except Exception:
            raised[name] = traceback.format_exc()
    print(json.dumps(raised))


@functools.cache
def run(*arguments):
    command = [sys.executable, __file__, *arguments]
    with tempfile.TemporaryDirectory() as room:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=room)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def pytest_generate_tests(metafunc):
    """A test that takes ``passed`` runs over the cases beside it: ``over_two_`` over two devices, others over any."""
    if "passed" in metafunc.fixturenames:
        cases = [name for name in vars(metafunc.module) if name.startswith("over_")]
        few = [name for name in cases if not name.startswith("over_two_")]
        counts = 2, 4, 8
        if os.environ["KERAS_BACKEND"] == "tensorflow":  # whose replicas are put together as PyTorch's are
            cases, counts = few, (2,)
        counted = [(name, count) for count in counts for name in (cases if count == 2 else few)]
        ids = [f"{name.removeprefix('over_').removeprefix('two_')}-{count}" for name, count in counted]
        # Four devices take the same paths as two and eight.
        values = [
            pytest.param((name, count, few, cases), marks=[pytest.mark.long] if count == 4 else [])
            for name, count in counted
        ]
        metafunc.parametrize("passed", values, indirect=True, ids=ids)


@pytest.fixture
def passed(request):
    """Return a function that checks a case. All cases of a number of devices run together, at the first call."""
    name, count, few, cases = request.param

    def ask():
        raised = run(str(request.path), str(count), *(cases if count == 2 else few))
        assert name not in raised, raised[name]

    return ask


@pytest.fixture
def over_three(request):
    """Run cases of the test's file in a process with 3 devices, once; return what each of them raised."""
    return lambda *cases: run(str(request.path), "3", *cases)


if __name__ == "__main__":
    main(*sys.argv[1:])
