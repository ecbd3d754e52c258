"""Four of the drills that ``drills/anytime.py`` makes many of: workers are killed as they start, train and end."""

import importlib
import pathlib
import sys

import pytest

DRILLS = str(pathlib.Path(__file__).parents[2] / "drills")
SEED = 589  # draws both algorithms, each with and without restarts, and two kills at the start


@pytest.fixture(scope="module")
def anytime():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DRILLS)
        patch.setenv("CHOROS_IDLE_SECONDS", "0")  # each drill starts its own workers, and leaves none
        for name in ("run", "anytime"):
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("anytime")


@pytest.fixture(scope="module")
def wholes():
    """Runs without a failure, made when a drill first needs one."""
    return {}


@pytest.mark.long
@pytest.mark.parametrize("number", range(4))
def test_a_worker_killed_at_any_moment_is_told_or_replaced(number, anytime, wholes):
    facts = anytime.drill(number, SEED, wholes, ("LocalSGD", "DOWNPOUR"))
    assert facts["wrong"] == []
