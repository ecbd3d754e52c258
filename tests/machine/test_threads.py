import importlib.util
import os
import subprocess
import sys

import pytest

from choros.cluster.hardware import usable_cores, variables
from choros.cluster.hardware.thread_env import NAMES
from choros.errors import InvalidInputError

COUNT = """
from pathlib import Path
def threads(name):
    found = 0
    for task in Path("/proc/self/task").iterdir():
        found += (task / "comm").read_text().strip() == name
    return found
"""
JAX = f"""{COUNT}
import jax, jax.numpy as jnp
jax.jit(lambda a: a @ a)(jnp.ones((64, 64))).block_until_ready()
print(threads("tf_XLAEigen"))
"""
TORCH = "import torch; print(torch.get_num_threads())"
TENSORFLOW = f"""{COUNT}
import tensorflow as tf
tf.function(lambda a: a @ a)(tf.ones((64, 64)))
print(threads("tf_Compute"))
"""


def test_every_name_is_set():
    assert set(variables(3)) == set(NAMES)
    assert variables(3)["OMP_NUM_THREADS"] == variables(3)["NPROC"] == "3"
    assert [variables(count)["TF_NUM_INTEROP_THREADS"] for count in (1, 2, 8)] == ["1", "2", "2"]


def test_what_the_user_set_is_left_alone():
    saved = variables(2, keep={"OMP_NUM_THREADS": "7", "HOME": "/"})
    assert "OMP_NUM_THREADS" not in saved
    assert saved["NPROC"] == "2"


def test_waiting_threads_sleep_only_where_cores_are_shared():
    assert variables(2, shared=True)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in variables(2)
    assert "OMP_WAIT_POLICY" not in variables(1, shared=True)


def test_no_threads_are_refused():
    with pytest.raises(InvalidInputError, match="1 or more"):
        variables(0)


@pytest.mark.skipif(len(usable_cores()) < 2, reason="with one core every framework runs one thread anyway")
@pytest.mark.parametrize(
    ("module", "code"), [("jax", JAX), ("torch", TORCH), ("tensorflow", TENSORFLOW)], ids=lambda value: value[:10]
)
def test_the_frameworks_obey(module, code):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    counts = {}
    for count in (1, 2):
        clean = {name: value for name, value in os.environ.items() if name not in NAMES}
        environment = {**clean, **variables(count), "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=200
        )
        counts[count] = int(done.stdout)
    assert counts == {1: 1, 2: 2}
