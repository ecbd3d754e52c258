"""The result of ``Trainer.fit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import keras

    from choros.training.run_record import RunRecord


class History(Protocol):
    """A ``keras.callbacks.History`` with the record of the run.

    Attributes:
        history: dict from a metric's name to its values, one for each epoch.
        epoch: list of int. The epochs of this fit, counted from 0.
        params: dict. Keras' parameters of the fit, such as the number of epochs.
        model: keras.Model. The trained model.
        run: choros.RunRecord. The figures of the workers.
    """

    history: dict[str, list[float]]
    epoch: list[int]
    params: dict[str, Any]
    model: keras.Model
    run: RunRecord
