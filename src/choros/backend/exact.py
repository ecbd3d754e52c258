"""Which losses AllReduce can train exactly: by their reduction, and by a small trial where that says too little.

Exact is a loss that is a mean (or a sum) over rows of what each row gives by itself. Keras' own losses are known.
A user's loss, and Keras' Dice and Tversky, are tried on eight rows: the loss of all must be that of the first three
and that of the other five together, each weighted by what it divides by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from choros.errors import NotExact
from choros.types import Batch

MEANS = ("sum_over_batch_size", "mean")
WEIGHTED = "mean_with_sample_weight"
DECLARED = "a declared divisor"
ROWS, FIRST = 8, 3
NOTHING = object()
TRIED = {"Dice", "Tversky", "dice", "tversky"}  # of Keras' own: over the whole batch, unless an axis is given


def check_exact(
    model: Any, workers: int = 2, batch: Batch | None = None, wide: Callable[[], Batch] | None = None
) -> None:
    """Refuse a compiled model whose loss AllReduce could not train exactly.

    Args:
        model: a compiled model, built where a batch is given.
        workers: how many will train; with one, everything is exact.
        batch: one batch with rows, to try losses that are not Keras' own.
        wide: gives rows from the whole data set, for the trial of a whole step. Defaults to the batch.

    Raises:
        NotExact: a loss without reduction, or one that mixes the rows; ``sum`` with several outputs or with
            regularisers; several outputs that do not all divide by rows.
    """
    if workers < 2:
        return
    scales = [v.path for v in model.trainable_variables if getattr(v, "overwrite_with_gradient", False)]
    if scales:
        raise NotExact(
            f"Variable {scales[0]!r} holds float8 scales, whose next values are the largest over a batch, and not a "
            "mean over ranks: quantise to float8 after training, or use another algorithm than AllReduce."
        )
    losses = [entry.loss for entry in compiled_losses(model)]
    losses = losses or [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    declares = model_divisor(model) != (None, False)  # what its whole step divides by, which the trial tests
    kinds = [] if declares else [kind(loss) for loss in losses]
    check_together(kinds, losses)
    layers = model._flatten_layers()
    terms = any(v.regularizer is not None for v in model.trainable_variables)
    if "sum" in kinds and (terms or any(layer.activity_regularizer is not None for layer in layers)):
        raise refuse_sum(model)
    if batch is None:
        return
    refusal = mixed_rows(model, (batch.x, batch.y, batch.sample_weight))
    if refusal is not None:
        raise refusal
    from choros.backend.trial import try_parts

    try_parts(model, wide or (lambda: batch), workers)


def compiled_losses(model: Any) -> list[Any]:
    """Keras' own list of the compiled losses (named tuples), which may be changed in place; empty until built."""
    entries: list[Any] | None = None if model._compile_loss is None else model._compile_loss._flat_losses
    return [] if entries is None else entries


def kind(loss: Any) -> str:
    """Return what the loss divides by: "rows", "weights", "sum" or ``DECLARED``; "rows" for names and functions."""
    if declared(loss) is not None:
        return DECLARED
    if not isinstance(loss, keras.losses.Loss):
        return "rows"
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise NotExact(
            f"Loss {loss.name!r} ({type(loss).__name__}) overrides __call__, so what it divides by is unknown: "
            "override call() instead, or train with another algorithm than AllReduce."
        )
    if isinstance(loss, keras.losses.Circle) or _name(loss) == "circle":
        raise NotExact(f"Loss {loss.name!r} compares the rows of a batch with each other: use another algorithm.")
    if loss.reduction in MEANS:
        return "rows"
    if loss.reduction == WEIGHTED:
        return "weights"
    if loss.reduction == "sum":
        return "sum"
    raise NotExact(
        f"Loss {loss.name!r} has reduction={loss.reduction!r}; AllReduce needs 'sum_over_batch_size', 'mean', "
        "'mean_with_sample_weight' or 'sum'."
    )


def declared(loss: Any) -> Any:
    """The method ``divisor(y_true, y_pred, sample_weight)`` of a loss or of its function; None where there is none."""
    own = getattr(loss, "divisor", None)
    own = getattr(getattr(loss, "fn", None), "divisor", None) if own is None else own
    return own if callable(own) else None


def model_divisor(model: Any) -> tuple[Any, bool]:
    """The model's method ``loss_divisor``, or None; and True where it declares ``loss_divisor = None``: a sum."""
    divisor = getattr(model, "loss_divisor", NOTHING)
    return (divisor, False) if callable(divisor) else (None, divisor is None)


def check_together(kinds: list[str], losses: list[Any]) -> None:
    """Raise ``NotExact`` where several losses do not all divide by rows."""
    if len(kinds) > 1 and set(kinds) != {"rows"}:
        named = ", ".join(f"{getattr(x, 'name', x)!r} by {k}" for x, k in zip(losses, kinds, strict=True))
        raise NotExact(f"Of several losses all must divide by rows to be exact; here: {named}.")


def refuse_sum(model: Any) -> NotExact:
    """The error for a loss that adds over ranks beside terms that must not."""
    return NotExact(
        f"Model {model.name!r} has regularisers or add_loss beside a loss of reduction='sum': adding over ranks "
        "would count them once for each worker. Use reduction='sum_over_batch_size', or another algorithm."
    )


def mixed_rows(model: Any, data: tuple[Any, ...]) -> NotExact | None:
    """Try the losses that are not known on a few rows; say why one is not exact.

    Args:
        model: the compiled and built model; its metrics are to be reset afterwards.
        data: ``(x, y, sample_weight)`` or a shorter tuple, with at least one row. Only rows of ``y`` are used as
            they are, since predictions and weights can be made up and labels cannot.
    """
    x, y, weight = (*data, None, None)[:3]
    entries = compiled_losses(model)
    plain = list(entries)
    if y is None or model_divisor(model) != (None, False) or all(known(entry.loss) for entry in plain):
        return None
    random = np.random.default_rng(0)

    def drawn(leaf: Any) -> Any:
        shape = (ROWS, *leaf.shape[1:])
        values = random.uniform(0.02, 0.1, shape) * np.arange(1, ROWS + 1).reshape(-1, *[1] * (len(shape) - 1))
        return keras.ops.convert_to_tensor(values, dtype=keras.backend.standardize_dtype(leaf.dtype))

    def symbol(leaf: Any) -> Any:
        return keras.KerasTensor((ROWS, *leaf.shape[1:]), dtype=keras.backend.standardize_dtype(leaf.dtype))

    def spread(leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(leaf[np.arange(ROWS) * len(leaf) // ROWS])

    predicted = keras.tree.map_structure(drawn, model.compute_output_spec(keras.tree.map_structure(symbol, x)))
    labels = keras.tree.map_structure(spread, y)
    weights = None if weight is None else keras.tree.map_structure(drawn, weight)
    mixed: list[str] = []
    try:
        entries[:] = [entry._replace(loss=_trial(entry.loss, mixed)) for entry in plain]
        model._compile_loss(labels, predicted, weights)
    finally:
        entries[:] = plain
    if not mixed:
        return None
    return NotExact(
        f"Loss {mixed[0]!r} of a batch is not the mean of its rows' losses (or mixes the mean of the weights with "
        "it), so AllReduce would not be exact: return one loss for each row, give it a method divisor(y_true, y_pred, "
        "sample_weight) that returns what it divides by, or use another algorithm."
    )


def _trial(loss: Any, mixed: list[str]) -> Any:
    divisor = declared(loss)

    def tried(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        def part(where: slice) -> tuple[float, float]:
            one = [None if t is None else keras.tree.map_structure(_cut(where), t) for t in (y_true, y_pred)]
            weight = None if sample_weight is None else sample_weight[where]
            value = float(keras.ops.convert_to_numpy(loss(*one, weight)))
            if divisor is not None:
                return value, float(keras.ops.convert_to_numpy(divisor(*one, weight)))
            if loss.reduction == WEIGHTED and weight is not None:
                return value, float(keras.ops.convert_to_numpy(keras.ops.sum(weight)))
            return value, float(len(range(ROWS)[where]))

        (whole, n), (first, a), (rest, b) = part(slice(ROWS)), part(slice(FIRST)), part(slice(FIRST, ROWS))
        expected = first + rest if loss.reduction == "sum" else (a * first + b * rest) / n
        if math.isfinite(whole) and not math.isclose(whole, expected, rel_tol=1e-4, abs_tol=1e-6):
            mixed.append(loss.name)
        return keras.ops.zeros(())

    return tried


def _cut(where: slice) -> Any:
    return lambda tensor: tensor[where]


def _name(loss: Any) -> str:
    """The class' name, or the function's where Keras has wrapped one."""
    function = getattr(loss, "fn", None)
    wrapped = type(loss).__name__ == "LossFunctionWrapper" and function is not None
    return str(getattr(function, "__name__", "")) if wrapped else type(loss).__name__


def known(loss: Any) -> bool:
    """Whether the loss is Keras' own and is made of each row by itself."""
    if getattr(loss, "axis", -1) != -1 or getattr(loss, "_fn_kwargs", {}).get("axis", -1) != -1:
        return False
    wrapped = type(loss).__name__ == "LossFunctionWrapper"
    home = str(getattr(loss.fn if wrapped else type(loss), "__module__", ""))
    return home.split(".")[0] == "keras" and _name(loss) not in TRIED
