"""On GPUs: what one trains, what two train together, where a batch lies that was made ready; skipped without one."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import keras, numpy as np, choros
from choros import parallel

rng = np.random.default_rng(0)
x = rng.normal(size=(61, 6)).astype("float32")
y = (x[:, :3] > 0).sum(1)
how = dict(batch_size=10, epochs=2, shuffle=False, verbose=0)

def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4, "softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model

def near(model, plain):
    for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)

def on_gpu(leaf):
    place = leaf.devices() if hasattr(leaf, "devices") else leaf.device
    return "cuda" in str(place).lower() or "gpu" in str(place).lower()

gpus = parallel.get_available_gpus()
assert gpus, "there is a GPU, and the backend does not use it"
plain = make()
plain.fit(x, y, **how)
for data in ((x, y), (choros.prefetch((x, y)), None)):
    model = make()
    choros.Trainer(model, "single").fit(*data, **how)
    near(model, plain)
from choros.backends import make_replica
from choros.types import Batch
batch = Batch(x, y, None, 61, 61)
replica = make_replica(make())
replica.build(batch)
assert all(map(on_gpu, keras.tree.flatten(replica.ready(batch).packed)))
if len(gpus) > 1:
    model = make()
    parallel.make_parallel(model, devices=2).fit(x, y, **how)
    near(model, plain)
    model = make()
    choros.Trainer(model, workers=2).fit(x, y, **how)
    near(model, plain)
print(len(gpus), "GPUs")
"""


@pytest.mark.skipif(not pathlib.Path("/dev/nvidia0").exists(), reason="no GPU on this machine")
def test_on_gpus():
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    if "the backend does not use it" in done.stderr:
        pytest.skip("there is a GPU, but this build of the backend does not use it")
    assert done.returncode == 0, done.stderr
    assert "GPUs" in done.stdout
