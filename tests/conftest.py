"""What the tests share: one pool of workers a size, and a watch for whatever is left behind."""

import contextlib
import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest


@pytest.fixture(scope="session")
def backend():
    """The backend that this process tests."""
    return os.environ["KERAS_BACKEND"]


@pytest.fixture(scope="session")
def pools():
    """Worker pools by size, started when first asked for and kept for the whole session."""
    import choros

    kept = {}

    def pool(size):
        if size not in kept:
            kept[size] = choros.WorkerPool(size)
        return kept[size]

    yield pool
    for one in kept.values():
        one.close()


@pytest.fixture
def children():
    """What returns the process ids of this process's children, whichever thread started them."""

    def look():
        found = set()
        for task in pathlib.Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                found |= set((task / "children").read_text().split())
        return found

    return look


@pytest.fixture(autouse=True)
def _nothing_in_shared_memory():
    """Law 6: /dev/shm is after a test what it was before."""
    room = pathlib.Path("/dev/shm")
    before = sorted(room.iterdir()) if room.is_dir() else []
    yield
    after = sorted(room.iterdir()) if room.is_dir() else []
    left = [path for path in after if path not in before and "choros" in path.name]
    assert not left, f"left in shared memory: {left}"
