"""Check that AllReduce can train a loss exactly, from the loss's reduction or by a small trial.

A loss is exact if it is a mean (or a sum) over rows of a value of each row. Most losses of Keras are known to be exact.
A user-defined loss, and Keras' Dice and Tversky, are tried on eight rows. The loss of all rows must be the mean of the
losses of the first three and the other five rows, each weighted by its divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from choros.backends.encoded_inputs import symbol
from choros.backends.host_values import host_value
from choros.backends.number_attributes import NumberAttributes
from choros.backends.rowwise_parts import compiled_losses, flat, flat_outputs, known, model_divisor, name_of, title
from choros.errors import InexactLossError
from choros.types import Batch

MEANS = ("sum_over_batch_size", "mean")
WEIGHTED = "mean_with_sample_weight"
DECLARED = "a declared divisor"
ROWS, FIRST = 8, 3
ONE_AXIS = (
    "an output has the shape (rows,), and Keras takes its losses along the last axis, here over the rows, whatever the "
    "reduction and the weights are. Give the output the shape (rows, 1), as a last layer keras.layers.Reshape((1,)) "
    "does; or "
)


def check_exact(
    model: Any,
    workers: int = 2,
    batch: Batch | None = None,
    wide: Callable[[], Batch] | None = None,
    *,
    repeats: bool = True,
) -> str | None:
    """Refuse a compiled model whose loss AllReduce cannot train exactly.

    Args:
        model: a compiled model. It must be built if a batch is given.
        workers: number of workers. With one worker, every loss is exact.
        batch: one batch with rows, for the trial of losses that are not known. Defaults to no trial.
        wide: returns rows from the whole data set, for the trial of a whole step. Defaults to the batch.
        repeats: whether workers can run a step again with the reduced gradient. Defaults to True.

    Returns:
        None; or, if each step must be run again, the name of a value that depends on the optimizer's update.

    Raises:
        InexactLossError: for one of these reasons. A step must be run again, but ``repeats`` is False. A loss has no
            reduction or mixes rows. A ``sum`` has several outputs or regularizers. Of several outputs, not all divide
            by rows. A variable holds float8 scales.
    """
    if workers < 2:
        return None
    check_scales(model.trainable_variables)
    losses = [entry.loss for entry in compiled_losses(model)]
    losses = losses or [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    declares = model_divisor(model) != (None, False)  # a divisor of the whole step, which the trial tests
    kinds = [] if declares else [kind(loss) for loss in losses]
    check_together(kinds, losses)
    layers = model._flatten_layers()
    terms = any(v.regularizer is not None for v in model.trainable_variables)
    if "sum" in kinds and (terms or any(layer.activity_regularizer is not None for layer in layers)):
        raise refuse_sum(model)
    if batch is None:
        return None
    refusal = mixed_rows(model, (batch.x, batch.y, batch.sample_weight))
    if refusal is not None:
        raise refusal
    from choros.backends.loss_trial import after_update, try_parts

    dependent = after_update(model, wide or (lambda: batch), workers)
    if dependent is not None and not repeats:
        raise InexactLossError(
            f"{type(model).__name__}.train_step of model {model.name!r} goes on with weights that the optimizer has "
            f"updated: {dependent} depends on them. With several devices for each worker this would come one step "
            "late: give each worker one device, or do it in a callback's on_train_batch_end."
        )
    try_parts(model, wide or (lambda: batch), workers)
    return dependent


def check_scales(variables: Iterable[Any]) -> None:
    """Refuse float8 scales. Their next values replace the gradients in a step.

    A scale is computed from the largest value of a batch. With a mean of several workers' scales, values of a worker
    with a larger maximum would overflow. The maximum of the scales does not help: a scale is large if values are small.
    A scale must also agree with the history from which it was computed.

    Raises:
        InexactLossError: a variable holds float8 scales. The message contains its path.
    """
    scales = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if scales:
        raise InexactLossError(
            f"Variable {scales[0]!r} holds float8 scales, whose next values are the largest over a batch, and no mean "
            "over workers: quantise to float8 after training, or train in one process."
        )


def kind(loss: Any) -> str:
    """Return the kind of divisor of a loss: "rows", "weights", "sum" or ``DECLARED``; "rows" for names and functions.

    Raises:
        InexactLossError: the loss overrides ``__call__``, compares rows with each other, or has another reduction.
    """
    if declared(loss) is not None:
        return DECLARED
    if not isinstance(loss, keras.losses.Loss):
        return "rows"
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise InexactLossError(
            f"Loss {loss.name!r} ({type(loss).__name__}) overrides __call__, so what it divides by is unknown: "
            "override call() instead, or train with another algorithm than AllReduce."
        )
    if isinstance(loss, keras.losses.Circle) or name_of(loss) == "circle":
        raise InexactLossError(
            f"Loss {loss.name!r} compares the rows of a batch with each other: use another algorithm."
        )
    if loss.reduction in MEANS:
        return "rows"
    if loss.reduction == WEIGHTED:
        return "weights"
    if loss.reduction == "sum":
        return "sum"
    raise InexactLossError(
        f"Loss {loss.name!r} has reduction={loss.reduction!r}; AllReduce needs 'sum_over_batch_size', 'mean', "
        "'mean_with_sample_weight' or 'sum'."
    )


def declared(loss: Any) -> Any:
    """Return the method ``divisor(y_true, y_pred, sample_weight)`` of a loss or its function; None if it has none."""
    divisor = getattr(loss, "divisor", None)
    divisor = getattr(getattr(loss, "fn", None), "divisor", None) if divisor is None else divisor
    return divisor if callable(divisor) else None


def check_together(kinds: list[str], losses: list[Any]) -> None:
    """Raise ``InexactLossError`` if there are several losses and not all divide by rows."""
    if len(kinds) > 1 and set(kinds) != {"rows"}:
        named = ", ".join(f"{getattr(x, 'name', x)!r} by {k}" for x, k in zip(losses, kinds, strict=True))
        raise InexactLossError(f"Of several losses all must divide by rows to be exact; here: {named}.")


def refuse_sum(model: Any) -> InexactLossError:
    """Return the error for a loss that is summed over ranks in a model with terms that must not be summed."""
    return InexactLossError(
        f"Model {model.name!r} has regularisers or add_loss beside a loss of reduction='sum': adding over ranks "
        "would count them once for each worker. Use reduction='sum_over_batch_size', or another algorithm."
    )


def mixed_rows(model: Any, data: tuple[Any, ...]) -> InexactLossError | None:
    """Try the losses that are not known on a few rows; return an error if one is not exact, else None.

    Args:
        model: the compiled and built model. The caller must reset its metrics afterwards.
        data: ``(x, y, sample_weight)`` or a shorter tuple, with at least one row. The trial uses rows of ``y``, and
            random predictions and weights: labels must be valid, so they cannot be random.
    """
    x, y, weight = (*data, None, None)[:3]
    entries = compiled_losses(model)
    plain = list(entries)
    if y is None or model_divisor(model) != (None, False):
        return None
    ours, rows_only = all(known(entry.loss) for entry in plain), flat_outputs(model)
    if ours and rows_only is None:
        rows_only = None if flat(y) else False  # Keras adapts the rank of an output to the rank of its labels
    if ours and rows_only is False:
        return None
    random = np.random.default_rng(0)

    def drawn(leaf: Any) -> Any:
        shape = (ROWS, *leaf.shape[1:])
        values = random.uniform(0.02, 0.1, shape) * np.arange(1, ROWS + 1).reshape(-1, *[1] * (len(shape) - 1))
        return keras.ops.convert_to_tensor(values, dtype=keras.backend.standardize_dtype(leaf.dtype))

    def spread(leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(leaf[np.arange(ROWS) * len(leaf) // ROWS])

    numbers = NumberAttributes(model)
    outputs = model.compute_output_spec(keras.tree.map_structure(lambda leaf: symbol(leaf, ROWS), x))
    numbers.restore()
    rows_only = flat(outputs)
    if ours and not rows_only:
        return None
    predicted = keras.tree.map_structure(drawn, outputs)
    labels = keras.tree.map_structure(spread, y)
    weights = None if weight is None else keras.tree.map_structure(drawn, weight)
    mixed: list[tuple[Any, bool]] = []
    try:
        entries[:] = [entry._replace(loss=_trial(entry.loss, mixed, numbers)) for entry in plain]
        model._compile_loss(labels, predicted, weights)
    finally:
        entries[:] = plain
    if not mixed:
        return None
    loss, adds = mixed[0]
    axis = ONE_AXIS if rows_only else ""
    if adds:
        return InexactLossError(
            f"Loss {title(loss)} of a batch is the sum of its rows' losses, and its reduction does not say so: {axis}"
            "return one loss for each row, in a keras.losses.Loss with reduction='sum', or use another algorithm."
        )
    return InexactLossError(
        f"Loss {title(loss)} of a batch is not the mean of its rows' losses, each times its sample weight, so "
        f"AllReduce would not be exact: {axis}return one loss for each row, give it a method "
        "divisor(y_true, y_pred, sample_weight) that returns what it divides by, or use another algorithm."
    )


def _trial(loss: Any, mixed: list[tuple[Any, bool]], numbers: NumberAttributes) -> Any:
    divisor = declared(loss)

    def tried(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        def part(where: slice) -> tuple[float, float]:
            parts = [None if t is None else keras.tree.map_structure(_cut(where), t) for t in (y_true, y_pred)]
            weight = None if sample_weight is None else sample_weight[where]
            value = float(host_value(loss(*parts, weight)))
            numbers.restore()
            if divisor is not None:
                return value, float(host_value(divisor(*parts, weight)))
            if loss.reduction == WEIGHTED and weight is not None:
                return value, float(host_value(keras.ops.sum(weight)))
            return value, float(len(range(ROWS)[where]))

        (whole, n), (first, a), (rest, b) = part(slice(ROWS)), part(slice(FIRST)), part(slice(FIRST, ROWS))
        expected = first + rest if loss.reduction == "sum" else (a * first + b * rest) / n
        if math.isfinite(whole) and not math.isclose(whole, expected, rel_tol=1e-4, abs_tol=1e-6):
            mixed.append((loss, divisor is None and math.isclose(whole, first + rest, rel_tol=1e-4, abs_tol=1e-6)))
        return keras.ops.zeros(())

    return tried


def _cut(where: slice) -> Any:
    return lambda tensor: tensor[where]
