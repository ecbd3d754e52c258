"""``benchmarks/distrib.py``, whose figures docs/from-keras-experiments.md has: it runs, and rows cross as it says."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "distrib.py"


def run(*options):
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=dict(os.environ))


def test_rows_that_each_rank_reads_do_not_cross_the_network():
    """In both modes the chief ships half of the rows, those of the other rank, and no accuracy depends on that."""
    rows, epochs = 512, 2
    done = run("--rates", "1gbit", "--rows", str(rows), "--epochs", str(epochs))
    assert done.returncode == 0, done.stderr[-4000:]
    (result,) = json.loads(done.stdout)["rates"]
    cases = {(case["mode"], case["data"]): case for case in result["results"]}
    assert len(cases) == 4
    for mode in ("sync", "async"):
        saved = cases[mode, "ship"]["megabytes_an_epoch"] - cases[mode, "own"]["megabytes_an_epoch"]
        assert saved > 0.9 * (rows / 2) * 32 * 32 * 3 / 1e6
        assert all(cases[mode, data]["seconds"] > 0 for data in ("ship", "own"))
    assert cases["sync", "ship"]["accuracy"] == cases["sync", "own"]["accuracy"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--rows", "0", "must be a whole number of 1 or more, got 0"),
        ("--epochs", "-1", "must be a whole number of 1 or more, got -1"),
        ("--rates", "1gbit,fast", "must be rates such as 20mbit,10gbit, got fast"),
    ],
)
def test_values_out_of_range_are_refused(option, value, message):
    done = run(f"{option}={value}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"distrib.py: error: argument {option}: {message}"
