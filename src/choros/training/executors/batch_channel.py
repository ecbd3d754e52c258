"""A fast channel of two pipes between rank 0 and the caller: logs of each batch, and permission to continue.

A message over the socket costs both sides a tenth of a millisecond of JSON and system calls. With batch hooks, every
step pays this. Nearly all batches have logs of the same names, and the reply is "continue". So their numbers are sent
as one record through a pipe, and the reply is one byte. All other messages use the socket: the first logs, which bring
the names, logs of other names, control messages, and requests for weights.
"""

from __future__ import annotations

import os
import select
import struct
from contextlib import suppress

from choros.launch.process.worker_connection import WorkerConnection

Logs = dict[str, float]

_MAX_NUMBERS = 256  # in a record: 2048 bytes, which Linux writes to a pipe atomically (PIPE_BUF is 4096)
_CONTINUE = b"\x00"


class BatchChannel:
    """The caller's end of the batch channel.

    Attributes:
        records: int. The descriptor that is readable when a record has arrived.
        names: tuple of str. The names of the last logs from the socket. The worker holds the same names.

    Example:
        >>> channel = BatchChannel()
        >>> channel.fds[0] > 0
        True
        >>> channel.close()
    """

    def __init__(self) -> None:
        self.records, self._record_writer = os.pipe()
        self._reply_reader, self._reply_writer = os.pipe()
        self.names: tuple[str, ...] = ()
        self._format = _format(0)

    @property
    def fds(self) -> list[int]:
        """The worker's two descriptors, of which it gets copies: for records, and for replies."""
        return [self._record_writer, self._reply_reader]

    def learn(self, logs: Logs) -> None:
        """Store the names of logs from the socket, as ``WorkerBatchChannel.report`` does on the other side."""
        self.names = tuple(logs)
        self._format = _format(len(self.names))

    def read(self) -> tuple[int, int, Logs]:
        """Return the epoch, the batch and the logs of the next record."""
        epoch, step, *values = self._format.unpack(os.read(self.records, self._format.size))
        return int(epoch), int(step), dict(zip(self.names, values, strict=True))

    def send_no_change(self) -> None:
        """Send the reply "continue": callbacks have changed nothing."""
        os.write(self._reply_writer, _CONTINUE)

    def close(self) -> None:
        """Close all four ends. The worker's copies stay open."""
        for descriptor in (self.records, self._record_writer, self._reply_reader, self._reply_writer):
            with suppress(OSError):
                os.close(descriptor)


class WorkerBatchChannel:
    """Rank 0's end of the batch channel.

    Args:
        link: WorkerConnection. The socket connection with the caller.
        fds: the two descriptors of ``BatchChannel.fds``. ``close`` closes them.
    """

    def __init__(self, link: WorkerConnection, fds: list[int]) -> None:
        self._link, (self._record_writer, self._reply_reader) = link, fds
        self._names: tuple[str, ...] = ()
        self._format = _format(0)
        # A blocking read of this pipe would not notice a reply over the socket.
        os.set_blocking(self._reply_reader, False)
        self._poll = select.poll()
        self._poll.register(self._reply_reader, select.POLLIN)
        self._poll.register(link.fileno(), select.POLLIN)

    def report(self, epoch: int, step: int, logs: Logs) -> bool:
        """Send a record. Return False if these logs must be sent over the socket, for example if a name is new."""
        names, floats = tuple(logs), set(map(type, logs.values())) == {float}
        # Both sides must know the names before a record, which has only numbers. So these logs go over the socket.
        if names != self._names:
            self._names = names if len(names) + 2 <= _MAX_NUMBERS and floats else ()
            self._format = _format(len(names))
            return False
        if not floats:
            return False
        os.write(self._record_writer, self._format.pack(epoch, step, *logs.values()))
        return True

    def no_change_arrived(self) -> bool:
        """Wait for the reply. Return True for "continue", False if the reply arrives over the socket."""
        # A frame that was read from the socket already does not make the socket readable, so ``poll`` would wait
        # forever.
        while not self._link.pending:
            with suppress(BlockingIOError):  # usually the reply has arrived while gradients were calculated
                if os.read(self._reply_reader, 1):
                    return True
            self._poll.poll()
            if self._link.poll():
                break
        return False

    def close(self) -> None:
        """Close the descriptors of this process."""
        os.close(self._record_writer)
        os.close(self._reply_reader)


def _format(count: int) -> struct.Struct:
    """Return the layout of a record: epoch, batch and ``count`` numbers, all float64."""
    return struct.Struct(f"={2 + count}d")
