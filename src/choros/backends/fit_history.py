"""The callback whose object ``Trainer.fit`` returns."""

from __future__ import annotations

from numbers import Real

import keras

from choros.object_text import value_text


class History(keras.callbacks.History):  # type: ignore[misc]
    """Keras' record of the epochs, with a ``repr`` that shows their number and the last values.

    Example:
        >>> history = History()
        >>> history.epoch, history.history = [0, 1], {"loss": [0.75, 0.5], "val_loss": [0.625]}
        >>> history
        <History of 2 epochs, last values: loss 0.5, val_loss 0.625; see .history, .epoch>
    """

    def __repr__(self) -> str:
        epochs = len(getattr(self, "epoch", ()))  # Keras sets it when training begins
        last = ", ".join(f"{name} {_number(values[-1])}" for name, values in self.history.items() if values)
        text = f"{epochs} {'epoch' if epochs == 1 else 'epochs'}" + (f", last values: {last}" if last else "")
        return f"<History of {text}; see .history, .epoch{', .run' if hasattr(self, 'run') else ''}>"


def _number(value: object) -> str:
    return f"{float(value):.4g}" if isinstance(value, Real) else value_text(value)
