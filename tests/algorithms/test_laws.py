"""The laws that every algorithm must obey, applied to all from one list."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from choros.algorithms import (
    ADAG,
    AEASGD,
    AGN,
    ALL,
    DOWNPOUR,
    EAMSGD,
    EASGD,
    Algorithm,
    AllReduce,
    DiLoCo,
    DynSGD,
    ExchangeInfo,
    LocalSGD,
    from_config,
    to_config,
)

WORKERS = 3
VARIANTS = [DOWNPOUR(adagrad=True), ADAG(eta=0.5), ADAG(divide=True), DiLoCo(outer_rate=1.0, outer_momentum=0.0)]
EVERY = [kind().bound(WORKERS, 0.01) for kind in ALL] + VARIANTS
every = pytest.mark.parametrize("algorithm", EVERY, ids=repr)


def exchange(algorithm, center, local, seen, info, memory, window=2):
    message = algorithm.propose(local, seen, window)
    new, memory = algorithm.merge(center, message, info, memory)
    return new, algorithm.adopt(local, center if algorithm.shows == "before" else new), memory


@every
def test_travels_as_pickle_as_json_and_as_a_key(algorithm):
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert {algorithm: 1}[pickle.loads(pickle.dumps(algorithm))] == 1
    assert from_config(json.loads(json.dumps(to_config(algorithm)))) == algorithm


@every
def test_is_frozen(algorithm):
    with pytest.raises(AttributeError):
        algorithm.window = 3


@every
def test_a_settled_center_stays(algorithm, rng):
    """Workers that learnt nothing leave a center as it is, alone and together, and stay there."""
    x = rng.normal(size=5)
    for info in (ExchangeInfo(1, 2, 1), ExchangeInfo(WORKERS)):
        center, local, _ = exchange(algorithm, x, x, x, info, algorithm.start(x, WORKERS))
        np.testing.assert_array_equal(center, x)
        np.testing.assert_array_equal(local, x)


@every
def test_is_pure(algorithm, rng):
    """Nothing that was handed in is changed, and the same again gives the same again."""
    center, local, seen = rng.normal(size=(3, 5))
    memory = tuple(v + 0.5 for v in algorithm.start(center, WORKERS))
    for array in (center, local, seen, *memory):
        array.flags.writeable = False
    first = exchange(algorithm, center, local, seen, ExchangeInfo(1, 1, 2), memory)
    second = exchange(algorithm, center, local, seen, ExchangeInfo(1, 1, 2), memory)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert len(first[2]) == len(memory)
    assert all(vector.shape == center.shape for vector in first[2])


@every
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_keeps_the_dtype(algorithm, dtype):
    x = np.linspace(0, 1, 5).astype(dtype)
    memory = algorithm.start(x, WORKERS)
    center, local, memory = exchange(algorithm, x, x + np.ones(5, dtype), x, ExchangeInfo(2, 1, 1), memory)
    assert {v.dtype.name for v in (center, local, *memory)} == {dtype}


@every
def test_blocks_give_what_the_whole_gives(algorithm, rng):
    """Two halves are the whole if an algorithm is elementwise, and differ from it if it is not."""
    center, local, seen = rng.normal(size=(3, 6))
    memory = tuple(v + rng.normal(size=6) ** 2 for v in algorithm.start(center, WORKERS))
    complete = exchange(algorithm, center, local, seen, ExchangeInfo(1, 2, 1), memory)
    parts = [
        exchange(algorithm, center[s], local[s], seen[s], ExchangeInfo(1, 2, 1), tuple(v[s] for v in memory))
        for s in (slice(0, 4), slice(4, 6))
    ]
    same = all(np.array_equal(np.concatenate([p[i] for p in parts]), complete[i]) for i in (0, 1))
    assert same == algorithm.elementwise


@every
def test_uses_seen_is_the_truth(algorithm, rng):
    local, seen, other = rng.normal(size=(3, 5))
    changes = not np.array_equal(algorithm.propose(local, seen, 2), algorithm.propose(local, other, 2))
    assert algorithm.uses_seen == changes


@every
@pytest.mark.parametrize("library", ["jax", "torch"])
def test_same_on_every_array_library(algorithm, library, simulation):
    """Several meetings, alone and together, on numpy, JAX and PyTorch vectors of float32."""
    if library == "jax":
        import jax.numpy as jnp

        make = jnp.asarray
    else:
        import torch

        make = torch.tensor
    results = []
    for convert in (np.asarray, make):
        run = simulation(algorithm, convert(np.linspace(-1, 1, 5, dtype="float32")), WORKERS)
        drift = [convert(np.linspace(0, k + 1, 5, dtype="float32")) for k in range(WORKERS)]
        for k in (0, 1, 0, 2, 1):
            run.local[k] = run.local[k] + drift[k]
            run.exchange(k, window=2)
        run.exchange_all(window=2, rows=[1, 2, 3])
        results.append([np.asarray(run.center), *(np.asarray(x) for x in run.local)])
        assert type(run.center) is type(convert(np.zeros(1, "float32")))
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_allclose(expected, ours, rtol=2e-5, atol=1e-6)


ADDERS = [
    DOWNPOUR(),
    AGN(),
    ADAG(),
    ADAG(divide=True),
    DynSGD(),
    AEASGD(alpha=0.3),
    EAMSGD(alpha=0.3),
    EASGD(alpha=0.3),
]


@pytest.mark.parametrize("algorithm", ADDERS, ids=repr)
def test_law_2_what_was_contributed_is_what_the_center_gained(algorithm, simulation, rng):
    """The sum of the weighted contributions is the center less its start, a last partial window included."""
    run = simulation(algorithm, rng.normal(size=4), WORKERS)
    gained = np.zeros(4)
    for k, window in [(0, 8), (1, 8), (0, 8), (2, 8), (1, 8), (0, 3), (1, 5), (2, 1)]:
        run.local[k] = run.local[k] + rng.normal(size=4)
        message = algorithm.propose(run.local[k], run.seen[k], window)
        staleness, before, clock = run.clock - run.last[k], run.center, run.clock
        if isinstance(algorithm, EASGD):
            share = algorithm.force * (message - before)
        elif isinstance(algorithm, DynSGD):
            share = message / (staleness + 1)
        elif isinstance(algorithm, ADAG):
            share = message / (((before - run.memory[k]) ** 2).sum() / (message**2).sum() + 1)
        else:
            share = message
        run.exchange(k, window)
        gained = gained + share
        assert run.clock == clock + 1
    np.testing.assert_allclose(run.center - run.start, gained, rtol=1e-12)


PLAIN = [AllReduce(), LocalSGD(1), DOWNPOUR(1), AGN(1), ADAG(1), ADAG(1, divide=True), DynSGD(1)]
PLAIN += [EASGD(1, 0.0), AEASGD(1, 0.0), DiLoCo(1, outer_rate=1.0, outer_momentum=0.0)]


@pytest.mark.parametrize("algorithm", PLAIN, ids=repr)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_law_3_one_worker_with_a_window_of_one_is_the_plain_optimizer(algorithm, mode, simulation, rng):
    """To an ulp a step, in float32. With alpha = 0 a worker of the elastic family trains alone."""
    run = simulation(algorithm, rng.normal(size=6).astype("float32"), 1)
    target = rng.normal(size=6).astype("float32")
    plain = run.start
    for step in range(20):
        plain = plain - np.float32(0.1) * (plain - target)
        if algorithm.level == "gradients":
            run.local[0] = plain_gradient = np.float32(0.1) * (plain - target)
            run.exchange_all()
            np.testing.assert_array_equal(run.local[0], plain_gradient)
            continue
        run.local[0] = run.local[0] - np.float32(0.1) * (run.local[0] - target)
        run.exchange(0) if mode == "async" else run.exchange_all()
        np.testing.assert_allclose(run.local[0], plain, rtol=(step + 1) * 1.2e-7, atol=(step + 1) * 1.2e-7)


def test_the_base_is_usable_by_itself():
    assert Algorithm(window=3).propose(1.0, 0.0, 3) == 1.0
    assert Algorithm().bound(4, 0.1) == Algorithm()
    assert Algorithm().momentum == 0.0
    assert EAMSGD().momentum == 0.5
