"""A rank in a running MPI library: its place, and the end of the whole job if a rank raises."""

from __future__ import annotations

import os
import time
from types import ModuleType

import numpy as np

from choros.cluster.mpi_library import load_mpi, remedy, start, waiting_for_all_ranks_inside_mpi
from choros.comm.bootstrap.exit_hooks import exit_code_of, install_hook

__all__ = ["abort_on_exception", "load_mpi", "place", "remedy", "start"]

_FLUSH_SECONDS = 0.3  # seconds for the launcher to forward this rank's output before MPI_Abort ends the job


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
        # MPI itself finds the ranks that share a host. The host name would be the same in containers of several hosts.
        host_comm = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
        first_rank, first_ranks = np.array([world.Get_rank()], "int64"), np.empty(world.Get_size(), "int64")
        host_comm.Bcast(first_rank)
        world.Allgather(first_rank, first_ranks)
        nodes = sorted(set(first_ranks.tolist()))
        numbers.update(rank=world.Get_rank(), size=world.Get_size())
        numbers.update(local_rank=host_comm.Get_rank(), local_size=host_comm.Get_size())
        numbers.update(node=nodes.index(int(first_rank[0])), nodes=len(nodes))
        host_comm.Free()

    waiting_for_all_ranks_inside_mpi(timeout, count)
    return numbers


def abort_on_exception(MPI: ModuleType) -> None:
    """Install an exception hook that ends the whole job: first the traceback, then MPI_Abort.

    For a ``PeerLostError`` the hook prints only the message.

    Without the hook, under MPICH, the other ranks would wait for the failed rank until their time limit.
    """

    def abort_job(error: BaseException) -> None:
        if not MPI.Is_finalized():
            # MPI_Abort kills this process too, and the launcher may drop output that it has not read yet.
            time.sleep(_FLUSH_SECONDS)
            # At least 1: the launcher would report a job that was aborted with code 0 as a success.
            MPI.COMM_WORLD.Abort(exit_code_of(error) or 1)

    world = MPI.COMM_WORLD
    install_hook("mpi", f"rank {world.Get_rank()} of {world.Get_size()} on {os.uname().nodename}", abort_job)
