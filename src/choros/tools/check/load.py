"""Loading of a user's model file, and random rows for a model without data."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.argument_checks import check_model_file
from choros.errors import InvalidInputError
from choros.types import Array

if TYPE_CHECKING:
    import keras

_BUILDERS = ("build", "make_model", "build_model")
_ROWS = 66


def load_model(path: str | Path) -> tuple[Any, tuple[Any, ...]]:
    """Run a Python file and return its model and its data.

    The file defines a compiled ``model``, or a function ``build()``, ``make_model()`` or ``build_model()`` that returns
    one. It may also define data: ``x`` and ``y`` (``sample_weight``), or a function ``data()`` that returns them.

    Returns:
        The model, and a tuple (x, y, sample_weight) or a shorter one; empty if the file has no data.

    Raises:
        InvalidInputError: there is no such file, or no model in it.
        Exception: an exception that the file raises.
    """
    check_model_file(path)
    no_model = InvalidInputError(
        f"{path} defines no `model` and no `build()` or `make_model()`: give it one of them, outside of any "
        "`if __name__ == '__main__'` block, which is not run here."
    )
    if not _may_define_model(Path(path)):  # before the file runs: it may train for hours
        raise no_model
    names = runpy.run_path(str(path), run_name="choros_check")
    builder = next((names[name] for name in _BUILDERS if callable(names.get(name))), None)
    model = names.get("model") if names.get("model") is not None else builder and builder()
    if model is None:
        raise no_model
    if callable(names.get("data")):
        data = names["data"]()
        return model, tuple(data) if isinstance(data, (tuple, list)) else (data,)
    if names.get("x") is None:
        return model, ()
    return model, (names["x"], names.get("y"), names.get("sample_weight"))


def _may_define_model(path: Path) -> bool:
    """Return whether a file assigns, defines or imports one of the names. True for a file that cannot be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # running it gives the better error
        return True
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "exec"):
            return True
    return not bound.isdisjoint(("model", *_BUILDERS, "*"))


def made_rows(model: keras.Model, rows: int = _ROWS, seed: int = 0) -> tuple[Any, Any]:
    """Draw random inputs and targets with the shapes and dtypes of a model's inputs and outputs.

    Unknown lengths are 8. Integers are below the number of rows of the smallest Embedding. Targets are class indices,
    one-hot vectors or 0 and 1, as the loss requires, else numbers from 0 to 1.

    Args:
        model: a compiled functional or sequential model.
        rows: int. Number of rows. Defaults to 66.
        seed: int. Defaults to 0.

    Returns:
        (x, y), nested like the model's inputs and outputs.

    Raises:
        InvalidInputError: the model has no symbolic inputs and outputs, such as a subclassed model.
    """
    import keras

    from choros.backends.driver_model import pairs

    is_sequential = isinstance(model, keras.Sequential)
    if is_sequential:  # has no .input before the first call, and without an Input no .inputs
        tensors = (getattr(model, name, None) or [None] for name in ("inputs", "outputs"))
        inputs, outputs = (first for first, *_ in tensors)
    else:
        inputs, outputs = getattr(model, "input", None), getattr(model, "output", None)
    if inputs is None or outputs is None:
        remedy = "add keras.Input(...) as the first layer, or define x and y" if is_sequential else "define x and y"
        raise InvalidInputError(f"The model {model.name!r} has no symbolic inputs, so no rows can be drawn: {remedy}.")
    random = np.random.default_rng(seed)
    tables = [layer.input_dim for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]

    def drawn(tensor: Any) -> Array:
        shape = (rows, *(8 if size is None else size for size in tensor.shape[1:]))
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "int" in dtype:
            return random.integers(0, min(tables, default=8), shape).astype(dtype)
        return random.normal(size=shape).astype("float32" if dtype == "string" else dtype)

    def target(loss: Any, tensor: Any) -> Array:
        name = str(loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", ""))
        shape = (rows, *(8 if size is None else size for size in tensor.shape[1:]))
        if "sparse_categorical" in name:
            return random.integers(0, shape[-1], shape[:-1])
        if "categorical" in name:
            return np.eye(shape[-1], dtype="float32")[random.integers(0, shape[-1], shape[:-1])]
        if "binary" in name:
            return random.integers(0, 2, shape).astype("float32")
        return random.uniform(size=shape).astype("float32")

    x = keras.tree.map_structure(drawn, inputs)
    if not isinstance(outputs, (dict, list, tuple)):
        return x, target(pairs(model.loss, outputs)[0][0], outputs)
    if isinstance(outputs, dict):
        losses = model.loss if isinstance(model.loss, dict) else dict.fromkeys(outputs, model.loss)
        return x, {name: target(losses.get(name), tensor) for name, tensor in outputs.items()}
    several = model.loss if isinstance(model.loss, (list, tuple)) else [model.loss] * len(outputs)
    return x, [target(loss, tensor) for loss, tensor in zip(several, outputs, strict=True)]
