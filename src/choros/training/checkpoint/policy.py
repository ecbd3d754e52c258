"""``Checkpoint``: the directory and the schedule of checkpoints, and the signals that request one."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from choros.argument_checks import check_path, check_signals
from choros.data.validation import is_whole
from choros.errors import AGAIN, InvalidInputError
from choros.training.checkpoint.store import CheckpointStore

logger = logging.getLogger(__name__)


class Checkpoint:
    """Checkpoints of ``Trainer.fit`` in a directory. ``fit(resume=True)`` resumes from the newest one.

    For a synchronous run, a checkpoint holds the model, every worker's optimizer and random state, and the algorithm's
    state. It also holds the position in the epoch and the metrics up to there. A resumed run ends with the same bits as
    one that was never stopped, on the same backend, with the same settings and data. For an asynchronous run it holds
    the center variable, the algorithm's state, its clock and each worker's position. It also holds optimizer states:
    with local workers that of each one at the end of its last epoch, else that of rank 0, from which all ranks resume.

    A scheduler's warning (SIGTERM, SIGUSR1, SIGUSR2, or the time in ``CHOROS_STOP_AT``) makes ``fit`` write a
    checkpoint and raise ``SystemExit``: with code 0 if the job's script requeues the job (``CHOROS_REQUEUE``), else
    with 75.

    Args:
        directory: str or path. Used by this training only. In a job, all ranks must see it.
        every: "epoch"; or an int, a number of global batches (also at each epoch's end); or a ``datetime.timedelta``.
            A checkpoint is always written at the end of training. Defaults to "epoch".
        keep: int. The number of checkpoints to keep. Defaults to 3.
        signals: names of the signals that request a checkpoint and the end of training. Defaults to SIGTERM, SIGUSR1
            and SIGUSR2.

    Raises:
        InvalidInputError: an argument, or ``CHOROS_STOP_AT``, has no valid value.

    Example:
        >>> Checkpoint("state", every=timedelta(seconds=30)).schedule
        {'seconds': 30.0}
        >>> Checkpoint("state", every=100).schedule
        {'batches': 100}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str | int | timedelta = "epoch",
        keep: int = 3,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2"),
    ) -> None:
        path = check_path("directory", directory)
        self.store = CheckpointStore(path, keep)
        self._arguments = (path, every, keep)
        self.signals = check_signals(signals)
        self.schedule: dict[str, Any] = schedule_of(every)
        self._stop_at = stop_time()
        self._requested = False

    def __repr__(self) -> str:
        directory, every, keep = self._arguments
        return f"Checkpoint({directory!r}, every={every!r}, keep={keep})"

    @property
    def asked(self) -> bool:
        """True if a signal or the time limit requests the end of training."""
        return self._requested or time.time() >= self._stop_at

    @contextmanager
    def listening(self, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Handle the signals within this context, and call ``then`` at each of them.

        Python handles signals only in the main thread; in other threads this has no effect. At the end the earlier
        handlers are installed again. This is not possible for a handler of a C library: the signal then gets its
        default action.
        """
        self._requested = False

        def handle(signal_number: int, frame: FrameType | None) -> None:
            # Only a flag: a handler may interrupt any line of this thread, also one that holds a lock. The loops that
            # train poll the flag between two steps, where the state is complete.
            self._requested = True
            then()

        earlier_handlers: dict[signal.Signals, Any] = {}
        try:
            if threading.current_thread() is threading.main_thread():
                for signal_number in dict.fromkeys(signal.Signals[name] for name in self.signals):
                    earlier_handlers[signal_number] = signal.getsignal(signal_number)
                    signal.signal(signal_number, handle)
            yield
        finally:
            for signal_number, handler in earlier_handlers.items():
                signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)

    def code(self) -> int:
        """Return the exit code for a requested end. Create the file that makes the job's script requeue the job."""
        script = os.environ.get("CHOROS_REQUEUE", "")
        if not script:
            return AGAIN
        try:
            Path(script).touch()
        except OSError as error:
            host = os.uname().nodename
            text = f"{script} could not be created on {host} ({error.strerror or error}), so the job is not requeued"
            logger.info(f"{text}: this process ends with code {AGAIN}.")
            return AGAIN
        return 0


def stop_time() -> float:
    """Return the time limit in ``CHOROS_STOP_AT``, in seconds since 1970; infinity if there is none.

    Raises:
        InvalidInputError: it is not a number.
    """
    text = os.environ.get("CHOROS_STOP_AT", "")
    try:
        seconds = float(text or "inf")
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidInputError(f"CHOROS_STOP_AT={text}: give a time in seconds since 1970 (date +%s), or unset it.")
    return seconds


def schedule_of(every: object) -> dict[str, Any]:
    """Return the schedule of checkpoints as JSON values.

    Example:
        >>> schedule_of("epoch")
        {}
    """
    if every == "epoch":
        return {}
    if isinstance(every, timedelta) and every > timedelta(0):
        return {"seconds": every.total_seconds()}
    if is_whole(every, 1):
        return {"batches": int(every)}
    raise InvalidInputError(f"every={every!r}: give 'epoch', a number of global batches, or a datetime.timedelta.")


def checkpoint_of(checkpoint: object) -> Checkpoint | None:
    """Return a ``Checkpoint`` of the argument of ``fit(checkpoint=)``: a ``Checkpoint``, a directory, or None."""
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        return Checkpoint(checkpoint)
    raise InvalidInputError(
        f"checkpoint={checkpoint!r}: give a directory, or choros.Checkpoint(directory, every=..., keep=...)."
    )
