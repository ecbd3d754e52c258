"""The import of Keras in a worker: without packages that it does not need, and without garbage collection."""

import importlib.util
import subprocess
import sys

import pytest

SCRIPT = """
import gc, importlib, sys
from choros.launch.process.pool_worker import find, lean_keras_import
find("choros.training.worker.main:serve")
import keras
assert gc.isenabled() and gc.get_freeze_count() > 10_000
hidden = {"sklearn", "matplotlib", *(() if keras.backend.backend() == "jax" else ("jax",))}
assert not hidden & sys.modules.keys(), hidden & sys.modules.keys()
frozen = gc.get_freeze_count()
with lean_keras_import():
    assert gc.isenabled()
assert gc.get_freeze_count() == frozen
for name in hidden:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_worker_imports_keras_without_what_it_does_not_need(backend, tmp_path):
    for package in (backend, "jax", "sklearn", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'choros[test]'")
    path = [*sys.path, "src"]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{SCRIPT}"],
        env={"KERAS_BACKEND": backend, "HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
