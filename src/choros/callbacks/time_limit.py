"""A ``fit`` under a scheduler's time limit: its state is saved before the limit, and the next turn resumes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from choros.argument_checks import check_path, check_signals
from choros.cluster import Place
from choros.errors import AGAIN, InvalidInputError
from choros.object_text import call_text
from choros.training.checkpoint.policy import stop_time
from choros.training.checkpoint.store import sync

logger = logging.getLogger(__name__)

_TURNS = 3  # turns that may resume after they ended in the same epoch; the next such turn is the last
_FACTS = "choros.json"


class BeforeTimeLimit(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that saves the state shortly before a job's time limit and ends this turn; the next turn resumes.

    With ``choros submit``, SIGUSR2 or the clock warns the ranks some time before the limit. When the state is saved,
    the job gets another turn. ``keras.callbacks.BackupAndRestore`` saves weights, the optimizer's state and the epoch,
    also after each epoch. Each save goes to a new directory, which gets its final name when all files are on disk.

    ``fit`` of the next turn loads the state and resumes with that epoch. A synchronous ``choros.Trainer`` with a
    ``seed`` resumes at the next batch. Every other ``fit`` resumes at the first batch, so an epoch must be shorter
    than a turn (see ``steps_per_epoch``). When training is done, the state is removed.

    In a job, give this callback to all ranks; rank 0 writes. Outside of a job, a process that receives SIGUSR2 saves
    and exits with code 75. A ``Trainer``'s workers validate once more before they end.

    Args:
        directory: str or path. Used by this training only. All ranks must see it.
        signals: names of the signals that request the end of this turn. Defaults to those in
            ``CHOROS_STOP_SIGNALS``, or SIGUSR2.

    Raises:
        InvalidInputError: ``directory`` is not a path, or ``signals`` has an unknown name; or, when training begins,
            the model has no weights yet.
        SystemExit: on request, after the state is saved: with code 0 if the job's script requeues the job, else 75;
            with code 1 if too many turns have ended in the same epoch.

    Example:
        >>> callback = BeforeTimeLimit("state")
        >>> callback.signals
        ('SIGUSR2',)
    """

    guarded = True  # only rank 0 writes

    def __init__(self, directory: str | os.PathLike[str], signals: Sequence[str] | None = None) -> None:
        super().__init__()
        signal_names = os.environ.get("CHOROS_STOP_SIGNALS", "SIGUSR2").split()
        self.directory = Path(check_path("directory", directory))
        self.signals = check_signals(signal_names if signals is None else signals)
        self.asked = False
        self.at_once = True  # False: the code that runs the callbacks decides when this turn may end
        self.agree: Callable[[bool], bool] = bool  # returns whether any rank has the request
        self.barrier: Callable[[], Any] = lambda: None  # waits for the other ranks, after rank 0 has written
        self._end = 0.0
        self._at = (0, 0)  # the epoch, and the number of its batches that are done
        self._begun = (-1, 0)  # the epoch with which this turn resumes, and the number of turns that ended in it
        self._loaded = False
        self._kept: dict[str, Any] = {}

    def __repr__(self) -> str:
        return call_text(self, str(self.directory), signals=self.signals)

    # -- for the code that runs a fit
    def point(self) -> tuple[int, int] | None:
        """Return the epoch and the batch at which to resume; None if nothing is saved."""
        state_path = self._newest()
        facts = json.loads((state_path / _FACTS).read_text()) if state_path else None
        return (facts["epoch"], facts["batch"]) if facts else None

    def restore(self, model: keras.Model, batch: int = 0) -> None:
        """Load the saved state, if there is one, into a built model; training resumes at ``batch`` of the epoch."""
        self._loaded = True
        state_path = self._newest()
        if state_path is not None:
            facts = json.loads((state_path / _FACTS).read_text())
            self._begun = (-1, 0) if batch else (facts["epoch"], facts["turns"])
            keeper = keras.callbacks.BackupAndRestore(os.fspath(state_path), delete_checkpoint=False)
            keeper.set_model(model)
            keeper.on_train_begin()
            logger.info(f"resuming with epoch {facts['epoch'] + 1}, from {state_path}")

    def leave_if_asked(self) -> None:
        """End this turn if any rank has the request. Collective: every rank must call it.

        Raises:
            SystemExit: a rank has the request; the state is saved.
        """
        self.asked = self.agree(self.asked)
        if self.asked:
            self._leave()

    # -- Keras' hooks
    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Load the state of the last turn, and install the signal handlers (in the main thread only)."""
        self.asked, self._at, self._begun = False, (0, 0), (-1, 0) if not self._loaded else self._begun
        if not self.model.built:
            raise InvalidInputError(
                "BeforeTimeLimit needs a model that has its weights before fit: begin it with keras.Input."
            )
        if not self._loaded and Place.here().rank == 0:
            self.restore(self.model)
        self._loaded = False
        self._end = stop_time()
        if threading.current_thread() is threading.main_thread():
            for name in self.signals:
                self._kept[name] = signal.signal(signal.Signals[name], self._request_end)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the position of training."""
        self._at = (epoch, 0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stop if the end is requested, except after the last batch: then ``on_epoch_end`` saves the whole epoch."""
        self._at = (self._at[0], batch + 1)
        if self._due() and not self._whole():
            if self.at_once:
                self._leave()
            self._model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save after a whole epoch; stop if the end is requested."""
        if self._due() and not self._whole():
            return
        self._at = (epoch + 1, 0)
        if self._done():
            self.asked = False
            return
        if Place.here().rank == 0:
            self._save()
        if self._due():
            if self.at_once:
                self._leave()
            self._model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restore the signal handlers; then end this turn if that is requested, else remove the saved state."""
        for name, before in self._kept.items():
            signal.signal(signal.Signals[name], before)
        self._kept = {}
        self.asked = self.asked and not self._done()
        if not self.at_once:
            self.leave_if_asked()
        self.at_once, self.agree, self.barrier = True, bool, lambda: None
        self._model._initial_epoch = None  # otherwise Keras would begin the next fit at this epoch too
        if Place.here().rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _request_end(self, number: int, frame: object) -> None:
        self.asked = True

    def _due(self) -> bool:
        self.asked = self.asked or time.time() >= self._end
        return self.asked

    def _whole(self) -> bool:
        """Return whether training is between two epochs; False within an epoch whose length is unknown."""
        steps: int | None = (self.params or {}).get("steps")
        return self._at[1] == 0 or (steps is not None and self._at[1] >= steps)

    def _done(self) -> bool:
        epochs: int = (self.params or {}).get("epochs", sys.maxsize)
        return self._at[0] >= epochs

    # -- the files
    def _newest(self) -> Path | None:
        return max(self.directory.glob("state-[0-9]*"), default=None)

    def _save(self) -> None:
        """Write a new state beside the last one, and remove the last one afterwards: one state is always complete."""
        epoch, batch = self._at
        turns = self._begun[1] + 1 if epoch == self._begun[0] else 1
        before = self._newest()
        number = int(before.name.partition("-")[2]) + 1 if before else 1
        new = self.directory / f"new-{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        keeper = keras.callbacks.BackupAndRestore(os.fspath(new), delete_checkpoint=False)
        keeper.set_model(self.model)
        keeper.on_epoch_end(epoch - 1)
        (new / _FACTS).write_text(json.dumps({"epoch": epoch, "batch": batch, "turns": turns}))
        for path in (*new.iterdir(), new):
            sync(path)
        new.rename(self.directory / f"state-{number:08}")
        sync(self.directory)
        for path in self.directory.glob("state-[0-9]*"):
            if path.name != f"state-{number:08}":
                shutil.rmtree(path)

    def _leave(self) -> None:
        script, (epoch, batch) = os.environ.get("CHOROS_REQUEUE", ""), self._at
        stuck = self._begun[0] == epoch and self._begun[1] >= _TURNS
        if Place.here().rank == 0:
            if batch or self.point() != self._at:
                self._save()
            place = f"epoch {epoch + 1}, after {batch} of its batches"
            text = f"the time limit is near: {place}, is saved in {self.directory}"
            logger.info(text)
            if stuck:
                text = f"{_TURNS + 1} jobs in a row ended in epoch {epoch + 1}: set a longer --time or steps_per_epoch"
                logger.info(f"the job is not requeued: {text}")
            elif script:
                Path(script).touch()
                sync(Path(script))
        self.barrier()  # no rank ends before rank 0 has written
        raise SystemExit(1 if stuck else 0 if script else AGAIN)
