"""Horovod's elastic names: state that is committed, restored and synchronised, and the loop around it.

What a rank has committed is what it goes back to when a collective fails. Under ``choros run --min-np`` or
``--host-discovery-script`` ranks come and go while the job runs; any other job ends with the first rank that fails.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from choros.backends import seed_state
from choros.comm.collectives import MAX
from choros.errors import CommTimeoutError, PeerLostError
from choros.hvd import context
from choros.hvd.collectives import broadcast_object, broadcast_variables
from choros.hvd.elastic_client import membership


class HorovodInternalError(RuntimeError):
    """A collective failed: ``run`` restores the last commit and begins anew."""


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks came or went: ``run`` begins anew with the state as it is.

    Attributes:
        skip_sync: bool. Whether there is nothing to synchronise, as no rank came.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The ranks of this job have changed.")
        self.skip_sync = skip_sync


_LOST = (HorovodInternalError, PeerLostError, CommTimeoutError)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function(state, ...)``: synchronise the state, call it, and begin anew where it was interrupted.

    Example:
        >>> import choros.hvd as hvd
        >>> hvd.init()
        >>> hvd.elastic.run(lambda state: state.epoch)(hvd.elastic.ObjectState(epoch=3))
        3
    """

    @functools.wraps(function)
    def again(state: ObjectState, *args: Any, **given: Any) -> Any:
        sync, lost = True, None
        while True:
            try:
                if sync:
                    state.sync()
                return function(state, *args, **given)
            except HostsUpdatedInterrupt as interrupt:
                sync, lost = not interrupt.skip_sync, None
            except Exception as error:
                if not isinstance(error, _LOST) and not context.failed():  # compiled code raises others of its own
                    raise
                state.restore()
                sync, lost = True, error
            sync = context.begin_anew(sync, lost)
            state.on_reset()

    return again


class ObjectState:
    """Attributes that are committed and restored together, and that rank 0 gives to all.

    Args:
        bcast_object: Horovod's way to broadcast, which is ours anyway; ignored.
        get_rank: likewise.
        **values: what may travel without pickle; see ``hvd.broadcast_object``. Each becomes an attribute.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        self._names = list(values)
        self._saved: dict[str, Any] = {}
        self._callbacks: list[Callable[[], None]] = []
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keep a copy."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Go back to the copy."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Take rank 0's values, and keep a copy."""
        for name, value in broadcast_object({n: getattr(self, n) for n in self._names}, 0, name="state").items():
            setattr(self, name, value)
        self.save()

    def commit(self) -> None:
        """Keep a copy, then see whether ranks came or went."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks where the launcher has told one that ranks are to come or go."""
        member = membership()
        if member is None:
            return
        mine = np.array([member.changed, member.coming], np.int32)
        changed, coming = context.collectives().allreduce(mine, MAX, name="commit")
        if changed:
            raise HostsUpdatedInterrupt(skip_sync=not coming)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these when training begins anew."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Training begins anew."""
        for callback in self._callbacks:
            callback()


class KerasState(ObjectState):
    """The state of a model: weights, optimizer, and values such as ``epoch`` and ``batch``.

    Args:
        model: keras.Model, built.
        optimizer: its optimizer by default.
        backend: ignored.
        **values: see ``ObjectState``.

    Raises:
        ValueError: the model is not built, or none.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"The model is of type {type(model).__name__}: give a keras.Model.")
        if not model.built:
            raise ValueError(f"Model {model.name!r} is not built: call it on a batch, or give it an Input.")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._arrays: list[Any] = []
        super().__init__(**values)

    def _variables(self) -> list[Any]:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        return [*self.model.variables, *(self.optimizer.variables if self.optimizer is not None else [])]

    def save(self) -> None:
        """Keep a copy of weights, optimizer and values."""
        super().save()
        self._arrays = [np.array(keras.ops.convert_to_numpy(v)) for v in self._variables()]

    def restore(self) -> None:
        """Go back to the copy."""
        super().restore()
        for variable, array in zip(self._variables(), self._arrays, strict=True):
            variable.assign(array)

    def sync(self) -> None:
        """Take rank 0's state, but for the seeds of random layers, and keep a copy."""
        own = {id(variable) for variable in seed_state.find(self.model)}
        broadcast_variables([variable for variable in self._variables() if id(variable) not in own], 0)
        super().sync()


TensorFlowKerasState = KerasState


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state every ``batches_per_commit`` batches, and after each epoch. Comes after the Update callbacks."""

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit, self._left = state, batches_per_commit, batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count, and commit when it is time."""
        self._left -= 1
        if self._left <= 0:
            self.state.commit()
            self._left = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()
        self._left = self.batches_per_commit


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.batch``: how many batches of the epoch have been trained, those before an interruption included.

    Give ``fit`` what the epoch has left, after ``state.batch`` batches, to end it where it would have ended. (Horovod
    keeps the number of the last batch, so that one is trained twice, and forgets an earlier interruption.)
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self._first = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on from what was trained before."""
        self._first = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.state.batch = self._first + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin at 0."""
        self.state.batch = self._first = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.epoch``: how many epochs have been trained, those before an interruption included."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count, also where ``fit`` counts on from ``initial_epoch``."""
        self.state.epoch += 1


def __getattr__(name: str) -> Any:
    if name == "TensorFlowState":
        raise AttributeError("choros.hvd.elastic has no TensorFlowState: use KerasState(model, optimizer).")
    raise AttributeError(f"module 'choros.hvd.elastic' has no attribute {name!r}")
