"""Two pipes by which rank 0 reports the logs of each batch to the caller's process, and learns that it may go on.

A frame over the socket costs both sides a tenth of a millisecond of JSON and system calls. With callbacks of each batch
that is paid in every step. Nearly all batches have logs of the same names and are answered by "go on", so their numbers
travel as one record of a pipe and the answer as one byte. All else goes over the socket: the first logs, which bring
the names, logs of other names, orders, and requests for weights.
"""

from __future__ import annotations

import os
import select
import struct
from contextlib import suppress

from choros.launch.process.worker_connection import WorkerConnection

Logs = dict[str, float]

_MOST = 256  # numbers in a record: fewer bytes than a pipe takes whole (PIPE_BUF is 512 or more, 4096 on Linux)
_GO_ON = b"\x00"


class BatchLine:
    """The end of the caller's process.

    Attributes:
        records: int. The descriptor that is readable when a record has come.
        names: tuple of str. The names of the logs that came last; the worker keeps the same ones.

    Example:
        >>> line = BatchLine()
        >>> line.fds[0] > 0
        True
        >>> line.close()
    """

    def __init__(self) -> None:
        self.records, self._write_record = os.pipe()
        self._read_answer, self._answers = os.pipe()
        self.names: tuple[str, ...] = ()
        self._format = _format(0)

    @property
    def fds(self) -> list[int]:
        """The worker's ends, which it gets copies of."""
        return [self._write_record, self._read_answer]

    def learn(self, logs: Logs) -> None:
        """Take the names of logs that came over the socket, as ``WorkerBatchLine.report`` does."""
        self.names = tuple(logs)
        self._format = _format(len(self.names))

    def read(self) -> tuple[int, int, Logs]:
        """Return the record that has come: epoch, batch and logs."""
        epoch, step, *values = self._format.unpack(os.read(self.records, self._format.size))
        return int(epoch), int(step), dict(zip(self.names, values, strict=True))

    def go_on(self) -> None:
        """Answer that callbacks have decided nothing."""
        os.write(self._answers, _GO_ON)

    def close(self) -> None:
        """Close all four ends; the worker has its own copies."""
        for end in (self.records, self._write_record, self._read_answer, self._answers):
            with suppress(OSError):
                os.close(end)


class WorkerBatchLine:
    """The end of rank 0.

    Args:
        link: WorkerConnection. The connection with the caller's process.
        fds: two descriptors, as ``BatchLine.fds`` has them; closed by ``close``.
    """

    def __init__(self, link: WorkerConnection, fds: list[int]) -> None:
        self._link, (self._records, self._answers) = link, fds
        self._names: tuple[str, ...] = ()
        self._format = _format(0)
        os.set_blocking(self._answers, False)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._poll.register(link.fileno(), select.POLLIN)

    def report(self, epoch: int, step: int, logs: Logs) -> bool:
        """Send a record; False where these logs have to go over the socket, which teaches both ends their names."""
        names, floats = tuple(logs), set(map(type, logs.values())) == {float}
        if names != self._names:
            self._names = names if len(names) + 2 <= _MOST and floats else ()
            self._format = _format(len(names))
            return False
        if not floats:
            return False
        os.write(self._records, self._format.pack(epoch, step, *logs.values()))
        return True

    def may_go_on(self) -> bool:
        """Wait for an answer; False where it comes over the socket."""
        while not self._link.pending:
            with suppress(BlockingIOError):  # it mostly has come, while gradients were calculated
                if os.read(self._answers, 1):
                    return True
            self._poll.poll()
            if self._link.poll():
                break
        return False

    def close(self) -> None:
        """Close this process' copies."""
        os.close(self._records)
        os.close(self._answers)


def _format(count: int) -> struct.Struct:
    """Return the layout of a record of so many numbers, behind its epoch and its batch."""
    return struct.Struct(f"={2 + count}d")
