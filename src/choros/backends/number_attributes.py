"""Numbers that a model's layers and losses keep as attributes, such as a count of calls, saved during a trial.

A trial calls the model more often than training does. Each of its calls must see the same numbers, and training must
begin with those that the user's script has set.
"""

from __future__ import annotations

from typing import Any

from choros.backends.rowwise_parts import compiled_losses, of_keras


class NumberAttributes:
    """The numbers in attributes of the objects of a model whose classes are not Keras' own.

    Args:
        model: keras.Model, compiled and built.

    Example:
        >>> import keras
        >>> class Counting(keras.layers.Layer):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.calls = 0
        ...
        ...     def call(self, x):
        ...         self.calls += 1
        ...         return x
        >>> model = keras.Sequential([keras.Input((2,)), Counting(), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> numbers, before = NumberAttributes(model), model.layers[0].calls
        >>> _ = model(keras.ops.ones((1, 2)))
        >>> numbers.restore()
        >>> model.layers[0].calls - before
        0
    """

    def __init__(self, model: Any) -> None:
        losses = [entry.loss for entry in compiled_losses(model)]
        functions = [getattr(loss, "fn", None) for loss in losses]
        methods = [getattr(function, "__self__", None) for function in functions]
        parts = [model, *model._flatten_layers(include_self=False), *losses, *functions, *methods]
        users = [part for part in parts if hasattr(part, "__dict__") and not of_keras(type(part))]
        self._saved = [(vars(part), _numbers(part)) for part in users]

    def restore(self) -> None:
        """Set all numbers back."""
        for attributes, numbers in self._saved:
            attributes.update(numbers)


def _numbers(part: Any) -> dict[str, int | float]:
    # No bool: Keras' ``built`` and PyTorch's ``training`` are such, and a call may set them for good.
    return {name: value for name, value in vars(part).items() if type(value) in (int, float)}
