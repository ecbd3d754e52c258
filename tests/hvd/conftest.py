"""Scripts that run as ranks under ``choros run``, each leaving what it found."""

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
def run(tmp_path, backend):
    """Run a script on ``size`` ranks; return what each left."""

    def start(size, script):
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script) + "\nend()\n")
        done = subprocess.run(
            [sys.executable, "-m", "choros", "run", "-n", str(size), "--threads", "1", str(file)],
            env={**os.environ, "SAID": str(tmp_path), "HOROVOD_CYCLE_TIME": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no meaning here: HOROVOD_CYCLE_TIME" in done.stdout + done.stderr
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    return start
