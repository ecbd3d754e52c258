"""A trial of AllReduce on a few rows: do the gradients of two halves add up to the gradient of the whole?

The rows are halved in several ways, since a loss that divides by a part of the rows is no different from a mean where
both halves happen to have equally many of them. All halves have the same shape, so that nothing more is compiled.

For two halves with divisors ``n_a`` and ``n_b``, AllReduce makes of their gradients what it would make of two ranks'
gradients: ``(n_a g_a + n_b g_b) / (n_a + n_b)``. That must be the gradient of all rows in one batch, whatever the loss
comes from: a compiled loss, ``compute_loss``, ``add_loss`` or a ``train_step``. Models that consist of Keras' own
layers, losses and steps need no trial.

Two things couple rows without making a loss inexact, and are held still for the trial. Random layers draw the same
numbers for each row. BatchNormalization uses its moving statistics; with several workers its statistics are those of
each worker's own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src import backend as keras_backend

from choros.backends import make_replica
from choros.backends.rowwise_parts import compiled_losses, known, model_divisor, of_keras, plain, title
from choros.errors import InexactLossError, brief, warn
from choros.types import Array, Batch

WIDE, NARROW = 1e-3, 0.05  # tolerance relative to the gradient, for float32 and for 16-bit types
SMALL = 0.01  # a variable's gradient below this part of the whole is measured against the whole
WAYS = 6  # of halving the rows
ENTRIES = 4096  # of a variable's gradient tell whether two gradients make a third one
SEPARATE = 4  # layers that call add_loss are tried each by itself up to so many
MASKED = "use keras.ops.mean over all rows in add_loss (it divides by a part of them, such as the valid entries)"
SHAPED = ("normal", "uniform", "randint", "truncated_normal")  # random functions whose first argument is a shape
NOISE = 3.0  # a difference below so many times the spread between draws may be chance

SHIFT = 8.0  # what a trial adds to weights
ROUNDING = {"float16": 0.01, "bfloat16": 0.05}  # relative, where a variable has such a type

Sent = tuple[list[Array], float]


def try_parts(model: Any, rows: Callable[[], Batch], workers: int, count: int = WAYS) -> None:
    """Refuse a model whose gradients do not add up over parts of a batch.

    Args:
        model: the compiled and built model; on return its variables are as before, its metrics are reset.
        rows: gives rows from the whole data set; at least 4, else nothing can be tried.
        workers: int. How many will train together.
        count: int. In how many ways the rows are halved.

    Raises:
        InexactLossError: names where the loss comes from, and what to do.

    Warns:
        UserWarning: the loss depends on random numbers that hide the answer; or ``add_loss`` adds what depends on
            each worker's own batch as a whole, as statistics of a batch do.
    """
    if workers < 2 or not model.trainable_variables or plain(model):
        return
    sample = rows()
    half = sample.rows // 2
    if half < 2:
        return
    order, halves = np.arange(2 * half), ways(half, count)
    with trial(model, workers) as attempt:

        def gradients(**how: bool) -> Iterator[tuple[Sent, Sent, Sent]]:
            """Give those of all rows, and of two halves, for each way to halve them."""
            whole = attempt(cut(sample, order), **how)
            for first, second in halves:
                yield whole, attempt(cut(sample, first)), attempt(cut(sample, second))

        try:
            apart = [difference(model, *each, attempt.sums) or 0.0 for each in gradients()]
        except InexactLossError:
            raise
        except Exception as error:  # the workers' own step raises it again, with its traceback
            warn(
                f"AllReduce could not be tried on model {model.name!r} before training ({brief(error)}), so it is not "
                "known that its result equals that of one process."
            )
            return
        off = max(apart)
        if not off:
            return
        whole, moved = attempt(cut(sample, order)), attempt(cut(sample, order[::-1]))
        if distance(model, whole, moved) * NOISE > off:
            warn(
                f"{source(model)} draws random numbers (or depends on the order of the rows), so it cannot be seen "
                "that its loss is a mean over rows. AllReduce takes it as one; use keras.random with a "
                "keras.random.SeedGenerator to have it checked. This is said once."
            )
            return
        with muted() as adding:
            alone = any(difference(model, *each, attempt.sums) is not None for each in gradients(afresh=True))
        if alone or not adding:
            raise refusal(source(model), off, "return a mean over rows")
        names = ", ".join(sorted(adding))
        first, _ = halves[int(np.argmax(apart))]
        single = attempt(cut(sample, first), afresh=True)
        doubled = attempt(cut(sample, np.concatenate([first, first])))
        if model_divisor(model)[0] is not None or distance(model, doubled, single) >= tolerance(model):
            raise refusal(f"What {names} gives to add_loss", off, "use keras.ops.mean over rows in add_loss")
        if tolerance(model) <= WIDE:  # in 16 bits its gradient cannot be told from a statistic's
            refuse_masked(adding, gradients, [entries(gradient) for gradient in whole[0]], off)
        warn(
            f"What {names} gives to add_loss depends on a batch as a whole (here a step would be off by {off:.1%}). "
            "Each worker takes it of its own rows, as it takes the statistics of BatchNormalization; with another "
            "number of workers the result is another one."
        )


def refuse_masked(
    adding: set[str], gradients: Callable[..., Iterator[tuple[Sent, Sent, Sent]]], kept: list[Array], off: float
) -> None:
    """Refuse a model whose ``add_loss`` is a mean over valid entries, whose number differs between parts of a batch.

    Args:
        adding: names of the layers that call ``add_loss``.
        gradients: gives those of a batch and of its halves, for each way to halve it.
        kept: entries of each gradient that are compared.
        off: by how much a step would be off, relative.

    Raises:
        InexactLossError: names the layers.
    """
    loud = [[thinned(each, kept) for each in parts] for parts in gradients()]
    single_layers = [{name} for name in sorted(adding)]
    for layers in single_layers if len(adding) <= SEPARATE else [adding]:
        with muted(layers):
            quiet = [[thinned(each, kept) for each in parts] for parts in gradients(afresh=True)]
        if any(divides(*map(np.subtract, *both)) for both in zip(loud, quiet, strict=True)):
            raise refusal(f"What {', '.join(sorted(layers))} gives to add_loss", off, MASKED)


def after_update(model: Any, rows: Callable[[], Batch], workers: int) -> str | None:
    """Find out whether a ``train_step`` goes on with the weights that its optimizer's update has left.

    AllReduce updates after the step, when it has the gradients of all workers; a step that goes on has to be made again
    then.

    Args:
        model: the compiled and built model; on return its variables are as before, its metrics are reset.
        rows: gives rows from the whole data set.
        workers: int. How many will train together.

    Returns:
        A name of what depends on the update, a variable's path or that of a log; None where nothing does.
    """
    if workers < 2 or not model.trainable_variables or of_keras(type(model).train_step):
        return None
    if getattr(model, "repeat_step", False):
        return "the model says repeat_step"
    batch = rows()
    with trial(model, workers) as attempt:
        return dependent(attempt.replica, attempt.replica.pack(batch), batch.rows)


def dependent(replica: Any, data: tuple[Any, ...], rows: int) -> str | None:
    """Return a name of what depends on the update in a step, as ``after_update`` does.

    Its program is looked at first. Where that does not tell, the step is made twice, with stand-ins for the optimizer:
    one changes nothing, the other adds a number to each weight and counts a step. Nothing else may differ. Each weight
    has a number of its own, as the mean of two weights that are moved by the same number is moved by it too.

    Args:
        replica: of the model, after ``build`` or ``take_up``; nothing of it changes.
        data: a packed batch.
        rows: int. Its rows.
    """
    try:
        found = replica.structure(data, rows)
    except InexactLossError:
        raise
    except Exception:  # of a step that cannot be traced
        found = None
    if found is not None:
        return found or None
    random, trained = np.random.default_rng(0), len(replica.trainable)
    shifts = (SHIFT * random.uniform(0.5, 1, trained) * random.choice([-1, 1], trained)).tolist()
    unmoved = [0.0] * trained
    try:
        (still_there, logs), (moved, other_logs) = (replica.left(data, rows, each) for each in (unmoved, shifts))
    except InexactLossError:
        raise
    except Exception:  # the workers' own step raises it again, with its traceback
        return None
    shifts += [0.0] * (len(moved) - trained)
    for variable, before, after, shift in zip(replica.left_in(), still_there, moved, shifts, strict=True):
        if not _near(before, after, shift, str(variable.dtype)):
            return str(variable.path)
    for name, value in logs.items():
        before, after = (np.asarray(keras.ops.convert_to_numpy(each)) for each in (value, other_logs[name]))
        if not _near(before, after, 0.0, str(before.dtype)):
            return f"the log {name}"
    return None


def _near(before: Array, after: Array, shift: float, dtype: str) -> bool:
    """Tell whether two values differ by the shift, but for rounding."""
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64) - shift
    size = np.max(np.abs(before), initial=0.0) + abs(shift)
    rounding = ROUNDING.get(dtype, 4e-6 if shift else 2e-5)
    return bool(np.allclose(before, after, rtol=0, atol=rounding * size, equal_nan=True))


def ways(half: int, count: int = WAYS) -> list[tuple[Array, Array]]:
    """Return ways to halve twice as many rows: first and last, even and odd ones, and by chance.

    Example:
        >>> [tuple(part.tolist() for part in each) for each in ways(2, 2)]
        [([0, 1], [2, 3]), ([0, 2], [1, 3])]
    """
    order, random = np.arange(2 * half), np.random.default_rng(0)
    orders = [order, np.concatenate([order[::2], order[1::2]]), *(random.permutation(order) for _ in range(count - 2))]
    return [(each[:half], each[half:]) for each in orders[:count]]


def refusal(where: str, off: float, remedy: str) -> InexactLossError:
    """The error for a loss whose parts do not add up.

    Args:
        where: names the part of the model.
        off: the difference relative to the gradient.
        remedy: what to do instead of a declaration.
    """
    return InexactLossError(
        f"{where} is not a mean over the rows of a batch: the workers' gradients together would be off by {off:.1%} "
        f"from the gradient of one process. Do one of these: {remedy}; declare what it divides by, as a method "
        "divisor(y_true, y_pred, sample_weight) of a compiled loss or loss_divisor(x, y, y_pred, sample_weight) of the "
        "model (loss_divisor = None for a sum over rows); or use another algorithm, such as LocalSGD."
    )


def source(model: Any) -> str:
    """Name the user's own part that makes the loss, as the subject of a sentence."""
    kind = type(model)
    for name in ("train_step", "compute_loss"):
        if not of_keras(getattr(kind, name)):
            return f"The loss of {kind.__name__}.{name} of model {model.name!r}"
    foreign = [entry.loss for entry in compiled_losses(model) if not known(entry.loss)]
    if foreign:
        return f"Loss {title(foreign[0])}"
    own = [layer for layer in model._flatten_layers() if layer is not model and not of_keras(type(layer))]
    if not own:
        return f"The loss of model {model.name!r} ({kind.__name__})"
    layers = ", ".join(f"{layer.name!r} ({type(layer).__name__})" for layer in own[:3])
    return f"The loss of model {model.name!r}, whose layers {layers} may mix rows,"


def cut(batch: Batch, rows: Any) -> Batch:
    """Return the batch's given rows as a batch of their own."""
    parts = (batch.x, batch.y, batch.sample_weight)
    x, y, weight = (keras.tree.map_structure(lambda a: None if a is None else np.array(a[rows]), p) for p in parts)
    return Batch(x, y, weight, rows=len(rows), total=len(rows))


class Attempt:
    """Calculates what a rank would send for a batch, always from the same state, and changes nothing.

    Args:
        model: compiled and built.
        workers: int. How many will train together.

    Attributes:
        sums: whether the ranks' gradients add without weights.
    """

    def __init__(self, model: Any, workers: int) -> None:
        from choros.backends.loss_weighting import LossWeightTracker

        replica: Any = make_replica(model, workers)
        replica.take_up()
        replica.weigher = LossWeightTracker(model, workers)
        self.replica, self.sums = replica, replica.weigher.sums
        trained = {id(v) for v in replica.trainable}
        scale = getattr(model.optimizer, "dynamic_scale", None)  # float16: what overflows could not be compared
        self._state = [v for v in model.variables if id(v) not in trained] + ([] if scale is None else [scale])
        self._before = [np.array(value) for value in replica._values(self._state)]
        functional = keras_backend.backend() == "jax"  # there a step leaves the weights be
        self._weights = [] if functional else [np.array(value) for value in replica._values(replica.trainable)]
        self._generators = [np.array(state) for state in replica.generators()]
        self._begin = self._before if scale is None else [*self._before[:-1], np.ones(())]
        self.reset(self._begin)

    def __call__(self, batch: Batch, *, afresh: bool = False) -> Sent:
        """Return ``n * g`` for each trainable variable, and ``n``.

        Args:
            batch: with rows.
            afresh: whether to trace the step once more.
        """
        try:
            arrays, n = self.replica.attempt(self.replica.pack(batch), batch.rows, afresh)
        finally:
            self.reset(self._begin)
        zeros = (np.zeros(v.shape) for v in self.replica.trainable)
        pairs = zip(arrays, zeros, strict=True)
        return [zero if a is None else n * np.asarray(a, np.float64) for a, zero in pairs], n

    def reset(self, values: list[Array] | None = None) -> None:
        """Set all that a step changes to these values, or to what it was."""
        replica = self.replica
        replica._assign(self._state, self._before if values is None else values)
        for variable, weight in zip(replica.trainable, self._weights, strict=False):  # a step or a layer may set them
            if not np.array_equal(replica._values([variable])[0], weight, equal_nan=True):
                replica._assign([variable], [weight])
        replica.set_generators(self._generators)


@contextmanager
def trial(model: Any, workers: int) -> Iterator[Attempt]:
    """Hold randomness and batch statistics still, and give what calculates one rank's gradients."""
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
    """Return how far two parts together are from the whole, relative to it; None where they agree."""
    (g_a, n_a), (g_b, n_b) = first, second
    together = [a + b for a, b in zip(g_a, g_b, strict=True)], 1.0 if sums else n_a + n_b
    off = distance(model, whole, together)
    scale = [np.abs(a) + np.abs(b) for a, b in zip(g_a, g_b, strict=True)], together[1]
    return off if off > tolerance(model) and distance(model, whole, together, scale) > tolerance(model) else None


def entries(gradient: Array) -> Array:
    """Return places, in the flat gradient, that stand for all of it: some of those that are not 0."""
    places = np.flatnonzero(gradient)
    return places if len(places) <= ENTRIES else np.random.default_rng(0).choice(places, ENTRIES, replace=False)


def thinned(sent: Sent, places: list[Array]) -> Array:
    """Return a mean gradient at these places of each variable, in one vector."""
    arrays, n = sent
    return np.concatenate([array.reshape(-1)[kept] / n for array, kept in zip(arrays, places, strict=True)])


def divides(whole: Array, first: Array, second: Array) -> bool:
    """Tell whether a gradient is a mean of two halves' gradients with unequal weights, as that of a masked mean is.

    A loss made of statistics of the batch, such as a product of two means, has no such weights: either the gradient is
    no combination of the halves' gradients, or the weights do not add up to 1.
    """
    size = float(np.linalg.norm(whole))
    if not all(np.isfinite(each).all() for each in (whole, first, second)) or size == 0.0:
        return False
    weights, _, rank, _ = np.linalg.lstsq(np.stack([first, second], axis=1), whole, rcond=1e-4)
    residual = float(np.linalg.norm(weights[0] * first + weights[1] * second - whole)) / size
    uneven, excess = abs(weights[0] - weights[1]) / 2, abs(weights.sum() - 1)
    return bool(
        rank == 2 and residual < WIDE and weights.min() > -WIDE and uneven > WIDE and excess < 0.1 * uneven**2 + 1e-5
    )


def distance(model: Any, one: Sent, other: Sent, scale: Sent | None = None) -> float:
    """Return the largest difference of a variable's gradients, relative to them; 0 where they are not finite.

    A gradient far below the largest is compared with that: what is left of it may be rounding alone.
    """
    arrays, n = one if scale is None else scale
    if not all(np.isfinite(a).all() for a in (*one[0], *other[0], *arrays)):
        return 0.0
    apart = [a / one[1] - b / other[1] for a, b in zip(one[0], other[0], strict=True)]
    norms = [float(np.linalg.norm(a)) / n for a in arrays]
    found = [float(np.linalg.norm(a)) for a in apart]
    least = max(SMALL * max(norms), 1e-12)
    return max(d / max(norm, least) for d, norm in zip(found, norms, strict=True))


def tolerance(model: Any) -> float:
    """Return the difference that rounding may make."""
    kinds = {getattr(layer, "compute_dtype", "float32") for layer in model._flatten_layers()}
    return NARROW if kinds & {"float16", "bfloat16"} else WIDE


@contextmanager
def muted(names: set[str] | None = None) -> Iterator[set[str]]:
    """For a while, let ``add_loss`` of the named layers, or of all, add nothing; gives the names of those muted."""
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
    """For a while, random functions of Keras draw the same for all rows, and BatchNormalization looks at no batch."""
    random, normalise = keras_backend.random, keras.layers.BatchNormalization.call
    before = {name: getattr(random, name) for name in (*SHAPED, "dropout")}

    def same_for_all(draw: Any) -> Any:
        def drawn(shape: Any, *args: Any, **how: Any) -> Any:
            if len(shape) < 1:
                return draw(shape, *args, **how)
            return keras.ops.broadcast_to(draw((1, *shape[1:]), *args, **how), shape)

        return drawn

    def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        kept = tuple(inputs.shape) if noise_shape is None else tuple(noise_shape)
        return before["dropout"](inputs, rate, (1, *kept[1:]) if kept else kept, seed)

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return normalise(self, inputs, training=False, mask=mask)

    try:
        for name in SHAPED:
            setattr(random, name, same_for_all(before[name]))
        random.dropout = dropout
        keras.layers.BatchNormalization.call = call
        yield
    finally:
        keras.layers.BatchNormalization.call = normalise
        for name, function in before.items():
            setattr(random, name, function)
