"""The control block and the epoch log for ranks on other hosts, by requests to the host that holds them.

A request may be sent twice, because the server may end before it has replied. So requests are idempotent: a repeated
one adds nothing and writes no second line.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.training.async_control.center_snapshots import RemoteSnapshots
from choros.training.async_control.center_snapshots import answer as answer_snapshots
from choros.training.async_control.control_block import ControlBlock, Header, rate_in
from choros.training.async_control.epoch_log import EpochLog, Line, read_lines
from choros.types import Array

if TYPE_CHECKING:
    from choros.comm.tcp.reconnecting_client import ReconnectingClient
    from choros.comm.tcp.rpc import RpcConnection

_FRESH = 0.05  # seconds for which a header that was read is used again
_NONE = np.zeros(0)


class RemoteControlBlock:
    """A ``ControlBlock`` for a worker on another host.

    Args:
        line: connection with the host that holds the control block.
    """

    def __init__(self, line: RpcConnection | ReconnectingClient) -> None:
        self._line, self._version, self._read = line, 0.0, 0.0
        self._head: list[float] = []
        self._rank, self._beats, self._asks = 0, 0, False
        self._own: tuple[tuple[int, int], int, list[float], Array] | None = (
            None  # the last arguments of ``save_position``
        )

    def _control(self, fresh: bool = False) -> list[float]:
        if fresh or not self._head or time.monotonic() - self._read > _FRESH:
            message = {"op": "head", "rank": self._rank, "beats": self._beats, "asks": self._asks}
            self._head = self._line.request(message)[0]["head"]
            self._read = time.monotonic()
        return self._head

    def count_step(self, rank: int) -> None:
        """Count a step. The next request sends the count."""
        self._rank, self._beats = rank, self._beats + 1

    def request_end(self) -> None:
        """Request a checkpoint and the end of training.

        The next request sends it, because a signal handler calls this and must not use the connection.
        """
        self._asks = True

    @property
    def exit_code(self) -> int | None:
        """Exit code with which ranks must end their process; None if they continue."""
        code = self._control()[Header.EXIT_CODE]
        return int(code) - 1 if code else None

    @property
    def requested_pause(self) -> int:
        """Number of the requested pause, or 0."""
        return int(self._control()[Header.PAUSE])

    def join_pause(self, rank: int, number: float) -> None:
        """Record that this rank makes no exchange before the pause of this number is over, and send its saved state.

        The next access reads a new header.
        """
        place, iterations, tally, state = self._own or ((-1, 0), 0, [], _NONE)
        message = {
            "op": "rest",
            "rank": rank,
            "number": number,
            "place": place,
            "tally": tally,
            "iterations": iterations,
        }
        self._line.request(message, [state])
        self._read = 0.0

    def save_position(
        self, rank: int, place: tuple[int, int], iterations: int, tally: list[float], state: Array
    ) -> None:
        """Hold the arguments of ``ControlBlock.save_position`` until ``join_pause`` sends them."""
        self._own = place, iterations, tally, np.array(state, np.float64)

    def saved_position(self, rank: int) -> tuple[tuple[int, int], int, Array, Array] | None:
        """Return the state that this rank saved last, in an earlier process; see ``ControlBlock.saved_position``."""
        header, arrays = self._line.request({"op": "left", "rank": rank})
        if not arrays:
            return None
        epoch, batch = header["place"]
        return (int(epoch), int(batch)), int(header["iterations"]), arrays[0].copy(), arrays[1].copy()

    def ended(self, epoch: int, rank: int) -> bool:
        """Return whether a rank has ended an epoch."""
        return bool(self._line.request({"op": "ended", "epoch": epoch, "rank": rank})[0]["ended"])

    def complete(self, epoch: int) -> bool:
        """Return whether all ranks have ended an epoch."""
        return bool(self._line.request({"op": "complete", "epoch": epoch})[0]["complete"])

    def step_counts(self) -> Array:
        """Return the number of steps of each rank, as far as the host of the control block knows it."""
        self._control(fresh=True)  # sends the steps of this rank first
        beats: Array = self._line.request({"op": "beats"})[1][0].copy()
        return beats

    @property
    def stopped(self) -> bool:
        """True if rank 0's callbacks have requested to stop."""
        return bool(self._control()[Header.STOP])

    @property
    def first_unreported_epoch(self) -> int:
        """First epoch whose end is not reported after a stop."""
        return int(self._control()[Header.FIRST_UNREPORTED_EPOCH])

    @property
    def allowed_epoch(self) -> int:
        """Latest epoch that may begin, if workers wait for each other at an epoch's end."""
        return int(self._control()[Header.ALLOWED_EPOCH])

    def rate(self) -> float | None:
        """Return the latest learning rate if there was a control message since the last call, else None."""
        header = self._control()
        if header[Header.VERSION] == self._version:
            return None
        self._version = header[Header.VERSION]
        return rate_in(header)

    def add(self, epoch: int, rank: int, train: Array, validation: Array) -> bool:
        """Add a rank's metric state to an epoch. Return True for the last rank to end it; see ``ControlBlock.add``."""
        return bool(self._line.request({"op": "add", "epoch": epoch, "rank": rank}, [train, validation])[0]["complete"])

    def sums(self, epoch: int) -> tuple[Array, Array]:
        """Return an epoch's sums over ranks: metric states of training, and figures of validation."""
        train, validation = self._line.request({"op": "sums", "epoch": epoch})[1]
        return train.copy(), validation.copy()

    def close(self) -> None:
        """Do nothing: the connection belongs to the center."""


class RemoteEpochLog:
    """An ``EpochLog`` for a worker on another host.

    Args:
        line: connection with the host that holds the log.
        watched: bool. Whether callbacks read the center of epochs' ends. Defaults to False.
    """

    def __init__(self, line: RpcConnection | ReconnectingClient, watched: bool = False) -> None:
        self._line, self._taken = line, 0
        self.snapshots = RemoteSnapshots(line) if watched else None

    def write(self, epoch: int, logs: dict[str, float], seconds: float, held: list[float]) -> None:
        """Write the line of an epoch; see ``EpochLog.write``."""
        self._line.request({"op": "leave", "epoch": epoch, "logs": logs, "seconds": seconds, "held": held})

    def read_new(self) -> list[Line]:
        """Return the lines written since the last call."""
        text = str(self._line.request({"op": "since", "taken": self._taken})[0]["text"]).encode()
        self._taken += len(text)
        return read_lines(text)

    def close(self) -> None:
        """Do nothing: the connection belongs to the center."""


def answer(
    control_block: ControlBlock, epoch_log: EpochLog, head: dict[str, Any], arrays: list[Array]
) -> tuple[Any, list[Array]]:
    """Return the reply to a request of a ``RemoteControlBlock`` or a ``RemoteEpochLog``; None for other requests.

    Args:
        control_block: the control block of this host.
        epoch_log: the epoch log of this host.
        head: the request; "op" is its name.
        arrays: the arrays of the request: metric states, or the center and the moving statistics of a snapshot.
    """
    op = head["op"]
    if op == "head":
        if head["beats"]:
            control_block.set_steps(int(head["rank"]), int(head["beats"]))
        if head["asks"]:
            control_block.request_end()
        return {"head": control_block.header()}, []
    if op == "beats":
        return {}, [control_block.step_counts()]
    if op == "rest":
        rank = int(head["rank"])
        if head["tally"]:
            epoch, batch = head["place"]
            control_block.save_position(
                rank, (int(epoch), int(batch)), int(head["iterations"]), head["tally"], arrays[0]
            )
        control_block.join_pause(rank, float(head["number"]))
        return {}, []
    if op == "left":
        saved = control_block.saved_position(int(head["rank"]))
        return ({"place": saved[0], "iterations": saved[1]}, list(saved[2:])) if saved else ({}, [])
    if op == "ended":
        return {"ended": control_block.ended(int(head["epoch"]), int(head["rank"]))}, []
    if op == "complete":
        return {"complete": control_block.complete(int(head["epoch"]))}, []
    if op == "add":
        parts = (np.asarray(a, np.float64) for a in arrays)
        return {"complete": control_block.add(int(head["epoch"]), int(head["rank"]), *parts)}, []
    if op == "sums":
        return {}, list(control_block.sums(int(head["epoch"])))
    if op == "leave":
        # The request may be a repeated one. Only one rank writes the line of an epoch.
        if all(line[0] != head["epoch"] for line in read_lines(epoch_log.since(0))):
            epoch_log.write(int(head["epoch"]), head["logs"], float(head["seconds"]), head["held"])
        return {}, []
    if op == "since":
        return {"text": epoch_log.since(int(head["taken"])).decode()}, []
    if epoch_log.snapshots is not None:
        return answer_snapshots(epoch_log.snapshots, head, arrays)
    return None, []
