"""A fit on the rows of a frame: what the estimator and dist-keras' trainers call."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import choros
from choros import algorithms
from choros.errors import BadInput, UnknownAlgorithm, Unstable
from choros.spark.barrier import Task, run
from choros.spark.columns import Columns
from choros.spark.process import keras_here
from choros.spark.slots import choose_workers
from choros.types import Array

_packing = threading.Lock()  # CrossValidator fits in several threads, and Keras counts names for all of them


@dataclass(frozen=True)
class Order:
    """One fit as its tasks need to know it.

    Attributes:
        model: tuple of bytes, as ``choros.training.travel.pack_model`` wrote it.
        keras: dict. The caller's backend and settings, see ``choros.spark.process.keras_here``.
        algorithm: dict. The bound algorithm, as ``choros.algorithms.to_config`` wrote it.
        batch_size: int. The global batch.
        epochs: int.
        seed: int.
        fold_seed: int or None. The seed where the user gave one.
        shuffle: bool.
        class_weight: dict or None.
        timeout: float. Seconds without a step after which a worker counts as hung.
    """

    model: tuple[bytes, bytes]
    keras: dict[str, Any]
    algorithm: dict[str, Any]
    batch_size: int
    epochs: int
    seed: int
    fold_seed: int | None
    shuffle: bool
    class_weight: dict[int, float] | None
    timeout: float
    version: str = choros.__version__


def train(
    frame: Any,
    *,
    model: Any,
    algorithm: Any = "allreduce",
    workers: int | str = "auto",
    columns: Columns,
    batch_size: int = 32,
    per_worker: bool = False,
    epochs: int = 1,
    seed: int | None = None,
    shuffle: bool = True,
    callbacks: Sequence[Any] | None = None,
    class_weight: dict[int, float] | None = None,
    strict: bool = True,
    verbose: int = 0,
    max_restarts: int = 0,
    timeout: float = 300.0,
    first_timeout: float = 1800.0,
    profile: Any = None,
    partitioned: bool = False,
) -> tuple[Any, Any]:
    """Train a copy of a compiled model on the rows of a frame; the given model stays as it is.

    Args:
        frame: DataFrame, as ``choros.spark.columns.normalise`` made it.
        model: compiled keras.Model.
        algorithm: an algorithm, its class or its name.
        workers: int, or "auto" for all free task slots.
        columns: what the frame's columns mean; those that it marks validate.
        batch_size: int. The global batch.
        per_worker: bool. Whether ``batch_size`` is each worker's own, as in dist-keras.
        epochs: int.
        seed: int or None, which draws one.
        shuffle: bool. Whether rows are in another order in each epoch.
        callbacks: Keras callbacks, run in this process on the copy.
        class_weight: dict from class number to weight, or None.
        strict: bool. Whether settings outside an algorithm's stability bound are refused; else they warn.
        verbose: int. As in Keras.
        max_restarts: int. How often a run that lost a worker begins again from its last epoch.
        timeout: float. Seconds without a step after which a worker counts as hung.
        first_timeout: float. The same before the first step.
        profile: pyspark ResourceProfile of the tasks, or None.
        partitioned: bool. See ``choros.spark.barrier.run``.

    Returns:
        The trained keras.Model, and a keras.callbacks.History; after training by Ensemble ``history.models`` holds the
        members.

    Raises:
        BadInput: something that cannot work.
        WorkerFailed: a worker failed.
    """
    from choros.training.travel import pack_model, unpack_model

    algorithm = by_name(algorithm)
    _check(model, batch_size, epochs)
    if isinstance(algorithm, algorithms.Single):
        if workers not in ("auto", 1):
            raise BadInput(f"workers={workers}, but Single is one worker: leave workers out.")
        workers = 1
    size = choose_workers(frame.sparkSession, workers)
    rate = float(np.asarray(model.optimizer.learning_rate))
    try:
        bound = algorithm.bound(size, rate, strict=strict)
    except algorithms.UnstableError as error:
        raise Unstable(str(error)) from None
    with _packing:
        packed = pack_model(model)
        copy = unpack_model(*packed)
    order = Order(
        packed,
        keras_here(),
        algorithms.to_config(bound),
        batch_size * size if per_worker else batch_size,
        epochs,
        random.getrandbits(31) if seed is None else int(seed),
        seed,
        shuffle,
        class_weight,
        timeout,
    )
    done = run(
        frame,
        _Work(order),
        size,
        columns=columns,
        partitioned=partitioned,
        profile=profile,
        timeout=first_timeout,
    )
    return brought_back(copy, done)


@dataclass(frozen=True)
class _Work:
    order: Order

    def __call__(self, task: Task) -> bytes:
        return work_of_rank(self.order, task)


# ---- the rank's work: to be filled in --------------------------------------------------------------------------------
def work_of_rank(order: Order, task: Task) -> bytes:
    """Train one rank, in its task; rank 0 returns ``result`` (all ranks of an Ensemble do)."""
    raise NotImplementedError


# ----------------------------------------------------------------------------------------------------------------------


def result(weights: Sequence[Array], history: dict[str, list[float]]) -> bytes:
    r"""Return what a rank brings back: the history as JSON, then all variables of the model one after the other.

    Example:
        >>> result([], {"loss": [0.5]})
        b'{"history": {"loss": [0.5]}, "variables": []}\n'
    """
    said = {"history": history, "variables": [[one.dtype.name, list(one.shape)] for one in weights]}
    return json.dumps(said).encode() + b"\n" + b"".join(np.ascontiguousarray(one).tobytes() for one in weights)


def brought_back(model: Any, done: Sequence[bytes]) -> tuple[Any, Any]:
    """Set a model to what rank 0 brought back; return it and its history."""
    import keras

    head, _, rest = done[0].partition(b"\n")
    said, at = json.loads(head), 0
    for variable, (dtype, shape) in zip(model.variables, said["variables"], strict=True):
        count = int(np.prod(shape, dtype=np.int64))
        variable.assign(np.frombuffer(rest, dtype, count, at).reshape(shape))
        at += count * np.dtype(dtype).itemsize
    history = keras.callbacks.History()
    history.set_model(model)
    history.history = said["history"]
    history.epoch = list(range(len(next(iter(said["history"].values()), []))))
    history.models = []
    return model, history


def by_name(algorithm: Any, **options: Any) -> Any:
    """Return an algorithm with some of its hyper-parameters set.

    Args:
        algorithm: an algorithm, its class, its name, or what ``choros.algorithms.to_config`` wrote.
        options: hyper-parameters by name; None leaves one as it is. ``rho`` is dist-keras': alpha is rho times
            ``learning_rate``.

    Raises:
        UnknownAlgorithm: no algorithm has that name.
        BadInput: it has no such hyper-parameter, or not of that value.

    Example:
        >>> by_name("aeasgd", window=32, rho=5.0, learning_rate=0.01)
        AEASGD(window=32, alpha=0.05)
    """
    try:
        made = algorithms.from_config(algorithm) if isinstance(algorithm, dict) else algorithms.by_name(algorithm)
        rate = options.pop("learning_rate", None)
        given = {name: value for name, value in options.items() if value is not None}
        if "rho" in given and hasattr(made, "alpha"):
            rho = given.pop("rho")
            if rate is None:
                raise BadInput("rho needs a learning rate, since alpha = rho * learning rate: set it too.")
            given["alpha"] = rho * rate
        known = [one for one in algorithms.to_config(made) if one != "name"]
        if wrong := [name for name in given if name not in known]:
            raise BadInput(f"{type(made).__name__} has no {wrong[0]!r}: it has {', '.join(known)}.")
        return replace(made, **given)
    except algorithms.UnknownAlgorithmError as error:
        raise UnknownAlgorithm(str(error)) from None
    except BadInput:
        raise
    except (TypeError, ValueError) as error:
        raise BadInput(str(error)) from None


def _check(model: Any, batch_size: Any, epochs: Any) -> None:
    from choros.training.arguments import check_epochs, check_model

    check_model(model)
    check_epochs(epochs, 0, 0)
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise BadInput(f"batch_size={batch_size!r}: give a whole number of rows, 1 or more.")
