"""``Checkpoint``: where and how often a training's state is written, and which signals ask for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from choros.checkpoints.store import Store
from choros.errors import AGAIN, BadInput


class Checkpoint:
    """Writes the state of ``Trainer.fit`` to a directory, from which ``fit(resume=True)`` goes on.

    A checkpoint holds the model, every worker's optimizer and random state, the centre, the algorithm's memory, the
    place in the epoch and the metrics until there. Workers that train together go on to the same bits as if they had
    never been stopped (on the same backend, with the same settings and data). Of workers that train alone it holds the
    centre, its memory, its clock and how far each worker had come; their optimizers begin anew.

    A scheduler's warning (SIGTERM, SIGUSR1, SIGUSR2, or the time in ``CHOROS_STOP_AT``) ends ``fit`` in a checkpoint
    and ``SystemExit``: with code 0 where the job's script asks for another turn (``CHOROS_REQUEUE``), else with 75.

    Args:
        directory: str or path. Of this training alone; in a job, one that all ranks see.
        every: "epoch"; an int, so many global batches (and each epoch's end); or a ``datetime.timedelta``, a time.
            The end of training is written always. Defaults to "epoch".
        keep: int. How many are kept. Defaults to 3.
        signals: names of signals that ask for one and for the end. Defaults to SIGTERM, SIGUSR1 and SIGUSR2.

    Raises:
        BadInput: settings that have no meaning.

    Example:
        >>> Checkpoint("state", every=timedelta(seconds=30)).rule
        {'seconds': 30.0}
        >>> Checkpoint("state", every=100).rule
        {'batches': 100}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str | int | timedelta = "epoch",
        keep: int = 3,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGUSR2"),
    ) -> None:
        self.store = Store(directory, keep)
        self.signals = tuple(signals)
        unknown = [name for name in self.signals if name not in signal.Signals.__members__]
        if unknown:
            raise BadInput(f"{', '.join(unknown)} is no signal: give names such as SIGTERM.")
        self.rule: dict[str, Any] = rule_of(every)
        self._end = float(os.environ.get("CHOROS_STOP_AT") or "inf")
        self._told = False

    @property
    def asked(self) -> bool:
        """True if a signal, or the time limit, asks for the end."""
        return self._told or time.time() >= self._end

    @contextmanager
    def listening(self, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Listen to the signals for a while (in the main thread, where Python has them), and do so much at each."""
        self._told = False

        def told(number: int, frame: Any) -> None:
            self._told = True
            then()

        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {name: signal.signal(signal.Signals[name], told) for name in self.signals}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(signal.Signals[name], handler)

    def code(self) -> int:
        """Return the code with which this process ends when it was asked to; tells the job's script, if any."""
        script = os.environ.get("CHOROS_REQUEUE", "")
        if script:
            Path(script).touch()
        return 0 if script else AGAIN


def rule_of(every: Any) -> dict[str, Any]:
    """Return when a state is to be kept, as JSON.

    Example:
        >>> rule_of("epoch")
        {}
    """
    if every == "epoch":
        return {}
    if isinstance(every, timedelta) and every > timedelta(0):
        return {"seconds": every.total_seconds()}
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return {"batches": every}
    raise BadInput(f"every={every!r}: give 'epoch', a number of global batches, or a datetime.timedelta.")


def checkpoint_of(given: Any) -> Checkpoint | None:
    """Return what ``fit(checkpoint=)`` was given: a ``Checkpoint``, a directory, or None."""
    if given is None or isinstance(given, Checkpoint):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Checkpoint(given)
    raise BadInput(f"checkpoint={given!r}: give a directory, or choros.Checkpoint(directory, every=..., keep=...).")
