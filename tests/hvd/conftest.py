"""Scripts that run as ranks under ``choros run`` or ``mpiexec``, each leaving what it found."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

HEAD = """
    import json, os, sys
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        sys.modules["tensorflow"] = None  # Keras would load it to set a seed, which takes longer than most tests
    import numpy as np
    import keras
    import choros.hvd as hvd
    from choros.errors import RanksDiffer

    hvd.init()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    said = {}

    def numbers(x):
        return np.asarray(keras.ops.convert_to_numpy(x)).astype(float).tolist()

    def end():
        with open(os.path.join(os.environ["SAID"], f"{rank}.json"), "w") as file:
            json.dump(said, file)
"""


@pytest.fixture
def launcher():
    """What starts the ranks, for tests that do not say: "mpiexec" is of JAX alone, "any" is that where it can be."""
    return "choros run"


@pytest.fixture
def run(tmp_path, backend, launcher, request):
    """Run a script on ``size`` ranks; return what each left."""
    if launcher == "any":
        launcher = "mpiexec" if backend == "jax" and importlib.util.find_spec("mpi4py") else "choros run"
    if launcher == "mpiexec" and backend != "jax":
        pytest.skip("what moves the bytes is the same on every backend: once is enough")

    def start(size, script):
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script) + "\nend()\n")
        own = {"SAID": str(tmp_path), "HOROVOD_CYCLE_TIME": "1"}
        if launcher == "mpiexec":
            out = request.getfixturevalue("mpiexec")(size, sys.executable, file, timeout=200, **own)
        else:
            done = subprocess.run(
                [sys.executable, "-m", "choros", "run", "-n", str(size), "--threads", "1", str(file)],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                timeout=200,
            )
            out = done.stdout + done.stderr
            assert done.returncode == 0, out
        assert "no meaning here: HOROVOD_CYCLE_TIME" in out
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    return start
