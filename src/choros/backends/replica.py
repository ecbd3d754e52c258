"""The interface of a backend. One ``Replica`` holds the compiled Keras model of a worker.

The order of calls in a worker, with the sums over ranks::

    replica = make_replica(model, workers)
    replica.build(batch); replica.fold_seeds(rank, seed)

    # one epoch, synchronous, with reduced gradients (AllReduce)
    replica.reset_metrics()
    replica.gradients(batch, slot); replica.apply(group.sum_slots(...))     # each step
    replica.set_metric_state(group.sum(replica.metric_state()))             # end of the epoch
    logs = replica.metrics()                                                # the same on every rank

    # one epoch, asynchronous
    replica.reset_metrics()
    replica.step(batch)                                                     # each step
    replica.set_metric_state(sum of every worker's metric_state())          # end of the epoch
    logs = replica.metrics()

    # validation: each rank takes its rows of each batch; all ranks make the same number of calls
    replica.reset_metrics()
    replica.evaluate(batch)
    replica.set_metric_state(group.sum(replica.metric_state()))
    logs = replica.metrics()

Before the sum, ``metrics()`` returns the values of this rank, except that ``loss`` is already global after ``apply``.
The sum is set only to be read. Call ``reset_metrics`` before the next batch. To read logs within an epoch, save
``metric_state()`` first and set it again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from choros.types import Array, Batch

if TYPE_CHECKING:
    import keras
    import numpy as np

    from choros.backends.optimizer_shard.shard import OptimizerShard


class Replica(Protocol):
    """One worker's copy of the model, used from one thread. Vectors are flat numpy arrays of type ``dtype``.

    The caller owns the vectors that it passes or receives, and may write into them after the call. The arrays of a
    batch may be read after ``step`` has returned, so they must not be written again.
    """

    model: keras.Model
    size: int  # number of trainable values
    statistics_size: (
        int  # number of float non-trainable values that are averaged (moving statistics of BatchNormalization)
    )
    dtype: np.dtype[Any]  # float64 if any trainable variable has it, else float32
    seeds: list[Any]  # variables that hold the seed states of random layers
    packing: float  # seconds in which steps converted batches and copied them to the device (JAX: converted them only)
    averaged: Sequence[int]  # indices of metric variables that do not add over ranks; set by the caller, default: none
    revocable: bool  # whether ``swap`` may undo ``gradients``; set by the caller before the first batch
    watches: bool  # whether a step that uses updated weights is refused if it is not repeated (PyTorch); set likewise
    shard: OptimizerShard | None  # this rank's share of the update, while the ranks of a host divide it
    repeats: bool  # whether ``apply`` runs the step again with the reduced gradient; set likewise

    @property
    def lead(self) -> Any:
        """The replica of the first device; the replica itself if all devices share one model."""
        ...

    def on_lead(self, function: Callable[[Batch], Any], batch: Batch) -> Any:
        """Call a function with the batch of ``lead``, in the thread of ``lead``."""
        ...

    @property
    def learning_rate(self) -> float:
        """The current learning rate, also of a schedule or with loss scaling. A schedule ignores a new value."""
        ...

    @learning_rate.setter
    def learning_rate(self, value: float) -> None: ...

    def build(self, batch: Batch) -> None:
        """Create the variables that the first ``fit`` creates, from one batch with rows.

        These are the model's weights, optimizer slots and metrics. Only the structure, shapes and dtypes of the batch
        matter. A rank without rows may therefore pass the batch of another rank.
        """

    def ready(self, batch: Batch) -> Batch:
        """Return the batch with its data on the device, ready for a step. Any thread may call this method."""
        ...

    def fold_seeds(self, rank: int, seed: int | None) -> None:
        """Give the random layers of each rank a different seed state.

        Without a ``seed``, rank 0 keeps the model's seed state. With a ``seed``, the states of all ranks depend on it.
        """

    def seed_generators(self, rank: int, seed: int) -> None:
        """Seed the global random generators of the framework by rank and seed; layers without a seed may use them."""

    def step(self, batch: Batch) -> None:
        """Run one local training step (``train_step`` with its optimizer); a batch without rows is skipped."""

    def window(self, batch: Batch, most: int) -> int:
        """Return how many steps on batches of this form run as one compiled program.

        Only Keras' own ``train_step`` on one CPU device is compiled so, of a model and batches that are not large
        (``choros.backends.step_windows``).

        Args:
            batch: a batch with rows, not made ready.
            most: int. The largest number to return.

        Returns:
            An int of at least 1. 1: each step is a program.
        """
        ...

    def steps(self, batches: Sequence[Batch], window: int, momentum: float = 0.0) -> None:
        """Run one local training step for each batch, with the same result as ``step`` and ``look_ahead`` for each.

        Args:
            batches: up to ``window`` batches with rows, of equal shapes and dtypes.
            window: int. What ``window`` returned for a batch of this form.
            momentum: float. That of ``look_ahead``, which must have been called once. 0: none.
        """

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]`` into ``out`` (size + 2 values); zeros for a batch without rows.

        The metrics (except ``loss``) and the non-trainable variables are updated; the weights are not. ``n`` is the
        divisor of the loss (``choros.backends.loss_weighting``); it is 1 for a loss that is a sum. ``batch.total`` is
        stored until ``apply``.

        Raises:
            InexactLossError: the step does not call the compiled optimizer exactly once. Or, with several workers, no
                weights make the reduced gradient that of one process.
        """

    def apply(self, summed: Array) -> None:
        """Divide the summed gradient by its last element and run the optimizer. ``summed`` may be reused afterwards.

        The optimizer applies clipping, loss scaling, accumulation and averaging to the reduced gradient. The exact loss
        of the batch is added to ``metrics()``.
        """

    def outcome(self) -> list[Array]:
        """Return copies of the variables that a repeated step makes equal on all ranks.

        These are all variables of the model except seed states and large frozen weights.
        """
        ...

    def set_outcome(self, arrays: list[Array]) -> None:
        """Set the values that ``outcome`` returned on another rank. A rank without rows in the step calls this."""

    def mark(self) -> Any:
        """Return the state that ``gradients`` changes: metrics, moving statistics, random state.

        Set ``revocable`` first, and call this directly before ``gradients``, which may fill the mark. The mark is valid
        until the next ``apply`` or any call that sets values.
        """
        ...

    def state_after_gradients(self) -> Array:
        """Return ``metric_state()``. Directly after ``gradients`` this costs less."""
        ...

    def swap(self, mark: Any) -> Any:
        """Restore the state of a mark; return a mark of the state that it replaces."""
        ...

    def look_ahead(self, momentum: float) -> None:
        """Apply Nesterov momentum after a step (EAMSGD): v <- mu v + u(x + mu v), x <- x + v; on the device.

        Call it once before the first ``step``, with v = 0, and then after each step. Between the calls the variables
        hold the look-ahead point x + mu v. ``get``, ``set``, ``snapshot`` and ``evaluate`` refer to x.
        """

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out`` (with momentum: x, not the look-ahead point)."""

    def set(self, vector: Array) -> None:
        """Set the trainable variables to a copy of the vector. With momentum, set x and keep the velocity."""

    def get_statistics(self, out: Array) -> None:
        """Copy the moving statistics into ``out``."""

    def set_statistics(self, vector: Array) -> None:
        """Set the moving statistics to a copy of the vector."""

    @property
    def averages(self) -> bool:
        """True if the optimizer keeps moving averages of the weights (``use_ema``)."""
        ...

    def get_average(self, out: Array) -> None:
        """Copy the moving averages of the trainable variables into ``out`` (``size`` values of ``dtype``)."""

    def set_average(self, vector: Array) -> None:
        """Set the moving averages to a copy of the vector. The variables keep their values."""

    def optimizer_state(self) -> list[Array]:
        """Return copies of the variables of all optimizers of the model, the compiled one's first."""
        ...

    def set_optimizer_state(self, arrays: list[Array]) -> None:
        """Set the values that ``optimizer_state`` returned."""

    def take_settings(self, values: dict[str, Any]) -> None:
        """Set values that ``choros.backends.callback_settings.Settings.changed`` returned for a copy of the model."""

    @property
    def iterations(self) -> int:
        """The optimizer's step counter, which includes the steps of gradient accumulation; it can be set."""
        ...

    @iterations.setter
    def iterations(self, count: int) -> None: ...

    def reset_metrics(self) -> None:
        """Reset the metrics and the loss."""

    def metric_state(self) -> Array:
        """Return all metric variables, and the losses of the evaluated batches, as one flat float64 vector.

        It adds over ranks if the metrics are additive. After the same calls it has the same length on every rank.
        """
        ...

    def set_metric_state(self, state: Array) -> None:
        """Set the metrics from one state or from a sum of states. The losses that ``apply`` counted are kept."""

    def own_logs(self) -> dict[str, tuple[float, bool]] | None:
        """Return the scalars that a user-defined step last logged; None if the step logs Keras' metrics."""
        ...

    def metrics(self) -> dict[str, Any]:
        """Return the logs of Keras at this point, as numbers; ``loss`` is exact after ``apply`` or ``evaluate``.

        If a user-defined ``train_step`` returns other logs, the values of the last step are returned, as in Keras.
        """
        ...

    def metric_values(self, state: Array) -> list[float]:
        """Return the values of the metric variables in one process, flat, for a sum of metric states."""
        ...

    def peek(self, state: Array) -> dict[str, Any]:
        """Return the result of ``metrics`` for a sum of metric states. The replica's metrics keep their values."""
        ...

    def evaluate(self, batch: Batch) -> None:
        """Run one test step, which updates only the metrics. Call it also without rows, so that states add."""

    def predict(self, batch: Batch) -> list[Any]:
        """Return the model's outputs for ``x``, as a list of nested arrays to be concatenated in order."""
        ...

    def snapshot(self) -> list[Array]:
        """Return copies of the variables of the model and its optimizers, first ``model.variables``."""
        ...

    def view(self) -> list[Array]:
        """Return the values of ``snapshot`` without a copy if possible. They are valid until the next change."""
        ...

    def restore(self, arrays: list[Array]) -> None:
        """Set the values that ``snapshot`` returned, and reset the velocity of the momentum to 0."""

    def ahead(self) -> list[Array]:
        """Return copies of the trainable variables as the next step reads them: with momentum, the look-ahead point."""
        ...

    def set_ahead(self, arrays: list[Array]) -> None:
        """Set the values that ``ahead`` returned, after ``restore``. With momentum this restores the velocity."""

    def sync(self) -> None:
        """Copy all state into the Keras model."""

    def refresh(self) -> None:
        """Read values that were set in the Keras model after ``sync`` or ``finish``."""

    def finish(self) -> None:
        """Copy all state into the Keras model, and finalize the weights as ``fit`` does (averages of ``use_ema``)."""

    @property
    def reusable(self) -> bool:
        """True if another fit of an equal model may use this replica, after ``finish``, with its compiled steps."""
        ...

    def renew(self, arrays: list[Array]) -> None:
        """Replace ``build`` for a further fit of the same model: set the values that ``snapshot`` returns."""

    def close(self) -> None:
        """Release resources, such as threads."""
