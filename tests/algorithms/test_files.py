"""Rules for the files of algorithms: short, documented, importing only the standard library and the errors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import choros.algorithms as algorithms

FOLDER = Path(algorithms.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
KINDS = {kind.__module__.rsplit(".", 1)[1]: kind for kind in algorithms.ALL}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_the_standard_library_and_errors_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            known = name.startswith(("choros.algorithms", "choros.errors"))
            assert known or name.split(".")[0] in sys.stdlib_module_names, name
        assert not (isinstance(node, ast.ImportFrom) and node.level)


def test_importing_them_loads_no_array_library():
    code = "import sys, choros.algorithms; print([m for m in ('numpy', 'jax', 'torch', 'keras') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_one_file_an_algorithm():
    assert len(KINDS) == len(algorithms.ALL)
    assert {path.stem for path in FILES} == set(KINDS) | {"base", "legacy", "__init__"}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_is_short_and_says_what_it_is(name):
    text, doc = (FOLDER / f"{name}.py").read_text(), KINDS[name].__doc__ or ""
    assert len(text.splitlines()) <= 70
    assert "::\n" in doc
    assert "Example:" in doc
    assert ">>>" in doc
    assert "Not good" in doc
    assert "dist-keras" in doc
