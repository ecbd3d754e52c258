"""Prediction in a task. A process loads the model once, and predicts in batches of few sizes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.errors import InvalidInputError
from choros.spark.feature_columns import Columns
from choros.spark.prediction_columns import Output
from choros.spark.task_process import hold_back, keras_there, on_cpu_unless_given, same_version
from choros.training.model_io.serialization import PackedModel
from choros.types import Array

if TYPE_CHECKING:
    import keras

_MOST = 3  # most models that a process keeps
_loaded_models: OrderedDict[str, Any] = OrderedDict()


@dataclass(frozen=True)
class PredictTask:
    """The message that the driver sends to the tasks.

    Attributes:
        model: PackedModel.
        weights: list of arrays. The values of the model's variables.
        keras: dict. Backend and settings of the driver's Keras; see ``keras_here``.
        version: str. The driver's version of choros.
        columns: Columns. The columns that the model reads.
        kept: int. Number of the first columns that are kept.
        outputs: list of Output.
        batch_size: int. Largest number of rows in a batch.
    """

    model: PackedModel
    weights: list[Array]
    keras: dict[str, Any]
    version: str
    columns: Columns
    kept: int
    outputs: list[Output]
    batch_size: int

    @cached_property
    def key(self) -> str:
        """A hash of the model and its weights."""
        digest = hashlib.sha256(self.model.code)
        for array in (*self.model.arrays, *self.weights):
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def predict(order: PredictTask, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches with the kept columns and then those of the prediction. It runs in each task."""
    from choros.spark.pyarrow import batch_of

    for batch in batches:
        if batch.num_rows:
            columns: list[tuple[str, Any]] = list(zip(batch.schema.names, batch.columns, strict=True))[: order.kept]
            yield batch_of([*columns, *_made(order, {name: batch.column(name) for name in order.columns.leaves})])


def answer(order: PredictTask, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield a column of structs with the prediction, for batches of the columns that the model reads."""
    from choros.spark.pyarrow import struct_of

    for columns in batches:
        columns = columns if isinstance(columns, tuple) else (columns,)
        if len(columns[0]):
            made = _made(order, dict(zip(order.columns.leaves, columns, strict=True)))
        else:
            names = [pair for output in order.outputs for pair in output.names()]
            made = [(name, np.empty((0, 1) if vector else 0)) for name, vector in names]
        yield struct_of(made)


def _made(order: PredictTask, columns: dict[str, Any]) -> list[tuple[str, Array]]:
    from pyspark import TaskContext

    from choros.spark.pyarrow import to_array

    if order.key not in _loaded_models and (context := TaskContext.get()) is not None:
        hold_back(context)
        on_cpu_unless_given(context.resources())
    model, sizes = load(order)
    arrays = {name: to_array(columns[name], leaf) for name, leaf in order.columns.leaves.items()}
    rows = len(next(iter(arrays.values())))
    outputs = values(model, order.columns.x, arrays, rows, fitting(rows, order.batch_size, sizes))
    if len(outputs) != len(order.outputs):
        raise InvalidInputError(f"The model gives {len(outputs)} outputs, not {len(order.outputs)}: build it first.")
    made: list[tuple[str, Array]] = []
    for output, value in zip(order.outputs, outputs, strict=True):
        made.extend((name, column.astype("float64")) for name, column in output.columns(value).items())
    return made


def fitting(rows: int, most: int, sizes: set[int]) -> int:
    """Return a batch size for some rows. Few sizes are compiled, and padding is small.

    Args:
        rows: int. Number of rows to predict.
        most: int. Largest number of rows in a batch.
        sizes: set of int. The sizes that were compiled before. A new size is added.

    Example:
        >>> known = set()
        >>> [fitting(rows, 4096, known) for rows in (10_000, 10_000, 6_000, 4)], sorted(known)
        ([3392, 3392, 3392, 64], [64, 3392])
    """
    batch_rows = -(-rows // -(-rows // most))
    fitting = [size for size in sizes if batch_rows <= size <= 2 * batch_rows]
    if not fitting:
        fitting = [max(batch_rows, min(-(-batch_rows // 64) * 64, most))]
        sizes.add(fitting[0])
    return min(fitting)


def load(order: PredictTask) -> tuple[Any, set[int]]:
    """Return the model, which is loaded once in this process, and the batch sizes that it has compiled."""
    key = order.key
    if key not in _loaded_models:
        same_version(order.version)
        keras_there(order.keras)
        _loaded_models[key] = order.model.unpack(order.weights), set()
        while len(_loaded_models) > _MOST:
            _loaded_models.popitem(last=False)
    _loaded_models.move_to_end(key)
    loaded: tuple[Any, set[int]] = _loaded_models[key]
    return loaded


def values(model: keras.Model, x: object, arrays: dict[str, Array], rows: int, size: int) -> list[Array]:
    """Return a model's outputs for some rows, computed in batches of one size. The last batch is padded with zeros.

    Args:
        model: keras.Model.
        x: names of arrays, nested like the model's inputs.
        arrays: arrays by name, of shape (rows, ...).
        rows: int. Number of rows.
        size: int. Rows of a batch.
    """
    parts: list[list[Array]] = []
    for first in range(0, rows, size):
        valid = min(size, rows - first)

        def cut(name: str, first: int = first, valid: int = valid) -> Array:
            piece = arrays[name][first : first + valid]
            if valid == size:
                return piece
            filled = np.zeros((size, *piece.shape[1:]), piece.dtype)
            filled[:valid] = piece
            return filled

        outputs = model.predict_on_batch(_nested(x, cut))
        listed = [outputs[key] for key in sorted(outputs)] if isinstance(outputs, dict) else outputs
        listed = list(listed) if isinstance(listed, (list, tuple)) else [listed]
        parts.append([np.asarray(output)[:valid] for output in listed])
    return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _nested(x: Any, cut: Any) -> Any:
    if isinstance(x, dict):
        return {key: cut(name) for key, name in x.items()}
    return [cut(name) for name in x] if isinstance(x, list) else cut(x)
