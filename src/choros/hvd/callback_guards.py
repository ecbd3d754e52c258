"""Callbacks of a ``fit`` on several ranks: who writes files, and what decisions are made from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from choros.callbacks import BeforeTimeLimit
from choros.comm.collectives import Collectives
from choros.errors import RankMismatchError
from choros.hvd.collectives import take
from choros.hvd.model_state import state_of

_WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.BackupAndRestore)
_DECIDE = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


def guarded(callbacks: Any, last: Any, calls: Collectives) -> Any:
    """Return the callbacks of this rank's ``fit``.

    ``ModelCheckpoint`` and ``CSVLogger`` write on rank 0 alone; so does ``BackupAndRestore``, and what it restores goes
    to all ranks. ``EarlyStopping`` and ``ReduceLROnPlateau``, where all ranks have the same of them, decide from the
    mean of the ranks' logs, so they decide alike. ``BeforeTimeLimit`` is restored as ``BackupAndRestore`` is, and ends
    all ranks after the same step.

    Args:
        callbacks: as given to ``fit``.
        last: a callback to be called after all others.
        calls: of the ranks that train.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        limits = [one for one in callbacks.callbacks if isinstance(one, BeforeTimeLimit)]
        for one in (*_limited(limits, calls, last), last):
            callbacks.append(one)
        return callbacks
    given = list(keras.tree.flatten(callbacks)) if callbacks is not None else []
    mine = [type(one).__name__ for one in given if isinstance(one, _DECIDE)]
    limits = [one for one in given if isinstance(one, BeforeTimeLimit)]
    said = calls.allgather_object([mine, len(limits)], name="callbacks that decide")
    same = all(theirs == mine for theirs, _ in said)
    if len({count for _, count in said}) > 1:
        raise RankMismatchError(
            "BeforeTimeLimit must be given on all ranks: rank 0 alone writes, but all end together."
        )
    kept: list[Any] = []
    for one in given:
        if not (calls.rank and isinstance(one, _WRITERS) and not getattr(one, "guarded", False)):
            kept.append(_AveragedLogs(one, calls) if same and isinstance(one, _DECIDE) else one)
        if isinstance(one, keras.callbacks.BackupAndRestore):
            kept.append(_Restored(one, calls, lambda backup: os.path.exists(backup._weights_path)))
    return [*kept, *_limited(limits, calls, last), last]


def _limited(limits: list[Any], calls: Collectives, last: Any) -> list[Any]:
    """Have these end together with the other ranks; return what brings all ranks what rank 0's have restored."""
    last.limits = limits
    for limit in limits:
        limit.at_once, limit.meet = False, calls.barrier
        limit.agree = lambda asked: any(calls.allgather_object(asked, name="whether the time limit is near"))
    return [_Restored(limit, calls, lambda one: one.point() is not None) for limit in limits]


class _Restored(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes after what rank 0 alone restores: that goes to all ranks."""

    def __init__(self, backup: Any, calls: Collectives, holds: Callable[[Any], bool]) -> None:
        super().__init__()
        self._backup, self._calls, self._holds = backup, calls, holds

    def on_train_begin(self, logs: Any = None) -> None:
        """Take rank 0's variables and its next epoch, where it has a backup."""
        model = self.model
        if not model.built:  # an error that rank 0 has met already
            self._backup.set_model(model)
            self._backup.on_train_begin(logs)
        mine = [self._holds(self._backup), model._initial_epoch]
        there, model._initial_epoch = self._calls.broadcast_object(mine, name="what a backup holds")
        if there:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            take(self._calls, state_of(model))


class _AveragedLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that is shown the mean of all ranks' logs."""

    def __init__(self, inner: Any, calls: Collectives) -> None:
        super().__init__()
        self.inner, self._calls = inner, calls

    def set_model(self, model: Any) -> None:
        """Hand on."""
        super().set_model(model)
        self.inner.set_model(model)

    def set_params(self, params: Any) -> None:
        """Hand on."""
        super().set_params(params)
        self.inner.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Hand on."""
        self.inner.on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Hand on."""
        self.inner.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Hand on."""
        self.inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hand on the mean, and what was added to it."""
        logs = {} if logs is None else logs
        shown = mean_logs(logs, self._calls, f"logs for {type(self.inner).__name__}")
        before = dict(shown)
        self.inner.on_epoch_end(epoch, shown)
        logs.update({name: value for name, value in shown.items() if name not in before})


def mean_logs(logs: dict[str, Any], calls: Collectives, name: str) -> dict[str, float]:
    """Return the plain mean over the ranks of each entry that is a number, by name."""
    mine = {key: float(keras.ops.convert_to_numpy(value)) for key, value in sorted(logs.items()) if _number(value)}
    said = calls.allgather_object(mine, name=name)
    return {key: sum(other[key] for other in said) / len(said) for key in mine if all(key in other for other in said)}


def _number(value: Any) -> bool:
    return not isinstance(value, str | bool | None) and getattr(value, "ndim", 0) == 0
