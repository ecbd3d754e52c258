"""The split step: one step of ``fit`` and ``train_on_batch`` of a model whose optimizer is distributed.

The step has three parts: the model's ``train_step`` up to the optimizer, one reduction over the ranks, and the
optimizer. The first and the last part are compiled. Of the ways measured, this was exact and the fastest on every
backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from choros.backends import make_replica
from choros.backends.loss_trial import dependent
from choros.backends.rowwise_parts import of_keras
from choros.comm.collectives import AVERAGE
from choros.consistency.model_fingerprint import alike
from choros.errors import InvalidInputError
from choros.hvd.context import collectives
from choros.hvd.gradient_reduction import GradientBuffer, ReductionConfig
from choros.hvd.sync_batch_norm import SyncBatchNormalization, weighed
from choros.types import Array


class SplitStep:
    """A replacement for a model's ``train_function``.

    Args:
        model: keras.Model, compiled.
        config: ReductionConfig.

    Attributes:
        before: list of functions, called once when the model is built, before the next step.
    """

    def __init__(self, model: keras.Model, config: ReductionConfig) -> None:
        self.model, self.config = model, config
        self.before: list[Callable[[], None]] = []
        self.flat: GradientBuffer | None = None
        self._replica: Any = None
        self._logs: Any = {}
        self._order_checked = False  # True after _check_order, which finds whether the step uses updated weights
        self._stopped = False  # True if another rank stopped and ended its epoch while this rank was in a step
        runners: dict[str, Any] = {"jax": self._on_jax, "torch": self._on_torch, "tensorflow": self._on_tensorflow}
        self._run = runners[keras.backend.backend()]
        if built(model):
            self._begin()

    def __call__(self, *arguments: Any) -> Any:
        """Run one call of Keras' loop: on JAX and TensorFlow up to ``steps_per_execution`` steps, on PyTorch one."""
        return self._run(*arguments)

    @property
    def current(self) -> bool:
        """True if the group of ranks has not changed since the step was built: compiled code may depend on it."""
        return self.flat is None or self.flat.current

    def weights(self) -> Array:
        """Return the weights of the present step as one vector, in the replica's dtype."""
        reduced = np.empty(self._replica.size, self._replica.dtype)
        self._replica.get(reduced)
        return reduced

    def end(self, stopping: bool) -> bool:
        """End the epoch's batches with the other ranks; see ``GradientBuffer.end``."""
        if self._stopped or self.flat is None:
            stopping, self._stopped = stopping or self._stopped, False
            return stopping
        return self.flat.end(stopping)

    def _on_jax(self, state: Any, iterator: Any) -> Any:
        self._replica.in_state(state)
        data: Any = self._read_timed(lambda: next(iterator))
        for remaining in reversed(range(self.model.steps_per_execution)):
            self._step(data)
            data = self._read_timed(lambda: next(iterator, None)) if remaining else None
            if data is None:
                break
        return self._logs, self._replica.out_state()

    def _on_torch(self, data: Any) -> Any:
        self._step(data[0])
        return self._logs

    def _on_tensorflow(self, iterator: Any) -> Any:
        from choros.hvd.host_ops.tensorflow import next_batch

        for number in range(self.model.steps_per_execution):
            data = self._read_timed(lambda: next_batch(iterator))
            if data is None:
                if not number:
                    raise StopIteration
                break
            self._step(data)
        return self._logs

    def _read_timed(self, read: Callable[[], Any]) -> Any:
        """Read the next batch; record the time it took in the timeline."""
        trace = collectives(self.config.process_set).group.trace
        if trace is None:
            return read()
        begin = time.monotonic_ns()
        data = read()
        trace(("data", "next batch", begin, time.monotonic_ns(), -1))
        return data

    def _step(self, data: Any) -> None:
        if self.flat is None:
            self.model._symbolic_build(data_batch=data)
            self._begin()
        while self.before:
            self.before.pop(0)()
        assert self.flat is not None  # noqa: S101 - for the type checker
        replica, arrays, n = self._replica, None, 0.0
        rows = int(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None).shape[0])
        if not self._order_checked:
            self._check_order(data, rows)
        if rows:
            with weighed(self.config.op == AVERAGE):
                arrays, n, self._logs = replica.half_step(data)
        elif self._synced:
            collectives(self.config.process_set).refuse(
                "a step without rows, which SyncBatchNormalization has no use for: give every rank a row in each batch "
                "(leave out the last rows, or take another batch_size)"
            )
        elif replica.repeats:
            collectives(self.config.process_set).refuse(
                f"a step without rows, while {type(self.model).__name__}.train_step reads updated weights: give "
                "every rank a row in each batch (leave out the last rows, or take another batch_size)"
            )
        if not self.flat.add(arrays, n):
            replica.skip()
            return
        reduced = self.flat.reduce()
        if reduced is None:
            # This rank's gradients were not used, so they must not count as a step that lacks its update.
            self.config.taken -= 1
            self.model.stop_training = self._stopped = True
        elif reduced[1]:  # 0 if no rank had a row
            with self.config.through(), weighed(self.config.op == AVERAGE):
                self._logs = replica.update(*reduced) or self._logs
        else:
            replica.skip()

    def _check_order(self, data: Any, rows: int) -> None:
        """Find out on all ranks whether the train step uses the updated weights, so that it must be run again.

        Raises:
            InvalidInputError: it does, and ``backward_passes_per_step`` is more than 1.
        """
        self._order_checked = True
        if of_keras(type(self.model).train_step):  # the same result on all ranks, as they have the same model
            return
        reason = None
        if rows:
            repeat = getattr(self.model, "repeat_step", False)
            reason = "the model says repeat_step" if repeat else dependent(self._replica, data, rows)
        reasons = collectives(self.config.process_set).allgather_object(reason, name="what depends on the update")
        names = [name for name in reasons if name is not None]
        if names and self.config.every > 1:
            raise InvalidInputError(
                f"{type(self.model).__name__}.train_step reads updated weights ({names[0]} depends on them), "
                f"which backward_passes_per_step={self.config.every} does not support: leave it at 1."
            )
        self._replica.repeats, self._replica.watches = bool(names), not names

    def _begin(self) -> None:
        replica: Any = make_replica(self.model)
        replica.attach()
        self._synced = any(isinstance(layer, SyncBatchNormalization) for layer in self.model._flatten_layers())
        local = self.config.are_local(replica.trainable)
        self.config.refuse_scales(replica.trainable, local)
        count = f"{len(local)} variables, {replica.size} values, {sum(local)} local"
        name = f"gradients of {alike(self.model.name)} ({count})"
        self.flat = GradientBuffer(self.config, replica.slices, local, name, replica.dtype)
        self._replica = replica


def built(model: keras.Model) -> bool:
    """Return whether the model, its metrics and its optimizer have all their variables."""
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(layer.built for layer in model._flatten_layers()) and all(p is None or p.built for p in parts)
