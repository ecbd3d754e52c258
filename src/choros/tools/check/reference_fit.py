"""The reference run: Keras' ``fit`` on the global batches of a Trainer, in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.algorithms import Algorithm
from choros.backends import seed_state
from choros.backends.encoded_inputs import as_keras_input
from choros.data import Source
from choros.tools.check.model_state import fold_seeds, optimizers_of, values
from choros.tools.check.report import Difference
from choros.types import Array

if TYPE_CHECKING:
    import keras

LOOSE = 1e-4  # least tolerance of a metric with thresholds, such as AUC


@dataclass(frozen=True)
class Setting:
    """The settings that all runs of a check share.

    Attributes:
        data: (x, y, sample_weight), as for ``Trainer.fit``.
        batch_size, epochs, seed: int. As for ``Trainer.fit``.
        tolerance: float. Largest difference that passes.
        algorithm: Algorithm. The algorithm of the workers.
        options: dict. Further arguments of ``fit``.
    """

    data: tuple[Any, Any, Any]
    batch_size: int
    epochs: int
    seed: int
    tolerance: float
    algorithm: Algorithm
    options: dict[str, Any]


Figures = dict[str, list[float]]
Result = tuple[dict[tuple[str, str], Array], Figures]


def global_batches(
    source: Source, setting: Setting, seed: int, order: int | None = None
) -> list[list[tuple[Any, ...]]]:
    """Return the global batches of each epoch, as in ``Trainer.fit(seed=)``.

    Args:
        source: the data.
        setting: batch size and epochs.
        seed: seed of the order of rows.
        order: seed of a permutation of the rows in each batch. Defaults to no permutation.
    """
    import keras

    epochs = []
    random = np.random.default_rng(order)
    for epoch in range(setting.epochs):
        made = source.epoch(
            rank=0, size=1, synchronous=True, batch_size=setting.batch_size, seed=seed, epoch=epoch, shuffle=True
        )
        batches = []
        for batch in made:
            parts = tuple(part for part in (batch.x, batch.y, batch.sample_weight) if part is not None)
            if order is not None:
                rows = random.permutation(batch.rows)
                parts = keras.tree.map_structure(lambda leaf, rows=rows: leaf[rows], parts)
            batches.append(_tuples(keras.tree.map_structure(as_keras_input, parts)))
        epochs.append(batches)
    return epochs


def _tuples(part: object) -> Any:
    """Convert lists to tuples: on TensorFlow a PyDataset must not yield lists."""
    if isinstance(part, dict):
        return {name: _tuples(value) for name, value in part.items()}
    return tuple(map(_tuples, part)) if isinstance(part, (list, tuple)) else part


def plain_fit(model: keras.Model, source: Source, setting: Setting, seed: int, order: int | None = None) -> Result:
    """Train with ``model.fit`` in this process.

    Returns:
        Copies of all variables by kind and path, and Keras' history.
    """
    import keras

    epochs = global_batches(source, setting, seed, order)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        now = 0

        def __len__(self) -> int:
            return len(epochs[0])

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return epochs[self.now][index]

    def begin(epoch: int, logs: dict[str, Any] | None = None) -> None:
        data.now = epoch

    data = Batches()
    fold_seeds(model, seed)
    keras.utils.set_random_seed(seed)
    history = model.fit(
        data,
        epochs=setting.epochs,
        shuffle=False,
        verbose=0,  # pyright: ignore[reportArgumentType] - annotated by its default
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=begin)],
        **{name: value for name, value in setting.options.items() if name != "class_weight"},  # in the source
    )
    return collect(model), history.history


def collect(model: keras.Model) -> dict[tuple[str, str], Array]:
    """Return copies of weights, moving statistics and optimizer slots, by kind and path."""
    variables = {("weight", path): array for path, array in _named(_weights(model))}
    for name, optimizer in optimizers_of(model).items():
        slots = [(f"{name}/{path}", array) for path, array in _named(optimizer.variables)]
        variables |= {("optimizer", path): array for path, array in slots}
    return variables


def _weights(model: keras.Model) -> list[Any]:
    measures = {id(v) for v in model.metrics_variables}
    return [v for v in model.variables if v.name != seed_state.NAME and id(v) not in measures]


def _named(variables: list[Any]) -> list[tuple[str, Array]]:
    """Return pairs of a variable's path and its value. A number is appended to a repeated path."""
    named: dict[str, Array] = {}
    for variable, array in zip(variables, values(variables), strict=True):
        path, count = variable.path, 2
        while path in named:
            path, count = f"{variable.path} ({count})", count + 1
        named[path] = array
    return list(named.items())


def differences(expected: Result, found: Result, tolerance: float, noise: dict[Any, float]) -> tuple[Difference, ...]:
    """Compare two runs by variable and metric.

    Args:
        expected: the result of ``plain_fit``, or the same of a run with workers.
        found: the result of another run.
        tolerance: the largest difference that passes, divided by 1 + the expected size.
        noise: the measured effect of rounding by kind and name; ten times this also passes.
    """
    result = []
    for key, array in expected[0].items():
        other = found[0].get(key)
        result.append(_difference(*key, array, other, max(tolerance, 10 * noise.get(key, 0.0))))
    for name, figures in expected[1].items():
        key = ("metric", name)
        least = max(tolerance, LOOSE) if "auc" in name.lower() else tolerance
        value = found[1].get(name)
        other = None if value is None else np.asarray(value, np.float64)
        array = np.asarray(figures, np.float64)
        if other is not None and len(other) < len(array):  # a resumed run has only the epochs after the resume
            array = array[-len(other) :]
        result.append(_difference(*key, array, other, max(least, 10 * noise.get(key, 0.0)), len(figures) - len(array)))
    extra = [name for name in found[1] if name not in expected[1]]
    nan = float("nan")
    result += [Difference("metric", name, float("inf"), tolerance, "only with workers", nan, nan) for name in extra]
    return tuple(result)


def _difference(
    kind: str, name: str, expected: Array, actual: Array | None, tolerance: float, first: int = 0
) -> Difference:
    nan = float("nan")
    if actual is None or actual.shape != expected.shape:
        where = "missing" if actual is None else f"of shape {list(actual.shape)}, not {list(expected.shape)}"
        return Difference(kind, name, float("inf"), tolerance, where, nan, nan)
    if not expected.size:
        return Difference(kind, name, 0.0, tolerance, "[]", 0.0, 0.0)
    a, b = (array.astype(np.float64) for array in (expected, actual))
    both = (np.isnan(a) & np.isnan(b)) | (a == b)  # also equal infinities
    with np.errstate(invalid="ignore"):
        apart = np.where(both, 0.0, np.abs(a - b) / (1 + np.abs(a)))
    apart = np.where(np.isnan(apart), np.inf, apart)
    place = np.unravel_index(int(np.argmax(apart)), apart.shape)
    where = f"epoch {first + int(place[0]) + 1}" if kind == "metric" else str([int(index) for index in place])
    return Difference(kind, name, float(apart[place]), tolerance, where, float(a[place]), float(b[place]))
