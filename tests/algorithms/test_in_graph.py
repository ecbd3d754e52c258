"""The same objects traced inside one jitted program, where the group is ``lax.pmean``."""

from __future__ import annotations

import numpy as np
import pytest

from choros.algorithms import AGN, DOWNPOUR, EASGD, Averaging, DiLoCo, DynSGD, ExchangeInfo, LocalSGD

RULES = [Averaging(), LocalSGD(), DOWNPOUR(), AGN(), DynSGD(), EASGD(alpha=0.1), DiLoCo()]


@pytest.mark.parametrize("algorithm", RULES, ids=repr)
def test_in_graph_equals_by_hand(algorithm, simulation, rng):
    import jax
    import jax.numpy as jnp

    workers, window = 3, 4
    curvature, target = rng.uniform(0.5, 2, (2, workers, 5)).astype("float32")
    start = np.linspace(-1, 1, 5, dtype="float32")

    def local_steps(x, a, b):
        for _ in range(window):
            x = x - 0.05 * a * (x - b)
        return x

    def body(a, b):
        center = seen = x = jnp.asarray(start)
        memory = algorithm.start(center, workers)
        for _ in range(3):
            x = local_steps(x, a, b)
            message = jax.lax.pmean(algorithm.propose(x, seen, window), "workers")
            before = center
            center, memory = algorithm.merge(before, message, ExchangeInfo(workers), memory)
            seen = before if algorithm.shows == "before" else center
            x = algorithm.adopt(x, seen)
        return x, center

    x, center = jax.jit(jax.vmap(body, axis_name="workers", out_axes=(0, 0)))(curvature, target)
    run = simulation(algorithm, start, workers)
    for _ in range(3):
        run.local = [local_steps(x, a, b) for x, a, b in zip(run.local, curvature, target, strict=True)]
        run.exchange_all(window)
    np.testing.assert_allclose(x, np.stack(run.local), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(center[0], run.center, rtol=2e-5, atol=2e-6)
