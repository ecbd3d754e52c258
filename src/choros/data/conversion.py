"""Conversion of users' data (tensors of any library, pandas, numpy) to numpy arrays, and errors with a remedy."""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.data.encoded_rows import decoded, encode, is_encoded, is_sparse, with_float_dtype
from choros.data.tree import map_leaves
from choros.errors import InvalidDataError, brief, counted, named_type
from choros.types import Array, ArrayTree

_REMEDY = "convert it to numpy arrays, name files by choros.files, or wrap it in a keras.utils.PyDataset"


def is_py_dataset(value: object) -> bool:
    """Return whether ``value`` is a ``keras.utils.PyDataset``. Keras is not imported.

    Example:
        >>> is_py_dataset([1, 2])
        False
    """
    return any(
        parent.__name__ in ("PyDataset", "Sequence") and parent.__module__.split(".")[0] == "keras"
        for parent in type(value).__mro__
    )


def brings_targets(value: object) -> bool:
    """Return whether ``value`` includes y and weights: a PyDataset, rows of files, or a stream of batches.

    Example:
        >>> brings_targets([1, 2])
        False
    """
    return is_py_dataset(value) or getattr(value, "brings_targets", False) is True or is_stream(value)


def is_stream(value: object) -> bool:
    """Return whether ``value`` yields batches: an iterable that is neither an array nor a container of arrays.

    Example:
        >>> is_stream(iter([1])), is_stream([1]), is_stream("text")
        (True, False, False)
    """
    if isinstance(value, dict | list | tuple | set | str | bytes | type) or hasattr(value, "__array__"):
        return False
    if is_special(value):
        return False
    return hasattr(value, "__iter__") or hasattr(value, "__next__")


def is_special(value: object) -> bool:
    """Return whether ``value`` is a sparse matrix, or a sparse or ragged tensor."""
    kind = type(value).__name__
    return hasattr(value, "tocoo") or "Ragged" in kind or "Sparse" in kind or kind == "BCOO"


def as_array(value: Any, name: str = "x") -> Array:
    """Convert one array or tensor to a numpy array of native byte order, without a copy if possible.

    PyTorch tensors are detached and copied to the CPU. A pandas Series of n values gets the shape (n, 1), as in Keras.
    Inputs that are text, sparse or ragged are encoded (``choros.data.encoded_rows``). Other sparse parts become dense.

    Args:
        value: An object that numpy can read: numpy, JAX, PyTorch and TensorFlow arrays, pandas, ``__array__``.
        name: Name of the value in error messages. Inputs have names that begin with "x".

    Returns:
        A numeric or encoded array with at least one axis.

    Raises:
        InvalidDataError: The value is not an array. Or it holds objects or dates; has no axis; or is masked. Or it is
            text or ragged, and no input, or the backend is not TensorFlow.

    Example:
        >>> as_array(np.arange(3)).shape
        (3,)
    """
    library = type(value).__module__.split(".")[0]
    if is_special(value):
        encoded = encode(value, name)
        if encoded is None:
            raise InvalidDataError(f"{name} is of type {type(value).__name__}: give a dense array instead.")
        if not is_sparse(encoded):
            _check_tensorflow(name, "is a ragged tensor", "a dense array, as by its method to_tensor()")
        return encoded if name.startswith("x") else decoded(encoded)
    if library == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype):
            value = value.float()
    if not hasattr(value, "__array__") or isinstance(value, type):
        raise InvalidDataError(f"{name} is {_describe(value)}: {_REMEDY}.")
    if isinstance(value, np.ma.MaskedArray) and value.mask is not np.ma.nomask:
        raise InvalidDataError(
            f"{name} is a masked array, and the mask would be lost: fill it, as by {name}.filled(0)."
        )
    series = library == "pandas" and type(value).__name__ == "Series"
    try:
        array = np.asarray(value)
    except Exception as error:  # sparse, nested, quantized or symbolic tensors: each library raises another type
        raise InvalidDataError(
            f"{name} is {named_type(value)} that numpy cannot read ({brief(error)}): {_REMEDY}."
        ) from None
    text = encode(array, name)
    if text is not None:
        _check_tensorflow(name, "holds text", "numbers, as a StringLookup or TextVectorization layer makes them")
        array = text
    if array.dtype.kind not in "biufc" and "float" not in array.dtype.name and not is_encoded(array):
        raise InvalidDataError(
            f"{name} holds {array.dtype.name} values, not numbers: convert it first, for instance with "
            "astype('float32') or a keras StringLookup layer."
        )
    if array.ndim == 0:
        raise InvalidDataError(f"{name} is a single number: give an array with one row for each sample.")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array[:, None] if series else array


def as_arrays(structure: ArrayTree, name: str = "x") -> ArrayTree:
    """Apply ``as_array`` to every leaf of a nested structure; None stays None.

    Raises:
        InvalidDataError: A leaf is not an array. The message contains its name.

    Example:
        >>> as_arrays({"a": np.zeros(2), "b": None})
        {'a': array([0., 0.]), 'b': None}
    """
    if isinstance(structure, dict):
        for key in structure:
            if not isinstance(key, str | int):
                raise InvalidDataError(
                    f"{name} has the key {key!r}: name the parts of a dict with text or whole numbers."
                )
        return {key: as_arrays(value, f"{name}[{key!r}]") for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        first: object = structure
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if not isinstance(first, dict) and is_row(first):
            noun, kind = "string" if isinstance(first, str | bytes) else "number", type(structure).__name__
            flat = not isinstance(structure[0], list | tuple)
            text = f"a {kind} of {counted(len(structure), noun)}" if flat else f"a nested {kind} of {noun}s"
            raise InvalidDataError(f"{name} is {text}: give numpy.array({name}).")
        if structure and isinstance(structure[0], dict | list | tuple) and is_row(structure[0]):
            raise InvalidDataError(
                f"{name} is {named_type(structure)} of rows: give an array of all rows for each part of them, as "
                "np.stack makes it."
            )
        parts = [as_arrays(value, f"{name}[{i}]") for i, value in enumerate(structure)]
        return parts if isinstance(structure, list) else tuple(parts)
    return None if structure is None else as_array(structure, name)


def is_row(value: object) -> bool:
    """Return whether a nested structure is one row instead of a batch: a part of it is a single number or text.

    Example:
        >>> is_row({"image": np.zeros((8, 8)), "label": 3}), is_row((np.zeros(4), np.zeros(4)))
        (True, False)
    """
    if isinstance(value, dict | tuple):
        return any(map(is_row, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | bytes | int | float | np.generic) or getattr(value, "shape", None) == ()


def to_floatx(structure: ArrayTree, floatx: str) -> ArrayTree:
    """Convert every array of floats to ``floatx``, as Keras' array adapter does. Integers keep their dtype.

    For ``bfloat16``, which numpy lacks, the arrays are float32; the backend rounds them.

    Example:
        >>> to_floatx((np.zeros(1), np.zeros(1, "uint8")), "float32")
        (array([0.], dtype=float32), array([0], dtype=uint8))
    """
    wanted = np.dtype("float32" if floatx == "bfloat16" else floatx)

    def cast(array: Array) -> Array:
        if array.dtype.names is not None:
            return with_float_dtype(array, wanted)
        return array.astype(wanted, copy=False) if "float" in array.dtype.name else array

    return map_leaves(cast, structure)


def _check_tensorflow(name: str, problem: str, remedy: str) -> None:
    """Refuse text and ragged tensors where Keras takes none: on JAX and PyTorch, and as labels or weights."""
    import keras

    if not name.startswith("x"):
        raise InvalidDataError(f"{name} {problem}: give {remedy}.")
    if keras.backend.backend() != "tensorflow":
        raise InvalidDataError(
            f"{name} {problem}, which Keras takes on the TensorFlow backend only: give {remedy}, or set "
            "KERAS_BACKEND=tensorflow."
        )


def _describe(value: object) -> str:
    """Return a description of an object that is not an array."""
    kind = type(value)
    modules = {parent.__module__.split(".")[0] for parent in kind.__mro__}
    names = {parent.__name__ for parent in kind.__mro__}
    if "tensorflow" in modules and ("DatasetV2" in names or "Dataset" in kind.__name__):
        return "a tf.data.Dataset"
    if "torch" in modules and "DataLoader" in names:
        return "a PyTorch DataLoader"
    if "torch" in modules and "Dataset" in names:
        return "a PyTorch Dataset without a DataLoader"
    if "grain" in modules:
        return f"a grain {kind.__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    if hasattr(value, "__next__"):
        return f"a generator or iterator ({kind.__name__})"
    if callable(value):
        return f"a function ({getattr(value, '__name__', kind.__name__)})"
    return f"of type {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else f"a {kind.__name__}"
