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
_Change = tuple[list[Array], list[Array]]  # arrays before a step, and after it
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
_COUNTS = {4: 60, 6: 1_000, 8: 50_000, 10: 1_000_000}  # by the step before which the step counter is set to them
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
        reason = f"has the attribute {unknown!r}, which is neither a setting (numbers, text) nor slots"
        return None, f"{kind.__name__} {reason}"
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
    trials, name = _Trials(optimizer, trainable), type(optimizer).__name__
    for number, size in enumerate(_SIZES):
        trials.step(size, _COUNTS.get(number))
        reason = trials.difference()
        if reason:
            return None, f"in a trial {name} {reason}"
    reason = trials.unchanged()
    if reason:
        return None, f"in a trial {name} {reason}"
    if trials.changes_attributes():
        return None, f"{name} changes attributes in a step other than a keras.Variable"
    return "value" if trials.ranges else "variable", ""


class _Trials:
    """Copies of an optimizer that get the same gradients.

    Args:
        optimizer: built for ``trainable``.
        trainable: list of variables.

    Attributes:
        whole: the copy for all variables.
        separate: for each variable, a copy for it alone.
        ranges: copies for ranges of the vector of all values; empty if they cannot be made, or have not agreed.
    """

    def __init__(self, optimizer: Any, trainable: list[Any]) -> None:
        self._rng, self._trainable = np.random.default_rng(0), trainable
        self._shapes = [tuple(min(length, _LONGEST) for length in variable.shape) for variable in trainable]
        self._first, self._minima = (self._normal(0.05) for _ in range(2))
        self.whole = _Trial(optimizer, self._first, trainable)
        self.separate = [_Trial(optimizer, [value], [v]) for value, v in zip(self._first, trainable, strict=True)]
        self.ranges: list[_Trial] = []
        vector = _vector(self._first)
        self._cuts = [len(vector) // 3, len(vector) // 2]
        if _may_be_vector(optimizer, trainable):
            parts = np.split(vector, self._cuts)
            self.ranges = [_Trial(optimizer, [part], trainable[:1], names=False) for part in parts]
        self._settings = plain_attributes(self.whole.optimizer)

    def _normal(self, size: float) -> list[Array]:
        return [self._rng.normal(0, size, shape) for shape in self._shapes]

    def step(self, size: float | None, count: int | None) -> None:
        """Update the variables of all copies.

        Args:
            size: of the gradients; None: those of a quadratic loss.
            count: the step counter is first set to this. None: it is not set.
        """
        if size is None:
            pairs = zip(self.whole.values, self._minima, strict=True)
            gradients = [value - minimum for value, minimum in pairs]
        else:
            gradients = [self._rng.choice(_FACTORS) * gradient for gradient in self._normal(size)]
        self.whole.step(gradients, count)
        for part, gradient in zip(self.separate, gradients, strict=True):
            part.step([gradient], count)
        if self.ranges:
            for part, gradient in zip(self.ranges, np.split(_vector(gradients), self._cuts), strict=True):
                part.step([gradient], count)

    def difference(self) -> str:
        """Return the reason why variables depend on each other, by the last step; "" if there is none.

        Ranges that depend on each other are removed.
        """
        whole = self.whole
        if not all(np.isfinite(value).all() for value in whole.values):
            return "gave weights that are not finite"
        for index, (part, variable) in enumerate(zip(self.separate, self._trainable, strict=True)):
            if not (_same(part.change(0), whole.change(index)) and _same(part.change(-1), whole.change(-1))):
                return f"updated {variable.path} differently with the other variables than alone"
        if self.ranges:
            parts = _change_of_vector([part.change(0) for part in self.ranges])
            expected = _change_of_vector([whole.change(index) for index in range(len(self._trainable))])
            numbers = all(_same(part.change(-1), whole.change(-1)) for part in self.ranges)
            self.ranges = self.ranges if numbers and _same(parts, expected) else []
        return ""

    def unchanged(self) -> str:
        """Return that a variable has its first values, about which the trial shows nothing; "" if all have changed."""
        for variable, first, value in zip(self._trainable, self._first, self.whole.values, strict=True):
            if first.size and np.allclose(first, value, rtol=1e-3, atol=1e-6):
                return f"did not change {variable.path}"
        return ""

    def changes_attributes(self) -> bool:
        """Return whether steps have changed attributes, which a divided update would not share."""
        return not are_equal(self._settings, plain_attributes(self.whole.optimizer))


def _vector(arrays: list[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _change_of_vector(changes: list[_Change]) -> _Change:
    """Return the change of the vector of several variables, and of the vectors of their slots."""
    before, after = (
        [_vector(list(arrays)) for arrays in zip(*part, strict=True)] for part in zip(*changes, strict=True)
    )
    return before, after


def _same(change: _Change, expected: _Change) -> bool:
    """Return whether two copies have changed equal values equally, up to rounding."""
    for first, last, other_first, other_last in zip(*change, *expected, strict=True):
        if not last.size:
            continue
        if not np.isfinite(other_last).all():
            if not np.array_equal(last, other_last, equal_nan=True):
                return False
            continue
        size = np.abs(other_last - other_first).max()
        rounding = 4 * np.finfo(np.float32).eps * max(np.abs(last).max(), np.abs(first).max())
        difference = (last - first) - (other_last - other_first)
        if not np.abs(difference).max() <= 1e-3 * size + rounding:  # also if it is NaN
            return False
    return True


class _Trial:
    """A copy of an optimizer, with small variables of its own.

    Args:
        original: the optimizer.
        values: list of array. The first values of the variables.
        counterparts: for each, a variable of the original, with its dtype and exceptions.
        names: whether the variables also have the names and constraints of these, on which a rule may depend.
    """

    def __init__(self, original: Any, values: list[Array], counterparts: list[Any], names: bool = True) -> None:
        self._variables: list[Any] = []
        for value, variable in zip(values, counterparts, strict=True):
            if names:
                self._variables.append(variable_like(variable, value, trainable=False))
            else:
                self._variables.append(keras.Variable(value, dtype=variable.dtype, trainable=False, name="range"))
        self.optimizer = optimizer_copy(original, self._variables, counterparts, _CONFIG)
        self._before = self._after = self._read()

    @property
    def values(self) -> list[Array]:
        """The values of the variables."""
        return [state[0] for state in self._after[:-1]]

    def step(self, gradients: list[Array], count: int | None) -> None:
        """Update the variables. With a ``count`` the step counter is first set to it."""
        self._before = self._after
        if count is not None:
            self.optimizer._iterations.assign(count)
            self._before = self._read()
        pairs = zip(gradients, self._variables, strict=True)
        tensors = [keras.ops.convert_to_tensor(gradient, dtype=variable.dtype) for gradient, variable in pairs]
        self.optimizer.apply(tensors, self._variables)
        self._after = self._read()

    def change(self, index: int) -> _Change:
        """Return a variable and its slots before and after the last step; -1: what belongs to no variable."""
        return self._before[index], self._after[index]

    def _read(self) -> list[list[Array]]:
        """Return the values of each variable and its slots; last those of other variables, such as the step counter."""
        slots = slot_lists(self.optimizer)
        states = [[variable, *(slots[name][i] for name in sorted(slots))] for i, variable in enumerate(self._variables)]
        states.append([value for value in vars(self.optimizer).values() if isinstance(value, keras.Variable)])
        return [[_values(variable) for variable in state if variable is not None] for state in states]


def _values(variable: keras.Variable) -> Array:
    return np.array(keras.ops.convert_to_numpy(variable), dtype=np.float64)
