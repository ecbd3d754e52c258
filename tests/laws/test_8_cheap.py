"""Law 8: cheap. The ratios are measured by ``benchmarks/``, not here; here: they are there, and they run."""

import ast
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
FILES = sorted(FOLDER.glob("*.py")) if FOLDER.is_dir() else []
SCRIPTS = [path for path in FILES if "argparse" in path.read_text()]  # the others are parts of them


def test_there_are_benchmarks_of_the_engine():
    assert {"allreduce_shm.py", "centre_shm.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_explains_itself(path):
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_says_what_it_measures_and_asserts_no_time(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
