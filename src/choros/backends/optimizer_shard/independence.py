"""Independence of an optimizer's update: of each value, or of each variable, from all others.

It is known for the optimizers of Keras. A trial shows it for an optimizer of the user: the same gradients go to a copy
of the optimizer with all variables, and to copies with a part of them.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import keras
import numpy as np

from choros.backends.optimizer_shard.optimizer_copy import optimizer_copy, variable_like
from choros.backends.rowwise_parts import of_keras
from choros.types import Array

Unit = Literal["value", "variable"]
ELEMENTWISE = frozenset(  # optimizers of Keras that update each value by its own gradient and slots alone
    {"SGD", "Adam", "AdamW", "Nadam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Lion"}
)
BY_VARIABLE = frozenset({"Adafactor", "Ftrl", "Lamb", "Muon"})  # ... and that update each variable independently
# What a divided update takes over from the optimizer, or never calls.
_OWN = ("apply", "stateless_apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
_LONGEST = 160  # values along a dimension of a trial's variables; rules for large matrices begin at 128 or less
_SCALES = (1.0, 1e-3, 1e3, 1.0, 1e-6, 30.0)  # of the gradients in the steps of a trial
_RATE = 0.1  # learning rate of a trial: with a schedule's first rates, which may be 0, weights would not change
_SIMPLE = (str, bytes, bool, int, float, tuple, type(None))

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
    replaced = [name for name in _OWN if not of_keras(getattr(kind, name))]
    if replaced:
        return None, f"{kind.__name__} has its own {replaced[0]}"
    settings = {name: value for name, value in vars(optimizer).items() if isinstance(value, _SIMPLE)}
    known = _results.get(optimizer)
    if known is None or known[0] != settings:
        try:
            known = settings, *_try(optimizer, trainable)
        except Exception as error:  # any error of the user's code
            known = settings, None, f"a trial of {kind.__name__} failed ({type(error).__name__}: {error})"
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


def slot_lists(optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    """Return the slots of a built optimizer by the attribute that holds them: one for each variable, or None.

    Example:
        >>> import keras
        >>> optimizer, variable = keras.optimizers.SGD(momentum=0.9), keras.Variable([1.0, 2.0])
        >>> optimizer.build([variable])
        >>> list(slot_lists(optimizer))
        ['momentums']
    """
    trainable = optimizer._trainable_variables
    others = {id(value) for value in vars(optimizer).values() if isinstance(value, keras.Variable)}  # such as counters
    others |= {id(variable) for variable in trainable}
    lists: dict[str, list[Any]] = {}
    for name, value in vars(optimizer).items():
        if not isinstance(value, list) or len(value) != len(trainable):
            continue
        variables = [item for item in value if item is not None]
        if variables and all(isinstance(item, keras.Variable) and id(item) not in others for item in variables):
            lists[name] = list(value)
    return lists


def dtype_of(variable: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a variable."""
    dtype: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return dtype


def _try(optimizer: Any, trainable: list[Any]) -> tuple[Unit | None, str]:
    """Return the result of ``independent_unit`` for an optimizer of the user, from a trial on small variables."""
    rng, name = np.random.default_rng(0), type(optimizer).__name__
    shapes = [tuple(min(length, _LONGEST) for length in variable.shape) for variable in trainable]
    values = [rng.normal(0, 0.05, shape) for shape in shapes]
    whole = _Trial(optimizer, values, trainable)
    lost = whole.lost_setting(optimizer)
    if lost:
        return None, f"{name}.get_config does not give {lost!r}"
    separate = [_Trial(optimizer, [value], [v]) for value, v in zip(values, trainable, strict=True)]
    ranges: list[_Trial] = []
    if _may_be_vector(optimizer, trainable):
        vector = _joined(values)
        parts = np.split(vector, [len(vector) // 3, len(vector) // 2])
        ranges = [_Trial(optimizer, [part], trainable[:1], names=False) for part in parts]
    ends = np.cumsum([part.variables[0].shape[0] for part in ranges])[:-1]
    for scale in _SCALES:
        gradients = [rng.normal(0, scale * rng.choice([0.1, 1.0, 10.0]), shape) for shape in shapes]
        whole.step(gradients)
        for index, part in enumerate(separate):
            part.step([gradients[index]])
            if not part.agrees(part.state_of(0), whole.state_of(index), whole):
                return (
                    None,
                    f"in a trial {name} updated {trainable[index].path} by the gradients of other variables too",
                )
        if ranges:
            cut = np.split(_joined(gradients), ends)
            for part, gradient in zip(ranges, cut, strict=True):
                part.step([gradient])
            if not _same_as_vector(ranges, whole):
                ranges = []
    if not all(np.isfinite(part.state_of(0)[0]).all() for part in separate):
        return None, f"in a trial {name} gave weights that are not finite"
    return "value" if ranges else "variable", ""


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _same_as_vector(ranges: list[_Trial], whole: _Trial) -> bool:
    """Return whether the copies for ranges of the vector of all values have the state of the copy for all variables."""
    states = [whole.state_of(index) for index in range(len(whole.variables))]
    vectors = [_joined(list(values)) for values in zip(*states, strict=True)]
    joined = [_joined(list(values)) for values in zip(*(part.state_of(0) for part in ranges), strict=True)]
    return all(part.agrees(joined, vectors, whole) for part in ranges)


class _Trial:
    """A copy of an optimizer, with small variables of its own.

    Args:
        original: the optimizer.
        values: list of array. The first values of the variables.
        counterparts: for each, a variable of the original, with its dtype and exceptions.
        names: whether the variables also have the counterparts' names and constraints, on which a rule may depend.
    """

    def __init__(self, original: Any, values: list[Array], counterparts: list[Any], names: bool = True) -> None:
        self.variables: list[Any] = []
        for value, variable in zip(values, counterparts, strict=True):
            if names:
                self.variables.append(variable_like(variable, value, trainable=False))
            else:
                self.variables.append(keras.Variable(value, dtype=variable.dtype, trainable=False, name="range"))
        self.optimizer = optimizer_copy(original, self.variables, counterparts, _RATE)

    def lost_setting(self, original: object) -> str:
        """Return the name of an attribute that the copy does not have as the original; "" if there is none."""
        copy: dict[str, Any] = vars(self.optimizer)
        name: str
        for name, value in vars(original).items():
            if isinstance(value, _SIMPLE) and copy.get(name, _SIMPLE) != value:
                return name
        return ""

    def step(self, gradients: list[Array]) -> None:
        """Update the variables."""
        pairs = zip(gradients, self.variables, strict=True)
        tensors = [keras.ops.convert_to_tensor(gradient, dtype=variable.dtype) for gradient, variable in pairs]
        self.optimizer.apply(tensors, self.variables)

    def state_of(self, index: int) -> list[Array]:
        """Return the values of a variable, and of its slots by their names."""
        slots = slot_lists(self.optimizer)
        variables = [self.variables[index], *(slots[name][index] for name in sorted(slots))]
        return [keras.ops.convert_to_numpy(variable) for variable in variables if variable is not None]

    def agrees(self, state: list[Array], expected: list[Array], whole: _Trial) -> bool:
        """Return whether a state is the expected one up to rounding, and the optimizer's other variables are equal."""
        pairs = [*zip(state, expected, strict=True), *zip(self.scalars(), whole.scalars(), strict=True)]
        return all(np.allclose(left, right, rtol=1e-4, atol=1e-6, equal_nan=True) for left, right in pairs)

    def scalars(self) -> list[Array]:
        """Return the variables that belong to no weight, such as the step counter."""
        attributes = vars(self.optimizer).values()
        return [keras.ops.convert_to_numpy(value) for value in attributes if isinstance(value, keras.Variable)]
