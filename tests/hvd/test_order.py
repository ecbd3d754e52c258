"""``train_step`` that goes on with updated weights, with ``hvd.DistributedOptimizer``: made again with the sum."""

import inspect

import numpy as np
from tests.backend.test_order import Teacher, after_step

SCRIPT = (
    inspect.getsource(after_step)
    + inspect.getsource(Teacher)
    + """
def made(optimizer):
    keras.utils.set_random_seed(1)
    model = Teacher()
    model(x[:1])
    model.compile(optimizer, "mse")
    return model

random = np.random.default_rng(0)
x, y = random.normal(size=(16, 3)).astype("float32"), random.normal(size=(16, 1)).astype("float32")
plain = made(keras.optimizers.Adam(0.05))
plain.fit(x, y, batch_size=8, shuffle=False, epochs=2, verbose=0)
said["plain"] = [numbers(v) for v in plain.variables]

mine = np.concatenate([np.arange(8 * step + 4 * rank, 8 * step + 4 * rank + 4) for step in range(2)])
model = made(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
model.fit(x[mine], y[mine], batch_size=4, shuffle=False, epochs=2, verbose=0)
said["reduced"] = [numbers(v) for v in model.variables]

several = made(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), backward_passes_per_step=2))
try:
    several.fit(x[mine], y[mine], batch_size=4, verbose=0)
except Exception as error:
    said["several"] = f"{type(error).__name__}: {error}"
"""
)


def test_it_is_exact_or_refused_by_name(run):
    for result in run(2, SCRIPT):
        for value, plain in zip(result["reduced"], result["plain"], strict=True):
            np.testing.assert_allclose(value, plain, rtol=1e-5, atol=1e-6)
        assert result["several"].startswith("InvalidInputError: Teacher.train_step reads updated weights")
        assert "backward_passes_per_step=2" in result["several"]
