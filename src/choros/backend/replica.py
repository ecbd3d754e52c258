"""What a backend must do for Choros: one ``Replica`` holds a compiled Keras model inside a worker."""

from __future__ import annotations

from typing import Any, Protocol

from choros.types import Array, Batch


class Replica(Protocol):
    """One worker's copy of the model. Vectors are flat, host-side, of ``dtype``."""

    model: Any
    size: int  # trainable values
    others: int  # float non-trainable values that are averaged (BatchNorm's moving statistics)
    dtype: Any  # float32, or float64 where a trainable variable is
    learning_rate: float  # property with a setter; ignored by the setter where the rate is a schedule

    def build(self, batch: Batch) -> None:
        """Create what the first ``fit`` would create (model, optimizer slots, metrics) from one real batch."""

    def fold_seeds(self, rank: int, seed: int | None) -> None:
        """Make random layers differ by rank: rank 0 keeps the model's seed state; a given ``seed`` sets all."""

    def step(self, batch: Batch) -> None:
        """One plain local training step (``train_step``, optimizer and all); nothing for a batch of no rows."""

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]`` into ``out`` (size + 2 values); zeros for a batch of no rows.

        Updates the metrics and the non-trainable variables, not the weights; ``n`` is what the loss divided by.
        """

    def apply(self, summed: Array) -> None:
        """Divide the gradient by the last element and run the real optimizer. ``summed`` is not kept."""

    def look_ahead(self, momentum: float) -> None:
        """After a ``step``: Nesterov momentum around it (EAMSGD), velocity kept on the device."""

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out`` (with momentum: x, not the look-ahead point)."""

    def set(self, vector: Array) -> None:
        """Set the trainable variables; always copies."""

    def get_others(self, out: Array) -> None:
        """Copy the moving statistics into ``out``."""

    def set_others(self, vector: Array) -> None:
        """Set the moving statistics; always copies."""

    def reset_metrics(self) -> None:
        """Forget what the metrics have seen."""

    def metric_state(self) -> Array:
        """All metric variables as one flat float64 vector."""

    def set_metric_state(self, state: Array) -> None:
        """Set them."""

    def metrics(self) -> dict[str, float]:
        """What Keras would log now; ``loss`` is the exact one."""

    def loss_tally(self) -> list[tuple[float, float, int]]:
        """Since the reset, for each evaluated batch: (n * loss, n, rows)."""

    def evaluate(self, batch: Batch) -> None:
        """One test step: metrics only."""

    def snapshot(self) -> list[Array]:
        """Every variable of model and optimizer, in Keras' order (``model.variables`` + ``optimizer.variables``)."""

    def restore(self, arrays: list[Array]) -> None:
        """Set them."""

    def finish(self) -> None:
        """What Keras does at the end of ``fit`` (averaged weights of ``use_ema``); sync state into the model."""
