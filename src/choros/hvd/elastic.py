"""Horovod's elastic API: state that is committed, restored and synchronized, and the loop around it.

When a collective fails, each rank restores its last commit. Under ``choros run --min-np`` or
``--host-discovery-script`` ranks join and leave while the job runs. Any other job ends when a rank fails.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from choros.argument_checks import check_whole
from choros.backends import seed_state
from choros.backends.host_values import to_host
from choros.comm.collectives import MAX
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError
from choros.hvd import context
from choros.hvd.collectives import broadcast_object, broadcast_variables
from choros.hvd.elastic_client import membership
from choros.hvd.unused_arguments import warn_of_unused
from choros.object_text import call_text, value_text

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class HorovodInternalError(RuntimeError):
    """Failure of a collective: ``run`` restores the last commit, initializes again and calls the function again."""


class HostsUpdatedInterrupt(RuntimeError):
    """Change of the ranks: ``run`` initializes again and continues with the present state.

    Attributes:
        skip_sync: bool. True if no rank joined, so that the state need not be synchronized. Defaults to False.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The ranks of this job have changed.")
        self.skip_sync = skip_sync


_LOSS_ERRORS = (HorovodInternalError, PeerLostError, CommTimeoutError)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function(state, ...)``: synchronize the state and call it, again after each interruption.

    Example:
        >>> import choros.hvd as hvd
        >>> hvd.init()
        >>> hvd.elastic.run(lambda state: state.epoch)(hvd.elastic.ObjectState(epoch=3))
        3
    """

    @functools.wraps(function)
    def run_until_done(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        sync, lost = True, None
        while True:
            try:
                if sync:
                    state.sync()
                return function(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                sync, lost = not interrupt.skip_sync, None
            except Exception as error:
                if not isinstance(error, _LOSS_ERRORS) and not context.failed():  # compiled code raises other types
                    raise
                state.restore()
                sync, lost = True, error
            sync = context.begin_anew(sync, lost)
            state.on_reset()

    return run_until_done


class ObjectState:
    """Attributes that are committed and restored as one state, and that rank 0 broadcasts to all ranks.

    Args:
        bcast_object, get_rank: without effect, with a warning.
        **values: objects of the types that ``hvd.broadcast_object`` takes. Each becomes an attribute.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        warn_of_unused(
            "elastic.ObjectState", "hvd's own functions are used", bcast_object=bcast_object, get_rank=get_rank
        )
        self._names = list(values)
        self._saved: dict[str, Any] = {}
        self._callbacks: list[Callable[[], None]] = []
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def __repr__(self) -> str:
        return call_text(self, **{name: getattr(self, name) for name in self._names})

    def save(self) -> None:
        """Keep a copy of the values in memory."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Set the values to the last copy."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Take rank 0's values and keep a copy."""
        for name, value in broadcast_object({n: getattr(self, n) for n in self._names}, 0, name="state").items():
            setattr(self, name, value)
        self.save()

    def commit(self) -> None:
        """Keep a copy, then check whether ranks join or leave."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks if the driver has announced a change of the ranks to one rank.

        In an elastic job this is a collective: every rank calls it.
        """
        member = membership()
        if member is None:
            return
        status = np.array([member.changed, member.coming], np.int32)
        changed, coming = context.collectives().allreduce(status, MAX, name="commit")
        if changed:
            raise HostsUpdatedInterrupt(skip_sync=not coming)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Add functions that ``on_reset`` calls."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks; ``run`` calls this after it has initialized again."""
        for callback in self._callbacks:
            callback()


class KerasState(ObjectState):
    """The state of a model: weights, optimizer, and values such as ``epoch`` and ``batch``.

    Args:
        model: keras.Model, built.
        optimizer: keras.optimizers.Optimizer. Defaults to the model's.
        backend: without effect, with a warning.
        **values: see ``ObjectState``.

    Raises:
        ValueError: ``model`` is not built, or is not a keras.Model.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: object = None,
        **values: Any,
    ) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"The model is of type {type(model).__name__}: give a keras.Model.")
        if not model.built:
            raise ValueError(f"Model {model.name!r} is not built: call it on a batch, or give it an Input.")
        warn_of_unused("elastic.KerasState", "the model's own backend is used", backend=backend)
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._arrays: list[Any] = []
        super().__init__(**values)

    def __repr__(self) -> str:
        return call_text(self, self.model, **{name: getattr(self, name) for name in self._names})

    def _variables(self) -> list[Any]:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        return [*self.model.variables, *(self.optimizer.variables if self.optimizer is not None else [])]

    def save(self) -> None:
        """Keep a copy of weights, optimizer state and values in memory."""
        super().save()
        self._arrays = to_host(self._variables())

    def restore(self) -> None:
        """Set weights, optimizer state and values to the last copy."""
        super().restore()
        for variable, array in zip(self._variables(), self._arrays, strict=True):
            variable.assign(array)

    def sync(self) -> None:
        """Take rank 0's state, except for the seeds of random layers, and keep a copy."""
        seed_ids = {id(variable) for variable in seed_state.find(self.model)}
        broadcast_variables([variable for variable in self._variables() if id(variable) not in seed_ids], 0)
        super().sync()


TensorFlowKerasState = KerasState


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that commits a state every ``batches_per_commit`` batches (default 1) and after each epoch.

    Put it after the Update callbacks in the list, so that it commits the updated numbers.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.batches_per_commit = check_whole("batches_per_commit", batches_per_commit, 1, "batches")
        self.state, self._remaining = _checked(state, "commit"), self.batches_per_commit

    def __repr__(self) -> str:
        return call_text(self, self.state, batches_per_commit=self.batches_per_commit)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch; commit after ``batches_per_commit`` batches."""
        self._remaining -= 1
        if self._remaining <= 0:
            self.state.commit()
            self._remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self.state.commit()
        self._remaining = self.batches_per_commit


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that counts the trained batches of the epoch in ``state.batch``, also those before an interruption.

    After an interruption, give ``fit`` only the batches of the epoch after the first ``state.batch``. (Horovod keeps
    the index of the last batch, so this batch is trained twice, and an earlier interruption is not counted.)
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self._first = _checked(state, "batch"), 0

    def __repr__(self) -> str:
        return call_text(self, self.state)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Continue from the number of batches trained before."""
        self._first = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch."""
        self.state.batch = self._first + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reset the count to 0."""
        self.state.batch = self._first = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that counts the trained epochs in ``state.epoch``, also those before an interruption."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = _checked(state, "epoch")

    def __repr__(self) -> str:
        return call_text(self, self.state)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch, whatever ``initial_epoch`` of ``fit`` is."""
        self.state.epoch += 1


def _checked(state: Any, attribute: str) -> Any:
    """Return a state that has the attribute that a callback uses.

    Raises:
        InvalidInputError: it has no such attribute.
    """
    if not hasattr(state, attribute):
        raise InvalidInputError(
            f"state={value_text(state)} has no {attribute!r}: give a state such as "
            "hvd.elastic.KerasState(model, batch=0, epoch=0)."
        )
    return state


def __getattr__(name: str) -> Any:
    if name == "TensorFlowState":
        raise AttributeError("choros.hvd.elastic has no TensorFlowState: use KerasState(model, optimizer).")
    raise AttributeError(f"module 'choros.hvd.elastic' has no attribute {name!r}")
