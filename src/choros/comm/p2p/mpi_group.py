"""Process group over MPI: the ranks of a communicator, with point-to-point messages only."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from choros.comm.p2p import mpi_runtime
from choros.comm.p2p.group import MessageGroup
from choros.comm.p2p.interface import RequestHandle
from choros.types import Array


class MpiMessages:
    """Messages over a communicator; implements ``choros.comm.p2p.interface.PointToPoint``.

    Args:
        comm: an mpi4py communicator. None starts MPI and uses all ranks.
        timeout: float. Seconds that the start of MPI may last.
        owned: bool. Whether only this object uses ``comm``; if not, ``settle`` makes a copy. Defaults to False.
    """

    name, patience = "MPI", math.inf
    sleep = staticmethod(time.sleep)

    def __init__(self, comm: Any, timeout: float, owned: bool = False) -> None:
        MPI = self._mpi = mpi_runtime.start(timeout)
        self._comm, self._owned = MPI.COMM_WORLD if comm is None else comm, owned
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self.errors: tuple[type[Exception], ...] = (MPI.Exception,)
        # Testall and never Wait: a wait inside MPI occupies a core, sees no dead rank and has no time limit.
        self.done = MPI.Request.Testall
        # Under MPI_THREAD_FUNNELED a call of another thread is undefined: it may corrupt messages without an error.
        self._main_thread_only = MPI.Query_thread() < MPI.THREAD_SERIALIZED
        self.concurrent = bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def receive(self, array: Array, rank: int, tag: int) -> RequestHandle:
        """Start to receive a message into a flat uint8 array."""
        return self._comm.Irecv([array, self._mpi.BYTE], rank, tag)

    def send(self, array: Array, rank: int, tag: int) -> RequestHandle:
        """Start to send a flat uint8 array."""
        return self._comm.Isend([array, self._mpi.BYTE], rank, tag)

    def is_done(self, request: RequestHandle) -> bool:
        """Return whether one request is done."""
        return bool(request.Test())

    def check_thread(self) -> str:
        """Return the reason why this thread may not call, or ``""``."""
        if self._main_thread_only and not self._mpi.Is_thread_main():
            return (
                "MPI was started for one thread, and this is another: let Choros start MPI, or leave "
                "mpi4py.rc.thread_level as it is."
            )
        return ""

    def settle(self) -> None:
        """Copy the communicator, so that no message of other code mixes with the group's. Dup waits for all ranks."""
        if not self._owned:
            self._comm, self._owned = self._comm.Dup(), True

    def part(self, ranks: Sequence[int]) -> MpiMessages:
        """Return the messages among some of the ranks."""
        # Create_group and not Split: only the members call it. Split would need all ranks of the communicator.
        return MpiMessages(self._comm.Create_group(self._comm.Get_group().Incl(list(ranks))), 0.0, owned=True)

    def is_closed(self) -> bool:
        """Return whether MPI has ended."""
        return bool(self._mpi.Is_finalized())

    def free(self, broken: bool) -> None:
        """Free the communicator, unless a call failed: MPI_Comm_free waits for all ranks."""
        if self._owned and not broken:
            self._comm.Free()


class MpiGroup(MessageGroup):
    """The ranks of an MPI communicator; implements ``choros.comm.group.Group``.

    Args:
        comm: an mpi4py communicator; the group uses a copy. The default is the communicator of all ranks. MPI is then
            started if the script has not started it, and an uncaught exception ends the job.
        timeout: float. Seconds that one wait may last. Defaults to 300.
        spin: float. Seconds to poll before sleeping. Defaults to 50 us, or 0 if a machine has more ranks than cores.

    Attributes:
        rank, size: int.
        timeout, warn_after: float. doing: str. trace: see ``FullMesh``; may be set between calls.

    Raises:
        InvalidInputError: mpi4py is missing, or the launcher belongs to another MPI.
        CommTimeoutError: not all ranks joined within the time limit.

    Example, in a script that ``mpiexec -n 2`` starts::

        group = MpiGroup()
        group.gather(b"hello")  # [b'hello', b'hello']
    """

    def __init__(self, comm: object = None, timeout: float = 300.0, *, spin: float | None = None) -> None:
        messages = MpiMessages(comm, timeout)
        # Only for the communicator of all ranks: a caller with a communicator of its own decides itself how a job ends.
        if comm is None and messages.size > 1:
            mpi_runtime.abort_on_exception(mpi_runtime.start(timeout))
        super().__init__(messages, timeout, spin=spin)
