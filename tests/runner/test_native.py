"""JAX's and PyTorch's own runtimes, started from the place that Choros finds."""

import os
import subprocess
import sys

import pytest

import choros.native
from choros.errors import InvalidInputError

SCRIPT = """
import sys
import choros.native

place = choros.native.initialize("jax", cluster_detection_method="deactivate")
import jax
import numpy as np
from jax.experimental import multihost_utils

assert (jax.process_index(), jax.process_count()) == (place.rank, 2)
assert multihost_utils.process_allgather(np.array([place.rank])).reshape(-1).tolist() == [0, 1]
choros.native.initialize("torch", backend="gloo")
import torch

total = torch.full((3,), float(place.rank + 1))
torch.distributed.all_reduce(total)
assert total.tolist() == [3.0] * 3
torch.distributed.destroy_process_group()
jax.distributed.shutdown()
sys.stdout.write(f"rank {place.rank} is done\\n")
"""

DIVIDED = """
import sys
import choros.native

place = choros.native.initialize("jax")
import keras
import numpy as np

folder = sys.argv[1]
layout = {"wide/kernel": (None, "model"), "wide/bias": ("model",), "out/kernel": ("model", None)}


def make():
    dense = keras.layers.Dense
    model = keras.Sequential(
        [keras.Input((8,)), dense(6, "relu", name="wide"), keras.layers.Dropout(0.2), dense(3, "softmax", name="out")]
    )
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with parallel.whole_weights(self.model):
            if place.rank == 0:
                self.model.save(f"{folder}/{epoch}.keras")


rng = np.random.default_rng(0)
x, y = rng.normal(size=(61, 8)).astype("float32"), rng.integers(0, 3, 61)  # the last batch has one row
how = {"batch_size": 10, "epochs": 3, "verbose": 0, "validation_data": (x[:17], y[:17])}
keras.utils.set_random_seed(3)
plain = make()
expected = plain.fit(x, y, **how).history
with choros.native.ModelParallel(layout, seed=3) as parallel:
    model = make()
    history = parallel.fit(model, x, y, callbacks=[Save()], **how).history
    kernel, slot = model.layers[0].kernel.value, model.optimizer.variables[2].value
    for divided in (kernel, slot):
        assert [shard.data.shape for shard in divided.addressable_shards] == [(8, 3)], divided.sharding
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-6)
    with parallel.whole_weights(model):
        for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)
        np.testing.assert_allclose(model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), atol=1e-5)
    for rows, message in ((x + place.rank, "Rank 1 on .* have different settings: data"), (x, "whole_weights")):
        with np.testing.assert_raises_regex(ValueError, message):
            saves = keras.callbacks.ModelCheckpoint(f"{folder}/never.keras")
            parallel.fit(model, rows, y, callbacks=[saves] if rows is x else [], **how)
sys.stdout.write(f"rank {place.rank} is done\\n")
"""


@pytest.mark.parametrize("launcher", ["choros", "mpiexec"])
def test_both_know_their_ranks(launcher, tmp_path, request):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if launcher == "mpiexec":
        out = request.getfixturevalue("mpiexec")(2, sys.executable, script)
    else:
        command = [sys.executable, "-m", "choros", "run", "-n", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        out = done.stdout
        assert done.returncode == 0, out + done.stderr
    assert all(f"rank {rank} is done" in out for rank in range(2))


def test_weights_divided_over_ranks_train_as_in_one_process(tmp_path, backend):
    if backend != "jax":
        pytest.skip("keras.distribution divides weights on JAX only")
    import keras

    script = tmp_path / "script.py"
    script.write_text(DIVIDED)
    command = [sys.executable, "-m", "choros", "run", "-n", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2))
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == ["0.keras", "1.keras", "2.keras"]
    assert keras.models.load_model(tmp_path / "2.keras").count_params() == 8 * 6 + 6 + 6 * 3 + 3


REFUSED = """
import re
import choros.native
import choros.parallel
choros.parallel.logical_devices(2)
import keras


def make(layout):
    wide = keras.layers.Dense(7, name="wide")
    with choros.native.ModelParallel(layout):
        try:
            keras.Sequential([keras.Input((8,)), wide])
        finally:
            placed[:] = wide.variables


placed = []
mesh = keras.distribution.DeviceMesh((1, 1), ("a", "b"), ["cpu:0"])
for layout, message in (
    ({"e/kernel": (None, "model")}, r"wide/kernel, of the shape \\(8, 7\\), along 'model', .* size 2, .*: give None"),
    ({"e/kernel": (None, None, "model")}, r"wide/kernel has 3 dimensions, .* has the shape \\(8, 7\\)"),
    ({"e/kernel": (None, "other")}, "along 'other': the mesh has batch, model"),
    (keras.distribution.LayoutMap(mesh), "takes 1 device, and there are 2 in this job"),
):
    try:
        make(layout)
    except choros.InvalidInputError as error:
        assert re.search(message, str(error)), error
    else:
        raise SystemExit(f"{layout} was accepted")
    assert placed == []
make({"e/kernel": ("model", None)})
assert len(placed) == 2
"""


def test_a_layout_that_does_not_fit_is_refused_before_a_variable_is_placed(tmp_path, backend):
    if backend != "jax":
        pytest.skip("keras.distribution divides weights on JAX only")
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_jaxs_runtime_weights_are_not_divided_over_ranks(backend, monkeypatch):
    if backend != "jax":
        with pytest.raises(InvalidInputError, match=f"ModelParallel needs JAX; this is {backend}"):
            choros.native.ModelParallel({})
        return
    monkeypatch.setattr("choros.native.model_parallel.find_place", lambda timeout: choros.cluster.Place(0, 2))
    with pytest.raises(InvalidInputError, match="JAX knows 1 process, and this job has 2 ranks: call"):
        choros.native.ModelParallel({})


def test_another_library_is_refused():
    with pytest.raises(InvalidInputError, match="give one of jax, torch"):
        choros.native.initialize("tensorflow")
