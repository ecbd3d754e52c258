"""A fit by two workers on each backend, in a process of its own."""

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import keras
import numpy as np

import choros

x = np.random.default_rng(0).standard_normal((50, 4), dtype="float32")
y = x.sum(axis=1, keepdims=True)


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


if __name__ == "__main__":
    model, plain = make(), make()
    history = choros.Trainer(model, "allreduce", workers=2).fit(x, y, batch_size=15, epochs=2, shuffle=False, verbose=0)
    expected = plain.fit(x, y, batch_size=15, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    print("equal on", keras.backend.backend())
"""


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_two_workers_train_as_plain_keras_does(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    script = tmp_path / "fit.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"equal on {backend}\n")  # workers' output comes before it, TensorFlow's too
