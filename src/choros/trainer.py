"""``Trainer``: a compiled Keras model, an algorithm and workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from choros import algorithms
from choros.argument_checks import check_flag, check_text
from choros.backends import backend_name
from choros.backends.devices.weight_layout import check_layout, say_mesh
from choros.backends.driver_model import build_model, check_target
from choros.backends.host_values import to_host
from choros.backends.loss_exactness import check_exact, check_scales
from choros.backends.metric_additivity import not_additive
from choros.cluster import Place
from choros.cluster.hardware.cpu_affinity import usable_cores
from choros.cluster.hardware.network_address import own_address
from choros.console import write_line
from choros.data import StreamSource
from choros.data import validation as checks
from choros.data.sample_rows import spread
from choros.device_choice import SHARE, choose_device, prepare_rank
from choros.errors import InvalidInputError, counted
from choros.launch.process.interrupts import ignored_interrupts_repeated
from choros.launch.process.rank_limit import open_files_explained
from choros.launch.specs import LaunchPreferences, launcher_of
from choros.training.autolog_warning import warn_of_autologging
from choros.training.callback_runner import CallbackRunner
from choros.training.checkpoint.manager import CheckpointManager, facts_of
from choros.training.data_advice import DataKind
from choros.training.executors.executor import Executor, FitResult
from choros.training.executors.standard import InJobExecutor, LocalExecutor, make_executor
from choros.training.executors.worker_pool import WorkerPool, check_workers, default_workers, each_devices
from choros.training.fit_arguments import FitArguments
from choros.training.model_io.redraw import check_redraw
from choros.training.model_io.serialization import PackedModel, pack_model
from choros.training.recording import Recording
from choros.training.spec import FitConfig, FitRequest
from choros.training.startup_notice import StartupNotice
from choros.training.unused_arguments import PROFILED, warn_of_unused_arguments
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
    check_member_callbacks,
    check_mode,
    check_model,
    check_place,
    check_reach,
    check_restarts,
    check_shard_optimizer,
    check_shardable,
    check_timeout,
    check_validation_data,
    keras_settings,
    limits_of,
    restore_backup,
    sample_rows,
    warn_of_sparse_gradients,
)
from choros.training.worker.setup import several_models

if TYPE_CHECKING:
    import keras

    from choros.algorithms.base import Algorithm
    from choros.launch.specs import Launcher
    from choros.training.checkpoint import Checkpoint
    from choros.training.history import History

_NOTHING_TRAINED = (
    "choros: nothing was trained, so history.history is empty: it has only the epochs of this call of fit. "
    "keras.callbacks.CSVLogger(path, append=True) collects the figures of all calls."
)


class Trainer:
    """Train a compiled Keras model with several workers, on this machine or where a launcher starts them.

    After ``fit`` the given model holds the final weights. Workers are separate processes. They do not run your script
    again, so no ``if __name__`` guard is needed.

    Args:
        model: a compiled ``keras.Model``.
        algorithm: an algorithm, its class or its name (``"aeasgd"``; ``choros.algorithms()`` lists them).
            Defaults to ``"allreduce"``.
        workers: int. Defaults to the number of GPUs that the backend can use, else to min(4, physical cores), as in
            ``WorkerPool``. Single always has one worker.
        mode: "sync" (all workers exchange at once) or "async" (each with the parameter server). Defaults to the
            mode of the algorithm.
        pool: WorkerPool to use. Defaults to None: the Trainer starts workers itself.
        threads: int. Threads of each worker. Defaults to its number of cores.
        bind: bool. Whether each worker is bound to separate cores. Defaults to True.
        devices: "auto", "gpu", "cpu" or "shared", as in ``WorkerPool``. Defaults to "auto".
        echo: bool. Whether the workers' output is shown, marked with their rank. Defaults to True.
        devices_per_worker: int, or one for each worker. A worker divides each of its batches exactly among its
            devices, with every algorithm. Defaults to 1, or to the setting of ``pool``.
        layout: how a worker's devices divide the model's weights (JAX): a ``keras.distribution.LayoutMap``, a
            ``ModelParallel``, or a dict from patterns of variables' paths to a tuple with "model" or None for each
            dimension. Defaults to None: each device has all weights.
        launcher: the launcher of workers elsewhere: ``choros.Ssh("n1:2,n2:2")``, ``choros.Srun()`` (or ``"srun"``) in
            an allocation of SLURM, ``choros.Mpiexec()`` (or ``"mpiexec"``), ``choros.Ray(...)`` (or ``"ray"``) for the
            nodes of a Ray cluster, or ``choros.Spark(...)`` (or ``"spark"``) for the tasks of a Spark cluster. The
            callbacks run in this process. All hosts need this directory (not on Ray and Spark), this Python and its
            packages (on Spark: the same packages). Arrays are sent once to each host (on Spark: to each worker). Each
            worker reads files itself, so give files for large data. Defaults to None: workers on this machine.
        network: str. The interface (``"ib0"``), a prefix of several interfaces, or the domain
            (``".hsn.example.org"``) by which the workers' hosts reach each other. It is also passed to the
            communication libraries. Defaults to ``CHOROS_NETWORK``, else to the route to the other hosts.
        timeout: float. Seconds without a step after which a worker counts as hung. Defaults to 300. The first step
            may take ``first_timeout`` seconds, by default 1,800.
        restarts: int. Total number of restarts after a worker dies, hangs or raises. All workers then resume from
            their last saved state: that of the last epoch's end, or of the schedule of a ``Checkpoint``. With an
            asynchronous algorithm on this machine, only the failed worker restarts, from its last exchange. For Spark
            use ``choros.Spark(restarts=)``. Defaults to 0: the first failure ends ``fit``.
        timeline: str or path. A file for ui.perfetto.dev and chrome://tracing (JSON), which each ``fit`` replaces when
            it ends. It has one lane per worker with its computing, its exchanges, its waits for other workers and for
            callbacks, and its waits for data. Workers keep their last 1,000,000 events. A ``fit`` that fails writes no
            file; after a restart the file begins with the restart. Defaults to None.
        profile: str or path. A directory to which each worker writes the profile of its backend's profiler, as
            ``rank-0``, ``rank-1`` ...; see ``choros.callbacks.Profile``. On other hosts it is this path there. Defaults
            to None.
        profile_batches: (first, last). The steps of a worker that ``profile`` covers, both inclusive, counted from 0
            over all epochs of a ``fit``. Defaults to (10, 14).
        shard_optimizer: bool. Whether the workers of this machine divide the optimizer's update (AllReduce): each
            updates a part of the weights and its slots, in memory that all share. The host then holds weights and
            slots once, not once for each worker. On CPUs, for optimizers of Keras. True: refused where it is not
            possible, or a warning if only training shows this. Defaults to None: where it is possible and saves time,
            on JAX and PyTorch from 1 MiB of weights on.
        strict: bool. Whether settings outside an algorithm's stability bound are refused. If False, they warn.
            Defaults to True.
        executor: Executor. Runs each fit, instead of workers of this machine or of ``launcher``; see
            ``choros.training.executors.executor``. Defaults to None: chosen by ``launcher`` and by the job that this
            process belongs to.

    Attributes:
        models: list of keras.Model. The members, after training by Ensemble.

    Raises:
        InvalidInputError: an argument that cannot work, before any worker starts.

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
        model: keras.Model,
        algorithm: Algorithm | type[Algorithm] | str = "allreduce",
        workers: int | None = None,
        *,
        mode: Literal["sync", "async"] | None = None,
        pool: WorkerPool | None = None,
        threads: int | None = None,
        bind: bool = True,
        devices: Literal["auto", "cpu", "gpu", "shared"] = "auto",
        devices_per_worker: int | Sequence[int] | None = None,
        layout: keras.distribution.LayoutMap | None = None,
        echo: bool = True,
        launcher: Launcher | str | None = None,
        network: str | None = None,
        timeout: float = 300.0,
        first_timeout: float = 1800.0,
        restarts: int = 0,
        timeline: str | os.PathLike[str] | None = None,
        profile: str | os.PathLike[str] | None = None,
        profile_batches: tuple[int, int] = PROFILED,
        shard_optimizer: bool | None = None,
        strict: bool = True,
        executor: Executor | None = None,
    ) -> None:
        self.algorithm = _algorithm(algorithm)
        check_model(model)
        bind, echo = check_flag("bind", bind), check_flag("echo", echo)
        _check_place_of_ranks(executor, launcher, pool, network)
        self._place = check_place(workers, self.algorithm, pool) if executor is None else Place()
        self._launcher = launcher_of(launcher)
        if not self._place.rank:  # one rank of a job warns
            given: dict[str, Any] = {"threads": threads, "bind": bind, "devices": devices, "echo": echo}
            given |= {"profile": profile, "profile_batches": profile_batches}
            job = self._place.launcher if self._place.size > 1 else ""
            warn_of_unused_arguments(self.algorithm, workers, given, pool, self._launcher or executor, job)
        if network and self._launcher is None:
            own_address(network)  # workers on one machine need no network, but an unknown name is a mistake
        if self._place.size > 1:
            workers = self._place.size
            choose_device(self._place)
            prepare_rank(self._place)
            os.environ |= {SHARE: "1"} if devices == "shared" else {}
            os.environ |= {"CHOROS_NETWORK": network} if network else {}
        if self._launcher is not None:
            workers = check_launcher(self._launcher, workers, self._place, self.algorithm, pool)
        per_worker = 1 if devices_per_worker is None else devices_per_worker
        self.workers = _count_workers(self.algorithm, workers, pool, devices, per_worker)
        self.mode = check_mode(self.algorithm, mode)
        self.model, self.models = model, list[Any]()
        self.timeout, self.strict = check_timeout("timeout", timeout), check_flag("strict", strict)
        self.first_timeout = check_timeout("first_timeout", first_timeout)
        self.restarts = check_restarts(restarts, self._place, self._launcher)
        self._shard_optimizer = shard_optimizer
        check_shard_optimizer(shard_optimizer, self.algorithm, self.workers)
        local_pool = pool or WorkerPool(
            self.workers, threads=threads, bind=bind, devices=devices, devices_per_worker=per_worker, echo=echo
        )
        self._each = each_devices(per_worker, self.workers) if pool is None else pool.per_worker[: self.workers]
        self._layout = check_devices(self._each, devices_per_worker, layout)
        if self._layout is not None and (self._place.size > 1 or self._launcher is not None):
            raise InvalidInputError(
                "layout= is for workers that the Trainer starts on this machine: leave the launcher of ranks out."
            )
        self._local = LocalExecutor(local_pool, self.restarts, owned=pool is None)
        preferences = LaunchPreferences(threads, bind, network or "", echo)
        self._executor: Executor = executor or self._choose_executor(preferences)
        self._recording = Recording.of(timeline, profile, profile_batches, self._place.rank)
        if isinstance(self.algorithm, algorithms.Ensemble) and self._executor.remote_members and (timeline or profile):
            raise InvalidInputError(
                "timeline= and profile= do not reach the members of an Ensemble on Spark, which train apart: leave "
                "them out, or train on this machine."
            )

    def __repr__(self) -> str:
        model = f"<{type(self.model).__name__} {self.model.name}>"
        launcher = f", launcher={self._launcher!r}" if self._launcher is not None else ""
        return f"Trainer({model}, {self.algorithm!r}, workers={self.workers}{launcher})"

    def _choose_executor(self, preferences: LaunchPreferences) -> Executor:
        """Return the executor for the job of this process, for the launcher, or for local workers."""
        if self._place.size > 1:
            return InJobExecutor(self._place.rank)
        if self._launcher is not None:
            return make_executor(self._launcher, preferences, self.restarts)
        return self._local

    def fit(
        self,
        x: object,
        y: object = None,
        batch_size: int | None = 32,
        epochs: int = 1,
        verbose: Literal["auto", 0, 1, 2] | bool = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None = None,
        validation_split: float = 0.0,
        validation_data: object = None,
        shuffle: bool | Literal["batch"] = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: object = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
        seed: int | None = None,
        initial_batch: int = 0,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> History:
        """Train, as ``model.fit`` does.

        Args:
            x: arrays or nested arrays, whose first axis is that of the rows. Or a ``keras.utils.PyDataset`` whose items
                are global batches, ``choros.files``, or a stream of global batches: a ``tf.data.Dataset``, a PyTorch
                ``DataLoader``, a Grain loader, a generator (with ``steps_per_epoch`` if it does not end). This process
                reads a stream, in the stream's order, and divides each batch among the workers.
            y: arrays or nested arrays of labels, one for each row. Defaults to None, if ``x`` has them.
            batch_size: int. Rows of the global batch, divided among the workers with every algorithm. A remainder is
                spread (7 rows on 4 workers: 2, 2, 2, 1). Data that yield batches decide it instead. None is 32, as in
                Keras. Defaults to 32.
            epochs: int. The number of the last epoch, counted from 1, as in Keras. Defaults to 1.
            verbose: 0, 1 or 2, as in Keras: silent, a progress bar, a line for each epoch. Defaults to "auto": 1.
            callbacks: a list of Keras callbacks, a ``CallbackList`` or None. They run in this process, in a
                job in that of rank 0.
            validation_split: float. Fraction of the rows, from their end, that is not trained but validated. Defaults
                to 0.
            validation_data: ``(x, y)``, ``(x, y, sample_weight)``, or any data that ``x`` may be. A stream is read
                once, before training, and evaluated after each epoch. If it has no end, it needs ``validation_steps``.
            shuffle: bool, or "batch" as in Keras. Whether to shuffle rows in each epoch; without effect on streams.
                Defaults to True.
            class_weight: dict from a class to the weight of its rows, or None.
            sample_weight: array of the weight of each row, or None.
            initial_epoch: int. The epoch at which training begins, counted from 0. Epochs have the same batches as in a
                run from epoch 0. Defaults to 0.
            steps_per_epoch: int. Global batches in an epoch. An epoch continues where the last one stopped; at the end
                of the rows it continues with their next pass. Defaults to all batches.
            validation_steps: int. Batches of the validation data to evaluate. Defaults to all.
            validation_batch_size: int. Rows of a global batch of validation data. Defaults to ``batch_size``.
            validation_freq: int, or a list of epochs counted from 1. Epochs between two validations. Defaults to 1.
            seed: int. Determines the order of the rows and the state of random layers. Defaults to a draw from
                Python's ``random``, so ``keras.utils.set_random_seed`` makes runs repeatable. With ``shuffle`` the
                order is not that of ``model.fit`` with the same seed, so the batches differ: to compare weights with
                ``model.fit``, give ``shuffle=False`` to both.
            initial_batch: int. Global batches of the first epoch that an interrupted run with this ``seed`` and these
                data has trained. This run continues with the rest. Defaults to 0.
            checkpoint: ``choros.Checkpoint``, or a directory for checkpoints after each epoch. Defaults to None.
            resume: bool. Whether to resume from the newest checkpoint. If there is none, training starts from the
                beginning. The history has only the epochs of this call. Defaults to False: a directory with
                checkpoints is refused.

        Returns:
            ``keras.callbacks.History`` of the epochs of this call, with Keras' keys. It is empty if the checkpoint has
            all epochs already. ``history.run`` (``choros.RunRecord``) has the figures of the workers.

        Raises:
            InvalidInputError: an argument that cannot work, or a change by a callback that workers cannot take.
            CheckpointError: a checkpoint could not be written, for example because the disk is full.
            SystemExit: a signal requested a checkpoint and the end of training.
            WorkerFailedError: a worker failed. The model is unchanged; ``error.weights`` holds the last center.
        """
        begun = time.perf_counter()
        check_fit(self.model)  # again: a preprocessor may have been set since ``__init__``
        arguments = FitArguments(
            x, y, 32 if batch_size is None else batch_size, epochs, verbose, callbacks, validation_split,
            validation_data, shuffle, class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps,
            validation_batch_size, validation_freq, seed, initial_batch, checkpoint, resume,
        ).checked(self._synchronous)  # fmt: skip
        check_distribution()
        with open_files_explained(), ignored_interrupts_repeated():
            request = self._request(arguments, begun)
            warn_of_autologging(request.callbacks.user)
            if request.verbose:
                request.callbacks.notice = StartupNotice(self._starting())
            result = self._run(request)
        history: History = request.callbacks.history
        # Ranks of a job read a stream themselves; else this process reads it ahead of the workers.
        data = DataKind.of(request.source, read_ahead=self._place.size == 1)
        history.run, self.models = replace(result.record, data=data), result.models
        self._recording.write(result.lanes)
        if history.epoch:
            request.job.follow_datasets(history.epoch[-1] + 1, source=request.source, validation=request.validation)
        if request.verbose:
            write_line(history.run.summary() if history.epoch or history.run.rows else _NOTHING_TRAINED)
        return history

    def _run(self, request: FitRequest) -> FitResult:
        """Run the request; after Ctrl-C say what is left of the training."""
        try:
            return self._executor.run(request)
        except KeyboardInterrupt:
            if request.verbose and self._place.size == 1:
                saved = " resume=True continues from the last checkpoint." if request.checkpoints.checkpoint else ""
                write_line(f"choros: interrupted: the workers have ended, the model has the latest weights.{saved}")
            raise

    def _starting(self) -> str:
        """Return the workers that ``fit`` has to start, as text; "" if they run already."""
        local = self._launcher is None
        if self._place.size > 1 or (local and (self._executor is not self._local or self._local.ready)):
            return ""
        by = "" if self._launcher is None else f" by {type(self._launcher).__name__}"
        return f"{counted(self.workers, 'worker')} ({backend_name()}){by}"

    def _request(self, arguments: FitArguments, begun: float) -> FitRequest:
        """Return the request for the executor; the model is then built, and a checkpoint is loaded.

        Args:
            arguments: checked.
            begun: float. ``time.perf_counter()`` at the call of ``fit``.
        """
        source, validation = arguments.sources()
        if isinstance(source, StreamSource):
            check_reach(self._launcher)
        callbacks = arguments.callbacks
        averaged = check_average(self.model, callbacks, synchronous=self._synchronous)
        facts = (source, self.mode, self._each, self._launcher)
        checkpoints = CheckpointManager(check_checkpoint(arguments.checkpoint, arguments.resume, self.restarts, *facts))
        if isinstance(self.algorithm, algorithms.Ensemble):
            checks.check_members(source, self.workers)
            check_member_callbacks(callbacks if self.workers > 1 else None, self._executor.remote_members)
        check_batch_shape(self.model, self._replicas)
        sample = source.sample(sample_rows(self.model, arguments.batch_size))
        algorithm, after_update = self._bind(sample, partial(spread, source, sample))
        check_shardable(self._shard_optimizer, self.model, self.workers)
        if validation is not None:
            check_validation_data(self.model, validation, sample)
        for limit in limits_of(callbacks):
            limit.restore(self.model, arguments.initial_batch)
        epoch = restore_backup(callbacks, self.model, arguments.initial_epoch, arguments.checkpoint)
        check_epochs(arguments.epochs, epoch, arguments.initial_batch)
        written = self._write()
        verbose = 1 if arguments.verbose == "auto" else arguments.verbose
        if self._place.rank:  # rank 0 of a job runs the callbacks and draws the bar
            callbacks, verbose = None, 0
        steps = arguments.steps(source)
        callback_runner = CallbackRunner(
            self.model, callbacks, verbose, arguments.epochs, steps, int(arguments.initial_batch)
        )
        callback_runner.sends_model = self._executor.packs_model
        job = FitConfig(
            **replace(arguments, initial_epoch=epoch, verbose=verbose).config(source),
            first_epoch=epoch,
            **self._worker_config(),
            algorithm=algorithms.to_config(algorithm),
            validation=None if validation is None else {},
            keras=keras_settings(),
            per_batch=callback_runner.per_batch,
            watched=bool(callback_runner.user),
            run_metrics=any(getattr(callback, "adds_run_metrics", False) for callback in callback_runner.user),
            # The position in a stream is not saved: ranks that resume must all need the stream from the same epoch on.
            whole_epochs=isinstance(source, StreamSource) and checkpoints.checkpoint is not None,
            averaged_metrics=not_additive(self.model, sample) if self._replicas > 1 else [],
            validate_average=averaged,
            repeats=after_update is not None,
            **self._recording.config(),
        )
        lead = not self._place.rank
        job = checkpoints.begin(job, lambda: facts_of(self.model, source), arguments.resume, self.restarts, lead)
        callback_runner.first, callback_runner.synchronous = job.initial_batch, job.synchronous
        if checkpoints.latest is not None:
            callback_runner.restore_checkpoint = partial(checkpoints.load_into_model, self.model)
        if verbose and job.devices:
            write_line(say_mesh(self.workers, job.devices, job.layout, self.model))
        if verbose and job.repeats:
            write_line(f"train_step reads updated weights ({after_update}): each step is calculated twice")
        how = (callback_runner, written, begun, checkpoints, bool(verbose))
        return FitRequest(self.model, algorithm, job, source, validation, *how)

    def _worker_config(self) -> dict[str, Any]:
        """Return the fields of a FitConfig that this Trainer and its model give."""
        return {
            "mode": self.mode,
            "workers": self.workers,
            "timeout": self.timeout,
            "first_timeout": self.first_timeout,
            "metric_values": 1 + sum(int(np.prod(v.shape)) for v in self.model.metrics_variables),
            "spin": self.workers <= len(usable_cores()),
            "devices": self._each if max(self._each) > 1 else [],
            "layout": self._layout,
            "shard_optimizer": self._shard_optimizer,
        }

    @property
    def _synchronous(self) -> bool:
        """True if workers train synchronously; one worker always does."""
        return self.mode == "sync" or self.workers == 1

    @property
    def _replicas(self) -> int:
        """Number of model replicas among which a global batch is divided."""
        return sum(self._each) if several_models(max(self._each)) else self.workers

    def _write(self) -> PackedModel:
        """Pack the model for workers. A rank of a job already has the model."""
        if isinstance(self.algorithm, algorithms.Ensemble) and self.workers > 1:
            check_redraw(self.model)
        if not (self._executor.packs_model or self._replicas > self.workers):
            return PackedModel()
        self.model.reset_metrics()  # as Keras' fit does; the values that stay are sent
        return pack_model(self.model)

    def _bind(self, sample: Any, wide: Callable[[], Any]) -> tuple[Any, str | None]:
        """Build the model as Keras' ``fit`` would, and check model, loss and layout.

        Args:
            sample: a batch with rows.
            wide: returns a batch for ``check_exact``.

        Returns:
            The bound algorithm, and the result of ``check_exact``, or None if that check was not needed.
        """
        after_update = None
        check_layers(self.model, self._replicas)
        check_target(self.model, sample)
        build_model(self.model, sample)
        if (self.algorithm.level == "gradients" and self.workers > 1) or self._replicas > self.workers:
            repeats = not several_models(max(self._each))
            after_update = check_exact(self.model, self._replicas, sample, wide, repeats=repeats)
            warn_of_sparse_gradients(self.model)
        check_held(self.model, self._replicas)
        if self._replicas > 1 and self.mode is not None:
            check_scales(self.model.trainable_variables)
        if self._layout is not None:
            check_layout(self._layout, self.model)
        rate = float(to_host([self.model.optimizer.learning_rate])[0])
        return self.algorithm.bound(self.workers, rate, strict=self.strict), after_update

    def evaluate(self, *args: Any, **kwargs: Any) -> float | list[float] | dict[str, float]:
        """Evaluate the trained model in this process: ``model.evaluate``."""
        result: float | list[float] | dict[str, float] = self.model.evaluate(*args, **kwargs)
        return result

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict in this process: ``model.predict``. For an Ensemble, return the mean of the members' predictions."""
        import keras

        if not self.models:
            return self.model.predict(*args, **kwargs)
        predictions = [member.predict(*args, **kwargs) for member in self.models]
        return keras.tree.map_structure(lambda *parts: np.mean(parts, axis=0), *predictions)

    def close(self) -> None:
        """End the workers that this Trainer started, also those that stay after ``fit``."""
        self._local.kept = False
        self._executor.close()

    def __enter__(self) -> Trainer:
        self._local.kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_place_of_ranks(executor: object, launcher: object, pool: object, network: object) -> None:
    """Refuse values of another type, and two arguments that both decide where the ranks run."""
    if network not in (None, ""):  # "" is not a choice, as in CHOROS_NETWORK
        check_text("network", network, "an interface such as 'ib0', or a domain such as '.hsn.example.org'")
    if pool is not None and not isinstance(pool, WorkerPool):
        raise InvalidInputError(f"pool={pool!r:.80}: give a choros.WorkerPool.")
    if executor is not None and not callable(getattr(executor, "run", None)):
        raise InvalidInputError(f"executor={executor!r:.80}: give an object with the methods of an Executor.")
    if executor is not None and (launcher is not None or pool is not None):
        raise InvalidInputError("executor= decides where ranks run: leave launcher and pool out.")


def _algorithm(algorithm: Algorithm | type[Algorithm] | str) -> Algorithm:
    """Return the ``algorithm`` argument of ``Trainer`` as an object.

    Raises:
        InvalidInputError: no algorithm has this name, or the argument is not an algorithm.
    """
    try:
        return algorithms.by_name(algorithm)
    except InvalidInputError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidInputError(str(error)) from None


def _count_workers(
    algorithm: Algorithm,
    workers: int | None,
    pool: WorkerPool | None,
    devices: Literal["auto", "cpu", "gpu", "shared"],
    per_worker: int | Sequence[int],
) -> int:
    """Return the number of workers.

    Raises:
        InvalidInputError: ``workers`` is not a whole number of 1 or more, or is more than the pool has.
    """
    if isinstance(algorithm, algorithms.Single):
        return 1
    if workers is None:
        workers = pool.size if pool is not None else default_workers(backend_name(), devices, per_worker)
    count = check_workers(workers)
    if pool is not None and pool.size < count:
        raise InvalidInputError(f"workers={count}, but the pool has {pool.size}: give workers={pool.size} or fewer.")
    return count
