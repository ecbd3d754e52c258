from __future__ import annotations

import pytest

from choros.training.worker.exchange import Schedule


@pytest.mark.parametrize(
    ("window", "steps", "windows"),
    [(1, 4, [1, 1, 1, 1]), (3, 7, [3, 3, 1]), (8, 3, [3]), (4, 8, [4, 4]), (5, 0, [])],
)
def test_meets_after_each_window_and_once_with_the_rest(window, steps, windows):
    schedule = Schedule(window)
    due_windows = [schedule.reset() for _ in range(steps) if schedule.due()]
    due_windows += [schedule.reset()] if schedule.pending else []
    assert due_windows == windows
    assert sum(due_windows) == steps
    assert schedule.pending == 0


def test_the_first_meeting_is_after_a_whole_window():
    """dist-keras met after window - 1 batches."""
    schedule = Schedule(5)
    assert [schedule.due() for _ in range(5)] == [False] * 4 + [True]


def test_a_window_of_none_meets_at_epoch_ends_only():
    schedule = Schedule(0)
    assert not any(schedule.due() for _ in range(100))
    assert schedule.reset() == 100


def test_several_steps_at_once():
    schedule = Schedule(8)
    assert not schedule.due(5)
    assert schedule.due(3)
    assert schedule.reset() == 8
    assert schedule.due(11)


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="give 1 or more"):
        Schedule(-1)
