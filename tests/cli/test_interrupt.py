"""Ctrl-C of a command while JAX compiles in its process."""

import os
import subprocess
import sys

import keras
import pytest

COMPILES_LONG = """
import signal
import jax, jax.numpy as jnp

def long_program(x):
    for index in range(200):
        x = jnp.sin(x @ x) + index
    return x

model = None
lowered = jax.jit(long_program).lower(jnp.ones((8, 8)))
signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C, at a time within the compilation
signal.setitimer(signal.ITIMER_REAL, 0.1)
lowered.compile()
"""


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX compiles in threads that outlive an interrupt")
def test_an_interrupted_compilation_does_not_end_in_a_segmentation_fault(tmp_path):
    (tmp_path / "model.py").write_text(COMPILES_LONG)
    # With optimizations the compilation takes longer than the end of the process. WHOLE_KERAS: the processes of tests
    # end without a garbage collection, which this test is about.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    environment["WHOLE_KERAS"] = "1"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "choros", "check", "model.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 130, done.stderr
