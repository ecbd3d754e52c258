"""Callbacks of a ``fit`` on several ranks: who writes files, and what decisions are made from."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

from choros.collectives import Collectives
from choros.hvd.models import state_of

_WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger)
_DECIDE = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


def guarded(callbacks: Any, last: Any, calls: Collectives) -> Any:
    """Return the callbacks of this rank's ``fit``.

    ``ModelCheckpoint`` and ``CSVLogger`` write on rank 0 alone; so does ``BackupAndRestore``, and what it restores goes
    to all ranks. ``EarlyStopping`` and ``ReduceLROnPlateau``, where all ranks have the same of them, decide from the
    mean of the ranks' logs, so they decide alike.

    Args:
        callbacks: as given to ``fit``.
        last: a callback to be called after all others.
        calls: of the ranks that train.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(last)
        return callbacks
    given = list(keras.tree.flatten(callbacks)) if callbacks is not None else []
    mine = [type(one).__name__ for one in given if isinstance(one, _DECIDE)]
    same = all(theirs == mine for theirs in calls.allgather_object(mine, name="callbacks that decide"))
    files = [one for one in given if isinstance(one, _WRITERS) and not getattr(one, "guarded", False)]
    kept = [one for one in given if not (calls.rank and one in files)]
    kept = [_Backup(one, calls) if isinstance(one, keras.callbacks.BackupAndRestore) else one for one in kept]
    return [*(_Alike(one, calls) if same and isinstance(one, _DECIDE) else one for one in kept), last]


class _Inner(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback around another one.

    Args:
        inner: the other one.
        calls: of the ranks that train.
    """

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


class _Backup(_Inner):
    """Backs up on rank 0; what is restored there goes to all ranks."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore on rank 0 (on all, where that is an error), then everywhere."""
        model, inner = self.model, self.inner
        there = os.path.exists(inner._weights_path)
        if not self._calls.rank or not model.built:
            inner.on_train_begin(logs)
        there, epoch = self._calls.broadcast_object([there, model._initial_epoch], name="what a backup holds")
        model._initial_epoch = epoch
        if there:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            for i, variable in enumerate(state_of(model)):
                value = np.asarray(keras.ops.convert_to_numpy(variable))
                variable.assign(self._calls.broadcast(value, 0, name=f"{i} {variable.path} from a backup"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Rank 0's."""
        if not self._calls.rank:
            self.inner.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Rank 0's."""
        if not self._calls.rank:
            self.inner.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Rank 0's."""
        if not self._calls.rank:
            self.inner.on_train_end(logs)


class _Alike(_Inner):
    """A callback that is shown the mean of all ranks' logs."""

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
