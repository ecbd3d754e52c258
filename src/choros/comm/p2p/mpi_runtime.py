"""Start and end of the MPI library in this process: one start with a time limit, and the end at exit of Python.

Only this module and ``mpi_group.py`` use mpi4py. They import it at first use.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from choros.comm.bootstrap.exit_hooks import exit_code_of, install_hook
from choros.errors import InvalidInputError

_FLUSH_SECONDS = 0.3  # seconds for the launcher to forward this rank's output before MPI_Abort ends the job


def load_mpi() -> ModuleType:
    """Return ``mpi4py.MPI`` without a start of MPI, unless the script has started it.

    Raises:
        InvalidInputError: mpi4py is not installed, or it finds no MPI library.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        with warnings.catch_warnings():  # ``start`` refuses a launcher that does not fit, with a better message
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        raise InvalidInputError(
            "The ranks were started by an MPI launcher, or CHOROS_COMM=mpi is set, but mpi4py with an MPI library is "
            f"missing ({error}): pip install 'choros[mpi]' to use this machine's own MPI, or 'choros[mpi-wheel]', "
            "which brings MPICH."
        ) from None
    except RuntimeError as error:  # mpi4py raises this if it can load no MPI library
        raise InvalidInputError(
            f"mpi4py is installed but finds no MPI library ({error}): load your site's MPI module, or "
            "pip install 'choros[mpi-wheel]', which brings MPICH."
        ) from None
    return MPI


def start(timeout: float) -> ModuleType:
    """Start MPI if it is not started; return ``mpi4py.MPI``.

    Args:
        timeout: float. Seconds for the start, which waits for all ranks; after that this process is ended.

    Raises:
        InvalidInputError: mpi4py is missing, the launcher belongs to another MPI, or MPI was ended in this process.
    """
    MPI = load_mpi()
    if MPI.Is_finalized():
        raise InvalidInputError("MPI was ended in this process (MPI.Finalize) and cannot be started again.")
    if not MPI.Is_initialized():
        version = MPI.Get_library_version()
        if "PMIX_RANK" in os.environ and "MPICH" in version and "pmix" not in version.lower():
            raise InvalidInputError(
                f"{local_name()}: the launcher uses PMIx, which mpi4py's {library_name(MPI)} does not support. "
                f"{remedy()}"
            )
        waiting_for_all_ranks_inside_mpi(timeout, MPI.Init_thread)
        # Python runs exit functions in reverse order. Groups register later than this, so they end before MPI.
        atexit.register(_finish, MPI, timeout)
    return MPI


def place(timeout: float) -> dict[str, int]:
    """Return this process's rank and host numbers from MPI. All ranks call, as they count the ranks of each machine.

    Args:
        timeout: float. Seconds for the start of MPI, and again for the count.

    Returns:
        ``rank``, ``size``, ``local_rank``, ``local_size``, ``node``, ``nodes``, as ``choros.cluster.Place`` has them.

    Raises:
        InvalidInputError: as ``start``.
    """
    MPI = start(timeout)
    numbers: dict[str, int] = {}

    def count() -> None:
        world = MPI.COMM_WORLD
        host_comm = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
        first, firsts = np.array([world.Get_rank()], "int64"), np.empty(world.Get_size(), "int64")
        host_comm.Bcast(first)
        world.Allgather(first, firsts)
        nodes = sorted(set(firsts.tolist()))
        numbers.update(rank=world.Get_rank(), size=world.Get_size())
        numbers.update(local_rank=host_comm.Get_rank(), local_size=host_comm.Get_size())
        numbers.update(node=nodes.index(int(first[0])), nodes=len(nodes))
        host_comm.Free()

    waiting_for_all_ranks_inside_mpi(timeout, count)
    return numbers


def _finish(MPI: ModuleType, timeout: float) -> None:
    if not MPI.Is_finalized():
        waiting_for_all_ranks_inside_mpi(timeout, MPI.Finalize)


def waiting_for_all_ranks_inside_mpi(timeout: float, call: Callable[[], object]) -> None:
    """Start or end MPI, which waits for all ranks; end this process after ``timeout`` seconds.

    mpi4py holds Python's global lock during the call, so no Python thread could watch the clock. faulthandler watches
    it from C and prints the Python stack. The stack shows this function's name, so the name explains the hang.

    Example:
        >>> waiting_for_all_ranks_inside_mpi(5.0, lambda: None)
    """
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
    try:
        call()
    finally:
        faulthandler.cancel_dump_traceback_later()


def local_name() -> str:
    """Return this process's rank and host for messages, with the rank from the launcher's variables or "?"."""
    rank = next((os.environ[k] for k in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if k in os.environ), "?")
    return f"rank {rank} on {os.uname().nodename}"


def library_name(MPI: ModuleType) -> str:
    """Return the MPI library's name and version, such as ``MPICH 5.0.2``."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def remedy() -> str:
    """Return advice how to start the ranks so that launcher and library fit."""
    own_mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
    launcher = f"{own_mpiexec}, which" if own_mpiexec.exists() else "the mpiexec that"
    return (
        f"Start the ranks with {launcher} belongs to {library_name(load_mpi())}, under SLURM with srun --mpi=pmix "
        "(Open MPI) or --mpi=pmi2 (MPICH), or install mpi4py for the MPI of your launcher."
    )


def abort_on_exception(MPI: ModuleType) -> None:
    """Install an exception hook that ends the whole job: first the traceback, then MPI_Abort.

    For a ``PeerLostError`` the hook prints only the message.

    Without the hook, under MPICH, the other ranks would wait for the failed rank until their time limit.
    """

    def abort_job(error: BaseException) -> None:
        if not MPI.Is_finalized():
            time.sleep(_FLUSH_SECONDS)
            MPI.COMM_WORLD.Abort(exit_code_of(error) or 1)

    world = MPI.COMM_WORLD
    install_hook("mpi", f"rank {world.Get_rank()} of {world.Get_size()} on {os.uname().nodename}", abort_job)
