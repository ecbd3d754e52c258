"""The output of a task, sent to the driver line by line; if the driver is not reached, only in the executor's log."""

from __future__ import annotations

import os
import queue
import sys
import threading
from contextlib import suppress
from typing import Any

from choros.comm.tcp.auth_socket import dial
from choros.comm.tcp.rpc import RpcConnection
from choros.errors import ChorosError

_DIAL = 5.0  # seconds to reach home for
_ENDS = 5.0  # seconds that the last lines may take


class _Tee:
    """A stream that also gives whole lines to ``lines``."""

    def __init__(self, stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
        self._stream, self._lines, self._part = stream, lines, ""

    def write(self, text: str) -> int:
        """Write, and pass on the lines that are whole."""
        *whole, self._part = (self._part + text).split("\n")
        for line in whole:
            self._lines.put(line.rpartition("\r")[2])
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LogForwarder:
    """While it is entered, what this process prints is also sent to the caller.

    Args:
        home: where the caller is, as ``choros.training.executors.callback_server.CallbackServer.opened`` gives it.
        rank: int. Whose lines they are.
    """

    def __init__(self, home: dict[str, Any], rank: int) -> None:
        self.home, self.rank = home, rank
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="choros-saying", daemon=True)

    def __enter__(self) -> None:
        self._given = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Tee(one, self._lines) for one in self._given)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._given
        self._lines.put(None)
        self._thread.join(_ENDS)

    def _send(self) -> None:
        hello = {"rank": self.rank, "host": os.uname().nodename}
        with suppress(ChorosError):
            end = dial(self.home["place"], bytes.fromhex(self.home["secret"]), hello, _DIAL)
            line = RpcConnection(end, "The driver", self.home["timeout"])
            while (text := self._lines.get()) is not None:
                line.request({"said": text})
            line.close()
