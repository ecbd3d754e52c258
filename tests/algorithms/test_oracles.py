"""The acceptance oracles: what the papers' mathematics demands, computed another way."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from choros.algorithms import (
    ADAG,
    AEASGD,
    AGN,
    DOWNPOUR,
    EAMSGD,
    EASGD,
    Averaging,
    DiLoCo,
    DynSGD,
    ExchangeInfo,
    LocalSGD,
)
from choros.errors import UnstableAlgorithmError


def radius(step, n):
    """The spectral radius of a linear map of n vectors, found by applying it to the identity."""
    return np.abs(np.linalg.eigvals(np.stack(step(list(np.eye(n)))))).max()


def synchronous_radius(alpha, p, z, paper=False):
    """One synchronous round on a quadratic: local step and exchange, or (the paper's order) both at once."""
    algorithm = EASGD(alpha=alpha)

    def step(state):
        *x, c = state
        moved = x if paper else [(1 - z) * xk for xk in x]
        center, _ = algorithm.merge(c, sum(moved) / p, ExchangeInfo(p), ())
        return [algorithm.adopt(m, c) - (z * xk if paper else 0) for m, xk in zip(moved, x, strict=True)] + [center]

    return radius(step, p + 1)


def in_turn(alpha, p, z, paper=False):
    """One round of p workers, each meeting the center alone."""
    algorithm = AEASGD(alpha=alpha)

    def step(state):
        *x, c = state
        for k in range(p):
            local = x[k] if paper else (1 - z) * x[k]
            c, before = algorithm.merge(c, local, ExchangeInfo(1, p - 1, k), ())[0], c
            x[k] = algorithm.adopt(local, before) - (z * x[k] if paper else 0)
        return [*x, c]

    return radius(step, p + 1)


def threshold(test):
    """The alpha from which on ``test(alpha)`` has a spectral radius above 1, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if test(middle) <= 1 + 1e-10 else (low, middle)
    return low


# -- 1: stability on quadratics
@pytest.mark.parametrize(("p", "z", "alpha"), [(4, 0.1, 0.404), (4, 1.0, 0.5), (20, 0.1, 0.0955), (2, 0.5, 0.75)])
def test_easgd_is_stable_up_to_its_bound_and_no_further(p, z, alpha):
    limit = EASGD().limit(p, z)
    assert limit == pytest.approx(alpha, rel=2e-3)
    assert threshold(lambda a: synchronous_radius(a, p, z)) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize(("z", "alpha"), [(0.1, 0.3958), (1.0, 1 / 3)])
def test_easgd_in_the_papers_order_has_the_papers_threshold(z, alpha):
    assert threshold(lambda a: synchronous_radius(a, 4, z, paper=True)) == pytest.approx(alpha, abs=2e-4)


@pytest.mark.parametrize("z", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("p", [1, 2, 4, 16])
def test_aeasgd_in_turn_is_stable_up_to_its_bound(p, z):
    limit = AEASGD().limit(p, z)
    assert threshold(lambda a: in_turn(a, p, z)) >= limit * (1 - 1e-6)
    if p == 1:
        assert threshold(lambda a: in_turn(a, 1, z)) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize(("eta", "alpha"), [(0.1, 0.9746), (0.5, 0.8578), (1.0, 0.6672)])
def test_aeasgd_in_the_papers_order_has_the_papers_threshold(eta, alpha):
    result = threshold(lambda a: in_turn(a, 16, eta, paper=True))
    assert result == pytest.approx(alpha, abs=2e-4)
    assert result >= (4 - 2 * eta) / (4 - eta)


def test_unstable_alphas_are_refused_with_the_bound():
    with pytest.raises(UnstableAlgorithmError, match=r"alpha=0.9.*4 workers.*below 0\.4043"):
        EASGD(alpha=0.9).bound(4, 0.1)
    with pytest.raises(UnstableAlgorithmError, match=r"AEASGD.*below 1\.027"):
        AEASGD(alpha=1.1).bound(4, 0.1)
    with pytest.raises(UnstableAlgorithmError, match="EAMSGD"):
        EAMSGD(alpha=3.0).bound(2, 1e-3)
    assert EASGD(alpha=0.4).bound(4, 0.1).alpha == 0.4


@pytest.mark.parametrize("kind", [EASGD, AEASGD, EAMSGD])
def test_the_default_alpha_is_never_refused(kind):
    for p in (1, 2, 3, 4, 8, 28, 64, 1000):
        for rate in (0.0, 1e-5, 1e-3, 0.01, 0.1, 1.0, 2.0, 30.0):
            assert kind().bound(p, rate).alpha == pytest.approx(0.9 / p)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_dilocos_bound_is_the_threshold_of_its_outer_step(momentum):
    """On a quadratic whose inner steps end at its minimum, the hardest that contracts without overshooting."""

    def grows(rate):
        algorithm = DiLoCo(outer_rate=rate, outer_momentum=momentum)

        def step(state):
            c, u = state
            c, (u,) = algorithm.merge(c, 0 - c, ExchangeInfo(3), (u,))
            return [c, u]

        return radius(step, 2)

    limit = (2 + 2 * momentum) / (1 + 2 * momentum)
    assert threshold(grows) == pytest.approx(limit, rel=1e-6)
    DiLoCo(outer_rate=limit * 0.999, outer_momentum=momentum).bound(3, 1e-3)
    with pytest.raises(UnstableAlgorithmError, match=f"outer_rate below {limit:.4g}"):
        DiLoCo(outer_rate=limit * 1.001, outer_momentum=momentum).bound(3, 1e-3)


# -- 2: one worker is the plain optimizer (its float32 form is law 3, in test_laws.py)
@pytest.mark.parametrize("algorithm", [DOWNPOUR(1), AGN(1), ADAG(1), DynSGD(1)], ids=repr)
def test_one_worker_is_the_plain_optimizer_bit_for_bit_on_whole_numbers(algorithm, simulation):
    """If no subtraction rounds, even the last bit is equal."""
    run = simulation(algorithm, np.array([4096.0, -512.0]), 1)
    plain = run.start
    for _ in range(8):
        plain = plain - 0.5 * plain
        run.local[0] = run.local[0] - 0.5 * run.local[0]
        run.exchange(0)
        np.testing.assert_array_equal(run.center, plain)


# -- 3: accumulated gradient normalisation
@pytest.mark.parametrize("algorithm", [AGN(window=5), ADAG(window=5, divide=True)], ids=repr)
def test_identical_steps_give_the_mean_step(algorithm, simulation):
    run = simulation(algorithm, np.zeros(3), 2)
    run.local[0] = run.local[0] + 5 * np.array([1.0, 2.0, 3.0])
    run.exchange(0, window=5)
    np.testing.assert_allclose(run.center, [1.0, 2.0, 3.0])


def test_adag_is_damped_by_the_distance_that_the_center_moved(simulation):
    """c + m / (||c - c_seen||^2 / eta + 1), with c_seen that of the sender."""
    run = simulation(ADAG(eta=2.0), np.zeros(2), 3)
    run.local[0] = np.array([3.0, 4.0])
    run.exchange(0)
    np.testing.assert_allclose(run.center, [3.0, 4.0])  # nobody moved it: undamped
    run.local[1] = np.array([1.0, 0.0])
    run.exchange(1)
    np.testing.assert_allclose(run.center, [3.0 + 1 / (25 / 2 + 1), 4.0])
    run.local[1] = run.center + np.array([0.0, 1.0])
    run.exchange(1)  # it saw the center last: undamped again
    np.testing.assert_allclose(run.center, [3.0 + 1 / 13.5, 5.0])


def test_adags_own_eta_is_dynsgds_share_where_contributions_are_equal_and_at_right_angles(simulation):
    run = simulation(ADAG(), np.zeros(4), 4)
    for k in range(4):
        run.local[k] = np.eye(4)[k]
        before = run.center
        run.exchange(k)
        share = (run.center - before)[k]
        moved = (before**2).sum()
        assert share == pytest.approx(1 / (moved + 1))


# -- 4: staleness
@pytest.mark.parametrize("p", [2, 3, 7])
def test_dynsgd_at_the_usual_staleness_counts_one_pth(p, simulation):
    run = simulation(DynSGD(), np.zeros(1), p)
    for turn in range(3 * p):
        before = run.center
        run.local[turn % p] = run.local[turn % p] + 1.0
        run.exchange(turn % p)
        if turn >= p:
            assert run.staleness[-1] == p - 1
            np.testing.assert_allclose(run.center - before, 1 / p)


# -- 5: conservation
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_an_elastic_exchange_conserves_the_sum(alpha, simulation, rng):
    run = simulation(AEASGD(alpha=alpha), rng.normal(size=5), 3)
    for k in (0, 2, 1, 0):
        run.local[k] = run.local[k] + rng.normal(size=5)
        total = run.local[k] + run.center
        run.exchange(k)
        np.testing.assert_allclose(run.local[k] + run.center, total, rtol=1e-12)


def test_together_the_elastic_sum_of_all_is_conserved(simulation, rng):
    run = simulation(EASGD(alpha=0.2), rng.normal(size=5), 3)
    run.local = [x + rng.normal(size=5) for x in run.local]
    total = sum(run.local) + run.center
    run.exchange_all()
    np.testing.assert_allclose(sum(run.local) + run.center, total, rtol=1e-12)


# -- 6: momentum
def momentum_run(algorithm, simulation, steps=12, rate=0.1):
    """Workers of algorithm 2: v <- mu v + u(x + mu v), x <- x + v; x is what is exchanged."""
    run, mu = simulation(algorithm, np.array([1.0, -2.0]), 2), algorithm.momentum
    velocity = [np.zeros(2), np.zeros(2)]
    target = [np.array([0.5, 0.0]), np.array([-0.5, 1.0])]
    for step in range(steps):
        for k in (0, 1):
            ahead = run.local[k] + mu * velocity[k]
            velocity[k] = mu * velocity[k] - rate * (ahead - target[k])
            run.local[k] = run.local[k] + velocity[k]
            if step % 4 == 3:
                run.exchange(k, 4)
    return run, velocity


def test_eamsgd_without_momentum_is_aeasgd(simulation):
    with_zero, _ = momentum_run(EAMSGD(alpha=0.3, momentum=0.0), simulation)
    without, _ = momentum_run(AEASGD(alpha=0.3), simulation)
    np.testing.assert_array_equal(with_zero.center, without.center)
    np.testing.assert_array_equal(with_zero.local, without.local)
    other, _ = momentum_run(EAMSGD(alpha=0.3, momentum=0.5), simulation)
    assert not np.allclose(other.center, without.center)


def test_eamsgd_without_force_is_nesterovs_gradient(simulation):
    """torch keeps the look-ahead point y = x + mu v in the variable."""
    import torch

    run, velocity = momentum_run(EAMSGD(alpha=0.0, momentum=0.9), simulation)
    y = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([y], 0.1, momentum=0.9, nesterov=True)
    for _ in range(12):
        y.grad = y.detach() - torch.tensor([0.5, 0.0], dtype=torch.float64)
        optimizer.step()
    np.testing.assert_allclose(run.local[0] + 0.9 * velocity[0], y.detach().numpy(), rtol=1e-10)
    np.testing.assert_array_equal(run.center, [1.0, -2.0])


# -- 7: averaging
@pytest.mark.parametrize("algorithm", [Averaging(), LocalSGD(window=1)], ids=repr)
@pytest.mark.parametrize("rows", [[4, 4, 4], [7, 4, 1]])
def test_averaging_after_one_sgd_step_is_the_large_batch(algorithm, rows, simulation, rng):
    """With equal shards the plain mean; with unequal ones the mean weighted by rows."""
    inputs, outputs = rng.normal(size=(12, 3)), rng.normal(size=12)
    shards = np.split(np.arange(12), np.cumsum(rows)[:-1])

    def step(x, part):
        return x - 0.1 * inputs[part].T @ (inputs[part] @ x - outputs[part]) / len(part)

    run = simulation(algorithm, rng.normal(size=3), 3)
    large = run.start
    for _ in range(5):
        large = step(large, np.arange(12))
        run.local = [step(x, part) for x, part in zip(run.local, shards, strict=True)]
        run.exchange_all(rows=rows)
    np.testing.assert_allclose(run.center, large, rtol=1e-12)


def test_averaging_forgets_the_last_mean(simulation):
    """dist-keras' never cleared buffer gave 2, 3, 3.5 for workers that are always at 1 and 3."""
    run = simulation(Averaging(), np.zeros(1), 2)
    for _ in range(3):
        run.local = [np.array([1.0]), np.array([3.0])]
        run.exchange_all(rows=[5, 5])
        np.testing.assert_array_equal(run.center, [2.0])


# -- 8: nothing is lost
@pytest.mark.parametrize("algorithm", [DOWNPOUR(), DOWNPOUR(window=3)], ids=repr)
def test_every_step_is_in_the_center(algorithm, simulation):
    """Workers of 10, 7 and 4 steps, each of length 1: the center ends 21 from its start."""
    run = simulation(algorithm, np.zeros(1), 3)
    pending = [0, 0, 0]
    for step in range(10):
        for k, steps in enumerate((10, 7, 4)):
            if step < steps:
                run.local[k] = run.local[k] + 1.0
                pending[k] += 1
                if pending[k] == algorithm.window or step == steps - 1:
                    run.exchange(k, pending[k])
                    pending[k] = 0
    np.testing.assert_array_equal(run.center, [21.0])


def test_downpours_adagrad_is_deans(simulation):
    """eta_i = gamma / sqrt(sum_j dw_ij^2), for each parameter."""
    run = simulation(DOWNPOUR(adagrad=True, gamma=0.5), np.zeros(3), 2)
    pushes = np.array([[1.0, -2.0, 0.0], [3.0, 0.5, 0.0], [-1.0, 1.0, 4.0]])
    center, squares = np.zeros(3), np.zeros(3)
    for turn, push in enumerate(pushes):
        k = turn % 2
        run.local[k] = run.seen[k] + push
        run.exchange(k)
        squares += push**2
        center += np.divide(0.5 * push, np.sqrt(squares), out=np.zeros(3), where=squares > 0)
        np.testing.assert_allclose(run.center, center, rtol=1e-12)


# -- 9: the sum rule of synchronous EASGD
def test_easgd_takes_the_papers_sum(simulation, rng):
    run = simulation(EASGD(alpha=0.1), rng.normal(size=4), 3)
    run.local = [x + rng.normal(size=4) for x in run.local]
    x, c = list(run.local), run.center
    run.exchange_all()
    np.testing.assert_allclose(run.center, c + 0.1 * sum(xk - c for xk in x))
    for ours, xk in zip(run.local, x, strict=True):
        np.testing.assert_allclose(ours, xk - 0.1 * (xk - c))


def test_the_notebooks_settings_are_warned_of_where_strictness_is_off():
    """alpha = .2 with 28 workers: spectral radius 4.8 under the sum rule."""
    assert synchronous_radius(0.2, 28, 0.01) == pytest.approx(4.8, abs=0.1)
    with pytest.warns(RuntimeWarning, match="unstable with 28 workers"):
        bound = EASGD(alpha=0.2).bound(28, 0.01, strict=False)
    assert bound.alpha == 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EASGD(alpha=0.2).bound(4, 0.01, strict=False)


# -- 10: DiLoCo
def test_diloco_is_torchs_nesterov_sgd(simulation, rng):
    import torch

    run = simulation(DiLoCo(), rng.normal(size=5), 3)
    c = torch.nn.Parameter(torch.tensor(run.start))
    optimizer = torch.optim.SGD([c], 0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        run.local = [x + rng.normal(size=5) for x in run.local]
        c.grad = -(torch.tensor(sum(run.local) / 3) - c.detach())
        optimizer.step()
        run.exchange_all(window=16)
        np.testing.assert_allclose(run.center, c.detach().numpy(), rtol=1e-10)
