"""Fixtures of the transport tests: no descriptor and no name in shared memory is left behind."""

import os

import pytest


@pytest.fixture(autouse=True)
def leaves_nothing():
    """No descriptor of this process and no name in /dev/shm is left by a test."""
    shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    yield
    if before:
        after = set(os.listdir("/proc/self/fd"))
        assert not [fd for fd in after - before if _is_memory(fd)], "a segment's descriptor was left open"
    if os.path.isdir("/dev/shm"):
        assert not [name for name in set(os.listdir("/dev/shm")) - shm if "choros" in name]


def _is_memory(fd):
    try:
        return "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
