"""Forwarding of a task's output to the driver, line by line. Without a connection it is only in the executor's log."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import suppress
from typing import Any

from choros.comm.messages import header_of
from choros.comm.tcp.rpc import RpcAddress
from choros.errors import ChorosError
from choros.training.worker.messages import CallbackGreeting, OutputLine

_DIAL = 5.0  # seconds to connect to the driver
_ENDS = 5.0  # seconds to send the last lines


class _Tee:
    """A wrapper for a stream that also puts complete lines into a queue."""

    def __init__(self, stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
        self._stream, self._lines, self._part = stream, lines, ""

    def write(self, text: str) -> int:
        """Write to the stream, and put complete lines into the queue."""
        *complete, self._part = (self._part + text).split("\n")
        for line in complete:
            # A progress bar writes its line again and again. Only the last state is sent.
            self._lines.put(line.rpartition("\r")[2])
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LogForwarder:
    """A context in which the output of this process is also sent to the driver.

    Args:
        home: the address of the driver, a result of
            ``choros.training.executors.callback_server.CallbackServer.opened``.
        rank: int. The rank of this task.
    """

    def __init__(self, home: RpcAddress, rank: int) -> None:
        self.home, self.rank = home, rank
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="choros-log", daemon=True)

    def __enter__(self) -> None:
        self._given = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Tee(stream, self._lines) for stream in self._given)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._given
        self._lines.put(None)
        self._thread.join(_ENDS)

    def _send(self) -> None:
        with suppress(ChorosError):
            line = self.home.dial(CallbackGreeting(self.rank), "The driver", _DIAL)
            while (text := self._lines.get()) is not None:
                line.request(header_of(OutputLine(text)))
            line.close()
