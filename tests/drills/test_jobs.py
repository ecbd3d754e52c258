"""Two of the drills that ``drills/jobs.py`` makes many of: sockets that are cut, a disk that is full."""

import pathlib
import sys

import pytest

DRILLS = str(pathlib.Path(__file__).parents[2] / "drills")


@pytest.mark.long
def test_jobs_that_are_cut_off_and_that_cannot_write_end_with_the_same_bits(backend, monkeypatch):
    if backend != "jax":
        pytest.skip("what moves and keeps the bytes is the same on every backend: once is enough")
    monkeypatch.syspath_prepend(DRILLS)
    for name in ("run", "proxy", "jobs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import jobs

    cut = jobs.run("LocalSGD", "cut", 1, (1, 3, 0.0), "")
    assert cut["wrong"] == []
    assert cut["restarts"] == 1
    full = jobs.run("LocalSGD", "full", 0, (0, 9, 0.0), cut["digest"])
    assert full["wrong"] == []
    assert full["restarts"] == 1
