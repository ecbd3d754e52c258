"""The ranks of an MPI communicator, which carries their messages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from choros.comm.p2p import mpi_runtime
from choros.comm.p2p.group import MessageGroup
from choros.types import Array


class MpiMessages:
    """Messages by a communicator; implements ``choros.comm.p2p.interface.PointToPoint``.

    Args:
        comm: an mpi4py communicator; None for that of all ranks, for which MPI is started.
        timeout: float. Seconds that the start of MPI may last.
        own: bool. It is nobody else's; else a copy is used once all are there. Defaults to False.
    """

    name, patience = "MPI", math.inf
    rest = staticmethod(time.sleep)

    def __init__(self, comm: Any, timeout: float, own: bool = False) -> None:
        MPI = self._mpi = mpi_runtime.start(timeout)
        self._comm, self._own = MPI.COMM_WORLD if comm is None else comm, own
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self.errors: tuple[type[Exception], ...] = (MPI.Exception,)
        self.done = MPI.Request.Testall
        self._one_thread = MPI.Query_thread() < MPI.THREAD_SERIALIZED

    def receive(self, array: Array, rank: int, tag: int) -> Any:
        """Have a message written into flat bytes."""
        return self._comm.Irecv([array, self._mpi.BYTE], rank, tag)

    def send(self, array: Array, rank: int, tag: int) -> Any:
        """Have flat bytes sent."""
        return self._comm.Isend([array, self._mpi.BYTE], rank, tag)

    def came(self, request: Any) -> bool:
        """Return whether one request is done."""
        return bool(request.Test())

    def check_thread(self) -> str:
        """Return why this thread may not call, or ``""``."""
        if self._one_thread and not self._mpi.Is_thread_main():
            return (
                "MPI was started for one thread, and this is another: let Choros start MPI, or leave "
                "mpi4py.rc.thread_level as it is."
            )
        return ""

    def settle(self) -> None:
        """Go on with a communicator of its own: all are there, so this is quick."""
        if not self._own:
            self._comm, self._own = self._comm.Dup(), True

    def part(self, ranks: Sequence[int]) -> MpiMessages:
        """The messages among some of the ranks."""
        return MpiMessages(self._comm.Create_group(self._comm.Get_group().Incl(list(ranks))), 0.0, own=True)

    def over(self) -> bool:
        """Return whether MPI has ended."""
        return bool(self._mpi.Is_finalized())

    def free(self, broken: bool) -> None:
        """Free the communicator, for which all are needed."""
        if self._own and not broken:
            self._comm.Free()


class MpiGroup(MessageGroup):
    """The ranks of an MPI communicator; implements ``choros.comm.group.Group``.

    Args:
        comm: an mpi4py communicator, of which a copy is used. By default that of all ranks, for which MPI is started
            where the script has not done so; then an exception that nobody catches ends the job.
        timeout: float. Seconds that one wait may last.
        spin: float. Seconds to look before sleeping; by default 0 where a machine has more ranks than cores.

    Attributes:
        rank, size: int.
        timeout, warn_after: float. doing: str. trace: as ``Mesh`` says; may be set between calls.

    Raises:
        InvalidInputError: mpi4py is missing, or the launcher belongs to another MPI.
        CommTimeoutError: not all ranks have come.

    Example, in a script that ``mpiexec -n 2`` starts::

        group = MpiGroup()
        group.gather(b"hello")  # [b'hello', b'hello']
    """

    def __init__(self, comm: Any = None, timeout: float = 300.0, *, spin: float | None = None) -> None:
        messages = MpiMessages(comm, timeout)
        if comm is None and messages.size > 1:
            mpi_runtime.abort_on_exception(mpi_runtime.start(timeout))
        super().__init__(messages, timeout, spin=spin)
