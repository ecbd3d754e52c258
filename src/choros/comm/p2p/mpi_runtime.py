"""MPI's library in this process: started once, with a limit, and ended when Python ends.

What only mpi4py knows is asked here and in ``mpi_group.py``; both import it when they are used, never before.
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
from typing import Any

import numpy as np

from choros.comm.bootstrap.exit_hooks import code_of, hook
from choros.errors import InvalidInputError

_SPOKEN = 0.3  # seconds in which the launcher passes on what was printed, before the end of the job cuts it off


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``, not yet started unless the script itself has started it.

    Raises:
        InvalidInputError: mpi4py is not installed, or finds no MPI library.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        with warnings.catch_warnings():  # a launcher that does not fit is refused below, in words that help
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except ImportError as error:
        raise InvalidInputError(
            "The ranks were started by an MPI launcher, or CHOROS_COMM=mpi is set, but mpi4py with an MPI library is "
            f"missing ({error}): pip install 'choros[mpi]' to use this machine's own MPI, or 'choros[mpi-wheel]', "
            "which brings MPICH."
        ) from None
    except RuntimeError as error:  # mpi4py's own word for: no MPI library can be loaded
        raise InvalidInputError(
            f"mpi4py is installed but finds no MPI library ({error}): load your site's MPI module, or "
            "pip install 'choros[mpi-wheel]', which brings MPICH."
        ) from None
    return MPI


def start(limit: float) -> Any:
    """Return ``mpi4py.MPI``, started.

    Args:
        limit: float. Seconds that the start, in which all ranks meet, may last; then this process is ended.

    Raises:
        InvalidInputError: mpi4py is missing, the launcher is another MPI's, or MPI has been ended in this process.
    """
    MPI = load_mpi()
    if MPI.Is_finalized():
        raise InvalidInputError("MPI was ended in this process (MPI.Finalize) and cannot be started again.")
    if not MPI.Is_initialized():
        version = MPI.Get_library_version()
        if "PMIX_RANK" in os.environ and "MPICH" in version and "pmix" not in version.lower():
            raise InvalidInputError(
                f"{here()}: the launcher speaks PMIx, which mpi4py's {name(MPI)} does not know. {remedy()}"
            )
        waiting_for_all_ranks_inside_mpi(limit, MPI.Init_thread)
        atexit.register(_finish, MPI, limit)  # runs after what the groups register
    return MPI


def place(limit: float) -> dict[str, int]:
    """Return where MPI says that this process is; all ranks call, for they count who shares a machine.

    Args:
        limit: float. Seconds that the start of MPI, in which all ranks meet, may last, and the counting after it.

    Returns:
        ``rank``, ``size``, ``local_rank``, ``local_size``, ``node``, ``nodes``, as ``choros.cluster.Place`` has them.

    Raises:
        InvalidInputError: as ``start``.
    """
    MPI = start(limit)
    found: dict[str, int] = {}

    def count() -> None:
        world = MPI.COMM_WORLD
        here = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
        first, firsts = np.array([world.Get_rank()], "int64"), np.empty(world.Get_size(), "int64")
        here.Bcast(first)
        world.Allgather(first, firsts)
        nodes = sorted(set(firsts.tolist()))
        found.update(rank=world.Get_rank(), size=world.Get_size())
        found.update(local_rank=here.Get_rank(), local_size=here.Get_size())
        found.update(node=nodes.index(int(first[0])), nodes=len(nodes))
        here.Free()

    waiting_for_all_ranks_inside_mpi(limit, count)
    return found


def _finish(MPI: Any, limit: float) -> None:
    if not MPI.Is_finalized():
        waiting_for_all_ranks_inside_mpi(limit, MPI.Finalize)


def waiting_for_all_ranks_inside_mpi(limit: float, call: Callable[[], Any]) -> None:
    """Start or end MPI, for which all ranks must come; when the limit is over, end this process.

    mpi4py holds Python's lock meanwhile, so no thread of Python could look at the clock: faulthandler does it from C
    and prints where Python stands, which is why this function has the name that it has.

    Example:
        >>> waiting_for_all_ranks_inside_mpi(5.0, lambda: None)
    """
    faulthandler.dump_traceback_later(limit, exit=True, file=2)
    try:
        call()
    finally:
        faulthandler.cancel_dump_traceback_later()


def here() -> str:
    """Name this process for messages, as far as its launcher tells."""
    rank = next((os.environ[k] for k in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if k in os.environ), "?")
    return f"rank {rank} on {os.uname().nodename}"


def name(MPI: Any) -> str:
    """Return the MPI library's name and version, such as ``MPICH 5.0.2``."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def remedy() -> str:
    """Say how the ranks are to be started so that launcher and library fit."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    launcher = f"{own}, which" if own.exists() else "the mpiexec that"
    return (
        f"Start the ranks with {launcher} belongs to {name(load_mpi())}, under SLURM with srun --mpi=pmix (Open MPI) "
        "or --mpi=pmi2 (MPICH), or install mpi4py for the MPI of your launcher."
    )


def abort_on_exception(MPI: Any) -> None:
    """Have an exception that nobody catches end the whole job: traceback first, then MPI_Abort.

    Of the loss of another rank only the message is printed.

    Without it the other ranks wait for a rank that has gone (MPICH) until their limit.
    """

    def after(error: BaseException) -> None:
        if not MPI.Is_finalized():
            time.sleep(_SPOKEN)
            MPI.COMM_WORLD.Abort(code_of(error) or 1)

    world = MPI.COMM_WORLD
    hook("mpi", f"rank {world.Get_rank()} of {world.Get_size()} on {os.uname().nodename}", after)
