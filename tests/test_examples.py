"""Each example runs as its own words say."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(*command):
    pytest.importorskip("sklearn", reason="the examples train on scikit-learn's digits: pip install 'choros[demo]'")
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits(tmp_path):
    said = run(EXAMPLES / "digits.py", tmp_path)
    assert float(re.search(r"accuracy ([\d.]+)", said)[1]) > 0.9
    assert (tmp_path / "digits.keras").stat().st_size > 10_000


def test_ranks():
    said = run("-m", "choros", "run", "-n", "2", EXAMPLES / "ranks.py")
    sums = re.findall(r"rank (\d) of 2: the weights sum to (\S+)", said)
    assert {rank for rank, _ in sums} == {"0", "1"}
    assert len({total for _, total in sums}) == 1


def test_every_example_is_run_here():
    text = pathlib.Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text, f"{path.name} has no test"
