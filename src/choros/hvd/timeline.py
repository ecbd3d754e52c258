"""The timeline: one trace file with every collective and every reduction of every rank.

Each rank keeps events as tuples in memory. When the recording stops, each rank formats its events, and rank 0 writes
all of them into one file. If the ranks have lost each other, each rank writes a separate part beside that file.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from choros.comm import trace_format
from choros.comm.tracing import EventLog
from choros.console import write_line
from choros.errors import ChorosError, InvalidInputError, RankMismatchError
from choros.hvd.context import collectives, context, rank, size

logger = logging.getLogger(__name__)

_recordings: list[Recording] = []
_at_exit: list[bool] = []


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record collectives and reductions. Every rank calls it; the arguments of rank 0 are used.

    ``stop_timeline`` (or ``shutdown``, or the end of the script) writes one file of Chrome trace events for
    ui.perfetto.dev and chrome://tracing. It has one lane per rank. A lane shows each collective and each reduction
    of an optimizer under the tensor's name, with its bytes. Inside each event are the waits for other ranks and the
    time spent reducing. In ``fit`` the lane also shows each wait for the next batch (``data_us`` of its step).
    ``HOROVOD_TIMELINE=file`` records a whole script, from ``init`` on.

    Ranks of one host share the kernel's monotonic clock. Hosts are aligned by their wall clocks, so lanes of different
    hosts are shifted by the difference of these clocks.

    A rank keeps its last 1,000,000 events, about four per reduction. If ranks fail, each other rank writes its part
    beside the file, as ``timeline.rank-1.json``. A rank does so also on SIGTERM, if that signal had no handler before.

    Args:
        file_path: the file that rank 0 writes. An existing file is replaced when the recording stops.
        mark_cycles: bool. Also mark each reduction of an optimizer's gradients by an instant event. (Horovod marks the
            cycles of its background thread, which does not exist here.) Defaults to False.

    Raises:
        ValueError: before ``init``.
        InvalidInputError: on every rank, if a rank is already recording, or rank 0 cannot write the file.
        RankMismatchError: on every rank, if a rank makes another call.

    Example:
        >>> import json, tempfile, choros.hvd as hvd
        >>> hvd.init()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hvd.start_timeline(f"{folder}/timeline.json")
        ...     sums = hvd.allreduce([1.0, 2.0], op=hvd.Sum, name="loss")
        ...     hvd.stop_timeline()
        ...     with open(f"{folder}/timeline.json") as file:
        ...         events = json.load(file)["traceEvents"]
        >>> [event["name"] for event in events if event.get("cat") == "call"]
        ["allreduce 'loss' of float64 (2,) by Sum"]
    """
    context()
    path, problem = _checked_path(file_path)
    if _recordings:
        problem = f"it is recording one already, into {_recordings[0].path}: call hvd.stop_timeline() first"
    local = [path, bool(mark_cycles), problem, trace_format.clock()]
    reports = collectives().allgather_object(local, name="start of the timeline")
    problems = [f"rank {r}: {reason}" for r, (_, _, reason, _) in enumerate(reports) if reason]
    if problems:
        raise InvalidInputError(f"No timeline was started. {'; '.join(problems)}.")
    root_path, mark, *_ = reports[0]
    _recordings.append(Recording(root_path, mark, trace_format.zero_of(rank(), [clock for *_, clock in reports])))
    if not _at_exit:
        _at_exit.append(True)
        atexit.register(_exit)


def stop_timeline() -> None:
    """Stop recording and write the file, which is complete when this returns. Every rank calls it.

    Raises:
        ValueError: before ``init``.
        InvalidInputError: nothing is recorded; on every rank, if rank 0 cannot write the file.
        RankMismatchError: on every rank, if a rank makes another call; the recording continues.
        PeerLostError, CommTimeoutError: other ranks are lost; this rank has written its part beside the file.
    """
    calls = collectives()
    if not _recordings:
        raise InvalidInputError(
            f"Rank {rank()} records no timeline: call hvd.start_timeline(path) first, on every rank."
        )
    recording = _recordings[0]
    # The collective calls below do not belong to the recording.
    recording.follow(False)
    try:
        lanes = calls.allgather_object(recording.lane(), name="stop of the timeline")
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
            trace_format.write(recording.path, lanes)
        except OSError as error:
            problem = f"Rank 0 cannot write the timeline to {recording.path}: {error.strerror}."
    # All ranks raise the error. Otherwise only rank 0 would stop, and the others would wait for it in their next call.
    problem = calls.broadcast_object(problem, 0, name="file of the timeline")
    if problem:
        raise InvalidInputError(problem)


def finish() -> None:
    """Stop the recording, if there is one; log an error instead of raising it."""
    if not _recordings:
        return
    try:
        stop_timeline()
    except (ChorosError, OSError) as error:
        logger.error(f"rank {rank()}: {error}")
        if _recordings:
            _recordings[0].leave_part(type(error).__name__)


class Recording:
    """The events that this rank records.

    Args:
        path: str. The timeline's file.
        mark: bool. Whether to mark steps.
        zero: int. Nanoseconds of this rank's monotonic clock at the time 0 of the lanes.
    """

    def __init__(self, path: str, mark: bool, zero: int) -> None:
        self.path, self.mark, self.zero, self.rank = path, mark, zero, rank()
        self._process = os.getpid()
        self._events = EventLog()
        stem, suffix = os.path.splitext(path)
        self._part = f"{stem}.rank-{self.rank}{suffix}"
        with suppress(OSError):
            os.unlink(self._part)  # of an earlier recording
        # Python sets handlers in the main thread only; a handler of the script has priority.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_term)
        self.follow(True)

    @property
    def own(self) -> bool:
        """True in the process that began the recording, False in its forks."""
        return os.getpid() == self._process

    def follow(self, on: bool) -> None:
        """Start or stop recording the groups of all process sets."""
        for process_set in context().sets.values():
            if process_set.collectives is not None:
                process_set.collectives.group.trace = self._events.append if on else None

    def lane(self) -> bytes:
        """Return the recorded events as compressed JSON text; see ``trace_format.lane``."""
        return self._events.lane(self.rank, self.zero, "collectives and reductions", self.mark)

    def leave_part(self, why: str) -> None:
        """Write this rank's part beside the file and end the recording. A SIGTERM during this writes the part again."""
        self.follow(False)
        try:
            trace_format.write(self._part, [self.lane()])
            text = f"left its part of the timeline in {self._part}, because the ranks have lost each other ({why})"
        except OSError as error:
            text = f"cannot write its part of the timeline to {self._part}: {error.strerror}"
        line = f"choros: rank {self.rank} on {os.uname().nodename} {text}"
        try:
            write_line(line, sys.stderr)
        except RuntimeError:  # a signal handler must not write while another write to the stream is under way
            os.write(2, f"\n{line}\n".encode())
        self.end()  # last, because afterwards a SIGTERM ends this process at once

    def end(self) -> None:
        """Stop recording, and restore the default action of SIGTERM if this recording had set it."""
        self.follow(False)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _recordings.clear()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        """Write this rank's part, then end this process by SIGTERM with its default action."""
        if self.own:
            self.leave_part("SIGTERM")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _checked_path(file_path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the path of the file, and the reason why it cannot be written, or ``""``; write nothing yet."""
    try:
        path = os.path.abspath(os.fsdecode(file_path))
        if rank() == 0:
            trace_format.writable_path(path)
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return str(file_path), f"it cannot write {file_path!r}: {reason}"
    return path, ""


def _exit() -> None:
    """Finish the timeline at exit: write this rank's part after an uncaught error, else the file with all ranks.

    After an error the other ranks may still train, so a collective with them would wait.
    """
    if not _recordings or not _recordings[0].own:
        return
    if size() > 1 and getattr(sys, "last_value", None) is not None:
        _recordings[0].leave_part(type(sys.last_value).__name__)
    else:
        finish()
