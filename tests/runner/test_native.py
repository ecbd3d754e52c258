"""JAX's and PyTorch's own runtimes, started from the place that Choros finds."""

import os
import subprocess
import sys

import pytest

import choros.native
from choros.errors import InvalidInputError

SCRIPT = """
import sys
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import choros.native

place = choros.native.initialize("jax", cluster_detection_method="deactivate")
import jax
import numpy as np
from jax.experimental import multihost_utils

assert (jax.process_index(), jax.process_count()) == (place.rank, 2)
assert multihost_utils.process_allgather(np.array([place.rank])).reshape(-1).tolist() == [0, 1]
choros.native.initialize("torch", backend="gloo")
import torch

total = torch.full((3,), float(place.rank + 1))
torch.distributed.all_reduce(total)
assert total.tolist() == [3.0] * 3
torch.distributed.destroy_process_group()
jax.distributed.shutdown()
sys.stdout.write(f"rank {place.rank} is done\\n")
"""


@pytest.mark.parametrize("launcher", ["choros", "mpiexec"])
def test_both_know_their_ranks(launcher, tmp_path, request):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if launcher == "mpiexec":
        out = request.getfixturevalue("mpiexec")(2, sys.executable, script)
    else:
        command = [sys.executable, "-m", "choros", "run", "-n", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        out = done.stdout
        assert done.returncode == 0, out + done.stderr
    assert all(f"rank {rank} is done" in out for rank in range(2))


def test_another_library_is_refused():
    with pytest.raises(InvalidInputError, match="give one of jax, torch"):
        choros.native.initialize("tensorflow")
