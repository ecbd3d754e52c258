"""Callbacks of a ``fit`` on several ranks: files are written by rank 0, decisions use the mean of all ranks' logs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from choros.backends.host_values import host_value
from choros.callbacks import BeforeTimeLimit
from choros.comm.collectives import Collectives
from choros.errors import RankMismatchError
from choros.hvd.collectives import take
from choros.hvd.model_state import state_of
from choros.types import Callbacks

_WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.BackupAndRestore)
_DECIDING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


def guarded(callbacks: Callbacks, last: object, calls: Collectives) -> list[Any]:
    """Return the callbacks of this rank's ``fit``.

    ``ModelCheckpoint`` and ``CSVLogger`` write on rank 0 only. ``BackupAndRestore`` also runs on rank 0 only; the state
    it restores is broadcast to all ranks. ``EarlyStopping`` and ``ReduceLROnPlateau`` see the mean of all ranks' logs,
    so they decide alike; this needs the same of these callbacks on every rank. ``BeforeTimeLimit`` restores as
    ``BackupAndRestore`` does, and ends all ranks after the same step.

    Args:
        callbacks: as given to ``fit``. Of a ``CallbackList``, its callbacks are taken.
        last: a callback that runs after all others.
        calls: the collectives of the ranks that train.

    Raises:
        RankMismatchError: the ranks have different numbers of ``BeforeTimeLimit``.
    """
    # Not the list itself: it would keep this fit's callbacks for the next fit, and give them no model.
    items = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    user_callbacks = list(keras.tree.flatten(items)) if items is not None else []
    local_names = [type(callback).__name__ for callback in user_callbacks if isinstance(callback, _DECIDING)]
    limits = [callback for callback in user_callbacks if isinstance(callback, BeforeTimeLimit)]
    reports = calls.allgather_object([local_names, len(limits)], name="callbacks that decide")
    same = all(names == local_names for names, _ in reports)
    if len({count for _, count in reports}) > 1:
        raise RankMismatchError(
            "BeforeTimeLimit must be given on all ranks: only rank 0 writes, but all ranks end at the same step."
        )
    kept_callbacks: list[Any] = []
    for callback in user_callbacks:
        if not (calls.rank and isinstance(callback, _WRITERS) and not getattr(callback, "guarded", False)):
            kept_callbacks.append(
                _AveragedLogs(callback, calls) if same and isinstance(callback, _DECIDING) else callback
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            kept_callbacks.append(_Restored(callback, calls, lambda backup: os.path.exists(backup._weights_path)))
    return [*kept_callbacks, *_limited(limits, calls, last), last]


def _limited(limits: list[Any], calls: Collectives, last: Any) -> list[Any]:
    """Make the time limits end all ranks after the same step; return callbacks that broadcast rank 0's state."""
    last.limits = limits
    for limit in limits:
        limit.at_once, limit.barrier = False, calls.barrier
        limit.agree = lambda requested: any(calls.allgather_object(requested, name="whether the time limit is near"))
    return [_Restored(limit, calls, lambda callback: callback.point() is not None) for limit in limits]


class _Restored(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that broadcasts the state restored on rank 0; it runs directly after the callback that restores."""

    def __init__(self, backup: Any, calls: Collectives, holds: Callable[[Any], bool]) -> None:
        super().__init__()
        self._backup, self._calls, self._holds = backup, calls, holds

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the variables and the next epoch of rank 0, if rank 0 has a backup."""
        model = self.model
        if not model.built:  # the callback has raised on rank 0 already: raise the same error here
            self._backup.set_model(model)
            self._backup.on_train_begin(logs)
        local_state = [self._holds(self._backup), model._initial_epoch]
        root_state, model._initial_epoch = self._calls.broadcast_object(local_state, name="what a backup holds")
        if root_state:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            take(self._calls, state_of(model))


class _AveragedLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Wrapper that passes the mean of all ranks' logs to a callback."""

    def __init__(self, inner: Any, calls: Collectives) -> None:
        super().__init__()
        self.inner, self._calls = inner, calls

    def set_model(self, model: keras.Model) -> None:
        """Forward the call to the wrapped callback."""
        super().set_model(model)
        self.inner.set_model(model)

    def set_params(self, params: Any) -> None:
        """Forward the call to the wrapped callback."""
        super().set_params(params)
        self.inner.set_params(params)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forward the call to the wrapped callback."""
        self.inner.on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Forward the call to the wrapped callback."""
        self.inner.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forward the call to the wrapped callback."""
        self.inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Pass the mean of the logs to the wrapped callback; add to ``logs`` the entries that it added."""
        logs = {} if logs is None else logs
        shown = mean_logs(logs, self._calls, f"logs for {type(self.inner).__name__}")
        before = dict(shown)
        self.inner.on_epoch_end(epoch, shown)
        logs.update({name: value for name, value in shown.items() if name not in before})


def mean_logs(logs: dict[str, Any], calls: Collectives, name: str) -> dict[str, float]:
    """Return the unweighted mean over the ranks of each numeric entry that all ranks have, by name."""
    local_logs = {key: float(host_value(value)) for key, value in sorted(logs.items()) if _number(value)}
    all_logs = calls.allgather_object(local_logs, name=name)
    return {
        key: sum(other[key] for other in all_logs) / len(all_logs)
        for key in local_logs
        if all(key in other for other in all_logs)
    }


def _number(value: object) -> bool:
    return not isinstance(value, str | bool | None) and getattr(value, "ndim", 0) == 0
