"""The logs of epochs that asynchronous workers leave for rank 0, in one shared segment."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from choros.comm.shm.segment import Segment
from choros.training.async_control.center_snapshots import Snapshots
from choros.training.async_control.control_block import ControlBlock

LINE = 1 << 14  # bytes for the logs of an epoch
Line = tuple[int, dict[str, float], float, list[float]]
_FEW = 256  # values of metrics go along, no more


class EpochLog:
    """Logs of epochs, left by whichever rank ended an epoch last, taken by rank 0.

    Args:
        segment: Segment. For the logs.
        board: ControlBlock.
        snapshots: Snapshots of the center at epochs' ends, or None where no callback reads them.
    """

    def __init__(self, segment: Segment, board: ControlBlock, snapshots: Snapshots | None = None) -> None:
        self.segment, self.board, self.snapshots = segment, board, snapshots
        self.area = segment.array(np.uint8, segment.nbytes, 0)
        self.taken = 0

    def leave(self, epoch: int, logs: dict[str, float], seconds: float, held: list[float]) -> None:
        """Leave one line.

        Args:
            epoch: int. Which has ended.
            logs: its logs.
            seconds: of training until then.
            held: what the variables of metrics hold; left out where it is much.

        Raises:
            OverflowError: the logs of all epochs are longer than was foreseen.
        """
        self.put(json.dumps([epoch, logs, seconds, held if len(held) <= _FEW else []]).encode() + b"\n")

    def put(self, line: bytes) -> None:
        """Leave one line as it is."""
        with self.board.locked():
            end = int(self.board.post.item())
            if end + len(line) > len(self.area):
                raise OverflowError(
                    f"The logs of an epoch take {len(line)} bytes; {LINE} an epoch were set aside, and "
                    f"{len(self.area) - end} are left: log fewer or shorter names."
                )
            self.area[end : end + len(line)] = np.frombuffer(line, np.uint8)
            self.board.post[()] = end + len(line)

    def take(self) -> list[Line]:
        """Return what has come since the last time."""
        text = self.since(self.taken)
        self.taken += len(text)
        return read_lines(text)

    def since(self, taken: int) -> bytes:
        """Return all that has come but for the first bytes."""
        with self.board.locked():
            return self.area[taken : int(self.board.post.item())].tobytes()

    def close(self) -> None:
        """Let the segment go."""
        self.area = np.empty(0, np.uint8)
        self.segment.close()
        if self.snapshots is not None:
            self.snapshots.close()


def read_lines(text: bytes) -> list[Line]:
    r"""Return epochs, their logs, the seconds of training until then, and what the variables of metrics held.

    Example:
        >>> read_lines(b'[0, {"loss": 0.5}, 1.5, [4.0, 8.0]]\n')
        [(0, {'loss': 0.5}, 1.5, [4.0, 8.0])]
    """
    found: list[Any] = [json.loads(line) for line in text.splitlines()]
    return [(int(epoch), logs, seconds, held) for epoch, logs, seconds, held in found]
