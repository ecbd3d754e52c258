"""The driver's connections to the processes of an elastic job: one socket each, on which both ends may send first."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from choros.errors import ChorosError, MeetingTimeout
from choros.transport.tcp.channel import Channel
from choros.transport.tcp.wire import Door

_NEVER = 1e9  # seconds: a socket that waits as long as there is somebody at the other end


class Desk:
    """Takes in who knows the job's secret, and what they say.

    Args:
        door: Door. Where they come; closed with this.
        called: is called, from a thread, when there is something in ``heard``.

    Attributes:
        heard: queue of (number of the process, what it says). A process that has come says ``{"say": "here"}``.

    Example:
        >>> from choros.transport.tcp.wire import dial
        >>> desk = Desk(Door("127.0.0.1", b"a secret"))
        >>> far = Channel(dial(desk.place, b"a secret", {"member": 3}, 5.0), "the desk", 5.0)
        >>> desk.heard.get(timeout=5.0), desk.tell(3, {"say": "good day"}), far.hear()[0]
        ((3, {'say': 'here'}), True, {'say': 'good day'})
        >>> desk.close(), far.close()
        (None, None)
    """

    def __init__(self, door: Door, called: Callable[[], object] = lambda: None) -> None:
        self.place, self._door, self._called = door.place, door, called
        self.heard: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._lines: dict[int, Channel] = {}
        self._over = False
        threading.Thread(target=self._welcome, name="choros-desk", daemon=True).start()

    def tell(self, number: int, head: dict[str, Any]) -> bool:
        """Say something to a process; whether it is there to hear it."""
        line = self._lines.get(number)
        if line is None:
            return False
        try:
            line.tell(head)
        except (ChorosError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Let nobody else in, and end all conversations."""
        self._over = True
        self._door.close()
        for line in list(self._lines.values()):
            line.close()

    def _welcome(self) -> None:
        while not self._over:
            try:
                hello, end = self._door.next(1.0)
            except MeetingTimeout:
                continue
            number = hello.get("member")
            if not isinstance(number, int) or number in self._lines:
                end.close()
                continue
            line = self._lines[number] = Channel(end, f"process {number} of the job", _NEVER)
            self._hear(number, {"say": "here"})
            threading.Thread(target=self._listen, args=(number, line), name="choros-listen", daemon=True).start()

    def _listen(self, number: int, line: Channel) -> None:
        with suppress(ChorosError, ValueError):  # it has gone, as its end will tell
            while True:
                self._hear(number, line.hear()[0])

    def _hear(self, number: int, head: dict[str, Any]) -> None:
        self.heard.put((number, head))
        self._called()
