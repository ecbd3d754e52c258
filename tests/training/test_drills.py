"""A few of the drills that ``make drills`` makes many of."""

import pathlib
import runpy

import pytest

DRILLS = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "drills" / "run.py"), run_name="_drills")


@pytest.mark.parametrize("number", [12], ids=["one of AEASGD is killed"])
def test_a_drill_comes_right(number, pools, tmp_path):
    pool = pools(2)
    pool.start()
    facts = DRILLS["drill"](number, 1, pool, {}, str(tmp_path))
    assert facts["wrong"] == []
    assert facts["restarts"] == 1
