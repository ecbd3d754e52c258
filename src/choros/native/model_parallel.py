"""One model whose weights are divided over the devices of all ranks of a job: Keras' layout map on JAX.

Keras' own multi-process path divides the weights, and its results are exact if all ranks pass the same rows. It does
not check that they do, and it can neither save such a model nor predict with it. This module adds these parts.
"""

from __future__ import annotations

import hashlib
import platform
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.argument_checks import check_number, check_whole
from choros.backends.devices.weight_layout import check_layout, describe, laid_out
from choros.cluster import Place
from choros.comm.bootstrap.discover_rank import find_place
from choros.comm.bootstrap.init import join
from choros.comm.group import Group
from choros.comm.shared_values import gather_values
from choros.comm.single_rank_group import SingleRankGroup
from choros.consistency.rank_agreement import difference, facts_of_model
from choros.errors import InvalidInputError, counted
from choros.object_text import call_text
from choros.types import ArrayTree

if TYPE_CHECKING:
    import keras

_FUNCTIONS = ("train_function", "test_function", "predict_function")  # compiled for the weights' present devices
_READ_WEIGHTS = ("ModelCheckpoint", "BackupAndRestore", "SwapEMAWeights")
_ADVICE = "All ranks run the same script, with the same data and libraries."


class ModelParallel:
    """The devices of all ranks of a job as one mesh, over which the weights of a model are divided (JAX).

    Every rank runs the same script. Call ``choros.native.initialize("jax")`` at its top. Make, compile and train the
    model inside this context. Every device calculates with its part of the weights, on all rows of each batch. So any
    number of rows is exact, and more ranks give room for a larger model, not more rows a second. To divide rows too,
    use ``choros.Trainer(..., devices_per_worker=n, layout=...)``, which divides weights within each worker.

    Entering the context sets Keras' random seed to the same value on all ranks, so initial weights, Dropout and the
    order of rows are equal.

    Args:
        layout: a mapping from a regular expression of variable paths to "model" or None for each dimension; or a
            ``keras.distribution.LayoutMap`` whose mesh has all devices of the job and does not divide rows.
        seed: int. Keras' random seed. Defaults to a number that rank 0 draws from Python's ``random``.
        timeout: float. Seconds that the ranks wait for each other. Defaults to 300.

    Raises:
        InvalidInputError: Keras does not run on JAX, ``jax.distributed`` was not started for this job, the layout's
            mesh has other devices or divides rows. Inside the context, when a layer makes its variables: the layout
            does not fit a variable.

    Example:
        >>> import keras  # doctest: +SKIP
        >>> with ModelParallel({"wide/kernel": (None, "model")}) as parallel:  # doctest: +SKIP
        ...     layers = [keras.Input((8,)), keras.layers.Dense(4096, name="wide"), keras.layers.Dense(1)]
        ...     model = keras.Sequential(layers)
        ...     model.compile("adam", "mse")
        ...     parallel.fit(model, x, y, batch_size=64, epochs=3)
        ...     with parallel.whole_weights(model):
        ...         if parallel.place.rank == 0:
        ...             model.save("model.keras")
    """

    def __init__(self, layout: Any, seed: int | None = None, timeout: float = 300.0) -> None:
        import keras

        if keras.backend.backend() != "jax":
            raise InvalidInputError(f"ModelParallel needs JAX; this is {keras.backend.backend()}.")
        from choros.native.jax import device_count, process_count

        if seed is not None:
            check_whole("seed", seed, 0)
        self.place: Place = find_place(check_number("timeout", timeout, "a number of seconds"))
        if process_count() != self.place.size:
            raise InvalidInputError(
                f"JAX knows {counted(process_count(), 'process')}, and this job has {self.place.size} ranks: call "
                'choros.native.initialize("jax") at the top of the script.'
            )
        self.layout = describe(layout, device_count(), "in this job")
        sizes = dict(zip(self.layout["axes"], self.layout["shape"], strict=True))
        if sizes.get(self.layout["batch"], 1) != 1:
            raise InvalidInputError(
                f"The layout's mesh divides rows in {sizes[self.layout['batch']]} parts along "
                f"{self.layout['batch']!r}, where Keras computes other numbers for an uneven last batch: give that "
                "axis the size 1."
            )
        self.seed, self._timeout, self._given = seed, timeout, layout
        self._context = ExitStack()

    def __repr__(self) -> str:
        return call_text(self, self._given, seed=self.seed)

    def _group(self) -> Group:
        size = self.place.size
        return SingleRankGroup() if size == 1 else join(self.place.rank, size, self._timeout)

    def __enter__(self) -> ModelParallel:
        import keras

        drawn = random.getrandbits(31) if self.seed is None else self.seed
        keras.utils.set_random_seed(int(self._group().gather(str(drawn).encode())[0]))
        self._context.enter_context(laid_out(self.layout))
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def fit(self, model: keras.Model, x: ArrayTree, y: ArrayTree = None, **arguments: Any) -> keras.callbacks.History:
        """Train by ``model.fit``, after a check that all ranks pass the same model, rows and arguments.

        Callbacks run on every rank. Each sees the same logs. One that reads weights must do so in ``whole_weights``,
        which all ranks enter.

        Args:
            model: keras.Model, built and compiled inside this context.
            x: array or nested arrays of rows.
            y: array or nested arrays: the labels of the rows.
            **arguments: those of ``keras.Model.fit``; ``validation_data`` and ``sample_weight`` are arrays, too.

        Raises:
            InvalidInputError: on every rank, if a rank passes something else than rank 0. Or: the model is not built,
                the layout does not fit it, data are not arrays, or a callback of Keras reads weights on one rank.
        """
        import keras

        if not (model.built and model.compiled):
            raise InvalidInputError(f"Build and compile {model.name!r} before fit: give it a keras.Input.")
        check_layout(self.layout, model)
        callbacks = arguments.get("callbacks") or []
        for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
            if type(callback).__name__ in _READ_WEIGHTS and isinstance(callback, keras.callbacks.Callback):
                raise InvalidInputError(
                    f"{type(callback).__name__} reads the weights, of which this rank has a part: save in "
                    "whole_weights(model), from a callback on every rank."
                )
        data = (x, y, arguments.get("sample_weight"), arguments.get("validation_data"))
        plain = {name: repr(value) for name, value in sorted(arguments.items()) if _is_plain(value)}
        facts = {**facts_of_model(model), "arguments": plain, "data": _digest(data), "host": platform.node()}
        group = self._group()
        gather = partial(gather_values, group)
        if problem := difference(gather(facts), model, gather):
            raise InvalidInputError(f"{problem} {_ADVICE}")
        return model.fit(x, y, **arguments)

    @contextmanager
    def whole_weights(self, model: keras.Model) -> Iterator[None]:
        """Give every rank all weights of the model within this context. Collective: all ranks enter it.

        Inside, the model is one of this process alone: it can be saved, and it predicts and evaluates without the other
        ranks. At the end the divided weights are restored, and changes of the weights are lost.

        Args:
            model: keras.Model, made inside the context of this object. Every rank needs memory for all its variables.
        """
        import keras

        from choros.backends.optimizers import model_variables
        from choros.native.jax import whole

        model.jax_state_sync()
        variables = [*model_variables(model), *model.metrics_variables]
        variables = list({id(variable): variable for variable in variables}.values())
        values = [(variable, variable.value, vars(variable)["_layout"]) for variable in variables]
        functions = {name: getattr(model, name) for name in _FUNCTIONS}
        distribution = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            for variable, value, _ in values:
                vars(variable).update(_value=whole(value), _layout=None)
            for name in _FUNCTIONS:
                setattr(model, name, None)
            yield
        finally:
            model.jax_state_sync()
            for variable, value, layout in values:
                vars(variable).update(_value=value, _layout=layout)
            for name, function in functions.items():
                setattr(model, name, function)
            keras.distribution.set_distribution(distribution)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _digest(data: ArrayTree) -> str:
    """Return a digest of nested arrays.

    Raises:
        InvalidInputError: a leaf is not an array.
    """
    import keras

    digest = hashlib.blake2b(digest_size=8)
    for leaf in keras.tree.flatten(data):
        if leaf is None:
            continue
        if not hasattr(leaf, "__array__"):
            raise InvalidInputError(f"The data are of type {type(leaf).__name__}: give arrays, the same on all ranks.")
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
