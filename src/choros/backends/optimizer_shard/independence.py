"""Independence of an optimizer's update: of each value, or of each variable, from all others.

It is known for the optimizers of Keras. A trial shows it for an optimizer of the user: the same gradients go to a copy
of the optimizer with all variables, and to copies with a part of them.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import keras
import numpy as np

from choros.backends.optimizer_shard.optimizer_copy import (
    are_equal,
    optimizer_copy,
    plain_attributes,
    slot_lists,
    unknown_attribute,
    variable_like,
)
from choros.backends.rowwise_parts import of_keras
from choros.types import Array

Unit = Literal["value", "variable"]
ELEMENTWISE = frozenset(  # optimizers of Keras that update each value by its own gradient and slots alone
    {"SGD", "Adam", "AdamW", "Nadam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Lion"}
)
BY_VARIABLE = frozenset({"Adafactor", "Ftrl", "Lamb", "Muon"})  # ... and that update each variable independently
# A divided update replaces these methods, or they get all gradients at once.
_REPLACED = (
    *("apply", "stateless_apply", "apply_gradients"),
    *("_backend_apply_gradients", "_backend_update_step", "_clip_gradients"),
)
_LONGEST = 160  # values along a dimension of a trial's variables; rules for large matrices begin at 128 or less
# Sizes of the gradients in the steps of a trial; None: gradients that point away from a minimum, as in training.
_SIZES = (1e-6, 1e-3, 1.0, None, None, None, None, None, None, 30.0, 1e3, 1.0)
_FACTORS = (0.1, 1.0, 10.0)  # of a variable's gradients
_COUNTS = {
    4: 60,
    6: 1_000,
    8: 50_000,
    10: 1_000_000,
}  # before these steps the step counter is set, as rules may begin late
# The learning rate is constant, since with a schedule's first rates, which may be 0, weights would not change. A
# divided update does the rest without the optimizer's code.
_CONFIG = {
    "learning_rate": 0.1,
    "gradient_accumulation_steps": None,
    "global_clipnorm": None,
    "loss_scale_factor": None,
}

_results: WeakKeyDictionary[Any, tuple[dict[str, Any], Unit | None, str]] = WeakKeyDictionary()


def independent_unit(
    optimizer: keras.optimizers.Optimizer, trainable: list[Any], tries: bool
) -> tuple[Unit | None, str]:
    """Return the smallest part of the weights whose update depends on no other part, and a reason if there is none.

    Args:
        optimizer: built for ``trainable``.
        trainable: list of variables.
        tries: whether a trial may decide about an optimizer that is not Keras' own.

    Returns:
        ``("value", "")`` or ``("variable", "")``, or None and a reason.

    Example:
        >>> import keras
        >>> optimizer, variable = keras.optimizers.Lamb(), keras.Variable([1.0, 2.0])
        >>> optimizer.build([variable])
        >>> independent_unit(optimizer, [variable], tries=False)
        ('variable', '')
    """
    kind = type(optimizer)
    if of_keras(kind) and kind.__name__ in ELEMENTWISE:
        return "value", ""
    if of_keras(kind) and kind.__name__ in BY_VARIABLE:
        return "variable", ""
    if of_keras(kind) or not tries:
        return None, f"it is not known whether {kind.__name__} updates each variable independently"
    replaced = [name for name in _REPLACED if not of_keras(getattr(kind, name))]
    if replaced:
        return None, f"{kind.__name__} has its own {replaced[0]}"
    unknown = unknown_attribute(optimizer)
    if unknown:
        return (
            None,
            f"{kind.__name__} has the attribute {unknown!r}, which is neither a setting (numbers, text) nor slots",
        )
    settings = plain_attributes(optimizer)
    known = _results.get(optimizer)
    if known is None or not are_equal(known[0], settings):
        try:
            known = settings, *_try(optimizer, trainable)
        except Exception as error:  # any error of the user's code
            known = settings, None, f"{kind.__name__} raised {type(error).__name__} with a part of the weights: {error}"
        _results[optimizer] = known
    return known[1], known[2]


def treats_alike(optimizer: keras.optimizers.Optimizer, trainable: list[Any], tries: bool) -> bool:
    """Return whether a built optimizer's update is the same function of each value's gradient and slots."""
    return _may_be_vector(optimizer, trainable) and independent_unit(optimizer, trainable, tries)[0] == "value"


def _may_be_vector(optimizer: keras.optimizers.Optimizer, trainable: list[Any]) -> bool:
    decayed = {optimizer._use_weight_decay(variable) for variable in trainable}  # a decay may be set later
    return (
        optimizer.clipnorm is None
        and len(decayed) == 1
        and len({dtype_of(variable) for variable in trainable}) == 1
        and all(variable.constraint is None for variable in trainable)
        and all(
            _fits(slot, variable)
            for slots in slot_lists(optimizer).values()
            for slot, variable in zip(slots, trainable, strict=True)
        )
    )


def _fits(slot: Any, variable: Any) -> bool:
    return slot is not None and tuple(slot.shape) == tuple(variable.shape) and slot.dtype == variable.dtype


def dtype_of(variable: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a variable."""
    dtype: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return dtype


def _try(optimizer: Any, trainable: list[Any]) -> tuple[Unit | None, str]:
    """Return the result of ``independent_unit`` for an optimizer of the user, from a trial on small variables."""
    rng, name = np.random.default_rng(0), type(optimizer).__name__
    shapes = [tuple(min(length, _LONGEST) for length in variable.shape) for variable in trainable]
    values, minima = ([rng.normal(0, 0.05, shape) for shape in shapes] for _ in range(2))
    whole = _Trial(optimizer, values, trainable)
    separate = [_Trial(optimizer, [value], [v]) for value, v in zip(values, trainable, strict=True)]
    ranges: list[_Trial] = []
    if _may_be_vector(optimizer, trainable):
        vector = _joined(values)
        parts = np.split(vector, [len(vector) // 3, len(vector) // 2])
        ranges = [_Trial(optimizer, [part], trainable[:1], names=False) for part in parts]
    ends = np.cumsum([part.variables[0].shape[0] for part in ranges])[:-1]
    for number, size in enumerate(_SIZES):
        if number in _COUNTS:
            for part in (whole, *separate, *ranges):
                part.count(_COUNTS[number])
        if size is None:
            gradients = [state[0] - minimum for state, minimum in zip(whole.states, minima, strict=True)]
        else:
            gradients = [rng.normal(0, size * rng.choice(_FACTORS), shape) for shape in shapes]
        whole.step(gradients)
        if not all(np.isfinite(state[0]).all() for state in whole.states):
            return None, f"in a trial {name} gave weights that are not finite"
        for index, part in enumerate(separate):
            part.step([gradients[index]])
            if not part.agrees(index, whole):
                path = trainable[index].path
                return None, f"in a trial {name} updated {path} differently with the other variables than alone"
        if ranges:
            for part, gradient in zip(ranges, np.split(_joined(gradients), ends), strict=True):
                part.step([gradient])
            ranges = ranges if _agree_as_vector(ranges, whole) else []
    for variable, first, state in zip(trainable, values, whole.states, strict=True):
        if first.size and np.allclose(first, state[0], rtol=1e-3, atol=1e-6):
            return None, f"in a trial {name} did not change {variable.path}"
    if not are_equal(whole.settings, plain_attributes(whole.optimizer)):
        return None, f"{name} changes attributes in a step other than a keras.Variable"
    return "value" if ranges else "variable", ""


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _agree_as_vector(ranges: list[_Trial], whole: _Trial) -> bool:
    """Return whether the last step changed ranges of the vector of all values as it changed all variables."""

    def joined(states: list[list[Array]]) -> list[Array]:
        return [_joined(list(arrays)) for arrays in zip(*states, strict=True)]

    parts = [(joined([part.before[0] for part in ranges]), joined([part.states[0] for part in ranges]))]
    parts += [(part.numbers_before, part.numbers) for part in ranges]
    expected = [(joined(whole.before), joined(whole.states))] + [(whole.numbers_before, whole.numbers)] * len(ranges)
    return all(_same_change(*left, *right) for left, right in zip(parts, expected, strict=True))


def _same_change(before: list[Array], after: list[Array], other_before: list[Array], other_after: list[Array]) -> bool:
    """Return whether two copies have changed equal values equally, up to rounding."""
    for first, left, second, right in zip(before, after, other_before, other_after, strict=True):
        if not left.size:
            continue
        if not np.isfinite(right).all():
            return np.array_equal(left, right, equal_nan=True)
        change = np.abs(right - second).max()
        rounding = 4 * np.finfo(np.float32).eps * max(np.abs(left).max(), np.abs(first).max())
        if not np.allclose(left - first, right - second, rtol=0, atol=1e-3 * change + rounding, equal_nan=True):
            return False
    return True


class _Trial:
    """A copy of an optimizer, with small variables of its own.

    Args:
        original: the optimizer.
        values: list of array. The first values of the variables.
        counterparts: for each, a variable of the original, with its dtype and exceptions.
        names: whether the variables also have the names and constraints of these, on which a rule may depend.

    Attributes:
        states, before: for each variable, its values and those of its slots; after the last step, and before it.
        numbers, numbers_before: the optimizer's variables that belong to no weight, such as the step counter.
        settings: its plain attributes at first.
    """

    def __init__(self, original: Any, values: list[Array], counterparts: list[Any], names: bool = True) -> None:
        self.variables: list[Any] = []
        for value, variable in zip(values, counterparts, strict=True):
            if names:
                self.variables.append(variable_like(variable, value, trainable=False))
            else:
                self.variables.append(keras.Variable(value, dtype=variable.dtype, trainable=False, name="range"))
        self.optimizer = optimizer_copy(original, self.variables, counterparts, _CONFIG)
        self.settings = plain_attributes(self.optimizer)
        self.states, self.numbers = self._read()
        self.before, self.numbers_before = self.states, self.numbers

    def count(self, steps: int) -> None:
        """Set the step counter."""
        self.optimizer._iterations.assign(steps)
        self.states, self.numbers = self._read()

    def step(self, gradients: list[Array]) -> None:
        """Update the variables."""
        self.before, self.numbers_before = self.states, self.numbers
        pairs = zip(gradients, self.variables, strict=True)
        tensors = [keras.ops.convert_to_tensor(gradient, dtype=variable.dtype) for gradient, variable in pairs]
        self.optimizer.apply(tensors, self.variables)
        self.states, self.numbers = self._read()

    def agrees(self, index: int, whole: _Trial) -> bool:
        """Return whether the last step changed the only variable as it changed the variable ``index`` of ``whole``."""
        same = _same_change(self.before[0], self.states[0], whole.before[index], whole.states[index])
        return same and _same_change(self.numbers_before, self.numbers, whole.numbers_before, whole.numbers)

    def _read(self) -> tuple[list[list[Array]], list[Array]]:
        slots = slot_lists(self.optimizer)
        states = [[variable, *(slots[name][i] for name in sorted(slots))] for i, variable in enumerate(self.variables)]
        numbers = [value for value in vars(self.optimizer).values() if isinstance(value, keras.Variable)]
        values = [[_values(variable) for variable in state if variable is not None] for state in states]
        return values, [_values(variable) for variable in numbers]


def _values(variable: keras.Variable) -> Array:
    return np.array(keras.ops.convert_to_numpy(variable), dtype=np.float64)
