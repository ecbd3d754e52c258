"""The interface of a backend: one ``Replica`` holds a compiled Keras model inside a worker.

The order of calls in a worker, and who adds what over the ranks::

    replica = make_replica(model, workers)
    replica.build(batch); replica.fold_seeds(rank, seed)

    # one epoch, together on gradients (AllReduce)
    replica.reset_metrics()
    replica.gradients(batch, slot); replica.apply(group.sum_slots(...))     # each step
    replica.set_metric_state(group.sum(replica.metric_state()))             # end of the epoch
    logs = replica.metrics()                                                # the same on every rank

    # one epoch, each in its own time
    replica.reset_metrics()
    replica.step(batch)                                                     # each step
    replica.set_metric_state(sum of every worker's metric_state())          # end of the epoch
    logs = replica.metrics()

    # validation: every rank its rows of each batch, all ranks the same number of calls
    replica.reset_metrics()
    replica.evaluate(batch)
    replica.set_metric_state(group.sum(replica.metric_state()))
    logs = replica.metrics()

``metrics()`` before the sum is this rank's alone, except that ``loss`` is already global after ``apply``. The sum
is set for reading: call ``reset_metrics`` before the next batch, or, to look in the middle of an epoch, keep
``metric_state()`` and set it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from choros.types import Array, Batch


class Replica(Protocol):
    """One worker's copy of the model. Vectors are flat, host-side, of ``dtype``. One thread.

    Vectors given or returned belong to the caller, who may write into them at once. A batch's arrays may still be
    read after ``step`` has returned: they must not be written again.
    """

    model: Any
    size: int  # trainable values
    others: int  # float non-trainable values that are averaged (BatchNorm's moving statistics)
    dtype: Any  # float32, or float64 where a trainable variable is
    seeds: list[Any]  # variables that hold the states of random layers
    averaged: Sequence[int]  # metric variables that do not add over ranks; set by the caller, none by default
    revocable: bool  # whether ``gradients`` may be taken back with ``swap``; set by the caller before the first batch
    watches: bool  # whether a step that uses updated weights, and is not made again, is refused (PyTorch); likewise
    repeats: bool  # whether ``apply`` makes the step again, in which the optimizer gets the sum; set as ``revocable``

    @property
    def lead(self) -> Any:
        """The replica of the first device; itself where all devices share one model."""

    def on_lead(self, function: Callable[[Batch], Any], batch: Batch) -> Any:
        """Call a function with the batch of ``lead``, in the thread of ``lead``."""

    @property
    def learning_rate(self) -> float:
        """The present rate, also of a schedule and under loss scaling; its setter is ignored by schedules."""

    @learning_rate.setter
    def learning_rate(self, value: float) -> None: ...

    def build(self, batch: Batch) -> None:
        """Create what the first ``fit`` would create (model, optimizer slots, metrics) from one batch with rows.

        Only shapes, dtypes and structure of the batch matter: a rank that has no row may give another's.
        """

    def ready(self, batch: Batch) -> Batch:
        """The same batch, with what its step takes lying on the device; any thread may call it."""

    def fold_seeds(self, rank: int, seed: int | None) -> None:
        """Make random layers differ by rank: rank 0 keeps the model's seed state; a given ``seed`` sets all."""

    def seed_generators(self, rank: int, seed: int) -> None:
        """Set the library's own random generators, which layers without a seed may use, by rank and seed."""

    def step(self, batch: Batch) -> None:
        """One plain local training step (``train_step``, optimizer and all); nothing for a batch of no rows."""

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]`` into ``out`` (size + 2 values); zeros for a batch of no rows.

        Updates the metrics (except ``loss``) and the non-trainable variables, not the weights; ``n`` is what the loss
        divided by (``choros.backends.loss_weighting``), 1 for a loss that adds. ``batch.total`` is remembered until
        ``apply``.

        Raises:
            InexactLossError: the step does not pass once, and only once, through the compiled optimizer; or, with
                several
                workers, no weights could make its loss that of one process.
        """

    def apply(self, summed: Array) -> None:
        """Divide the gradient by the last element and run the real optimizer. ``summed`` is not kept.

        Clipping, loss scaling, accumulation and averaging in the optimizer see the reduced gradient. The batch's
        exact loss is counted into ``metrics()``.
        """

    def outcome(self) -> list[Array]:
        """Return copies of what a step that ``repeats`` leaves alike on all ranks: all but seeds and frozen weights."""

    def set_outcome(self, arrays: list[Array]) -> None:
        """Set what ``outcome`` of another rank gave: on a rank that had no rows in the step."""

    def mark(self) -> Any:
        """Return what ``gradients`` changes (metrics, moving statistics, random state), as it is now.

        Only where ``revocable`` is set, and right before ``gradients``, which may fill it. It is good until the next
        ``apply`` or any call that sets something.
        """

    def state_after_gradients(self) -> Array:
        """Return ``metric_state()``; right after ``gradients`` this costs less."""

    def swap(self, mark: Any) -> Any:
        """Go back, or forward again, to a mark; returns a mark of what was left."""

    def look_ahead(self, momentum: float) -> None:
        """Nesterov momentum around the step (EAMSGD): v <- mu v + u(x + mu v), x <- x + v; kept on the device.

        Call it once before the first ``step``, with v = 0, and then after each. Between, the variables hold the
        look-ahead point x + mu v; ``get``, ``set``, ``snapshot`` and ``evaluate`` mean x.
        """

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out`` (with momentum: x, not the look-ahead point)."""

    def set(self, vector: Array) -> None:
        """Set the trainable variables; always copies. With momentum x is set and the velocity kept."""

    def get_others(self, out: Array) -> None:
        """Copy the moving statistics into ``out``."""

    def set_others(self, vector: Array) -> None:
        """Set the moving statistics; always copies."""

    @property
    def averages(self) -> bool:
        """True where the optimizer keeps moving averages of the weights (``use_ema``)."""

    def get_average(self, out: Array) -> None:
        """Copy the moving averages of the trainable variables into ``out`` (``size`` values of ``dtype``)."""

    def set_average(self, vector: Array) -> None:
        """Set the moving averages; always copies. The variables stay as they are."""

    def optimizer_state(self) -> list[Array]:
        """Return copies of the variables of all optimizers of the model, the compiled one's first."""

    def set_optimizer_state(self, arrays: list[Array]) -> None:
        """Set what ``optimizer_state`` gave."""

    def take_settings(self, values: dict[str, Any]) -> None:
        """Set what ``choros.backends.callback_settings.Settings.changed`` gave in another copy of the model."""

    @property
    def iterations(self) -> int:
        """The optimizer's count of steps, those of gradient accumulation included; may be set."""

    @iterations.setter
    def iterations(self, count: int) -> None: ...

    def reset_metrics(self) -> None:
        """Forget what the metrics have seen, and the loss."""

    def metric_state(self) -> Array:
        """All metric variables, and the losses of the evaluated batches, as one flat float64 vector.

        It adds over ranks where the metrics are additive. After the same calls it has the same length anywhere.
        """

    def set_metric_state(self, state: Array) -> None:
        """Set them, from one or from a sum of several; what ``apply`` counted stays."""

    def own_logs(self) -> dict[str, tuple[float, bool]] | None:
        """Return the numbers that a user's own step last logged; None if a step logs Keras' metrics."""

    def metrics(self) -> dict[str, Any]:
        """Return what Keras would log now, as numbers; ``loss`` is the exact one after ``apply`` or ``evaluate``.

        Where a user's ``train_step`` returns logs that are not the metrics', the last step's, as in Keras.
        """

    def metric_values(self, state: Array) -> list[float]:
        """Return what the metrics' variables would hold in one process, flat, for a sum of metric states."""

    def peek(self, state: Array) -> dict[str, Any]:
        """Return what ``metrics`` would give for a sum of metric states, in the middle of an epoch; nothing changes."""

    def evaluate(self, batch: Batch) -> None:
        """One test step: metrics only. A batch of no rows counts as one, so that states add."""

    def predict(self, batch: Batch) -> list[Any]:
        """The model's outputs for the batch's ``x``, as a list of nested arrays to be put one after the other."""

    def snapshot(self) -> list[Array]:
        """Every variable of model and optimizer, in Keras' order (``model.variables`` + ``optimizer.variables``)."""

    def view(self) -> list[Array]:
        """Return what ``snapshot`` does, without a copy where that can be: valid until the next change."""

    def restore(self, arrays: list[Array]) -> None:
        """Set them; a velocity is forgotten."""

    def ahead(self) -> list[Array]:
        """Copies of the trainable variables where the next step is taken: with momentum the look-ahead point."""

    def set_ahead(self, arrays: list[Array]) -> None:
        """Set what ``ahead`` gave, after ``restore``: with momentum this brings the velocity back."""

    def sync(self) -> None:
        """Bring all state into the model, as it is."""

    def refresh(self) -> None:
        """After ``sync`` or ``finish``: take up what was set in the model itself since then."""

    def finish(self) -> None:
        """Do what Keras does at the end of ``fit`` (averaged weights of ``use_ema``); sync state into the model."""

    def close(self) -> None:
        """End what it keeps running, if anything."""
