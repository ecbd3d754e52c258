"""The MPI that ranks would load, found by another Python process: no MPI is loaded into this one."""

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
# SLURM's PMI2 cuts off lines of 1024 characters. MPICH's addresses under UCX, which it compresses, reach that once in
# about ten starts; those under libfabric are short. There a rank stays deaf to messages that came while it was not in
# MPI (MPICH 5.0 over TCP, in every job whose ranks meet in several communicators), unless MPICH matches tags itself.
MPICH_UNDER_PMI2 = {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_CH4_OFI_ENABLE_TAGGED": "0"}
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
