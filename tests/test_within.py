"""The time limit of ``make test``: slow tests are left out and named; the list of seconds has files that exist."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LISTED = json.loads((ROOT / "tests" / "seconds.json").read_text())
COSTLY = "tests/training/test_gan.py"


def outcome(limit):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "two_fits", COSTLY, "--within", limit]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


def test_a_late_run_leaves_slow_tests_out_and_names_their_files():
    shown = outcome("0.001")
    assert "13 skipped" in shown
    assert "left out: this machine is too slow" in shown
    assert " 13 tests left out, as this machine is slow " in shown
    assert f"\n{COSTLY} (13)\n" in shown


@pytest.mark.quick
def test_the_list_has_files_that_exist():
    assert LISTED["jax"][COSTLY] > 1
    assert [path for files in LISTED.values() for path in files if not (ROOT / path).exists()] == []
