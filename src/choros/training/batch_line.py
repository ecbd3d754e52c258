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

from choros.launch.link import Link

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

    @property
    def fds(self) -> list[int]:
        """The worker's ends, which it gets copies of."""
        return [self._write_record, self._read_answer]

    def learn(self, logs: Logs) -> None:
        """Take the names of logs that came over the socket, as ``WorkerBatchLine.report`` does."""
        self.names = tuple(logs)

    def read(self) -> tuple[int, int, Logs]:
        """Return the record that has come: epoch, batch and logs."""
        values = struct.unpack(f"={2 + len(self.names)}d", os.read(self.records, 8 * (2 + len(self.names))))
        return int(values[0]), int(values[1]), dict(zip(self.names, values[2:], strict=True))

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
        link: Link. The connection with the caller's process.
        fds: two descriptors, as ``BatchLine.fds`` has them; closed by ``close``.
    """

    def __init__(self, link: Link, fds: list[int]) -> None:
        self._link, (self._records, self._answers) = link, fds
        self._names: tuple[str, ...] = ()
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._poll.register(link.fileno(), select.POLLIN)

    def report(self, epoch: int, step: int, logs: Logs) -> bool:
        """Send a record; False where these logs have to go over the socket, which teaches both ends their names."""
        names = tuple(logs)
        if names != self._names:
            self._names = names if len(names) + 2 <= _MOST and all(map(_is_float, logs.values())) else ()
            return False
        if not names or not all(map(_is_float, logs.values())):
            return False
        os.write(self._records, struct.pack(f"={2 + len(names)}d", epoch, step, *logs.values()))
        return True

    def may_go_on(self) -> bool:
        """Wait for an answer; False where it comes over the socket."""
        while not self._link.pending:
            if any(fd == self._answers for fd, _ in self._poll.poll()):
                os.read(self._answers, 1)
                return True
            if self._link.poll():
                break
        return False

    def close(self) -> None:
        """Close this process' copies."""
        os.close(self._records)
        os.close(self._answers)


def _is_float(value: object) -> bool:
    return type(value) is float
