"""The state of a model between runs: variables, optimizers, random layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from choros.backends import seed_state
from choros.backends.host_values import to_host
from choros.training.model_io.serialization import copy_model
from choros.types import Array

if TYPE_CHECKING:
    import keras

_RATES = ("rate", "stddev", "dropout", "recurrent_dropout", "_dropout")


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """Return the model's optimizers by the names of their attributes."""
    import keras

    named = {name: value for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer)}
    held = {id(value) for value in named.values()}
    if model.optimizer is not None and id(model.optimizer) not in held:
        named["optimizer"] = model.optimizer
    return {name: value for name, value in named.items() if not name.startswith("__")}


class Snapshot:
    """A copy of all state that training changes in a model; ``restore`` sets it again.

    Args:
        model: a built ``keras.Model``.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.model_values = values(model.variables)
        self.optimizers = {
            name: (values(optimizer.variables) if optimizer.built else None, optimizer.get_config())
            for name, optimizer in optimizers_of(model).items()
        }

    def restore(self) -> None:
        """Set every variable to its value at the time of the copy, and reset metrics."""
        assign(self.model.variables, self.model_values)
        for name, optimizer in optimizers_of(self.model).items():
            saved, config = self.optimizers[name]
            if saved is not None:
                assign(optimizer.variables, saved)
            elif optimizer.built:
                setattr(self.model, name, type(optimizer).from_config(config))
        self.model.reset_metrics()
        self.model.stop_training = False


def values(variables: list[Any]) -> list[Array]:
    """Return copies of variables as numpy arrays."""
    return to_host(variables)


def assign(variables: list[Any], arrays: list[Array]) -> None:
    """Set variables from numpy arrays."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def fold_seeds(model: keras.Model, seed: int) -> None:
    """Seed the random layers as rank 0 of a Trainer does for ``fit(seed=)``."""
    for index, state in enumerate(seed_state.find(model)):
        state.assign(seed_state.mix(values([state])[0], index, 0, seed))


def random_layers(model: keras.Model) -> list[Any]:
    """Return the layers that draw random numbers in training, without layers that only contain such layers."""
    drawing = []
    for layer in model._flatten_layers():
        inner = {id(v) for sub in layer._flatten_layers(include_self=False) for v in seed_state.find(sub)}
        if any(id(v) not in inner for v in seed_state.find(layer)) and not _is_off(layer):
            drawing.append(layer)
    return drawing


def batch_statistics(model: keras.Model) -> list[Any]:
    """Return the layers that normalize with the statistics of their worker's share of a batch."""
    import keras

    layers = model._flatten_layers()
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]


def switched_off(model: keras.Model) -> Any:
    """Return a copy without random layers and batch statistics; None if some cannot be switched off.

    In the copy, the rates of Keras' random layers are 0, and batch normalization is frozen. The model is unchanged.

    Raises:
        NotSerializableError: the model cannot be sent to a worker.
    """
    copy = copy_model(model)
    for layer in copy._flatten_layers():
        if str(type(layer).__module__).startswith("keras."):
            for name in _RATES:
                if isinstance(vars(layer).get(name), float):
                    setattr(layer, name, 0.0)
    if not copy.optimizer.built:  # the slots of a built optimizer would not fit fewer trainable weights
        for layer in batch_statistics(copy):
            layer.trainable = False
    return None if random_layers(copy) or batch_statistics(copy) else copy


def _is_off(layer: keras.Layer) -> bool:
    """Return whether a layer belongs to Keras, has rates, and all rates are zero."""
    rates = [vars(layer)[name] for name in _RATES if isinstance(vars(layer).get(name), (int, float))]
    return str(type(layer).__module__).startswith("keras.") and bool(rates) and not any(rates)
