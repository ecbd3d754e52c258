"""A host's server of its part of the centre: ``python -m choros.training.serving``, started by the host's first rank.

A process of its own, so that it answers while that rank computes: a thread would wait for Python's lock. It maps the
same memory as the ranks of the host, and ends when the rank that started it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from choros import algorithms
from choros.errors import PeerFailed
from choros.training.far import answer
from choros.training.mail import Mail
from choros.training.noticeboard import Noticeboard
from choros.transport import sharded_state
from choros.transport.segment import Segment
from choros.transport.sharded_centre import Served, serve
from choros.transport.shared_centre import SharedCentre
from choros.transport.tcp.channel import Channel
from choros.transport.tcp.wire import Door

_ENDS = 5.0  # seconds in which a server ends


class Server:
    """The server of this host, as the rank that started it holds it.

    Args:
        told: JSON of what it is to do.
        fds: descriptors that it inherits.

    Attributes:
        place: str. Where the others reach it.

    Raises:
        PeerFailed: it could not start; what it said is above.
    """

    def __init__(self, told: dict[str, Any], fds: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "choros.training.serving"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, "CHOROS_WORKER": "server"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018 - pipes, as asked
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()
        self.place = self._process.stdout.readline().decode().strip()
        if not self.place:
            self.close()
            raise PeerFailed(f"The server of the centre on {os.uname().nodename} did not start: see what it printed.")

    def close(self) -> None:
        """End it; all workers have left."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_ENDS)


def main() -> int:
    """Serve until the rank that started this process closes its end.

    Returns:
        0.
    """
    told = json.loads(sys.stdin.buffer.readline())
    if told["cores"]:
        os.sched_setaffinity(0, told["cores"])
    rule = Served(algorithms.from_config(told["algorithm"]))
    segment = Segment(told["centre"])
    workers, lock = int(told["workers"]), threading.Lock()
    notes: tuple[Noticeboard, Mail] | None = None
    if told["board"] is not None:
        board = Noticeboard(Segment(told["board"]), workers, told["epochs"], told["values"])
        notes = board, Mail(Segment(told["mail"]), board)

    def guest(rank: int, channel: Channel) -> None:
        centre = SharedCentre(segment, rule, rank, workers, timeout=told["timeout"], spin=0.0)

        def reply(head: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
            if notes is not None:
                with lock:  # the board's own lock keeps processes apart, not threads
                    said, back = answer(*notes, head, arrays)
                if said is not None:
                    return said, back
            return sharded_state.answer(centre, head, arrays) or serve(centre, head, arrays)

        channel.answer(reply)

    def welcome(door: Door) -> None:
        while True:
            hello, end = door.next(threading.TIMEOUT_MAX)
            rank = int(hello["rank"])
            channel = Channel(end, f"rank {rank} on {hello['host']}", told["timeout"])
            threading.Thread(target=guest, args=(rank, channel), daemon=True).start()

    with Door(told["address"], bytes.fromhex(told["secret"])) as door:
        threading.Thread(target=welcome, args=(door,), daemon=True).start()
        print(door.place, flush=True)
        sys.stdin.buffer.read()
        os._exit(0)  # guests of a job that was given up may still be there


if __name__ == "__main__":
    sys.exit(main())
