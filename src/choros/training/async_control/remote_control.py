"""The control block and the epoch log for ranks on other hosts, by requests to the host that holds them.

A request may be sent twice, because the server may end before it has replied. So requests are idempotent: a repeated
one adds nothing and writes no second line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from choros.comm.messages import Client, Done, Messages, ask
from choros.training.async_control import center_snapshots
from choros.training.async_control.center_snapshots import RemoteCenterSnapshots
from choros.training.async_control.control_block import ControlBlock, Header, rate_in
from choros.training.async_control.epoch_log import EpochLog, Line, read_lines
from choros.types import Array

_HEADER_SECONDS = 0.05  # for which a header is used again, because each request costs a round trip
_NO_VALUES = np.zeros(0)


@dataclass(frozen=True)
class ReadHeader:
    """Send a rank's count of steps and its request to end; return the header of the control block."""

    rank: int
    steps: int
    end_requested: bool


@dataclass(frozen=True)
class HeaderReply:
    """The words of the header; see ``control_block.Header``."""

    words: list[float]


@dataclass(frozen=True)
class JoinPause:
    """Record that a rank joins a pause, and save its position; without counts it has none to save."""

    rank: int
    number: float
    position: tuple[int, int]
    counts: list[float]
    iterations: int
    metrics: Array


@dataclass(frozen=True)
class ReadPosition:
    """Request the state that a rank saved at a position, or else its newest one."""

    rank: int
    position: tuple[int, int] | None


@dataclass(frozen=True)
class PositionReply:
    """A saved position; with None as ``position`` none is saved."""

    position: tuple[int, int] | None
    iterations: int
    counts: Array
    metrics: Array


@dataclass(frozen=True)
class ReadStepCounts:
    """Request the number of steps of each rank."""


@dataclass(frozen=True)
class StepCountsReply:
    """The number of steps of each rank."""

    counts: Array


@dataclass(frozen=True)
class HasEnded:
    """Ask whether a rank, or with None each rank, has ended an epoch."""

    epoch: int
    rank: int | None


@dataclass(frozen=True)
class AddMetrics:
    """Add a rank's metric state to an epoch; the reply is true for the last rank."""

    epoch: int
    rank: int
    train: Array
    validation: Array


@dataclass(frozen=True)
class BoolReply:
    """The reply to ``HasEnded`` and ``AddMetrics``."""

    value: bool


@dataclass(frozen=True)
class ReadSums:
    """Request the sums of an epoch over ranks."""

    epoch: int


@dataclass(frozen=True)
class SumsReply:
    """Metric states of training, and figures of validation, summed over ranks."""

    train: Array
    validation: Array


@dataclass(frozen=True)
class WriteLog:
    """Write the line of an epoch to the epoch log."""

    epoch: int
    logs: dict[str, float]
    seconds: float
    held: list[float]


@dataclass(frozen=True)
class ReadLog:
    """Request the content of the epoch log after a number of bytes."""

    begin: int


@dataclass(frozen=True)
class LogReply:
    """Lines of the epoch log."""

    text: str


REQUESTS = Messages(
    ReadHeader, JoinPause, ReadPosition, ReadStepCounts, HasEnded, AddMetrics, ReadSums, WriteLog, ReadLog
)


class RemoteControlBlock:
    """A ``ControlBlock`` for a worker on another host.

    Args:
        client: connection with the host that holds the control block.
    """

    def __init__(self, client: Client) -> None:
        self._client, self._version, self._read_at = client, 0.0, 0.0
        self._header: list[float] = []
        self._rank, self._steps, self._end_requested = 0, 0, False
        # The last arguments of ``save_position``.
        self._unsent: tuple[tuple[int, int], int, list[float], Array] | None = None

    def _control(self, reload: bool = False) -> list[float]:
        if reload or not self._header or time.monotonic() - self._read_at > _HEADER_SECONDS:
            self._header = ask(
                self._client, ReadHeader(self._rank, self._steps, self._end_requested), HeaderReply
            ).words
            self._read_at = time.monotonic()
        return self._header

    def count_step(self, rank: int) -> None:
        """Count a step. The next request sends the count."""
        self._rank, self._steps = rank, self._steps + 1

    def request_end(self) -> None:
        """Request a checkpoint and the end of training.

        The next request sends it, because a signal handler calls this and must not use the connection.
        """
        self._end_requested = True

    @property
    def exit_code(self) -> int | None:
        """Exit code with which ranks must end their process; None if they continue."""
        code = self._control()[Header.EXIT_CODE]
        return int(code) - 1 if code else None

    @property
    def requested_pause(self) -> int:
        """Number of the requested pause, or 0."""
        return int(self._control()[Header.PAUSE])

    @property
    def in_callbacks(self) -> bool:
        """True while rank 0 runs callbacks, and so makes no step."""
        return bool(self._control()[Header.IN_CALLBACKS])

    def join_pause(self, rank: int, number: float) -> None:
        """Record that this rank makes no exchange before the pause of this number is over, and send its saved state.

        The next access reads a new header.
        """
        position, iterations, stats, state = self._unsent or ((-1, 0), 0, [], _NO_VALUES)
        ask(self._client, JoinPause(rank, number, position, stats, iterations, state), Done)
        # The saved header shows the state from before the pause.
        self._read_at = 0.0

    def save_position(
        self, rank: int, position: tuple[int, int], iterations: int, stats: list[float], state: Array
    ) -> None:
        """Hold the arguments of ``ControlBlock.save_position`` until ``join_pause`` sends them."""
        # Only a checkpoint needs the position, and each checkpoint makes a pause. A request at each exchange would cost
        # a round trip.
        self._unsent = position, iterations, stats, np.array(state, np.float64)

    def saved_position(
        self, rank: int, position: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], int, Array, Array] | None:
        """Return a state that this rank saved in an earlier process; see ``ControlBlock.saved_position``."""
        reply = ask(self._client, ReadPosition(rank, position), PositionReply)
        if reply.position is None:
            return None
        # Copies, because the arrays of a reply are valid only until the next request.
        return reply.position, reply.iterations, reply.counts.copy(), reply.metrics.copy()

    def ended(self, epoch: int, rank: int) -> bool:
        """Return whether a rank has ended an epoch."""
        return ask(self._client, HasEnded(epoch, rank), BoolReply).value

    def complete(self, epoch: int) -> bool:
        """Return whether all ranks have ended an epoch."""
        return ask(self._client, HasEnded(epoch, None), BoolReply).value

    def step_counts(self) -> Array:
        """Return the number of steps of each rank, as far as the host of the control block knows it."""
        self._control(reload=True)  # sends the steps of this rank first
        return ask(self._client, ReadStepCounts(), StepCountsReply).counts.copy()

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
        return ask(self._client, AddMetrics(epoch, rank, train, validation), BoolReply).value

    def sums(self, epoch: int) -> tuple[Array, Array]:
        """Return an epoch's sums over ranks: metric states of training, and figures of validation."""
        sums = ask(self._client, ReadSums(epoch), SumsReply)
        return sums.train.copy(), sums.validation.copy()

    def close(self) -> None:
        """Do nothing: the connection belongs to the center."""


class RemoteEpochLog:
    """An ``EpochLog`` for a worker on another host.

    Args:
        client: connection with the host that holds the log.
        watched: bool. Whether callbacks read the center of epochs' ends. Defaults to False.
    """

    def __init__(self, client: Client, watched: bool = False) -> None:
        self._client, self._taken = client, 0
        self.snapshots = RemoteCenterSnapshots(client) if watched else None

    def write(self, epoch: int, logs: dict[str, float], seconds: float, metric_values: list[float]) -> None:
        """Write the line of an epoch; see ``EpochLog.write``."""
        ask(self._client, WriteLog(epoch, logs, seconds, metric_values), Done)

    def read_new(self) -> list[Line]:
        """Return the lines written since the last call."""
        text = ask(self._client, ReadLog(self._taken), LogReply).text.encode()
        self._taken += len(text)
        return read_lines(text)

    def close(self) -> None:
        """Do nothing: the connection belongs to the center."""


def protocols(control_block: ControlBlock, epoch_log: EpochLog) -> list[tuple[Messages, Callable[[Any], object]]]:
    """Return the protocols of ``RemoteControlBlock``, ``RemoteEpochLog`` and their snapshots, for a ``Router``.

    Args:
        control_block: the control block of this host.
        epoch_log: the epoch log of this host.
    """
    lock = threading.Lock()  # the control block's file lock excludes other processes, but not threads of this process

    def locked(serve: Callable[[Any], object]) -> Callable[[Any], object]:
        def serve_locked(request: Any) -> object:
            with lock:
                return serve(request)

        return serve_locked

    served = [(REQUESTS, locked(partial(_reply, control_block, epoch_log)))]
    if epoch_log.snapshots is not None:
        served.append((center_snapshots.REQUESTS, locked(partial(center_snapshots.reply, epoch_log.snapshots))))
    return served


def _reply(control_block: ControlBlock, epoch_log: EpochLog, request: Any) -> object:
    match request:
        case ReadHeader():
            # Before its first step a client does not know its rank, and sends 0 steps for rank 0.
            if request.steps:
                control_block.set_steps(request.rank, request.steps)
            if request.end_requested:
                control_block.request_end()
            return HeaderReply(control_block.header())
        case JoinPause():
            if request.counts:
                control_block.save_position(
                    request.rank, request.position, request.iterations, request.counts, request.metrics
                )
            control_block.join_pause(request.rank, request.number)
            return Done()
        case ReadPosition(rank, position):
            saved = control_block.saved_position(rank, position)
            return PositionReply(*(saved or (None, 0, _NO_VALUES, _NO_VALUES)))
        case ReadStepCounts():
            return StepCountsReply(control_block.step_counts())
        case HasEnded(epoch, rank):
            ended = control_block.complete(epoch) if rank is None else control_block.ended(epoch, rank)
            return BoolReply(ended)
        case AddMetrics(epoch, rank, train, validation):
            parts = (np.asarray(array, np.float64) for array in (train, validation))
            return BoolReply(control_block.add(epoch, rank, *parts))
        case ReadSums(epoch):
            return SumsReply(*control_block.sums(epoch))
        case WriteLog():
            # The request may be a repeated one. Only one rank writes the line of an epoch.
            if all(line[0] != request.epoch for line in read_lines(epoch_log.since(0))):
                epoch_log.write(request.epoch, request.logs, request.seconds, request.held)
            return Done()
        case ReadLog(begin):
            return LogReply(epoch_log.since(begin).decode())
    raise AssertionError(f"no reply to {type(request).__name__}")
