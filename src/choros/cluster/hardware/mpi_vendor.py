"""The MPI that ranks would load. A subprocess determines it, so that this process loads no MPI."""

from __future__ import annotations

import subprocess
import sys

_VENDOR_PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
"""
# The value of srun's --mpi for each MPI.
PMI = {"mpich": "pmi2", "intel": "pmi2", "mvapich": "pmi2", "openmpi": "pmix"}
# SLURM's PMI2 truncates lines of 1024 characters. With UCX, MPICH's compressed addresses reach that length in about one
# of ten starts, so MPICH uses libfabric, whose addresses are short. With libfabric, a rank does not receive messages
# that arrived while it was outside MPI, unless MPICH matches tags itself. This was seen with MPICH 5.0 over TCP in
# every job with several communicators.
MPICH_UNDER_PMI2 = {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_CH4_OFI_ENABLE_TAGGED": "0"}
_NAMES = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "intel", "MVAPICH": "mvapich", "MVAPICH2": "mvapich"}


def find_mpi(python: str = sys.executable, timeout: float = 20.0) -> str:
    """Return the name, for ``Job.mpi``, of the MPI that mpi4py loads here.

    Args:
        python: the Python to run. Defaults to this one.
        timeout: seconds to wait for the subprocess. Defaults to 20.

    Returns:
        ``"mpich"``, ``"openmpi"``, ``"intel"`` or ``"mvapich"``; or ``""`` if mpi4py is missing or finds no MPI.

    Example:
        >>> find_mpi("no.such.python")
        ''
    """
    try:
        result = subprocess.run(
            [python, "-c", _VENDOR_PROGRAM], capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return _NAMES.get(result.stdout.strip(), "")
