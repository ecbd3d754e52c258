"""Fits whose local steps run as compiled windows end as fits that make single steps."""

import contextlib

import keras
import numpy as np
import pytest

import choros
from choros.backends.base import BaseReplica
from choros.training.worker import local_steps

if keras.backend.backend() == "torch":
    pytest.skip("PyTorch compiles no window", allow_module_level=True)


class Each(keras.callbacks.Callback):
    """A callback with a batch hook: nothing may wait then."""

    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize("algorithm", ["localsgd", choros.DiLoCo(window=20), "averaging", "easgd"])
def test_a_fit_ends_as_one_with_a_batch_hook(algorithm, make_model, data, pools, same):
    x, y = data(117)  # a last batch with fewer rows
    models = [make_model(dropout=0.3) for _ in range(2)]
    fits = [
        choros.Trainer(model, algorithm, pool=pools(2)).fit(x, y, batch_size=12, epochs=3, seed=4, verbose=0, **more)
        for model, more in zip(models, ({}, {"callbacks": [Each()]}), strict=True)
    ]
    for name, values in fits[1].history.items():
        np.testing.assert_allclose(fits[0].history[name], values, rtol=1e-5)
    same(*models, 0 if keras.backend.backend() == "jax" else 1e-6)


def test_one_worker_trains_as_keras(make_model, data, same):
    x, y = data(200)
    plain, model = make_model(), make_model()
    expected = plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    history = choros.Trainer(model, "localsgd", workers=1).fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert history.run.workers[0].steps == 50
    for name, values in expected.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
    same(model, plain)


class Recorded:
    """A run of which only the parts exist that ``LocalSteps`` uses."""

    def __init__(self, replica, window):
        self.replica, self.profiler = replica, None
        self.algorithm = choros.LocalSGD(window=window)
        self.spans = []

    def span(self, kind, name, nbytes=-1):
        self.spans.append(name)
        return contextlib.nullcontext()


@pytest.mark.parametrize(("slow", "expected"), [(10.0, ["step", "step", "4 steps", "3 steps"]), (0.0, ["step"] * 9)])
def test_slow_steps_run_alone_so_that_heartbeats_follow_each(slow, expected, make_model, data, monkeypatch):
    from choros.backends import make_replica
    from choros.types import Batch

    monkeypatch.setattr(local_steps, "SLOW", slow)
    x, y = data(72)
    replica: BaseReplica = make_replica(make_model())
    replica.build(Batch(x[:8], y[:8], None, 8, 8))
    run = Recorded(replica, 4)
    steps = local_steps.LocalSteps(run, False, 0.0)
    for first in range(0, 72, 8):
        steps.add(Batch(x[first : first + 8], y[first : first + 8], None, 8, 8))
    steps.run_waiting()
    assert run.spans == expected
    assert replica.iterations == 9
