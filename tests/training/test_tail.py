"""The values behind the gradients: what one rank writes, all read, to the bit."""

import numpy as np
import pytest

from choros.training.spec import TrainerControl
from choros.training.worker.gradient_tail import GradientTail


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_metrics_are_summed_as_float64_in_the_order_of_the_ranks(dtype):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 40)) * 10.0 ** rng.integers(-12, 12, (3, 40))
    states[0, :3], states[1, 1] = [np.inf, np.nan, 2.0**53 - 1], 1.0
    tails = [GradientTail(rank, 3, 40) for rank in range(3)]
    summed = np.zeros(tails[0].size, dtype)
    for tail, state in zip(tails, states, strict=True):
        slot = np.full(tail.size, 7, dtype)
        tail.write(slot, None, state)
        summed += slot
    np.testing.assert_array_equal(tails[0].metrics(summed), states[0] + states[1] + states[2])
    assert tails[1].control(summed) == TrainerControl()


@pytest.mark.parametrize("rate_alone", [True, False])
def test_only_a_rate_is_told_by_the_note(rate_alone):
    def control_from(orders):
        tail = GradientTail(0, 1, 1)
        tail.rate_alone = rate_alone
        slot = np.empty(tail.size, np.float32)
        tail.write(slot, orders, np.ones(1))
        return tail.control(slot)

    assert control_from(TrainerControl()) == control_from(None) == TrainerControl()
    assert control_from(TrainerControl(learning_rate=0.1)) == (
        TrainerControl(learning_rate=0.1) if rate_alone else None
    )
    assert control_from(TrainerControl(learning_rate=0.1, weights=True)) is None
    assert control_from(TrainerControl(stop=True)) is None
