"""The timeline: one file in which every collective and every reduction of every rank can be looked at.

Each rank keeps what it did as tuples in memory; they become text when the recording stops, and rank 0 puts the ranks'
texts into one file. If the ranks cannot meet any more, each leaves its own part beside it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import zlib
from collections import deque
from contextlib import suppress
from types import FrameType

from choros.errors import ChorosError, InvalidInputError, RankMismatchError
from choros.hvd import trace_format
from choros.hvd.context import collectives, context, rank, size

_MOST = 1_000_000  # events that a rank keeps, about 200 MB
_now: list[Recording] = []
_at_exit: list[bool] = []


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what the ranks do together from now on. Every rank calls it; rank 0's arguments count.

    ``stop_timeline`` (or ``shutdown``, or the end of the script) writes one file of Chrome's trace events, which
    ui.perfetto.dev and chrome://tracing open: one lane a rank; in it each collective and each reduction of an
    optimizer under the tensor's name, with its bytes, and inside of it the waits for the other ranks and the time
    spent reducing; in ``fit`` also each wait for the next batch (``data_us`` of its step).
    ``HOROVOD_TIMELINE=file`` does it for a whole script, from ``init`` on.

    The lanes have one clock: on one machine the kernel's monotonic one, which all its processes share; between
    machines it is set by their wall clocks, so lanes of different machines are shifted by what those differ.

    A rank keeps its last 1,000,000 events, some four for a reduction. If ranks fail, each of the others leaves its
    part beside the file, as ``timeline.rank-1.json``; also when it is sent SIGTERM, where that had no other handler.

    Args:
        file_path: where rank 0 writes. What is there is replaced when the recording stops.
        mark_cycles: bool. Also mark each step of an optimizer (each reduction of its gradients) by an instant event.
            Horovod marks the cycles of its background thread; here there is none.

    Raises:
        ValueError: before ``init``.
        InvalidInputError: on every rank, if one of them is recording already, or rank 0 cannot write there.
        RankMismatchError: on every rank, if one of them makes another call.

    Example:
        >>> import json, tempfile, choros.hvd as hvd
        >>> hvd.init()
        >>> with tempfile.TemporaryDirectory() as room:
        ...     hvd.start_timeline(f"{room}/timeline.json")
        ...     sums = hvd.allreduce([1.0, 2.0], op=hvd.Sum, name="loss")
        ...     hvd.stop_timeline()
        ...     with open(f"{room}/timeline.json") as file:
        ...         events = json.load(file)["traceEvents"]
        >>> [event["name"] for event in events if event.get("cat") == "call"]
        ["allreduce 'loss' of float64 (2,) by Sum"]
    """
    context()
    path, problem = _place(file_path)
    if _now:
        problem = f"it is recording one already, into {_now[0].path}: call hvd.stop_timeline() first"
    mine = [path, bool(mark_cycles), problem, trace_format.clock()]
    said = collectives().allgather_object(mine, name="start of the timeline")
    problems = [f"rank {r}: {told}" for r, (_, _, told, _) in enumerate(said) if told]
    if problems:
        raise InvalidInputError(f"No timeline was started. {'; '.join(problems)}.")
    where, mark, *_ = said[0]
    _now.append(Recording(where, mark, trace_format.zero_of(rank(), [theirs for *_, theirs in said])))
    if not _at_exit:
        _at_exit.append(True)
        atexit.register(_exit)


def stop_timeline() -> None:
    """Stop recording and write the file; it is there when this returns. Every rank calls it.

    Raises:
        ValueError: before ``init``.
        InvalidInputError: nothing is recorded; on every rank, if rank 0 cannot write the file.
        RankMismatchError: on every rank, if one of them makes another call; the recording goes on.
        PeerLostError, CommTimeoutError: ranks have gone; this one has left its part beside the file.
    """
    calls = collectives()
    if not _now:
        raise InvalidInputError(
            f"Rank {rank()} records no timeline: call hvd.start_timeline(path) first, on every rank."
        )
    recording = _now[0]
    recording.follow(False)
    try:
        lanes = calls.allgather_object(zlib.compress(recording.lane().encode(), 1), name="stop of the timeline")
    except (RankMismatchError, InvalidInputError):
        recording.follow(True)
        raise
    except BaseException as error:
        recording.leave_part(type(error).__name__)
        raise
    recording.end()
    problem = ""
    if calls.rank == 0:
        try:
            trace_format.write(recording.path, (zlib.decompress(each).decode() for each in lanes))
        except OSError as error:
            problem = f"Rank 0 cannot write the timeline to {recording.path}: {error.strerror}."
    problem = calls.broadcast_object(problem, 0, name="file of the timeline")
    if problem:
        raise InvalidInputError(problem)


def finish() -> None:
    """Stop recording, where something is recorded, and complain on stderr instead of raising."""
    if not _now:
        return
    try:
        stop_timeline()
    except (ChorosError, OSError) as error:
        print(f"choros: rank {rank()}: {error}", file=sys.stderr, flush=True)
        if _now:
            _now[0].leave_part(type(error).__name__)


class Recording:
    """The events that this rank records.

    Args:
        path: str. The file.
        mark: bool. Whether it marks steps.
        zero: int. What this rank's clock shows where the lanes begin.
    """

    def __init__(self, path: str, mark: bool, zero: int) -> None:
        self.path, self.mark, self.zero, self.rank = path, mark, zero, rank()
        self._process = os.getpid()
        self._events: deque[trace_format.Event] = deque(maxlen=_MOST)
        stem, suffix = os.path.splitext(path)
        self._part = f"{stem}.rank-{self.rank}{suffix}"
        with suppress(OSError):
            os.unlink(self._part)  # of a recording before
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_term)
        self.follow(True)

    @property
    def own(self) -> bool:
        """True if this is the process that began, and none that it forked."""
        return os.getpid() == self._process

    def follow(self, on: bool) -> None:
        """Take down what the groups of all process sets do, or no more."""
        for one in context().sets.values():
            if one.collectives is not None:
                one.collectives.group.trace = self._events.append if on else None

    def lane(self) -> str:
        """Return the recorded events."""
        return trace_format.lane(self.rank, self._events.copy(), self.zero, self.mark, len(self._events) == _MOST)

    def leave_part(self, why: str) -> None:
        """Write this rank's part beside the file, and end. A SIGTERM meanwhile writes it once more."""
        self.follow(False)
        try:
            trace_format.write(self._part, [self.lane()])
            said = f"left its part of the timeline in {self._part}, as the ranks do not meet any more ({why})"
        except OSError as error:
            said = f"cannot write its part of the timeline to {self._part}: {error.strerror}"
        line = f"choros: rank {self.rank} on {os.uname().nodename} {said}"
        try:
            print(line, file=sys.stderr, flush=True)
        except RuntimeError:  # a signal's handler may not print while a line is being printed
            os.write(2, f"\n{line}\n".encode())
        self.end()  # not before: from here on a SIGTERM ends this process at once

    def end(self) -> None:
        """Record no more."""
        self.follow(False)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _now.clear()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        """The job is ended: leave what there is, and end as if nothing had handled the signal."""
        if self.own:
            self.leave_part("SIGTERM")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _place(file_path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the file, and why it cannot be written, or ``""``; nothing is written yet."""
    try:
        path = os.path.abspath(os.fsdecode(file_path))
        if rank() == 0:
            there = os.path.exists(path)
            with open(path, "a"):
                pass
            if not there:
                os.unlink(path)
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return str(file_path), f"it cannot write {file_path!r}: {reason}"
    return path, ""


def _exit() -> None:
    """The script ends: with the others, or after an error of its own, of which they know nothing yet."""
    if not _now or not _now[0].own:
        return
    if size() > 1 and getattr(sys, "last_value", None) is not None:
        _now[0].leave_part(type(sys.last_value).__name__)
    else:
        finish()
