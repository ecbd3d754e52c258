"""Messages between the caller and its workers: the job, the control messages, the counts, and their channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from choros.algorithms import Algorithm
from choros.data import py_dataset_of

if TYPE_CHECKING:
    import keras

    from choros.data import Source
    from choros.training.model_io.serialization import PackedModel


_MEMBER_FIGURES = 128  # values reserved for scalars that an Ensemble's ``test_step`` logs without a metric


@dataclass(frozen=True)
class FitConfig:
    """The configuration of one ``fit`` for workers. All values are JSON; models and arrays are sent separately."""

    algorithm: dict[str, Any]
    mode: str | None  # "sync", "async", or None: the ranks never exchange
    workers: int
    batch_size: int
    epochs: int
    initial_epoch: int = 0
    first_epoch: int = 0  # where the fit began; after a resume initial_epoch is later
    initial_batch: int = 0
    steps: int | None = None  # steps_per_epoch, in global batches
    shuffle: bool | str = True
    seed: int = 0
    fold_seed: int | None = None  # the user's seed, or None: also sets the state of random layers
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    validation_freq: int | list[int] = 1
    source: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] | None = None  # None: no validation
    keras: dict[str, Any] = field(default_factory=dict)  # floatx, image format, dtype policy
    per_batch: bool = False  # a callback has batch hooks: rank 0 reports each batch and waits for a control message
    watched: bool = False  # there are user callbacks: they may read the weights of an epoch's end
    run_metrics: bool = False  # a callback adds ``epoch_rates`` to the logs of epochs
    progress: float = 0.0  # seconds between two progress reports of rank 0, after that of its first step; 0: none
    timeout: float = 300.0
    first_timeout: float = 1800.0
    metric_values: int = 0
    averaged_metrics: list[int] = field(default_factory=list)  # metric variables that must not be summed over ranks
    spin: bool = True  # ranks may spin briefly while they wait, because each has a core
    devices: list[int] = field(default_factory=list)  # devices of each worker; empty if all workers have one
    layout: dict[str, Any] | None = None  # how each worker's devices divide the weights (JAX)
    # Asynchronous workers exchange and wait at each epoch's end: a state saved there has each batch exactly once.
    # True on Spark with restarts, and for streams with checkpoints.
    whole_epochs: bool = False
    validate_average: bool = False  # validate at the optimizer's moving averages (SwapEMAWeights)
    # Under AllReduce, train_step uses updated weights after the update: it runs again with the summed gradients.
    repeats: bool = False
    shard_optimizer: bool | None = None  # ranks of a host divide the optimizer's update; None: where it pays
    # "batches" or "seconds"; "asks": poll for requests to end; "signals" that request an end.
    checkpoint_schedule: dict[str, Any] | None = None
    timeline: list[Any] | None = None  # the ``trace_format.Clock`` of time 0 if ranks record a timeline
    profile: dict[str, Any] | None = None  # ranks profile steps: "directory", "first_step", "steps"
    algorithm_code: int | None = None  # the index, among the payload's pickles, of the class of a custom algorithm
    continues_counts: bool = False  # a restart within one fit, so the counts continue

    def json(self) -> dict[str, Any]:
        """Return the job as plain JSON."""
        return asdict(self)

    @property
    def synchronous(self) -> bool:
        """True if ranks train synchronously; one rank always does."""
        return self.mode == "sync" or self.workers == 1

    @property
    def asynchronous(self) -> bool:
        """True if several ranks exchange with a center asynchronously."""
        return self.mode == "async" and self.workers > 1

    @property
    def ensemble(self) -> bool:
        """True if several ranks never exchange: members, each with a separate shard and model."""
        return self.mode is None and self.workers > 1

    @property
    def epoch_values(self) -> int:
        """Most values of one rank and epoch in the control block.

        These are its metric state and its ``EpochCounts``, or a member's ``val_*`` figures.
        """
        members = _MEMBER_FIGURES if self.ensemble and self.validation is not None else 0
        return self.metric_values + members + len(fields(EpochCounts))

    def validates(self, epoch: int) -> bool:
        """Return whether Keras would validate after this epoch (counted from 0)."""
        if self.validation is None:
            return False
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    def follow_datasets(self, epoch: int, source: Source | None = None, validation: Source | None = None) -> None:
        """Call the hooks of this process's PyDatasets for epochs before ``epoch`` that other processes have trained.

        Args:
            epoch: index of an epoch.
            source: the source of training batches, or None.
            validation: the source of validation batches, or None.
        """
        epochs = range(self.first_epoch, epoch)
        if dataset := py_dataset_of(source):
            dataset.follow(self.seed, epochs)
        if dataset := py_dataset_of(validation):
            dataset.follow(0, [0] * sum(map(self.validates, epochs)))


@dataclass(frozen=True)
class FitRequest:
    """One ``fit`` with its objects, in the process that called ``fit`` or in a rank.

    Attributes:
        model: the model, built and compiled.
        algorithm: the bound algorithm.
        job: FitConfig.
        source, validation: sources of batches; ``validation`` may be None.
        callbacks: CallbackRunner; None in a worker whose callbacks run in the caller.
        written: PackedModel, for workers.
        begun: float. ``time.perf_counter()`` at the call of ``fit``; in a worker, at the arrival of the job.
        checkpoints: CheckpointManager, or None.
        verbose: bool. Whether this process prints the record of the run.
    """

    model: keras.Model
    algorithm: Algorithm
    job: FitConfig
    source: Source
    validation: Source | None
    callbacks: Any
    written: PackedModel
    begun: float
    checkpoints: Any = None
    verbose: bool = False


@dataclass(frozen=True)
class TrainerControl:
    """A control message: the changes by the caller's callbacks, for the workers.

    Attributes:
        stop: bool. Whether training ends.
        learning_rate: float. A new learning rate, or None.
        weights: bool. Whether all ranks take new weights, which callbacks have set.
        slots: list of int. Indices, in ``optimizer_variables``, of the variables that callbacks have set.
        settings: dict. Other values that callbacks have set, by name; see ``choros.backends.callback_settings``.
        reset: bool. Whether ranks reset their metrics.
        end_after_batch: bool. Whether synchronous training ends after the next batch: a callback set ``stop_training``
            before the epoch, and Keras then still trains one batch.
    """

    stop: bool = False
    learning_rate: float | None = None
    weights: bool = False
    slots: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    reset: bool = False
    end_after_batch: bool = False

    @property
    def variables(self) -> bool:
        """True if the control message comes with new values of variables, which are sent separately."""
        return self.weights or bool(self.slots)

    def then(self, later: TrainerControl) -> TrainerControl:
        """Return this control message merged with a later one, whose values take precedence."""
        return TrainerControl(
            self.stop or later.stop,
            self.learning_rate if later.learning_rate is None else later.learning_rate,
            self.weights or later.weights,
            sorted({*self.slots, *later.slots}),
            {**self.settings, **later.settings},
            self.reset or later.reset,
            self.end_after_batch or later.end_after_batch,
        )


NO_CHANGE = TrainerControl()


@dataclass
class WorkerStats:
    """The counts of one worker, for ``history.run``."""

    rank: int
    steps: int = 0
    rows: int = 0
    exchanges: int = 0
    staleness: float = 0.0  # sum over the exchanges
    exchanging: float = 0.0  # seconds in exchanges
    waiting: float = 0.0  # seconds of waiting for data
    startup: float = 0.0  # seconds from the job's arrival until all were ready, and the first step of each shape
    seconds: float = 0.0  # seconds of training without compiling
    first_rows: int = 0  # the rows of the first steps of each shape
    keeping: float = 0.0  # CPU seconds for saving the state
    lost_epoch: int = -1  # the epoch and the step at which this rank's numbers were first not finite; -1: none
    lost_step: int = -1
    calling: float = 0.0  # seconds in which only this rank waited for callbacks
    reading: float = 0.0  # seconds of reading and decoding batches, in the thread of ``prefetch`` if there is one
    copying: float = 0.0  # seconds of converting batches and copying them to the device, likewise
    ahead: int = 0  # number of batches that ``prefetch`` prepares before their steps
    divided: int = 0  # weights that this rank updates, if the ranks divide the optimizer's update; else 0
    host: str = ""  # must be last: the only field that is not a number

    def json(self) -> dict[str, Any]:
        """Return the counts as plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class EpochCounts:
    """The counts of one worker in one epoch, without the first step of each shape, which compiles.

    Attributes:
        rows: float. Rows that it trained.
        seconds: float. Seconds of training.
        exchanging: float. Seconds in exchanges.
        waiting: float. Seconds of waiting for data.
        exchanges: float. Number of exchanges.
        staleness: float. Sum of the staleness of these exchanges.
    """

    rows: float
    seconds: float
    exchanging: float
    waiting: float
    exchanges: float
    staleness: float

    @classmethod
    def between(cls, begin: WorkerStats, end: WorkerStats) -> EpochCounts:
        """Return the difference of a worker's counts at the end and at the beginning of an epoch."""
        return cls(
            end.rows - end.first_rows - begin.rows + begin.first_rows,
            end.seconds - begin.seconds,
            end.exchanging - begin.exchanging,
            end.waiting - begin.waiting,
            end.exchanges - begin.exchanges,
            end.staleness - begin.staleness,
        )

    def numbers(self) -> list[float]:
        """Return the counts as a list, in the order of the fields."""
        return list(astuple(self))


def epoch_rates(sums: Iterable[float], workers: int, asynchronous: bool) -> dict[str, float]:
    """Return the figures that ``choros.callbacks.RunMetrics`` adds to the logs of an epoch.

    Args:
        sums: the sums over the workers of ``EpochCounts.numbers()``.
        workers: number of workers.
        asynchronous: whether exchanges have a staleness.

    Example:
        >>> epoch_rates([3000, 4.0, 0.4, 0.2, 10, 5], 2, True)
        {'samples_per_second': 1500.0, 'exchanging': 0.1, 'waiting': 0.05, 'staleness': 0.5}
    """
    counts = EpochCounts(*map(float, sums))
    seconds = max(counts.seconds, 1e-9)
    rates = {
        "samples_per_second": counts.rows * workers / seconds,
        "exchanging": min(1.0, counts.exchanging / seconds),
        "waiting": min(1.0, counts.waiting / seconds),
    }
    if asynchronous:
        rates["staleness"] = counts.staleness / counts.exchanges if counts.exchanges else 0.0
    return rates


Show = Callable[[], list[float]]  # see ``CallbackChannel.batch``


class CallbackChannel(Protocol):
    """A worker's channel to the process that runs the callbacks."""

    def begin(self) -> TrainerControl:
        """Report that this rank is ready to train. Return when all ranks are ready."""
        ...

    def batch(self, epoch: int, step: int, logs: dict[str, float] | None, show: Show | None = None) -> TrainerControl:
        """Report a step (logs on rank 0 only). If callbacks have batch hooks, wait for the control message.

        ``show`` writes the weights for callbacks, and is called only if they touch weights. It returns the values of
        the metrics' variables.
        """
        ...

    def done(self, epoch: int, step: int, logs: dict[str, float], show: Show | None = None) -> None:
        """Report a step of rank 0 to batch hooks, without waiting for the result. ``show`` as in ``batch``."""
        ...

    def decided(self, show: Show) -> TrainerControl:
        """Wait for the control message after the step of ``done``. ``show`` as in ``batch``."""
        ...

    def spread_control(self, control: TrainerControl) -> TrainerControl:
        """Return rank 0's control message. Collective: every synchronous rank must call it."""
        ...

    def epoch_end(
        self, epoch: int, logs: dict[str, float] | None, seconds: float, metric_values: list[float]
    ) -> TrainerControl:
        """Report the end of an epoch, and the seconds of training so far. If synchronous, wait for the control message.

        ``metric_values`` has the values of the metrics' variables, flat.
        """
        ...

    def save_state(self, part: tuple[dict[str, Any], dict[str, list[Any]]], end_requested: bool) -> None:
        """Save this rank's state. ``end_requested``: the end of training is requested."""
        ...

    def optimizer(self, part: tuple[dict[str, Any], dict[str, list[Any]]]) -> None:
        """Send the optimizer's state of an asynchronous worker to the caller.

        Args:
            part: the "rows" that the worker trained, and the "epoch" that it ends, or None at the end of training.
                Arrays: the variables of the "optimizer" (from rank 0, or from all ranks if states are saved), and with
                ``use_ema`` the moving "average" of the weights.
        """
        ...

    def poll(self) -> None:
        """Poll between two steps of an asynchronous worker; in a job, rank 0 runs the callbacks of ended epochs."""
        ...
