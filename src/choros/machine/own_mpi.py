"""Whose MPI the ranks would load, asked of a Python that is not this one: nothing of MPI gets into this process."""

from __future__ import annotations

import subprocess
import sys

_ASK = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
"""
# How srun is to speak to each MPI.
PMI = {"mpich": "pmi2", "intel": "pmi2", "mvapich": "pmi2", "openmpi": "pmix"}
_NAMES = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "intel", "MVAPICH": "mvapich", "MVAPICH2": "mvapich"}


def find_mpi(python: str = sys.executable, timeout: float = 20.0) -> str:
    """The name of the MPI that mpi4py loads here, as ``Job.mpi`` takes it.

    Args:
        python: which Python to ask. Defaults to this one.
        timeout: seconds to wait for the answer. Defaults to 20.

    Returns:
        ``"mpich"``, ``"openmpi"``, ``"intel"`` or ``"mvapich"``; ``""`` where there is no mpi4py, or it finds no MPI.

    Example:
        >>> find_mpi("no.such.python")
        ''
    """
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return _NAMES.get(done.stdout.strip(), "")
