"""The logs of epochs that asynchronous workers write for rank 0, in one shared segment."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from choros.comm.shm.segment import Segment
from choros.training.async_control.center_snapshots import CenterSnapshots
from choros.training.async_control.control_block import ControlBlock

LINE = 1 << 14  # bytes for the logs of an epoch
# The epoch, its logs, the seconds of training so far, the values of the metrics' variables.
Line = tuple[int, dict[str, float], float, list[float]]
_MAX_METRIC_VALUES = 256  # in a line, whose space is limited


class EpochLog:
    """Logs of epochs. The rank that ends an epoch last writes them; rank 0 reads them.

    Args:
        segment: Segment. Memory for the logs, one JSON line per epoch.
        control_block: ControlBlock. Its lock guards the memory.
        snapshots: the center at epochs' ends, or None if no callback reads them.
    """

    def __init__(self, segment: Segment, control_block: ControlBlock, snapshots: CenterSnapshots | None = None) -> None:
        self.segment, self.control_block, self.snapshots = segment, control_block, snapshots
        self.area = segment.array(np.uint8, segment.nbytes, 0)
        self.taken = 0

    def write(self, epoch: int, logs: dict[str, float], seconds: float, metric_values: list[float]) -> None:
        """Write the line of an epoch.

        Args:
            epoch: int. The epoch that has ended.
            logs: its logs.
            seconds: seconds of training so far.
            metric_values: values of the metrics' variables. Not written if there are more than 256.

        Raises:
            OverflowError: the logs need more memory than is free.
        """
        self.append_line(
            json.dumps(
                [epoch, logs, seconds, metric_values if len(metric_values) <= _MAX_METRIC_VALUES else []]
            ).encode()
            + b"\n"
        )

    def append_line(self, line: bytes) -> None:
        """Append a line to the segment."""
        with self.control_block.locked():
            end = int(self.control_block.log_bytes.item())
            if end + len(line) > len(self.area):
                raise OverflowError(
                    f"The logs of an epoch take {len(line)} bytes, and {len(self.area) - end} are free "
                    f"({LINE} for each epoch): log fewer values, or shorter names."
                )
            # The length comes last: a rank that is killed between the two stores has added nothing.
            self.area[end : end + len(line)] = np.frombuffer(line, np.uint8)
            self.control_block.log_bytes[()] = end + len(line)

    def read_new(self) -> list[Line]:
        """Return the lines written since the last call."""
        text = self.since(self.taken)
        self.taken += len(text)
        return read_lines(text)

    def since(self, taken: int) -> bytes:
        """Return the content after the first ``taken`` bytes."""
        with self.control_block.locked():
            return self.area[taken : int(self.control_block.log_bytes.item())].tobytes()

    def close(self) -> None:
        """Release the segment."""
        self.area = np.empty(0, np.uint8)
        self.segment.close()
        if self.snapshots is not None:
            self.snapshots.close()


def read_lines(text: bytes) -> list[Line]:
    r"""Return for each line the epoch, its logs, the seconds of training so far, and the metrics' variables.

    Example:
        >>> read_lines(b'[0, {"loss": 0.5}, 1.5, [4.0, 8.0]]\n')
        [(0, {'loss': 0.5}, 1.5, [4.0, 8.0])]
    """
    epoch_logs: list[Any] = [json.loads(line) for line in text.splitlines()]
    return [(int(epoch), logs, seconds, metric_values) for epoch, logs, seconds, metric_values in epoch_logs]
