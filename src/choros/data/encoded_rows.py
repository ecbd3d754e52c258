"""Text, sparse and ragged inputs as numpy arrays whose rows have equal size.

So encoded, they are sliced, shuffled, shared between processes and divided among ranks by the code of all other arrays:

- text: bytes in UTF-8, of the length of the longest value (dtype ``S``).
- sparse: the columns and values of a row's entries, padded to the most entries of a row. Batches are dense.
- ragged: a row's length and values, padded to the longest row or more. A replica on TensorFlow makes a
  ``RaggedTensor`` of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.errors import InvalidDataError
from choros.types import Array

_COUNT, _COLUMNS, _VALUES, _LENGTH = "count", "columns of ", "values", "length"


def encode(value: Any, name: str) -> Array | None:
    """Return text, a sparse matrix or a ragged tensor as an array of equal rows; None for any other object.

    Args:
        value: An array of text, or of objects that are text. Or a sparse matrix of SciPy, JAX (BCOO) or TensorFlow. Or
            a ``tf.RaggedTensor`` whose second axis is the ragged one.
        name: Name of the value in error messages.

    Raises:
        InvalidDataError: The value has more axes than can be encoded.

    Example:
        >>> encode(np.array(["a", "bc"], dtype=object), "x")
        array([b'a', b'bc'], dtype='|S2')
    """
    kind = type(value).__name__
    if kind == "RaggedTensor":
        return _ragged(value, name)
    if kind == "SparseTensor":
        places = np.asarray(value.indices)
        return _sparse(places, np.asarray(value.values), tuple(map(int, value.dense_shape)), name)
    if kind == "BCOO":
        return _sparse(np.asarray(value.indices), np.asarray(value.data), value.shape, name)
    if hasattr(value, "tocoo"):
        matrix = value.tocoo()
        return _sparse(np.stack([matrix.row, matrix.col], axis=1), np.asarray(matrix.data), matrix.shape, name)
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUST" and _is_text(value):
        return _text(value)
    return None


def decoded(rows: Array) -> Array:
    """Return sparse rows as a dense array; any other array as it is.

    Example:
        >>> from scipy.sparse import csr_matrix
        >>> decoded(encode(csr_matrix([[0, 2], [0, 0]]), "x"))
        array([[0, 2],
               [0, 0]])
    """
    if not is_sparse(rows):
        return rows
    columns = _fields(rows)[1]
    dense = np.zeros((len(rows), int(columns.removeprefix(_COLUMNS))), rows.dtype[_VALUES].base)
    used = np.arange(rows[columns].shape[1]) < rows[_COUNT][:, None]
    dense[np.nonzero(used)[0], rows[columns][used]] = rows[_VALUES][used]
    return dense


def is_encoded(array: Array) -> bool:
    """Return whether an array is a result of ``encode``."""
    return array.dtype.kind == "S" or is_sparse(array) or is_ragged(array)


def is_sparse(array: Array) -> bool:
    """Return whether an array holds encoded rows of a sparse matrix."""
    return _fields(array)[:1] == (_COUNT,)


def is_ragged(array: Array) -> bool:
    """Return whether an array holds encoded rows of a ragged tensor."""
    return _fields(array)[:1] == (_LENGTH,)


def ragged_parts(rows: Array) -> tuple[Array, Array]:
    """Return the padded values, of shape ``(rows, longest, ...)``, and the lengths of ragged rows."""
    return rows[_VALUES], rows[_LENGTH]


def with_float_dtype(rows: Array, dtype: np.dtype[Any]) -> Array:
    """Return sparse or ragged rows with their values, if these are floats, converted to ``dtype``."""
    values = rows.dtype[_VALUES]
    if values.base.kind != "f" or values.base == dtype:
        return rows
    fields = [(name, rows.dtype[name]) for name in _fields(rows) if name != _VALUES]
    return rows.astype([*fields, (_VALUES, dtype, values.shape)])


def filled(array: Array) -> Array:
    """Return the share of each row's entries that are not zero, a vector of one float for each row.

    Example:
        >>> filled(np.array([[0, 1], [1, 1]]))
        array([0.5, 1. ])
    """
    if array.dtype.names is not None:
        counts = array[_fields(array)[0]]
        return np.asarray(counts / max(int(counts.max(initial=0)), 1))
    flat = array.reshape(len(array), -1)
    return np.asarray(np.count_nonzero(flat, axis=1) / max(flat.shape[1], 1))


def form(array: Array) -> tuple[Any, ...]:
    """Return the dtype and the shape of a row, which are equal for texts of all lengths.

    Example:
        >>> form(np.zeros((2, 3), "float32")), form(np.array([b"ab"])) == form(np.array([b"abc"]))
        ((dtype('float32'), (3,)), True)
    """
    return "S" if array.dtype.kind == "S" else array.dtype, array.shape[1:]


def _fields(array: Array) -> tuple[str, ...]:
    return array.dtype.names or ()


def _is_text(array: Array) -> bool:
    return array.dtype.kind != "O" or all(isinstance(value, str | bytes) for value in array.flat)


def _text(array: Array) -> Array:
    if array.dtype.kind == "S":
        return array
    values = [value if isinstance(value, bytes) else str(value).encode() for value in array.flat]
    return np.array(values, dtype=f"S{max(1, *map(len, values))}" if values else "S1").reshape(array.shape)


def _sparse(places: Array, values: Array, shape: tuple[int, ...], name: str) -> Array:
    """Encode the entries of a sparse matrix, given by their (row, column). Entries of one place are added."""
    if len(shape) != 2:
        raise InvalidDataError(
            f"{name} is a sparse tensor of {len(shape)} axes: give a sparse matrix, or a dense array."
        )
    height, width = shape
    inside = places[:, 0] < height  # JAX pads with entries that lie outside of the matrix
    flat, inverse = np.unique(places[inside, 0] * np.int64(width) + places[inside, 1], return_inverse=True)
    summed = np.zeros(len(flat), values.dtype)
    np.add.at(summed, inverse.reshape(-1), values[inside])
    rows, columns = flat // width, flat % width
    counts = np.bincount(rows, minlength=height)
    longest = int(counts.max(initial=1))
    field = f"{_COLUMNS}{width}"
    encoded = np.zeros(height, [(_COUNT, "i4"), (field, "i4", (longest,)), (_VALUES, values.dtype, (longest,))])
    position = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    encoded[_COUNT] = counts
    encoded[field][rows, position] = columns
    encoded[_VALUES][rows, position] = summed
    return encoded


def _ragged(tensor: Any, name: str) -> Array:
    if tensor.ragged_rank != 1:
        raise InvalidDataError(
            f"{name} is a ragged tensor with {tensor.ragged_rank} ragged axes: give one with a single ragged axis, or "
            "a dense array, as by its method to_tensor()."
        )
    values, ends = np.asarray(tensor.values), np.asarray(tensor.row_splits)
    if values.dtype.kind == "O":
        values = _text(values)
    lengths = np.diff(ends)
    longest = 1 << int(lengths.max(initial=1) - 1).bit_length()  # few dtypes: batches of few lengths share a trace
    encoded = np.zeros(len(lengths), [(_LENGTH, "i4"), (_VALUES, values.dtype, (longest, *values.shape[1:]))])
    encoded[_LENGTH] = lengths
    encoded[_VALUES][np.arange(longest) < lengths[:, None]] = values
    return encoded
