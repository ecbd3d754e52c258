"""``Trainer``: a compiled Keras model, an algorithm and workers."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np

from choros import algorithms
from choros.backend import check_exact
from choros.backend.additive import not_additive
from choros.backend.caller import build_model
from choros.cluster import Place
from choros.data import StreamSource, checks, make_source, make_validation, packing
from choros.errors import BadInput, UnknownAlgorithm, Unstable
from choros.training import joined
from choros.training.conductor import Conductor, values
from choros.training.engine import Cargo, Engine
from choros.training.job import Job
from choros.training.lean import lean
from choros.training.pool import WorkerPool, check_workers, default_workers
from choros.training.record import RunRecord
from choros.training.travel import pack_model


class Trainer:
    """Train a compiled Keras model with several workers on this machine.

    The model that is given is the model that is trained: after ``fit`` it holds the final weights. Workers are
    processes of their own, started without running your script again, so no ``if __name__`` guard is needed.

    Args:
        model: a compiled ``keras.Model``.
        algorithm: an algorithm, its class or its name (``"aeasgd"``; ``choros.algorithms()`` lists them).
            Defaults to ``"allreduce"``.
        workers: int. Defaults to min(4, physical cores); Single always has one.
        meet: "together" or "alone": how the workers meet. Defaults to the algorithm's own way.
        pool: WorkerPool to use instead of starting workers of its own.
        threads, bind, devices, echo: as in ``WorkerPool``.
        timeout: float. Seconds without a step after which a worker counts as hung. Defaults to 300; the first step
            may take ``first_timeout`` (1,800) seconds.
        strict: bool. Whether settings outside an algorithm's stability bound are refused; else they warn.
            Defaults to True.

    Attributes:
        models: list of keras.Model. The members, after training by Ensemble.

    Raises:
        BadInput: something that cannot work, said before any worker starts.

    Example:
        >>> import choros, keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((8, 4), "float32"), np.ones(8, "float32")
        >>> trainer = choros.Trainer(model, choros.LocalSGD(window=2), workers=2)
        >>> history = trainer.fit(x, y, epochs=1, batch_size=4, verbose=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        algorithm: Any = "allreduce",
        workers: int | None = None,
        *,
        meet: str | None = None,
        pool: WorkerPool | None = None,
        threads: int | None = None,
        bind: bool = True,
        devices: str = "auto",
        echo: bool = True,
        timeout: float = 300.0,
        first_timeout: float = 1800.0,
        strict: bool = True,
    ) -> None:
        try:
            self.algorithm = algorithms.by_name(algorithm)
        except algorithms.UnknownAlgorithmError as error:
            raise UnknownAlgorithm(str(error)) from None
        except (TypeError, ValueError) as error:
            raise BadInput(str(error)) from None
        check_model(model)
        single = isinstance(self.algorithm, algorithms.Single)
        self._place = check_place(workers, self.algorithm, pool)
        if self._place.size > 1:
            workers = self._place.size
        if workers is None:
            workers = 1 if single else pool.size if pool is not None else default_workers()
        self.workers = 1 if single else check_workers(workers)
        if pool is not None and pool.size < self.workers:
            raise BadInput(f"workers={self.workers}, but the pool has {pool.size}: give workers={pool.size} or fewer.")
        self.meet = check_meet(self.algorithm, meet)
        self.model, self.models = model, list[Any]()
        self.timeout, self.first_timeout, self.strict = timeout, first_timeout, strict
        self._pool = pool or WorkerPool(self.workers, threads=threads, bind=bind, devices=devices, echo=echo)
        self._own, self._kept = pool is None, False

    def fit(  # noqa: D417 - those of Keras are named together
        self,
        x: Any,
        y: Any = None,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
        seed: int | None = None,
    ) -> Any:
        """Train, as ``model.fit`` does.

        Args:
            x, y, sample_weight: arrays, nested arrays, or ``x`` a ``keras.utils.PyDataset`` whose items are global
                batches, ``choros.files``, or what yields global batches: a ``tf.data.Dataset``, a PyTorch
                ``DataLoader``, a Grain loader, a generator (with ``steps_per_epoch`` where it does not end). These are
                read in this process and divided as they come; their order is their own business. Such validation data
                are read once, before training, and evaluated after each epoch.
            batch_size: int. The global batch, divided among the workers. Defaults to 32.
            steps_per_epoch: int. Global batches in an epoch, going on where the last one stopped and, where the rows
                run out, into their next pass. Defaults to all.
            seed: int. Order of the rows and the state of random layers. Defaults to a draw from Python's ``random``
                (so ``keras.utils.set_random_seed`` makes runs repeatable).
            epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight, initial_epoch,
                validation_steps, validation_batch_size, validation_freq: as in Keras.

        Returns:
            ``keras.callbacks.History`` with Keras' keys; what the workers did is at ``history.run``
            (``choros.RunRecord``).

        Raises:
            BadInput: something that cannot work; no worker was started.
            WorkerFailed: a worker failed; the model is unchanged and ``error.weights`` holds the last centre.
        """
        begun = time.perf_counter()
        together = self.meet == "together" or self.workers == 1
        checks.check(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            workers=self.workers,
            together=together,
            steps=steps_per_epoch,
            validation_split=validation_split,
        )
        check_epochs(epochs, initial_epoch)
        check_numbers(seed, verbose, validation_steps, validation_batch_size, validation_freq)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = checks.split(x, y, sample_weight, validation_split)
        import keras

        floatx = keras.config.floatx()
        source = make_source(x, y, sample_weight, class_weight, floatx)
        validation = None
        if validation_data is not None:
            validation = make_validation(validation_data, validation_steps, floatx)
        stream = source if isinstance(source, StreamSource) else None
        if stream is not None:
            stream.check(epochs - initial_epoch, steps_per_epoch)
        steps = steps_per_epoch or source.steps(batch_size)
        if isinstance(self.algorithm, algorithms.Ensemble):
            checks.check_members(source, self.workers)
        sample = source.sample(min(batch_size, 32))
        algorithm = self._bind(sample)
        arrays: list[Any] = []
        blobs: list[bytes] = []
        packed, packed_validation = self._pack(source, validation, arrays, blobs)
        model_bytes, custom = pack_model(self.model)
        verbose = 1 if verbose == "auto" else verbose
        if self._place.rank:  # rank 0 of a job runs the callbacks and draws the bar
            callbacks, verbose = None, 0
        engine: Engine | None = None

        def fetch() -> None:
            if engine is not None:
                engine.fetch()

        conductor = Conductor(self.model, callbacks, verbose, epochs, steps, fetch)
        job = Job(
            algorithm=algorithms.to_config(algorithm),
            meet=self.meet,
            workers=self.workers,
            batch_size=int(batch_size),
            epochs=int(epochs),
            initial_epoch=int(initial_epoch),
            steps=_int(steps_per_epoch),
            shuffle=bool(shuffle),
            seed=random.getrandbits(31) if seed is None else int(seed),
            fold_seed=_int(seed),
            validation_batch_size=_int(validation_batch_size),
            validation_steps=_int(validation_steps),
            validation_freq=list(map(int, validation_freq)) if np.iterable(validation_freq) else int(validation_freq),
            source=packed,
            validation=packed_validation,
            keras=keras_settings(),
            per_batch=conductor.per_batch,
            batch_weights=conductor.batch_weights,
            progress=0.2 if verbose == 1 else 0.0,
            timeout=self.timeout,
            first_timeout=self.first_timeout,
            metric_values=1 + sum(int(np.prod(v.shape)) for v in self.model.metrics_variables),
            averaged_metrics=not_additive(self.model, sample) if self.workers > 1 else [],
            spin=self.workers <= (os.cpu_count() or 1),
            hand_back=algorithm.level == "gradients" or self.workers == 1,
        )
        if self._place.size > 1:
            record = joined.fit(
                self.model,
                algorithm,
                job,
                source,
                validation,
                conductor,
                self._place.rank,
                begun,
            )
            return self._finish(conductor, record, verbose)  # its callbacks have ended already
        try:
            cargo = Cargo(model_bytes, custom, arrays, blobs)
            engine = Engine(self.model, algorithm, job, cargo, self._pool, begun, stream)
            record = engine.run(conductor)
            self.models = engine.gather_members()
        finally:
            if self._own and not self._kept:
                self._pool.close()
        conductor.end()
        return self._finish(conductor, record, verbose)

    def _pack(
        self, source: Any, validation: Any, arrays: list[Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Take the sources apart for workers; a rank of a job has its own."""

        def one(part: Any) -> dict[str, Any]:
            return {} if self._place.size > 1 else packing.pack(part, arrays, blobs)[0]

        return one(source), None if validation is None else one(validation)

    def _finish(self, conductor: Conductor, record: RunRecord, verbose: int) -> Any:
        conductor.history.run = record
        if verbose:
            print(record.line())
        return conductor.history

    def _bind(self, sample: Any) -> Any:
        """Build the model as ``fit`` would, check what must hold, and fill in the algorithm."""
        build_model(self.model, sample)
        if self.algorithm.level == "gradients" and self.workers > 1:
            check_exact(self.model, self.workers, sample)
        try:
            return self.algorithm.bound(
                self.workers, float(values([self.model.optimizer.learning_rate])[0]), strict=self.strict
            )
        except algorithms.UnstableError as error:
            raise Unstable(str(error)) from None

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the trained model in this process: ``model.evaluate``."""
        return self.model.evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict in this process: ``model.predict``; for an Ensemble the mean of its members' predictions."""
        import keras

        if not self.models:
            return self.model.predict(*args, **kwargs)
        predictions = [member.predict(*args, **kwargs) for member in self.models]
        return keras.tree.map_structure(lambda *parts: np.mean(parts, axis=0), *predictions)

    def close(self) -> None:
        """End the workers that this Trainer started."""
        self._kept = False
        if self._own:
            self._pool.close()

    def __enter__(self) -> Trainer:
        self._kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def check_place(workers: int | None, algorithm: Any, pool: WorkerPool | None) -> Place:
    """Return where this process is; inside a job a Trainer starts nothing and joins as that rank."""
    if os.environ.get("CHOROS_WORKER"):
        raise BadInput("This process is itself a worker of a Trainer: do not train inside a callback or a layer.")
    place = Place.here()
    if place.size == 1:
        return place
    if workers not in (None, place.size) or pool is not None:
        raise BadInput(
            f"This process is rank {place.rank} of {place.size} (started by {place.launcher}), so the Trainer has "
            f"{place.size} workers: leave workers and pool out."
        )
    if algorithm.meets == "never":
        raise BadInput(f"{type(algorithm).__name__} has workers that never meet: run it outside a job.")
    return place


def check_model(model: Any) -> None:
    """Refuse what is not a compiled Keras model."""
    import keras

    if not isinstance(model, keras.Model):
        raise BadInput(f"The model is a {type(model).__name__}: give a compiled keras.Model.")
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise BadInput(f"The model {model.name!r} is not compiled: call model.compile(optimizer, loss) first.")


def check_meet(algorithm: Any, meet: str | None) -> str:
    """Return how the workers meet; refuse what has no meaning."""
    if meet is None or meet == algorithm.meets:
        return str(algorithm.meets)
    name = type(algorithm).__name__
    if meet not in ("together", "alone"):
        raise BadInput(f"meet={meet!r}: give 'together' or 'alone'.")
    if algorithm.meets == "never":
        raise BadInput(f"{name} has workers that never meet: leave meet out.")
    if meet == "alone" and (algorithm.level == "gradients" or algorithm.weighted):
        raise BadInput(f"{name} is a mean over all workers, which needs them together: use AEASGD or DynSGD alone.")
    return meet


def check_epochs(epochs: Any, initial_epoch: Any) -> None:
    """Refuse what is not a number of epochs."""
    for name, value in (("epochs", epochs), ("initial_epoch", initial_epoch)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise BadInput(f"{name}={value!r}: give a whole number, 0 or more.")
    if epochs <= initial_epoch:
        raise BadInput(f"epochs={epochs} with initial_epoch={initial_epoch} leaves nothing to train: give more epochs.")


def check_numbers(seed: Any, verbose: Any, steps: Any, batch_size: Any, freq: Any) -> None:
    """Refuse a seed, a verbosity and settings of validation that have no meaning."""

    def whole(value: Any, least: int) -> bool:
        return bool(not isinstance(value, bool) and isinstance(value, (int, np.integer)) and value >= least)

    if seed is not None and not whole(seed, 0):
        raise BadInput(f"seed={seed!r}: give a whole number, 0 or more, or None.")
    if verbose not in ("auto", 0, 1, 2):
        raise BadInput(f"verbose={verbose!r}: give 0 (silent), 1 (a progress bar), 2 (one line an epoch) or 'auto'.")
    for name, value in (("validation_steps", steps), ("validation_batch_size", batch_size)):
        if value is not None and not whole(value, 1):
            raise BadInput(f"{name}={value!r}: give a whole number, 1 or more, or None.")
    several = isinstance(freq, (list, tuple, set, frozenset))
    if not (all(whole(value, 1) for value in freq) if several else whole(freq, 1)):
        raise BadInput(f"validation_freq={freq!r}: give a whole number of epochs, or a list of epochs (from 1).")


@lean()
def keras_settings() -> dict[str, Any]:
    """Return this process' Keras settings, for the workers."""
    import keras

    return {
        "floatx": keras.config.floatx(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.saving.serialize_keras_object(keras.config.dtype_policy()),
    }
