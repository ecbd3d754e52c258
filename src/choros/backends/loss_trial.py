"""A trial of AllReduce on a few rows: the gradients of two halves must add up to the gradient of all rows.

The rows are halved in several ways. A loss that divides by the number of valid entries, for example, equals a mean if
both halves have equally many of them. All halves have the same shape, so more ways need no more compilation.

For two halves with divisors ``n_a`` and ``n_b``, AllReduce computes the gradient as for two ranks:
``(n_a g_a + n_b g_b) / (n_a + n_b)``. This must be the gradient of all rows in one batch. It applies to every source of
a loss: a compiled loss, ``compute_loss``, ``add_loss`` or a ``train_step``. Models that consist of Keras' layers,
losses and steps need no trial.

Random layers and BatchNormalization couple rows, but do not make a loss inexact. They are fixed during the trial.
Random layers draw the same numbers for each row. BatchNormalization uses its moving statistics; in training with
several workers it uses the statistics of each worker's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src import backend as keras_backend

from choros.backends import make_replica
from choros.backends.host_values import host_value
from choros.backends.number_attributes import NumberAttributes
from choros.backends.rowwise_parts import compiled_losses, known, model_divisor, of_keras, plain, title
from choros.errors import InexactLossError, brief, warn
from choros.types import Array, Batch

WIDE, NARROW = 1e-3, 0.05  # tolerance relative to the gradient, for float32 and for 16-bit types
SMALL = 0.01  # a gradient smaller than this fraction of the largest one is compared with the largest one
WAYS = 6  # number of ways to halve the rows
ENTRIES = 4096  # most entries of a variable's gradient that ``divides`` compares
SEPARATE = 4  # up to this number, layers that call add_loss are tried one at a time
MASKED = "use keras.ops.mean over all rows in add_loss (it divides by a part of them, such as the valid entries)"
SHAPED = ("normal", "uniform", "randint", "truncated_normal")  # random functions whose first argument is a shape
NOISE = 3.0  # a difference smaller than this multiple of the spread between draws may be random

SHIFT = 8.0  # largest number that a trial adds to weights
ROUNDING = {"float16": 0.01, "bfloat16": 0.05}  # relative rounding error of variables with these dtypes

Sent = tuple[list[Array], float]


def try_parts(model: Any, rows: Callable[[], Batch], workers: int, count: int = WAYS) -> None:
    """Refuse a model whose gradients do not add up over parts of a batch.

    Args:
        model: the compiled and built model. Its variables are restored on return, and its metrics are reset.
        rows: returns rows from the whole data set. With fewer than 4 rows there is no trial.
        workers: int. Number of workers that will train.
        count: int. Number of ways to halve the rows. Defaults to 6.

    Raises:
        InexactLossError: the gradients do not add up. The message names the source of the loss and a remedy.

    Warns:
        UserWarning: the trial failed, or random numbers in the loss hide the result. Or ``add_loss`` adds a value that
            depends on the whole batch of a worker, such as a statistic of the batch.
    """
    if workers < 2 or not model.trainable_variables or plain(model):
        return
    sample = rows()
    half = sample.rows // 2
    if half < 2:
        return
    order, halves = np.arange(2 * half), ways(half, count)
    with trial(model, workers) as attempt:

        def gradients(**options: bool) -> Iterator[tuple[Sent, Sent, Sent]]:
            """Yield the gradients of all rows and of both halves, for each way to halve the rows."""
            whole = attempt(cut(sample, order), **options)
            for first, second in halves:
                yield whole, attempt(cut(sample, first)), attempt(cut(sample, second))

        try:
            errors = [difference(model, *triple, attempt.sums) or 0.0 for triple in gradients()]
        except InexactLossError:
            raise
        except Exception as error:  # the workers' own step raises it again, with its traceback
            warn(
                f"AllReduce could not be tried on model {model.name!r} before training ({brief(error)}), so it is not "
                "known that its result equals that of one process."
            )
            return
        off = max(errors)
        if not off:
            return
        # The same rows in another order give the same mean. What differs comes from random numbers or from the order.
        whole, moved = attempt(cut(sample, order)), attempt(cut(sample, order[::-1]))
        if distance(model, whole, moved) * NOISE > off:
            warn(
                f"{source(model)} draws random numbers (or depends on the order of the rows), so it cannot be seen "
                "that its loss is a mean over rows. AllReduce takes it as one; use keras.random with a "
                "keras.random.SeedGenerator to have it checked. This warning appears once."
            )
            return
        with muted() as adding:
            # The error stays without ``add_loss``: it comes from the loss or the step.
            persists = any(difference(model, *triple, attempt.sums) is not None for triple in gradients(afresh=True))
        if persists or not adding:
            custom_step = not of_keras(type(model).train_step)
            raise step_refusal(model, off) if custom_step else refusal(source(model), off, "return a mean over rows")
        names = ", ".join(sorted(adding))
        first, _ = halves[int(np.argmax(errors))]
        single = attempt(cut(sample, first), afresh=True)
        doubled = attempt(cut(sample, np.concatenate([first, first])))
        if model_divisor(model)[0] is not None or distance(model, doubled, single) >= tolerance(model):
            raise refusal(f"What {names} gives to add_loss", off, "use keras.ops.mean over rows in add_loss")
        if tolerance(model) <= WIDE:  # 16-bit gradients are too coarse to separate a masked mean from a statistic
            refuse_masked(adding, gradients, [entries(gradient) for gradient in whole[0]], off)
        warn(
            f"What {names} gives to add_loss depends on a batch as a whole (here a step would be off by {off:.1%}). "
            "Each worker takes it of its own rows, as it takes the statistics of BatchNormalization; with another "
            "number of workers the result is another one."
        )


def refuse_masked(
    adding: set[str], gradients: Callable[..., Iterator[tuple[Sent, Sent, Sent]]], indices: list[Array], off: float
) -> None:
    """Refuse a model with a masked mean in ``add_loss``: parts of a batch have unequal numbers of valid entries.

    Args:
        adding: names of the layers that call ``add_loss``.
        gradients: yields the gradients of a batch and of its halves, for each way to halve it.
        indices: indices of the entries of each gradient that are compared.
        off: relative error of a step.

    Raises:
        InexactLossError: a layer adds a masked mean. The message contains the names of the layers.
    """
    with_losses = [[thinned(gradient, indices) for gradient in parts] for parts in gradients()]
    single_layers = [{name} for name in sorted(adding)]
    for layers in single_layers if len(adding) <= SEPARATE else [adding]:
        with muted(layers):
            without_losses = [[thinned(gradient, indices) for gradient in parts] for parts in gradients(afresh=True)]
        if any(divides(*map(np.subtract, *both)) for both in zip(with_losses, without_losses, strict=True)):
            raise refusal(f"What {', '.join(sorted(layers))} gives to add_loss", off, MASKED)


def after_update(model: Any, rows: Callable[[], Batch], workers: int) -> str | None:
    """Find out whether a ``train_step`` uses the weights after the optimizer has updated them.

    AllReduce updates the weights after the step, with the gradients of all workers. A step that uses updated weights
    must therefore run again.

    Args:
        model: the compiled and built model. Its variables are restored on return, and its metrics are reset.
        rows: returns rows from the whole data set.
        workers: int. Number of workers that will train.

    Returns:
        The path of a variable, or the name of a log, that depends on the update; None if none depends on it.
    """
    if workers < 2 or not model.trainable_variables or of_keras(type(model).train_step):
        return None
    if getattr(model, "repeat_step", False):
        return "the model says repeat_step"
    batch = rows()
    with trial(model, workers) as attempt:
        return dependent(attempt.replica, attempt.replica.pack(batch), batch.rows)


def dependent(replica: Any, data: tuple[Any, ...], rows: int) -> str | None:
    """Return the name of a value in a step that depends on the update, as ``after_update`` does.

    The traced program is searched first. If it gives no answer, the step runs twice with stand-ins for the optimizer.
    One stand-in changes nothing. The other adds a number to each weight and increments the step counter. No other value
    may differ between the two runs. The numbers differ from weight to weight: if two weights moved by the same number,
    their mean would move by it too, and would look like another weight.

    Args:
        replica: a replica of the model, after ``build`` or ``attach``. Its state is restored.
        data: a packed batch.
        rows: int. Number of rows of the batch.
    """
    try:
        name_found = replica.structure(data, rows)
    except InexactLossError:
        raise
    except Exception:  # the step cannot be traced
        name_found = None
    if name_found is not None:
        return name_found or None
    random, trained = np.random.default_rng(0), len(replica.trainable)
    shifts = (SHIFT * random.uniform(0.5, 1, trained) * random.choice([-1, 1], trained)).tolist()
    unmoved = [0.0] * trained
    numbers = NumberAttributes(replica.model)
    try:
        still_there, logs = replica.left(data, rows, unmoved)
        # Both runs must start alike, also in Python numbers that a step counts up.
        numbers.restore()
        moved, other_logs = replica.left(data, rows, shifts)
    except InexactLossError:
        raise
    except Exception:  # the workers' own step raises it again, with its traceback
        return None
    shifts += [0.0] * (len(moved) - trained)
    for variable, before, after, shift in zip(replica.left_in(), still_there, moved, shifts, strict=True):
        if not _differ_by_shift(before, after, shift, str(variable.dtype)):
            return str(variable.path)
    for name, value in logs.items():
        before, after = (host_value(each) for each in (value, other_logs[name]))
        if not _differ_by_shift(before, after, 0.0, str(before.dtype)):
            return f"the log {name}"
    return None


def _differ_by_shift(before: Array, after: Array, shift: float, dtype: str) -> bool:
    """Return whether two values differ by the shift, up to rounding."""
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64) - shift
    size = np.max(np.abs(before), initial=0.0) + abs(shift)
    rounding = ROUNDING.get(dtype, 4e-6 if shift else 2e-5)
    return bool(np.allclose(before, after, rtol=0, atol=rounding * size, equal_nan=True))


def ways(half: int, count: int = WAYS) -> list[tuple[Array, Array]]:
    """Return ways to halve ``2 * half`` rows: first and last rows, even and odd rows, then random halves.

    Example:
        >>> [tuple(part.tolist() for part in halves) for halves in ways(2, 2)]
        [([0, 1], [2, 3]), ([0, 2], [1, 3])]
    """
    order, random = np.arange(2 * half), np.random.default_rng(0)
    orders = [order, np.concatenate([order[::2], order[1::2]]), *(random.permutation(order) for _ in range(count - 2))]
    return [(rows[:half], rows[half:]) for rows in orders[:count]]


def refusal(where: str, off: float, remedy: str) -> InexactLossError:
    """Return the error for a loss whose parts do not add up.

    Args:
        where: name of the part of the model, the subject of the message.
        off: the difference relative to the gradient.
        remedy: advice for users who do not declare a divisor.
    """
    return InexactLossError(
        f"{where} is not a mean over the rows of a batch: the workers' gradients together would be off by {off:.1%} "
        f"from the gradient of one process. Do one of these: {remedy}; declare what it divides by, as a method "
        "divisor(y_true, y_pred, sample_weight) of a compiled loss or loss_divisor(x, y, y_pred, sample_weight) of the "
        "model (loss_divisor = None for a sum over rows); or use another algorithm, such as LocalSGD."
    )


def step_refusal(model: keras.Model, off: float) -> InexactLossError:
    """Return the error for a ``train_step`` whose gradients do not add up.

    The loss may be a mean over rows: clipping and SAM change the gradients of each worker, and the mean of clipped
    gradients is not the clipped mean.

    Args:
        model: the compiled model.
        off: the difference relative to the gradient.
    """
    return InexactLossError(
        f"The gradients of {type(model).__name__}.train_step of model {model.name!r} do not add up over parts of a "
        f"batch: those of all workers together would be off by {off:.1%} from the gradient of one process. Either its "
        "loss is not a mean over the rows of a batch: return one, or declare what it divides by, as a method "
        "loss_divisor(x, y, y_pred, sample_weight) of the model (loss_divisor = None for a sum over rows). Or it "
        "changes the gradients before it applies them (clipping, sharpness-aware steps, noise): leave clipping to the "
        "optimizer (clipnorm, global_clipnorm or clipvalue), which clips the gradient of all workers. Or use another "
        "algorithm, such as LocalSGD, in which each worker makes whole steps."
    )


def source(model: Any) -> str:
    """Return the name of the user-defined source of the loss, as the subject of a sentence."""
    kind = type(model)
    for name in ("train_step", "compute_loss"):
        if not of_keras(getattr(kind, name)):
            return f"The loss of {kind.__name__}.{name} of model {model.name!r}"
    foreign = [entry.loss for entry in compiled_losses(model) if not known(entry.loss)]
    if foreign:
        return f"Loss {title(foreign[0])}"
    user_layers = [layer for layer in model._flatten_layers() if layer is not model and not of_keras(type(layer))]
    if not user_layers:
        return f"The loss of model {model.name!r} ({kind.__name__})"
    layers = ", ".join(f"{layer.name!r} ({type(layer).__name__})" for layer in user_layers[:3])
    return f"The loss of model {model.name!r}, whose layers {layers} may mix rows,"


def cut(batch: Batch, rows: Any) -> Batch:
    """Return the given rows of a batch as a new batch."""
    parts = (batch.x, batch.y, batch.sample_weight)
    x, y, weight = (keras.tree.map_structure(lambda a: None if a is None else np.array(a[rows]), p) for p in parts)
    return Batch(x, y, weight, rows=len(rows), total=len(rows))


class Attempt:
    """A function that computes the gradient of a batch as a rank does. Each call starts from the same state.

    Args:
        model: compiled and built. Its state is restored after each call.
        workers: int. Number of workers that will train.

    Attributes:
        sums: whether the ranks' gradients are added without weights.
    """

    def __init__(self, model: Any, workers: int) -> None:
        from choros.backends.loss_weighting import LossWeightTracker

        replica: Any = make_replica(model, workers)
        replica.attach()
        replica.weigher = LossWeightTracker(model, workers)
        self.replica, self.sums = replica, replica.weigher.sums
        trained = {id(v) for v in replica.trainable}
        scale = getattr(model.optimizer, "dynamic_scale", None)  # float16: set to 1, as overflow would spoil the trial
        self._state = [v for v in model.variables if id(v) not in trained] + ([] if scale is None else [scale])
        self._before = [np.array(value) for value in replica._values(self._state)]
        functional = keras_backend.backend() == "jax"  # on JAX a step does not set the weights
        self._weights = [] if functional else [np.array(value) for value in replica._values(replica.trainable)]
        self._generators = [np.array(state) for state in replica.generators()]
        self._numbers = NumberAttributes(model)
        self._begin = self._before if scale is None else [*self._before[:-1], np.ones(())]
        self.reset(self._begin)

    def __call__(self, batch: Batch, *, afresh: bool = False) -> Sent:
        """Return ``n * g`` for each trainable variable as float64, and the divisor ``n``.

        Args:
            batch: a batch with rows.
            afresh: whether to trace the step again. Defaults to False.
        """
        try:
            arrays, n = self.replica.attempt(self.replica.pack(batch), batch.rows, afresh)
        finally:
            self.reset(self._begin)
        zeros = (np.zeros(v.shape) for v in self.replica.trainable)
        pairs = zip(arrays, zeros, strict=True)
        return [zero if a is None else n * np.asarray(a, np.float64) for a, zero in pairs], n

    def reset(self, values: list[Array] | None = None) -> None:
        """Set the state that a step changes to these values. Defaults to the values before the trial."""
        replica = self.replica
        replica._assign(self._state, self._before if values is None else values)
        for variable, weight in zip(replica.trainable, self._weights, strict=False):  # a step may set weights
            if not np.array_equal(replica._values([variable])[0], weight, equal_nan=True):
                replica._assign([variable], [weight])
        replica.set_generators(self._generators)
        self._numbers.restore()


@contextmanager
def trial(model: Any, workers: int) -> Iterator[Attempt]:
    """Fix random numbers and batch statistics, and yield a function that computes one rank's gradients."""
    mode, floating = getattr(model, "training", None), keras.config.floatx()
    attempt = Attempt(model, workers)
    try:
        with still():
            yield attempt
    finally:
        attempt.reset()
        model.reset_metrics()
        keras.config.set_floatx(floating)
        if keras_backend.backend() == "torch":
            model.train(mode)


def difference(model: Any, whole: Sent, first: Sent, second: Sent, sums: bool) -> float | None:
    """Return the relative difference between the reduced gradient of two parts and that of the whole; None if equal.

    Two gradients are equal if they differ by no more than ``tolerance``.
    """
    (g_a, n_a), (g_b, n_b) = first, second
    together = [a + b for a, b in zip(g_a, g_b, strict=True)], 1.0 if sums else n_a + n_b
    off = distance(model, whole, together)
    scale = [np.abs(a) + np.abs(b) for a, b in zip(g_a, g_b, strict=True)], together[1]
    return off if off > tolerance(model) and distance(model, whole, together, scale) > tolerance(model) else None


def entries(gradient: Array) -> Array:
    """Return indices of a sample of the nonzero entries of the flat gradient, at most ``ENTRIES``."""
    indices = np.flatnonzero(gradient)
    return indices if len(indices) <= ENTRIES else np.random.default_rng(0).choice(indices, ENTRIES, replace=False)


def thinned(sent: Sent, indices: list[Array]) -> Array:
    """Return the entries of a mean gradient at these indices of each variable, in one vector."""
    arrays, n = sent
    return np.concatenate([array.reshape(-1)[chosen] / n for array, chosen in zip(arrays, indices, strict=True)])


def divides(whole: Array, first: Array, second: Array) -> bool:
    """Return whether a gradient is a mean of two halves' gradients with unequal weights, as for a masked mean.

    A loss of batch statistics, such as a product of two means, has no such weights. Either the gradient is not a
    combination of the halves' gradients, or the weights do not add up to 1.
    """
    size = float(np.linalg.norm(whole))
    if not all(np.isfinite(part).all() for part in (whole, first, second)) or size == 0.0:
        return False
    weights, _, rank, _ = np.linalg.lstsq(np.stack([first, second], axis=1), whole, rcond=1e-4)
    residual = float(np.linalg.norm(weights[0] * first + weights[1] * second - whole)) / size
    uneven, excess = abs(weights[0] - weights[1]) / 2, abs(weights.sum() - 1)
    return bool(
        rank == 2 and residual < WIDE and weights.min() > -WIDE and uneven > WIDE and excess < 0.1 * uneven**2 + 1e-5
    )


def distance(model: Any, first: Sent, second: Sent, scale: Sent | None = None) -> float:
    """Return the largest relative difference between two gradients of a variable; 0 if values are not finite.

    If a gradient is far smaller than the largest one, the difference is relative to the largest one. Such a small
    gradient may consist of rounding errors.
    """
    arrays, n = first if scale is None else scale
    if not all(np.isfinite(a).all() for a in (*first[0], *second[0], *arrays)):
        return 0.0
    deltas = [a / first[1] - b / second[1] for a, b in zip(first[0], second[0], strict=True)]
    norms = [float(np.linalg.norm(a)) / n for a in arrays]
    differences = [float(np.linalg.norm(a)) for a in deltas]
    least = max(SMALL * max(norms), 1e-12)
    return max(d / max(norm, least) for d, norm in zip(differences, norms, strict=True))


def tolerance(model: Any) -> float:
    """Return the largest relative difference that rounding may cause."""
    kinds = {getattr(layer, "compute_dtype", "float32") for layer in model._flatten_layers()}
    kinds |= {keras.backend.standardize_dtype(variable.dtype) for variable in model.trainable_variables}
    return NARROW if kinds & {"float16", "bfloat16"} else WIDE


@contextmanager
def muted(names: set[str] | None = None) -> Iterator[set[str]]:
    """Temporarily disable ``add_loss`` of the named layers, by default of all; yield the names of its callers."""
    calling: set[str] = set()
    plain_add = keras.Layer.add_loss

    def add_loss(self: Any, loss: Any) -> None:
        name = f"{type(self).__name__} {self.name!r}"
        if names is not None and name not in names:
            plain_add(self, loss)
            return
        calling.add(name)

    keras.Layer.add_loss = add_loss
    try:
        yield calling
    finally:
        keras.Layer.add_loss = plain_add


@contextmanager
def still() -> Iterator[None]:
    """Temporarily draw the same random numbers for all rows, and run BatchNormalization with moving statistics."""
    random, normalise = keras_backend.random, keras.layers.BatchNormalization.call
    before = {name: getattr(random, name) for name in (*SHAPED, "dropout")}

    def same_for_all(draw: Any) -> Any:
        def drawn(shape: Any, *args: Any, **options: Any) -> Any:
            if len(shape) < 1:
                return draw(shape, *args, **options)
            return keras.ops.broadcast_to(draw((1, *shape[1:]), *args, **options), shape)

        return drawn

    def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        kept = tuple(inputs.shape) if noise_shape is None else tuple(noise_shape)
        return before["dropout"](inputs, rate, (1, *kept[1:]) if kept else kept, seed)

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return normalise(self, inputs, training=False, mask=mask)

    try:
        for name, function in ({name: same_for_all(before[name]) for name in SHAPED} | {"dropout": dropout}).items():
            setattr(random, name, function)
        keras.layers.BatchNormalization.call = call
        yield
    finally:
        keras.layers.BatchNormalization.call = normalise
        for name, function in before.items():
            setattr(random, name, function)
