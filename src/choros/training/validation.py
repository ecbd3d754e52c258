"""Checks of a ``Trainer``'s arguments, before any worker starts."""

from __future__ import annotations

import os
from collections.abc import Collection
from numbers import Real
from typing import TYPE_CHECKING, Any

from choros.backends import inner_optimizer
from choros.backends.devices.weight_layout import describe
from choros.backends.driver_model import check_validation
from choros.backends.hide_tensorflow import lean
from choros.backends.optimizer_shard import obstacle
from choros.cluster import Place
from choros.comm.bootstrap.discover_rank import find_place
from choros.consistency.versions import versions
from choros.data import StreamSource
from choros.data.validation import is_whole
from choros.errors import ChorosError, InvalidInputError, counted, warn
from choros.training.checkpoint.policy import checkpoint_of
from choros.training.executors.executor import ExecutorLauncher
from choros.training.executors.worker_pool import WorkerPool, each_devices
from choros.training.worker.setup import several_models

if TYPE_CHECKING:
    import keras

    from choros.algorithms.base import Algorithm
    from choros.data import Source
    from choros.types import Batch, Callbacks

_LOOP_METHODS = ("fit", "make_train_function")  # methods with Keras' training loop; a Trainer calls train_step itself


def check_place(workers: int | None, algorithm: Algorithm, pool: WorkerPool | None) -> Place:
    """Return the place of this process. Inside a job a Trainer starts no worker: this process joins as its rank.

    Raises:
        InvalidInputError: this process is a worker of a Trainer, or an argument does not fit a job.
    """
    if os.environ.get("CHOROS_WORKER"):
        raise InvalidInputError(
            "This process is itself a worker of a Trainer: do not train inside a callback or a layer."
        )
    place = find_place()
    if place.size == 1:
        return place
    if workers not in (None, place.size) or pool is not None:
        raise InvalidInputError(
            f"This process is rank {place.rank} of {place.size} (started by {place.launcher}), so the Trainer has "
            f"{place.size} workers: leave workers and pool out."
        )
    if algorithm.mode is None:
        raise InvalidInputError(f"{type(algorithm).__name__} has workers that never exchange: run it outside a job.")
    return place


def check_launcher(
    launcher: Any, workers: int | None, place: Place, algorithm: Algorithm, pool: WorkerPool | None
) -> int:
    """Return the number of workers that a launcher starts.

    Raises:
        InvalidInputError: the launcher cannot start these workers.
    """
    if place.size > 1:
        raise InvalidInputError(
            f"This process is rank {place.rank} of {place.size} (started by {place.launcher}): launcher= is for one "
            "process that starts the others. Leave it out, and each rank of this job is a worker."
        )
    if pool is not None:
        raise InvalidInputError("launcher= starts workers of its own: leave pool out.")
    if algorithm.mode is None and workers != 1 and not isinstance(launcher, ExecutorLauncher):
        name = type(algorithm).__name__
        raise InvalidInputError(f"{name} never exchanges, and trains on this machine: leave launcher out.")
    capacity = launcher.size()
    if workers is None and capacity is None:
        raise InvalidInputError(f"{launcher} does not report how many ranks it has room for: give workers=.")
    count = capacity if workers is None else workers
    if capacity is not None and isinstance(count, int) and count > capacity:
        raise InvalidInputError(
            f"workers={workers}, but {launcher} has room for {capacity}: give more slots, or fewer workers."
        )
    return count  # type: ignore[return-value]


def check_reach(launcher: object) -> None:
    """Refuse a stream with a launcher: this process reads it, and the workers run elsewhere."""
    if launcher is not None:
        raise InvalidInputError(
            "What yields batches is read in this process, and launcher= starts the workers elsewhere: give arrays, "
            "choros.files or a PyDataset; or start the script itself with `choros run`, whose ranks each read it."
        )


def check_model(model: keras.Model) -> None:
    """Refuse a model that is not a compiled ``keras.Model`` with one learning rate."""
    import keras

    if not isinstance(model, keras.Model):
        raise InvalidInputError(f"The model is of type {type(model).__name__}: give a compiled keras.Model.")
    if not getattr(model, "compiled", False):
        raise InvalidInputError(f"The model {model.name!r} is not compiled: call model.compile(optimizer, loss) first.")
    if model.optimizer is None:
        raise InvalidInputError(
            f"The model {model.name!r} is compiled without an optimizer, which workers need: give compile "
            "an optimizer, or train with model.fit."
        )
    check_fit(model)
    if not hasattr(model.optimizer, "learning_rate"):  # as Keras' MultiOptimizer, which has several rates
        raise InvalidInputError(
            f"The model {model.name!r} is compiled with {type(model.optimizer).__name__}, which has no learning rate "
            "of its own and which a Trainer does not support: compile with one optimizer for all variables."
        )


def check_fit(model: keras.Model) -> None:
    """Refuse a model whose class overrides ``fit`` or ``make_train_function``, because a Trainer does not call them.

    A KerasHub task whose ``preprocessor`` is None is accepted, because its ``fit`` is then that of Keras.
    """
    classes = [owner for owner in type(model).__mro__ if owner.__module__.partition(".")[0] not in ("keras", "choros")]
    names = (*_LOOP_METHODS, "preprocess_samples")
    replaced = [(owner, name) for owner in classes for name in names if name in vars(owner)]
    loop_owners = [owner for owner, name in replaced if name in _LOOP_METHODS]
    if not loop_owners:
        return
    packages = {owner.__module__.partition(".")[0] for owner, _ in replaced}
    if callable(getattr(model, "preprocess_samples", None)) and len(packages) == 1:  # a user's subclass changes nothing
        if getattr(model, "preprocessor", model) is None:
            return
        raise InvalidInputError(
            f"{loop_owners[0].__name__}.fit preprocesses the samples, and a Trainer runs train_step without it. "
            "Preprocess them before, by model.preprocess_samples(x, y), and give Trainer.fit the arrays that this "
            "returns. Then set `model.preprocessor = None`, so that fit, evaluate and predict all take preprocessed "
            "samples."
        )
    owner, name = replaced[0]
    raise InvalidInputError(
        f"The model {model.name!r} has its own {owner.__name__}.{name}, which a Trainer would leave out, as it runs "
        "train_step itself: do what it does to the data before Trainer.fit, or in train_step, test_step and "
        "predict_step."
    )


def check_batch_shape(model: keras.Model, replicas: int) -> None:
    """Refuse a model that needs a fixed number of rows per batch, or has stateful layers, if batches are divided.

    Args:
        model: a compiled model.
        replicas: number of model replicas among which a global batch is divided.
    """
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False) is True]
    rows = fixed_rows(model)
    if replicas < 2 or not (rows or stateful):
        return
    if stateful:
        raise InvalidInputError(
            f"Layer {stateful[0]!r} is stateful: it carries a state for each row from batch to batch, and {replicas} "
            "workers divide each batch. Use stateful=False, or workers=1."
        )
    raise InvalidInputError(
        f"The model {model.name!r} takes batches of {rows} rows only (its input has a batch_size), and {replicas} "
        "workers divide each batch. Leave batch_size out of keras.Input, or use workers=1."
    )


def fixed_rows(model: keras.Model) -> int | None:
    """Return the number of rows per batch if the model's inputs fix it, else None."""
    inputs = getattr(model, "inputs", None) or []
    fixed = [tensor.shape[0] for tensor in inputs if len(tensor.shape) and tensor.shape[0] is not None]
    return int(fixed[0]) if fixed else None


def sample_rows(model: keras.Model, batch_size: int) -> int:
    """Return the number of rows of the sample with which a model is built and checked."""
    return fixed_rows(model) or min(batch_size, 32)


def check_layers(model: keras.Model, workers: int) -> None:
    """Refuse layers that need the rows of other workers in a step.

    Args:
        model: keras.Model.
        workers: int. Number of workers.

    Raises:
        InvalidInputError: there are several workers and a ``BatchNormalization(synchronized=True)``.
    """
    import keras

    if workers == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise InvalidInputError(
                f"The layer {layer.name!r} is a BatchNormalization(synchronized=True), and {workers} workers of a "
                "Trainer would each use the moments of their own rows: leave synchronized out, or train with "
                "choros.hvd and its SyncBatchNormalization."
            )


def check_mode(algorithm: Algorithm, mode: str | None) -> str | None:
    """Return the mode of a fit: the requested one, by default that of the algorithm.

    Raises:
        InvalidInputError: the algorithm has no such mode.
    """
    if mode is None or mode == algorithm.mode:
        return None if algorithm.mode is None else str(algorithm.mode)
    name = type(algorithm).__name__
    if mode not in ("sync", "async"):
        raise InvalidInputError(f"mode={mode!r}: give 'sync' or 'async'.")
    if algorithm.mode is None:
        raise InvalidInputError(f"{name} has workers that never exchange: leave mode out.")
    if mode == "async" and (algorithm.level == "gradients" or algorithm.weighted):
        raise InvalidInputError(
            f"{name} is a mean over all workers, so it is synchronous: use AEASGD or DynSGD for mode='async'."
        )
    return mode


def check_distribution() -> None:
    """Refuse an active Keras distribution in this process, because workers would train without it."""
    import keras

    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise InvalidInputError(
            f"keras.distribution.{type(distribution).__name__} is in force, which workers do not have: call "
            "keras.distribution.set_distribution(None) before fit. Workers divide each batch by themselves; on JAX, "
            "devices_per_worker= and layout= divide it and the weights over a worker's devices."
        )


def warn_of_sparse_gradients(model: keras.Model) -> None:
    """Warn if Keras on TensorFlow uses sparse gradients of an Embedding, because AllReduce uses dense ones.

    Keras' SGD without clipping gives the same result with both.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        return
    optimizer = inner_optimizer(model.optimizer)
    clips = any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))
    embeddings = [
        layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding) and layer.trainable
    ]
    if embeddings and (clips or type(optimizer) is not keras.optimizers.SGD):
        optimizer_text = f"{type(optimizer).__name__} with clipping" if clips else type(optimizer).__name__
        warn(
            f"Keras on TensorFlow gives {optimizer_text} the gradient of {embeddings[0].name!r} (Embedding) only "
            "for the rows that a batch uses. AllReduce gives it for all rows, as Keras does on JAX and PyTorch. So the "
            "result differs from that of one process."
        )


def check_devices(
    device_counts: list[int], requested: Any, layout: keras.distribution.LayoutMap | None
) -> dict[str, Any] | None:
    """Return the layout as JSON, or None; refuse devices that the workers do not have."""
    import keras

    if requested is not None and device_counts != each_devices(requested, len(device_counts)):
        raise InvalidInputError(
            f"devices_per_worker={requested!r}, but the pool's workers have {device_counts}: make the pool with it."
        )
    if layout is None:
        return None
    if keras.backend.backend() != "jax":
        raise InvalidInputError(
            f"layout= needs JAX; this is {keras.backend.backend()}. Leave it out: each device has all weights."
        )
    if len(set(device_counts)) > 1:
        raise InvalidInputError(f"A layout needs the same devices in every worker, not {device_counts}.")
    return describe(layout, device_counts[0])


def check_epochs(epochs: int, initial_epoch: int, initial_batch: int) -> None:
    """Refuse values that are not whole numbers, are too small, or leave nothing to train."""
    if not is_whole(epochs, 1):
        raise InvalidInputError(f"epochs={epochs!r}: give a whole number, 1 or more.")
    for name, value in {"initial_epoch": initial_epoch, "initial_batch": initial_batch}.items():
        if not is_whole(value, 0):
            raise InvalidInputError(f"{name}={value!r}: give a whole number, 0 or more.")
    if epochs <= initial_epoch:
        raise InvalidInputError(
            f"epochs={epochs} with initial_epoch={initial_epoch} leaves nothing to train: give more epochs."
        )


def resume_point(callbacks: Callbacks, initial_epoch: int, initial_batch: int, seed: int | None) -> tuple[int, int]:
    """Return the epoch and the batch at which to begin: those that a ``BeforeTimeLimit`` saved, else the given ones.

    Without a seed the order of rows differs from that of the last turn, so the saved epoch starts from its first batch.
    """
    for limit in limits_of(callbacks):
        point = limit.point()
        if point is not None:
            return point[0], 0 if seed is None else point[1]
    return initial_epoch, initial_batch


def limits_of(callbacks: Callbacks) -> list[Any]:
    """Return the callbacks that know where training resumes, such as ``choros.callbacks.BeforeTimeLimit``."""
    return [callback for callback in listed(callbacks) if hasattr(callback, "point") and hasattr(callback, "restore")]


def listed(callbacks: Callbacks) -> list[Any]:
    """Return the ``callbacks`` argument of ``fit`` as a list. It may be one, several, a ``CallbackList`` or None."""
    items = getattr(callbacks, "callbacks", callbacks)
    items = items if isinstance(items, (list, tuple)) else [items]
    return [callback for callback in items if callback is not None]


def check_callbacks(callbacks: object) -> None:
    """Refuse what is not a callback.

    Raises:
        InvalidInputError: an element is not a ``keras.callbacks.Callback``, or is its class.
    """
    for callback in listed(callbacks):  # type: ignore[arg-type]
        if isinstance(callback, type):
            raise InvalidInputError(
                f"callbacks: {callback.__name__} is a class: give an object, {callback.__name__}()."
            )
        if not (hasattr(callback, "set_model") and hasattr(callback, "on_epoch_end")):
            raise InvalidInputError(
                f"callbacks: {callback!r} is of type {type(callback).__name__}: give a keras.callbacks.Callback, a "
                "list of them, or None."
            )


def check_average(model: keras.Model, callbacks: Callbacks, synchronous: bool) -> bool:
    """Return whether to validate at the moving averages of the weights (``SwapEMAWeights``).

    Args:
        model: compiled.
        callbacks: the argument of ``fit``.
        synchronous: whether workers are synchronous, or there is one worker.

    Raises:
        InvalidInputError: the optimizer keeps no averages, or asynchronous workers do not support the callback or the
            optimizer's setting, which the message names.
    """
    import keras

    swaps = any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in listed(callbacks))
    optimizer = inner_optimizer(model.optimizer)
    if swaps and not getattr(optimizer, "use_ema", False):
        raise InvalidInputError(
            f"SwapEMAWeights needs an optimizer that keeps averages: compile with {type(optimizer).__name__}("
            "use_ema=True), or leave the callback out."
        )
    if swaps and not synchronous:
        raise InvalidInputError(
            "SwapEMAWeights needs the averages of all workers at each epoch's end, when asynchronous ones do not wait: "
            "use a synchronous algorithm (AllReduce, LocalSGD ...), or leave the callback out: fit ends with the "
            "averaged weights in the model."
        )
    if not synchronous and getattr(optimizer, "use_ema", False) and optimizer.ema_overwrite_frequency:
        raise InvalidInputError(
            f"ema_overwrite_frequency={optimizer.ema_overwrite_frequency}: each asynchronous worker would move the "
            "center back to its own average, once for each worker. Leave it out (use_ema alone works), or use a "
            "synchronous algorithm."
        )
    return swaps


def check_member_callbacks(callbacks: Callbacks, elsewhere: bool) -> None:
    """Refuse callbacks that cannot save the state of all members of an Ensemble.

    Args:
        callbacks: the argument of ``fit``.
        elsewhere: whether each member runs copies of the callbacks in a process elsewhere.

    Raises:
        InvalidInputError: with the name of the callback.
    """
    import keras

    for callback in listed(callbacks):
        name = type(callback).__name__
        if isinstance(callback, keras.callbacks.BackupAndRestore) or callback in limits_of(callback):
            raise InvalidInputError(
                f"{name} keeps one model, and training would resume without the weights of the other members of an "
                "Ensemble: leave it out, and save the members after fit (trainer.models)."
            )
        if elsewhere and isinstance(callback, keras.callbacks.ModelCheckpoint):
            raise InvalidInputError(
                f"{name} would have all members of an Ensemble write the same file, each where its task runs: leave it "
                "out, and save the model or the members after fit (trainer.models)."
            )


def check_held(model: keras.Model, replicas: int) -> None:
    """Refuse moving averages of weights in an optimizer beside the compiled one, if there are several replicas.

    Args:
        model: compiled and built.
        replicas: number of model replicas.

    Raises:
        InvalidInputError: with the name of the optimizer.
    """
    from choros.backends import averages_of
    from choros.backends.optimizers import held_optimizers

    for name, optimizer in held_optimizers(model).items():
        parts = getattr(optimizer, "optimizers", [optimizer])  # those of a MultiOptimizer
        if replicas > 1 and optimizer.built and any(map(averages_of, parts)):
            raise InvalidInputError(
                f"Model {model.name!r} holds a second optimizer, {name!r}, with use_ema=True: only the compiled "
                "optimizer's averages of the weights include what all workers learn. Leave it out there, or give "
                "workers=1."
            )


def restore_backup(callbacks: Callbacks, model: keras.Model, initial_epoch: int, checkpoint: object) -> int:
    """Restore the state of a ``BackupAndRestore`` before the model is sent to the workers; return the first epoch.

    Keras restores it when training begins. The callback then restores it again, which changes nothing.

    Args:
        callbacks: the argument of ``fit``.
        model: keras.Model, built. Its weights and its optimizer are restored.
        initial_epoch: the first epoch if nothing is saved.
        checkpoint: the argument of ``fit``.

    Raises:
        InvalidInputError: ``checkpoint`` is given too, so there would be two states to resume from.
    """
    import keras

    for callback in listed(callbacks):
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            continue
        if checkpoint is not None:
            raise InvalidInputError(
                "BackupAndRestore and checkpoint= both set where training resumes: leave the callback out, and give "
                "checkpoint= with resume=True."
            )
        model._initial_epoch = None
        callback.set_model(model)
        callback.on_train_begin()
        initial_epoch, model._initial_epoch = model._initial_epoch or initial_epoch, None
    return initial_epoch


def check_timeout(name: str, seconds: object) -> float:
    """Return a number of seconds above 0 as a float; refuse other values of the argument ``name``."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:  # NaN is not above 0
        raise InvalidInputError(f"{name}={seconds!r}: give a number of seconds above 0.")
    return float(seconds)


def check_restarts(restarts: object, place: Place, launcher: object) -> int:
    """Return the number of restarts as an int; refuse values and launchers with which restarts cannot work."""
    if not is_whole(restarts, 0):
        raise InvalidInputError(f"restarts={restarts!r}: give a whole number, 0 or more.")
    if restarts and place.size > 1:
        raise InvalidInputError(
            "restarts= is for workers that the Trainer starts. For ranks of a job give fit a checkpoint= and "
            "resume=True, and start the job again: choros run --restarts K."
        )
    if restarts and isinstance(launcher, ExecutorLauncher):
        raise InvalidInputError("restarts= is not for tasks of Spark: give choros.Spark(restarts=).")
    return int(restarts)


def check_shard_optimizer(requested: object, algorithm: Algorithm, workers: int) -> None:
    """Refuse values, algorithms and numbers of workers with which no optimizer's update can be divided."""
    if requested not in (None, True, False):
        raise InvalidInputError(f"shard_optimizer={requested!r}: give True, False or None.")
    if requested and (algorithm.level != "gradients" or workers == 1):
        raise InvalidInputError(
            f"shard_optimizer=True divides one update among the workers of AllReduce, and {type(algorithm).__name__} "
            f"has {workers} with an update each: leave it out."
        )


def check_shardable(requested: bool | None, model: keras.Model, workers: int) -> None:
    """Refuse a model whose optimizer's update cannot be divided among the workers, if this is requested.

    Args:
        requested: ``shard_optimizer`` of the Trainer.
        model: built and compiled.
        workers: int.
    """
    reason = obstacle(model, tries=True) if requested else ""
    if reason:
        raise InvalidInputError(
            f"shard_optimizer=True: the update of model {model.name!r} cannot be divided among {workers} workers, as "
            f"{reason}. Leave it out: each worker then makes the whole update."
        )


def check_checkpoint(
    argument: object,
    resume: object,
    restarts: int,
    source: Source,
    mode: str | None,
    device_counts: list[int],
    launcher: object,
) -> Any:
    """Return the ``Checkpoint``, or None; refuse runs whose state cannot be saved."""
    checkpoint = checkpoint_of(argument)
    if resume and checkpoint is None:
        raise InvalidInputError("resume=True needs a checkpoint to resume from: give checkpoint= a directory.")
    if checkpoint is None and not restarts:
        return None
    option = "checkpoint=" if checkpoint is not None else "restarts="
    if isinstance(launcher, ExecutorLauncher):
        raise InvalidInputError(
            f"{option} is not available on Spark: give choros.Spark(restarts=), which restarts its tasks."
        )
    if mode is None and len(device_counts) > 1:
        raise InvalidInputError(f"{option} has no meaning for workers that never exchange.")
    if several_models(max(device_counts)):
        raise InvalidInputError(
            f"{option} is not there for workers of several devices, each with a model of its own: leave it out, or "
            "give devices_per_worker=1."
        )
    if isinstance(source, StreamSource) and restarts:
        raise InvalidInputError(
            "restarts= needs data that can be read again: give arrays, choros.files or a PyDataset."
        )
    return checkpoint


def check_rest(initial_batch: int, steps: int | None) -> None:
    """Refuse an ``initial_batch`` past the end of the epoch."""
    if steps is not None and initial_batch >= steps:
        raise InvalidInputError(
            f"initial_batch={initial_batch}, but an epoch has {counted(steps, 'batch')}: give fewer, or the next "
            "initial_epoch."
        )


def check_numbers(
    seed: int | None, verbose: int | str, steps: int | None, batch_size: int | None, freq: int | Collection[int]
) -> None:
    """Refuse invalid values of ``seed``, ``verbose`` and the settings of validation."""
    if seed is not None and not is_whole(seed, 0):
        raise InvalidInputError(f"seed={seed!r}: give a whole number, 0 or more, or None.")
    if verbose not in ("auto", 0, 1, 2):
        raise InvalidInputError(
            f"verbose={verbose!r}: give 0 (silent), 1 (a progress bar), 2 (one line an epoch) or 'auto'."
        )
    for name, value in (("validation_steps", steps), ("validation_batch_size", batch_size)):
        if value is not None and not is_whole(value, 1):
            raise InvalidInputError(f"{name}={value!r}: give a whole number, 1 or more, or None.")
    values = freq if isinstance(freq, (list, tuple, set, frozenset)) else [freq]
    if not all(is_whole(value, 1) for value in values):
        raise InvalidInputError(
            f"validation_freq={freq!r}: give a whole number of epochs, or a list of epochs (from 1)."
        )


def check_validation_data(model: keras.Model, validation: Source, trained: Batch) -> None:
    """Refuse validation data whose first rows the model cannot take.

    Args:
        model: keras.Model, built.
        validation: the source of validation data; of a ``PyDataset`` the first batch is read.
        trained: a batch of training data.

    Raises:
        InvalidInputError: the message contains Keras' error in one line.
    """
    try:
        sample = validation.sample(1)
    except ChorosError:
        raise
    except Exception:  # a PyDataset may be readable only after its on_epoch_begin; a worker reports other errors
        return
    check_validation(model, sample, trained)


@lean()
def keras_settings() -> dict[str, Any]:
    """Return the Keras settings of this process, and the versions on which a pickle depends, for the workers."""
    import keras

    return {
        "versions": versions(),
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.saving.serialize_keras_object(keras.config.dtype_policy()),
    }
