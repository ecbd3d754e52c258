"""``Trainer``: a compiled Keras model, an algorithm and workers."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from choros import algorithms
from choros.backends import backend_name
from choros.backends.devices.weight_layout import check_layout, say_mesh
from choros.backends.driver_model import build_model
from choros.backends.host_values import to_host
from choros.backends.loss_exactness import check_exact, check_scales
from choros.backends.metric_additivity import not_additive
from choros.cluster import Place
from choros.cluster.hardware.cpu_affinity import usable_cores
from choros.cluster.hardware.network_address import own_address
from choros.data import StreamSource, make_source, make_validation
from choros.data import validation as checks
from choros.data.sample_rows import spread
from choros.device_choice import SHARE, choose_device
from choros.errors import InvalidInputError
from choros.launch.specs import LaunchPreferences, launcher_of
from choros.training.callback_runner import CallbackRunner
from choros.training.checkpoint.manager import CheckpointManager, facts_of
from choros.training.executors import in_job
from choros.training.executors.local import LocalExecutor
from choros.training.executors.remote import RemoteExecutor
from choros.training.executors.worker_pool import WorkerPool, check_workers, default_workers, each_devices
from choros.training.model_io.redraw import check_redraw
from choros.training.model_io.serialization import PackedModel, pack_model
from choros.training.payload import FitPayload
from choros.training.run_record import RunRecord
from choros.training.spec import FitConfig, FitRequest
from choros.training.validation import (
    check_average,
    check_batch_shape,
    check_checkpoint,
    check_devices,
    check_distribution,
    check_epochs,
    check_fit,
    check_held,
    check_launcher,
    check_layers,
    check_meet,
    check_member_callbacks,
    check_model,
    check_numbers,
    check_place,
    check_reach,
    check_rest,
    check_restarts,
    fixed_rows,
    go_on,
    keras_settings,
    limits_of,
    restore_backup,
    warn_of_sparse_gradients,
)
from choros.training.worker.setup import several_models


class Trainer:
    """Train a compiled Keras model with several workers, on this machine or where a launcher starts them.

    The model that is given is the model that is trained: after ``fit`` it holds the final weights. Workers are
    processes of their own, started without running your script again, so no ``if __name__`` guard is needed.

    Args:
        model: a compiled ``keras.Model``.
        algorithm: an algorithm, its class or its name (``"aeasgd"``; ``choros.algorithms()`` lists them).
            Defaults to ``"allreduce"``.
        workers: int. Defaults to the GPUs that the backend can use, else to min(4, physical cores), as in
            ``WorkerPool``; Single always has one.
        meet: "together" or "alone": how the workers meet. Defaults to the algorithm's own way.
        pool: WorkerPool to use instead of starting workers of its own.
        threads, bind, devices, echo: as in ``WorkerPool``.
        devices_per_worker: int, or one for each worker. Each batch of a worker is divided among its devices, exactly,
            whatever the algorithm between the workers. Defaults to 1 (a pool's own).
        layout: how a worker's devices divide the model's weights (JAX): a ``keras.distribution.LayoutMap``, a
            ``ModelParallel``, or a dict from patterns of variables' paths to a tuple with "model" or None for each
            dimension. Defaults to None: each device has all.
        launcher: what starts the workers elsewhere: ``choros.Ssh("n1:2,n2:2")``, ``choros.Srun()`` (or ``"srun"``) in
            an allocation of SLURM, ``choros.Mpiexec()`` (or ``"mpiexec"``), or ``choros.Spark(...)`` (or ``"spark"``)
            for the tasks of a Spark cluster. The callbacks run here. All hosts have this directory, this Python and
            what it has installed (on Spark: the same packages). Arrays go to each host once (on Spark: to each worker);
            files are read by each worker, so give those where there is much. Defaults to None: workers of this machine.
        network: str. The interface (``"ib0"``), the beginning of several, or the domain (``".hsn.example.org"``) by
            which the workers' hosts reach each other, told to the libraries that they use too. Defaults to
            ``CHOROS_NETWORK``, else the way to the other hosts.
        timeout: float. Seconds without a step after which a worker counts as hung. Defaults to 300; the first step
            may take ``first_timeout`` (1,800) seconds.
        restarts: int. How often workers that die, hang or raise are started again, in all; then all go on from where
            they last left their state (each epoch's end, or as a ``Checkpoint`` says); of this machine's workers that
            train alone, only the failed one, from its last meeting. Spark has ``choros.Spark(max_restarts=)``.
            Defaults to 0: the first failure ends ``fit``.
        strict: bool. Whether settings outside an algorithm's stability bound are refused; else they warn.
            Defaults to True.

    Attributes:
        models: list of keras.Model. The members, after training by Ensemble.

    Raises:
        InvalidInputError: something that cannot work, said before any worker starts.

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
        devices_per_worker: int | Sequence[int] | None = None,
        layout: Any = None,
        echo: bool = True,
        launcher: Any = None,
        network: str | None = None,
        timeout: float = 300.0,
        first_timeout: float = 1800.0,
        restarts: int = 0,
        strict: bool = True,
    ) -> None:
        try:
            self.algorithm = algorithms.by_name(algorithm)
        except InvalidInputError:
            raise
        except (TypeError, ValueError) as error:
            raise InvalidInputError(str(error)) from None
        check_model(model)
        single = isinstance(self.algorithm, algorithms.Single)
        self._place = self._where(workers, self.algorithm, pool)
        self._launcher, self._how = (
            launcher_of(launcher),
            LaunchPreferences(threads, bind, network or "", echo),
        )
        if network and self._launcher is None:
            own_address(network)  # workers on one machine need none, but one that is not there is a mistake
        if self._place.size > 1:
            workers = self._place.size
            choose_device(self._place)
            os.environ |= {SHARE: "1"} if devices == "shared" else {}
            os.environ |= {"CHOROS_NETWORK": network} if network else {}
        if self._launcher is not None:
            workers = check_launcher(self._launcher, workers, self._place, self.algorithm, pool)
        own = 1 if devices_per_worker is None else devices_per_worker
        if workers is None and not single:
            workers = pool.size if pool is not None else default_workers(backend_name(), devices, own)
        self.workers = 1 if single else check_workers(workers)
        if pool is not None and pool.size < self.workers:
            raise InvalidInputError(
                f"workers={self.workers}, but the pool has {pool.size}: give workers={pool.size} or fewer."
            )
        self.meet = check_meet(self.algorithm, meet)
        self.model, self.models = model, list[Any]()
        self.timeout, self.first_timeout, self.strict = timeout, first_timeout, strict
        self.restarts = check_restarts(restarts, self._place, self._launcher)
        self._pool = pool or WorkerPool(
            self.workers, threads=threads, bind=bind, devices=devices, devices_per_worker=own, echo=echo
        )
        self._own, self._kept = pool is None, False
        self._each = each_devices(own, self.workers) if self._own else self._pool.per_worker[: self.workers]
        self._layout = check_devices(self._each, devices_per_worker, layout)
        if self._layout is not None and (self._place.size > 1 or self._launcher is not None):
            raise InvalidInputError(
                "layout= is for workers that the Trainer starts on this machine: leave the launcher of ranks out."
            )

    def fit(  # noqa: D417 - those of Keras are named together
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = 32,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
        seed: int | None = None,
        initial_batch: int = 0,
        checkpoint: Any = None,
        resume: bool = False,
    ) -> Any:
        """Train, as ``model.fit`` does.

        Args:
            x, y, sample_weight: arrays, nested arrays, or ``x`` a ``keras.utils.PyDataset`` whose items are global
                batches, ``choros.files``, or what yields global batches: a ``tf.data.Dataset``, a PyTorch
                ``DataLoader``, a Grain loader, a generator (with ``steps_per_epoch`` where it does not end). These are
                read in this process and divided as they come; their order is their own business. Such validation data
                are read once, before training, and evaluated after each epoch; those without an end need
                ``validation_steps``.
            batch_size: int. The global batch, divided among the workers for every algorithm; one that does not divide
                is dealt out whole (7 rows on 4 workers: 2, 2, 2, 1). Data that yield batches decide it. None is 32, as
                in Keras. Defaults to 32.
            steps_per_epoch: int. Global batches in an epoch, going on where the last one stopped and, where the rows
                run out, into their next pass. Defaults to all.
            seed: int. Order of the rows and the state of random layers. Defaults to a draw from Python's ``random``
                (so ``keras.utils.set_random_seed`` makes runs repeatable).
            initial_batch: int. Global batches of the first epoch that a run with this ``seed`` and these data trained
                before it was cut short: this one goes on with the rest. Defaults to 0.
            checkpoint: ``choros.Checkpoint``, or a directory for one after each epoch. Defaults to None.
            resume: bool. Whether to go on from the newest checkpoint; where there is none, training begins. The
                history then has the epochs that were trained now. Defaults to False.
            epochs, verbose, callbacks, validation_split, validation_data, shuffle, class_weight, initial_epoch,
                validation_steps, validation_batch_size, validation_freq: as in Keras.

        Returns:
            ``keras.callbacks.History`` with Keras' keys; what the workers did is at ``history.run``
            (``choros.RunRecord``).

        Raises:
            InvalidInputError: something that cannot work; no worker was started.
            CheckpointError: a checkpoint could not be written, as the disk is full.
            SystemExit: a signal asked for a checkpoint and the end.
            WorkerFailedError: a worker failed; the model is unchanged and ``error.weights`` holds the last centre.
        """
        begun = time.perf_counter()
        check_fit(self.model)  # once more: a preprocessor may have been put back
        batch_size = 32 if batch_size is None else batch_size  # as in Keras
        together = self.meet == "together" or self.workers == 1
        checks.check(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            validation_split=validation_split,
        )
        check_distribution()
        check_epochs(epochs, initial_epoch, initial_batch)
        initial_epoch, initial_batch = go_on(callbacks, initial_epoch, initial_batch, seed if together else None)
        check_epochs(epochs, initial_epoch, initial_batch)
        check_numbers(seed, verbose, validation_steps, validation_batch_size, validation_freq)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = checks.split(x, y, sample_weight, validation_split)
        import keras

        floatx = keras.config.floatx()
        source = make_source(x, y, sample_weight, class_weight, floatx)
        validation = None
        if validation_data is not None:
            validation = make_validation(validation_data, validation_steps, floatx)
        if isinstance(source, StreamSource):
            source.check(epochs - initial_epoch, steps_per_epoch)
            check_reach(self._launcher)
        averaged = check_average(self.model, callbacks, alone=not together)
        facts = (source, self.meet, self._each, self._launcher)
        saver = CheckpointManager(check_checkpoint(checkpoint, resume, self.restarts, *facts))
        steps = steps_per_epoch or source.steps(batch_size)
        check_rest(initial_batch, steps)
        if isinstance(self.algorithm, algorithms.Ensemble):
            checks.check_members(source, self.workers)
            check_member_callbacks(callbacks if self.workers > 1 else None, self._apart)
        check_batch_shape(self.model, self._replicas)
        sample = source.sample(fixed_rows(self.model) or min(batch_size, 32))
        algorithm, after_update = self._bind(sample, partial(spread, source, sample))
        for limit in limits_of(callbacks):
            limit.restore(self.model, initial_batch)
        initial_epoch = restore_backup(callbacks, self.model, initial_epoch, checkpoint)
        check_epochs(epochs, initial_epoch, initial_batch)
        written = self._write()
        verbose = 1 if verbose == "auto" else verbose
        if self._place.rank:  # rank 0 of a job runs the callbacks and draws the bar
            callbacks, verbose = None, 0
        conductor = CallbackRunner(self.model, callbacks, verbose, epochs, steps, int(initial_batch))
        job = FitConfig(
            algorithm=algorithms.to_config(algorithm),
            meet=self.meet,
            workers=self.workers,
            batch_size=int(batch_size),
            epochs=int(epochs),
            initial_epoch=int(initial_epoch),
            initial_batch=int(initial_batch),
            steps=_int(steps_per_epoch),
            shuffle=checks.check_shuffle(shuffle, source),
            seed=random.getrandbits(31) if seed is None else int(seed),
            fold_seed=_int(seed),
            validation_batch_size=_int(validation_batch_size),
            validation_steps=_int(validation_steps),
            validation_freq=list(map(int, validation_freq)) if np.iterable(validation_freq) else int(validation_freq),
            validation=None if validation is None else {},
            keras=keras_settings(),
            per_batch=conductor.per_batch,
            watched=bool(conductor.user),
            progress=0.2 if verbose == 1 else 0.0,
            timeout=self.timeout,
            first_timeout=self.first_timeout,
            metric_values=1 + sum(int(np.prod(v.shape)) for v in self.model.metrics_variables),
            averaged_metrics=not_additive(self.model, sample) if self._replicas > 1 else [],
            spin=self.workers <= len(usable_cores()),
            devices=self._each if max(self._each) > 1 else [],
            layout=self._layout,
            validate_average=averaged,
            repeats=after_update is not None,
        )
        lead = not self._place.rank
        job = saver.begin(job, lambda: facts_of(self.model, source), resume, self.restarts, lead)
        conductor.first, conductor.alone = job.initial_batch, not job.together
        if saver.latest is not None:
            conductor.kept = partial(saver.show, self.model)
        if verbose and job.devices:
            print(say_mesh(self.workers, job.devices, job.layout, self.model))
        if verbose and job.repeats:
            print(f"train_step goes on with updated weights ({after_update}): each step is calculated twice")
        record = self._train(
            FitRequest(self.model, algorithm, job, source, validation, conductor, written, begun, saver)
        )
        conductor.history.run = record
        if verbose:
            print(record.line())
        return conductor.history

    @property
    def _apart(self) -> bool:
        """True if each member of an Ensemble has callbacks of its own, in a task elsewhere."""
        return hasattr(self._launcher, "train")

    @property
    def _replicas(self) -> int:
        """The number of models among which a global batch is divided."""
        return sum(self._each) if several_models(max(self._each)) else self.workers

    def _where(self, workers: int | None, algorithm: Any, pool: WorkerPool | None) -> Place:
        """Return the place of this process."""
        return check_place(workers, algorithm, pool)

    def _write(self) -> PackedModel:
        """Write the model down for workers; a rank of a job has its own."""
        if isinstance(self.algorithm, algorithms.Ensemble) and self.workers > 1:
            check_redraw(self.model)
        needed = self._place.size == 1 or self._replicas > self.workers
        return pack_model(self.model) if needed else PackedModel()

    def _train(self, plan: FitRequest) -> RunRecord:
        """Train on worker processes; inside a job, as one rank of it."""
        if self._place.size > 1:
            return in_job.fit(plan, self._place.rank)
        cargo = FitPayload(plan.written, [*plan.written.arrays], [])
        plan = replace(plan, job=cargo.load(plan, here=self._launcher is None))
        if self._launcher is not None:
            if hasattr(self._launcher, "train"):
                trained: RunRecord
                trained, self.models = self._launcher.train(plan, cargo, self._how)
                return trained
            record = RemoteExecutor(plan, cargo, self._launcher, self._how, self.restarts).run()
            plan.conductor.end()
            return record
        try:
            engine = LocalExecutor(plan, cargo, self._pool, self.restarts)
            record = engine.run()
            self.models = engine.gather_members()
        finally:
            if self._own and not self._kept:
                self._pool.close()
        plan.conductor.end()
        return record

    def _bind(self, sample: Any, wide: Callable[[], Any]) -> tuple[Any, str | None]:
        """Build the model as ``fit`` would, and check what must hold.

        Returns:
            The algorithm, filled in; and what ``check_exact`` gives.
        """
        after_update = None
        check_layers(self.model, self._replicas)
        build_model(self.model, sample)
        if (self.algorithm.level == "gradients" and self.workers > 1) or self._replicas > self.workers:
            repeats = not several_models(max(self._each))
            after_update = check_exact(self.model, self._replicas, sample, wide, repeats=repeats)
            warn_of_sparse_gradients(self.model)
        check_held(self.model, self._replicas)
        if self._replicas > 1 and self.meet != "never":
            check_scales(self.model.trainable_variables)
        if self._layout is not None:
            check_layout(self._layout, self.model)
        rate = float(to_host([self.model.optimizer.learning_rate])[0])
        return self.algorithm.bound(self.workers, rate, strict=self.strict), after_update

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
