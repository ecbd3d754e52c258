"""The split step in Keras' own loop: ``fit`` and ``train_on_batch`` of a model whose optimizer is distributed.

Keras asks ``make_train_function`` for what one step is. Here that is the model's own ``train_step`` up to the
optimizer, one reduction in shared memory, and the optimizer: two compiled halves with the meeting between them, which
was measured to be exact and the cheapest on every backend.
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
        model: compiled.
        how: ReductionConfig.

    Attributes:
        before: functions to call once the model is built, before the first step.
    """

    def __init__(self, model: Any, how: ReductionConfig) -> None:
        self.model, self.how = model, how
        self.before: list[Callable[[], None]] = []
        self.flat: GradientBuffer | None = None
        self._replica: Any = None
        self._logs: Any = {}
        self._tried = False  # True once it is known whether the step goes on with updated weights
        self._stopped = False  # by another rank, whose end of the epoch was met in a step
        ways: dict[str, Any] = {"jax": self._on_jax, "torch": self._on_torch, "tensorflow": self._on_tensorflow}
        self._run = ways[keras.backend.backend()]
        if built(model):
            self._begin()

    def __call__(self, *given: Any) -> Any:
        """One call of Keras' loop: ``steps_per_execution`` steps."""
        return self._run(*given)

    @property
    def current(self) -> bool:
        """True if its ranks are those that there are now; what is compiled may depend on them."""
        return self.flat is None or self.flat.current

    def weights(self) -> Array:
        """The weights as the present step has them, as one vector."""
        found = np.empty(self._replica.size, self._replica.dtype)
        self._replica.get(found)
        return found

    def end(self, stopping: bool) -> bool:
        """At the end of an epoch's batches; see ``GradientBuffer.end``."""
        if self._stopped or self.flat is None:
            stopping, self._stopped = stopping or self._stopped, False
            return stopping
        return self.flat.end(stopping)

    def _on_jax(self, state: Any, iterator: Any) -> Any:
        self._replica.in_state(state)
        data: Any = self._fed(lambda: next(iterator))
        for left in reversed(range(self.model.steps_per_execution)):
            self._step(data)
            data = self._fed(lambda: next(iterator, None)) if left else None
            if data is None:
                break
        return self._logs, self._replica.out_state()

    def _on_torch(self, data: Any) -> Any:
        self._step(data[0])
        return self._logs

    def _on_tensorflow(self, iterator: Any) -> Any:
        from choros.hvd.host_ops.tensorflow import next_batch

        for number in range(self.model.steps_per_execution):
            data = self._fed(lambda: next_batch(iterator))
            if data is None:
                if not number:
                    raise StopIteration
                break
            self._step(data)
        return self._logs

    def _fed(self, read: Callable[[], Any]) -> Any:
        """The next batch; how long it took goes into the timeline."""
        trace = collectives(self.how.process_set).group.trace
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
        if not self._tried:
            self._try_order(data, rows)
        if rows:
            with weighed(self.how.op == AVERAGE):
                arrays, n, self._logs = replica.half_step(data)
        elif self._synced:
            collectives(self.how.process_set).refuse(
                "a step without rows, which SyncBatchNormalization has no use for: give every rank a row in each batch "
                "(leave out the last rows, or take another batch_size)"
            )
        elif replica.repeats:
            collectives(self.how.process_set).refuse(
                f"a step without rows, while {type(self.model).__name__}.train_step goes on with updated weights: give "
                "every rank a row in each batch (leave out the last rows, or take another batch_size)"
            )
        if not self.flat.add(arrays, n):
            replica.skip()
            return
        found = self.flat.reduce()
        if found is None:
            self.how.taken -= 1
            self.model.stop_training = self._stopped = True
        elif found[1]:  # 0 where no rank had a row
            with self.how.through(), weighed(self.how.op == AVERAGE):
                self._logs = replica.update(*found) or self._logs
        else:
            replica.skip()

    def _try_order(self, data: Any, rows: int) -> None:
        """Find out, with all ranks, whether the step goes on with updated weights and so has to be made again.

        Raises:
            InvalidInputError: it does, and the optimizer does not update in each step.
        """
        self._tried = True
        if of_keras(type(self.model).train_step):  # on all ranks: they have the same model
            return
        mine = None
        if rows:
            repeat = getattr(self.model, "repeat_step", False)
            mine = "the model says repeat_step" if repeat else dependent(self._replica, data, rows)
        said = collectives(self.how.process_set).allgather_object(mine, name="what depends on the update")
        names = [name for name in said if name is not None]
        if names and self.how.every > 1:
            raise InvalidInputError(
                f"{type(self.model).__name__}.train_step goes on with updated weights ({names[0]} depends on them), "
                f"which backward_passes_per_step={self.how.every} does not support: leave it at 1."
            )
        self._replica.repeats, self._replica.watches = bool(names), not names

    def _begin(self) -> None:
        replica: Any = make_replica(self.model)
        replica.take_up()
        self._synced = any(isinstance(layer, SyncBatchNormalization) for layer in self.model._flatten_layers())
        local = self.how.are_local(replica.trainable)
        self.how.refuse_scales(replica.trainable, local)
        count = f"{len(local)} variables, {replica.size} values, {sum(local)} local"
        name = f"gradients of {alike(self.model.name)} ({count})"
        self.flat = GradientBuffer(self.how, replica.slices, local, name, replica.dtype)
        self._replica = replica


def built(model: Any) -> bool:
    """Return whether the model, its metrics and its optimizer have all their variables."""
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(layer.built for layer in model._flatten_layers()) and all(p is None or p.built for p in parts)
