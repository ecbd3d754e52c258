"""Settings from the environment."""

import math

import pytest

from choros.errors import InvalidInputError
from choros.hvd import env_settings


@pytest.mark.parametrize(
    ("values", "stalls"),
    [
        ({}, (60, 1800)),
        ({"CHECK_TIME_SECONDS": "5", "SHUTDOWN_TIME_SECONDS": "9.5"}, (5, 9.5)),
        ({"CHECK_TIME_SECONDS": "0", "SHUTDOWN_TIME_SECONDS": ""}, (math.inf, 1800)),
        ({"CHECK_TIME_SECONDS": "5", "SHUTDOWN_TIME_SECONDS": "9", "CHECK_DISABLE": "1"}, (math.inf, 1800)),
        ({"CHECK_TIME_SECONDS": "5", "CHECK_DISABLE": "0"}, (5, 1800)),
    ],
)
def test_stalls(values, stalls, monkeypatch):
    for name in ("CHECK_TIME_SECONDS", "SHUTDOWN_TIME_SECONDS", "CHECK_DISABLE"):
        monkeypatch.delenv(f"HOROVOD_STALL_{name}", raising=False)
    for name, value in values.items():
        monkeypatch.setenv(f"HOROVOD_STALL_{name}", value)
    assert env_settings.stalls() == stalls


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_what_is_no_time(value, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", value)
    with pytest.raises(InvalidInputError, match="HOROVOD_STALL_CHECK_TIME_SECONDS='.*' is not a number of seconds"):
        env_settings.stalls()


def test_timeline(monkeypatch):
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    assert env_settings.timeline() is None
    monkeypatch.setenv("HOROVOD_TIMELINE", "dynamic")
    assert env_settings.timeline() is None
    monkeypatch.setenv("HOROVOD_TIMELINE", "t.json")
    assert env_settings.timeline() == ("t.json", True)
