"""The processor time of other programs, from which the demo tells a busy machine."""

import time

import pytest

from choros.cluster.hardware import usable_cores
from choros.tools.demo import load


def test_the_cores_of_others_are_their_seconds_in_each_second(monkeypatch):
    seconds, clock = iter([10.0, 13.0, 9.0, 1e9]), iter([100.0, 102.0, 102.0, 102.0])
    monkeypatch.setattr(load, "_seconds_of_others", lambda: next(seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = load.LoadMeter()
    assert meter.cores() == pytest.approx(min(1.5, len(usable_cores())))
    assert meter.cores() == 0.0  # clock ticks are rounded
    assert meter.cores() == len(usable_cores())
