"""The messages to a worker, from a worker, and the caller's decisions for workers during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from choros.algorithms import Algorithm


@dataclass(frozen=True)
class FitConfig:
    """One ``fit`` as a worker needs to know it. Everything is JSON; models and arrays travel beside it."""

    algorithm: dict[str, Any]
    mode: str | None  # "sync", "async", or None: the ranks never exchange
    workers: int
    batch_size: int
    epochs: int
    initial_epoch: int = 0
    initial_batch: int = 0
    steps: int | None = None  # steps_per_epoch, in global batches
    shuffle: bool | str = True
    seed: int = 0
    fold_seed: int | None = None  # given by the user: also sets the random layers
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    validation_freq: int | list[int] = 1
    source: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] | None = None  # None: there is none
    keras: dict[str, Any] = field(default_factory=dict)  # floatx, image format, dtype policy
    per_batch: bool = False  # a callback wants each batch: rank 0 reports it, all wait for what it decides
    watched: bool = False  # there are user callbacks: they may read the weights of an epoch's end
    progress: float = 0.0  # seconds between progress reports of rank 0; 0 is none
    timeout: float = 300.0
    first_timeout: float = 1800.0
    metric_values: int = 0
    averaged_metrics: list[int] = field(default_factory=list)  # metric variables that do not add over ranks
    spin: bool = True  # ranks may spin for a moment while they wait: each has a core of its own
    devices: list[int] = field(default_factory=list)  # of each worker, where some have several
    layout: dict[str, Any] | None = None  # how each worker's devices divide the weights (JAX)
    whole_epochs: bool = False  # alone: all meet at an epoch's end, so what is kept of it has each batch exactly once
    validate_average: bool = False  # validate at the optimizer's moving averages (SwapEMAWeights)
    repeats: bool = False  # under AllReduce a step goes on with updated weights: it is made again with the sum
    keep: dict[str, Any] | None = None  # when ranks leave their state: "batches", "seconds"; "asks", "signals"
    counts_on: bool = False  # the run goes on within one fit: the tallies do too

    def json(self) -> dict[str, Any]:
        """Return the job as plain JSON."""
        return asdict(self)

    @property
    def together(self) -> bool:
        """True if all ranks go through the epochs together; one rank always does."""
        return self.mode == "sync" or self.workers == 1

    @property
    def alone(self) -> bool:
        """True if several ranks exchange with a center asynchronously."""
        return self.mode == "async" and self.workers > 1

    @property
    def ensemble(self) -> bool:
        """True if several ranks never exchange: members, each with a shard and a model of its own."""
        return self.mode is None and self.workers > 1

    def validates(self, epoch: int) -> bool:
        """Tell whether Keras would validate after this epoch (0-based)."""
        if self.validation is None:
            return False
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


@dataclass(frozen=True)
class FitRequest:
    """One ``fit`` as the process that asked for it knows it.

    Attributes:
        model: the given model, built and compiled.
        algorithm: the bound algorithm.
        job: FitConfig.
        source, validation: sources of batches; ``validation`` may be None.
        conductor: of the callbacks; None in a worker whose driver runs them.
        written: PackedModel, for workers.
        begun: float. ``time.perf_counter()`` when ``fit`` was called.
        saver: CheckpointManager of what the ranks leave, or None.
        verbose: bool. Whether this process prints what the ranks did.
    """

    model: Any
    algorithm: Algorithm
    job: FitConfig
    source: Any
    validation: Any
    conductor: Any
    written: Any
    begun: float
    saver: Any = None
    verbose: bool = False


@dataclass(frozen=True)
class TrainerControl:
    """Decisions of the caller's callbacks, for the workers: stop, take a new learning rate, take new weights.

    Attributes:
        stop: bool. Whether training ends.
        learning_rate: float. A new one; None where there is none.
        weights: bool. Whether all ranks take the weights that the callbacks left.
        slots: list of int. Indices, in ``optimizer_variables``, of the variables that callbacks have set.
        settings: dict. Other values that callbacks have set, by name; see ``choros.backends.callback_settings``.
        reset: bool. Whether ranks reset their metrics.
        leave: bool. Whether synchronous training ends after the next batch, as callbacks asked for it before an epoch.
    """

    stop: bool = False
    learning_rate: float | None = None
    weights: bool = False
    slots: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    reset: bool = False
    leave: bool = False

    @property
    def variables(self) -> bool:
        """True if the orders come with new values of variables, which are sent separately."""
        return self.weights or bool(self.slots)

    def then(self, later: TrainerControl) -> TrainerControl:
        """Return these orders with those that came after them."""
        return TrainerControl(
            self.stop or later.stop,
            self.learning_rate if later.learning_rate is None else later.learning_rate,
            self.weights or later.weights,
            sorted({*self.slots, *later.slots}),
            {**self.settings, **later.settings},
            self.reset or later.reset,
            self.leave or later.leave,
        )


GO_ON = TrainerControl()


@dataclass
class WorkerStats:
    """The counts of one worker, for ``history.run``."""

    rank: int
    steps: int = 0
    rows: int = 0
    exchanges: int = 0
    staleness: float = 0.0
    exchanging: float = 0.0  # seconds
    waiting: float = 0.0  # seconds, for data
    startup: float = 0.0  # seconds from the job's arrival until all were ready, and the first step of each shape
    seconds: float = 0.0  # of training, compiling left out
    first_rows: int = 0  # the rows of those first steps
    keeping: float = 0.0  # seconds of a processor, to keep the state
    lost_epoch: int = -1  # in which, and after which step of it, this rank's own numbers first were not finite
    lost_step: int = -1
    calling: float = 0.0  # seconds in which it alone waited for callbacks
    host: str = ""  # last: the one that is no number

    def json(self) -> dict[str, Any]:
        """Return the tally as plain JSON."""
        return asdict(self)


Show = Callable[[], list[float]]


class CallbackChannel(Protocol):
    """The worker's line to whoever drives the callbacks."""

    def begin(self) -> TrainerControl:
        """Say that this rank is ready to train; returns when all are."""
        ...

    def batch(self, epoch: int, step: int, logs: dict[str, float] | None, show: Show | None = None) -> TrainerControl:
        """Report a step (logs on rank 0 only); where callbacks want each batch, wait for what they decide.

        ``show`` writes the weights where callbacks find them, and is called only if they touch these. It returns what
        the variables of metrics hold.
        """
        ...

    def done(self, epoch: int, step: int, logs: dict[str, float], show: Show | None = None) -> None:
        """Rank 0 reports a step and does not wait; callbacks want each batch. ``show`` as in ``batch``."""
        ...

    def decided(self, show: Show) -> TrainerControl:
        """Wait for what callbacks decide after the step of ``done``; ``show`` as in ``batch``."""
        ...

    def spread_orders(self, orders: TrainerControl) -> TrainerControl:
        """Return rank 0's orders; all ranks that are together call it."""
        ...

    def epoch_end(self, epoch: int, logs: dict[str, float] | None, seconds: float, held: list[float]) -> TrainerControl:
        """Report the end of an epoch, and the seconds of training until then; together, wait for orders.

        ``held`` is what the variables of metrics hold.
        """
        ...

    def keep(self, part: tuple[dict[str, Any], dict[str, list[Any]]], asked: bool) -> None:
        """Leave this rank's state; ``asked``: somebody asks for the end of this process."""
        ...

    def optimizer(self, part: tuple[dict[str, Any], dict[str, list[Any]]]) -> None:
        """Give the caller what an asynchronous worker's optimizer holds.

        Args:
            part: the "rows" that the worker trained, and the "epoch" that it ends, None at the end of all; of rank 0
                the variables of the "optimizer", and with ``use_ema`` the worker's moving "average" of the weights.
        """
        ...

    def look(self) -> None:
        """Between two steps of a worker that waits for nobody: run the callbacks of epochs that others have ended."""
        ...
