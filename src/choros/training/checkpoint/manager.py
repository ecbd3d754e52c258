"""The collection of the ranks' states: held in memory, and written by a thread while training continues."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.driver_model import assign_average, assign_optimizer, assign_vectors, flat_vectors
from choros.backends.optimizers import model_variables
from choros.consistency.model_fingerprint import first_difference, layers_of, named
from choros.consistency.rank_agreement import digest, optimizer_of
from choros.data.array_source import ArraySource
from choros.errors import CheckpointError, InvalidInputError, counted
from choros.training.checkpoint import Checkpoint
from choros.training.checkpoint.snapshot import Part, Snapshot
from choros.training.spec import FitConfig
from choros.types import Array

if TYPE_CHECKING:
    import keras

    from choros.data import Source

logger = logging.getLogger(__name__)

# Fields of a job that must be the same when training resumes, in the order of their comparison: the number of workers
# and the mode come before the settings of the algorithm that depend on them.
_FIXED_FIELDS = ("workers", "mode", "algorithm", "batch_size", "steps", "shuffle", "metric_values")
_FIELD_TEXTS = {"metric_values": "numbers that its metrics keep"}
_WRITE_SECONDS = 600.0  # to wait until a state is on disk


class CheckpointManager:
    """The states of one fit. ``latest`` is the last complete state of all ranks.

    Args:
        checkpoint: Checkpoint, or None: states are held in memory only.

    Attributes:
        latest: Snapshot, or None.
        end_requested: bool. Whether the latest state was saved because the end of training was requested.
        busy: float. CPU seconds spent on receiving and writing states.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.checkpoint = checkpoint
        self.latest: Snapshot | None = None
        self.end_requested = False
        self.busy = 0.0
        self._run: dict[str, Any] = {}
        self._epochs, self._asynchronous = 0, False
        self._incomplete: dict[tuple[int, int], dict[int, Part]] = {}
        self._waiting: Snapshot | None = None
        self._error: BaseException | None = None
        self._wake, self._closing = threading.Condition(), False
        self._thread: threading.Thread | None = None

    # -- before training
    def begin(
        self, job: FitConfig, facts: Callable[[], dict[str, Any]], resume: bool, restarts: int, lead: bool = True
    ) -> FitConfig:
        """Return the job with its schedule of checkpoints and the position at which it resumes.

        Args:
            job: the job as requested.
            facts: returns the properties of model and data that must be the same when training resumes.
            resume: whether to resume from the newest checkpoint.
            restarts: number of restarts of workers.
            lead: whether this process writes checkpoints, and prints messages on stderr.

        Raises:
            InvalidInputError: the checkpoint is that of another training.
            CheckpointError: checkpoints cannot be written or read.
        """
        if self.checkpoint is None and not restarts:
            return job
        schedule = (
            self.checkpoint.schedule | {"asks": True, "signals": list(self.checkpoint.signals)}
            if self.checkpoint is not None
            else {}
        )
        job, self._epochs, self._asynchronous = replace(job, checkpoint_schedule=schedule), job.epochs, job.asynchronous
        job_facts = {name: getattr(job, name) for name in _FIXED_FIELDS} | facts()
        # Facts of a checkpoint have passed through JSON, which makes lists of tuples. So these facts do too.
        self._run = json.loads(json.dumps(job_facts, default=named))
        if self.checkpoint is not None and lead:
            if not resume:
                self.checkpoint.store.check_unused()
            # Before training: a directory that cannot be written must not be noticed only after the first epoch.
            self.checkpoint.store.try_out()
        saved = self.checkpoint.store.latest() if resume and self.checkpoint is not None else None
        if saved is not None:
            self.check(saved.facts["run"], saved.path)
            self.latest = Snapshot.of(saved.facts, saved.arrays)
            if job.fold_seed not in (None, saved.facts["seed"]):
                raise InvalidInputError(
                    f"{saved.path} belongs to a training with seed={saved.facts['seed']!r}; this one has "
                    f"{job.fold_seed!r}. Give that one, or none."
                )
            job = replace(job, seed=saved.facts["seed"])
            epoch, batch = saved.facts["epoch"] + 1, saved.facts["batch"]
            if saved.facts["over"]:
                state_text = "a callback had ended training, so that this fit trains nothing"
            elif saved.facts["epoch"] >= job.epochs:
                trained = counted(saved.facts["epoch"], "epoch")
                state_text = f"it has trained {trained}, and fit asks for {job.epochs}, so that this fit trains nothing"
            elif job.asynchronous:
                state_text = (
                    f"training resumes; callbacks continue with epoch {epoch}; each worker continues after its own "
                    "last exchange"
                )
            else:
                state_text = f"training resumes in epoch {epoch}, after {batch} of its batches"
            self._log(lead, f"checkpoint {saved.path}: {state_text}")
        elif resume and self.checkpoint is not None:
            self._log(
                lead, f"there is no checkpoint in {self.checkpoint.store.directory}: training starts from the beginning"
            )
        self._run = {**self._run, "seed": job.seed}
        return self.resumed_config(job, in_same_fit=False)

    @staticmethod
    def _log(lead: bool, text: str) -> None:
        if lead:
            logger.info(text)

    def check(self, saved_run: dict[str, Any], path: object) -> None:
        """Refuse a checkpoint of another training.

        Raises:
            InvalidInputError: a property differs; the message names it.
        """
        for name, value in self._run.items():
            if name == "layers":
                if problem := first_difference(saved_run.get(name, value), value):
                    raise InvalidInputError(
                        f"{path} belongs to the training of another model: {problem}. Resume with the same model, or "
                        "give another directory."
                    )
            elif saved_run.get(name) != value:
                raise InvalidInputError(
                    f"{path} belongs to {self._difference(name, saved_run)}. Resume with the same settings and data, "
                    "or give another directory."
                )

    def _difference(self, name: str, saved_run: dict[str, Any]) -> str:
        """Return the training of a checkpoint as text, by a property in which it differs from this one."""
        saved_name, current_name = ((run.get("algorithm") or {}).get("name") for run in (saved_run, self._run))
        # The number of workers and the mode may differ too, but the names of the algorithms say more.
        if saved_name != current_name:
            return f"a training by {saved_name}; this one uses {current_name}"
        if name == "first rows":
            return "the training of other data: the first rows or their weights differ"
        label, saved_value, value = unlike(_FIELD_TEXTS.get(name, name), saved_run.get(name), self._run[name])
        return f"a training with {label}={saved_value!r}; this one has {value!r}"

    def resumed_config(self, job: FitConfig, in_same_fit: bool = True) -> FitConfig:
        """Return the job that resumes from the latest state."""
        if self.latest is None:
            return job
        facts = self.latest.facts
        epoch = job.epochs if facts["over"] else facts["epoch"]
        begin = {"initial_epoch": min(epoch, job.epochs), "initial_batch": facts["batch"]}
        return replace(job, **begin, continues_counts=in_same_fit)

    def optimizer(self, rank: int = 0) -> list[Array]:
        """Return a rank's optimizer variables in the latest state of an asynchronous run; [] if there are none."""
        latest = None if self.latest is None else self.latest.parts.get(rank)
        return [] if latest is None else latest[1].get("optimizer", [])

    def averages(self) -> dict[int, tuple[int, Array]]:
        """Return, by rank, the rows trained and the moving average of the weights, from the latest state."""
        parts = {} if self.latest is None else self.latest.parts
        return {
            rank: (facts["rows"], groups["average"][0])
            for rank, (facts, groups) in parts.items()
            if groups.get("average")
        }

    def load_into_model(self, model: keras.Model) -> bool:
        """Load the latest state of rank 0 into the caller's model: weights and optimizer.

        Args:
            model: keras.Model. The model of the callbacks.

        Returns:
            Whether the state includes what callbacks do at the beginning of its epoch.
        """
        assert self.latest is not None  # noqa: S101 - only called if training resumes
        facts, (_, groups) = self.latest.facts, self.latest.parts[0]
        rate = model.optimizer.learning_rate
        if "model" in groups:
            for variable, value in zip(model_variables(model), groups["model"], strict=True):
                variable.assign(value)
        elif (saved_rate := kept_rate(facts)) is not None and hasattr(rate, "assign"):  # a schedule has no assign
            rate.assign(saved_rate)
        if optimizer := self.optimizer():
            assign_optimizer(model, optimizer)
        if averages := self.averages():
            assign_average(model, mean_of(averages))
        if center := groups.get("shown") or groups.get("meeting"):
            assign_vectors(model, center[0], flat_vectors(model)[1])
        return bool(facts.get("begun", True))

    # -- while training
    def take(self, rank: int, part: Part, end_requested: bool, workers: int) -> bool:
        """Take the state of a rank. Return True if the states of all ranks for this position are now present."""
        position = part[0]["epoch"], part[0]["batch"]
        rank_parts = self._incomplete.setdefault(position, {})
        rank_parts[rank] = part
        if len(rank_parts) < workers:
            return False
        # Ranks save in the order of their steps, so no part for an earlier position is still to come.
        self._incomplete = {other: parts for other, parts in self._incomplete.items() if other > position}
        facts = {name: part[0][name] for name in ("epoch", "batch", "over")}
        self.store_state(Snapshot(facts, rank_parts), end_requested)
        return True

    def drop_incomplete(self) -> None:
        """Drop incomplete states, which restarted workers will not complete."""
        self._incomplete = {}

    def store_state(self, state: Snapshot, end_requested: bool = False) -> None:
        """Hold a complete state as the latest one, and pass it to the writing thread.

        Raises:
            CheckpointError: an earlier state could not be written.
        """
        self.poll()
        # The callbacks for the beginning of that epoch have run, if there is such an epoch.
        state.facts.setdefault("begun", state.facts["epoch"] < self._epochs)
        self.latest, self.end_requested = state, end_requested
        if self.checkpoint is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="choros-checkpoint", daemon=True)
            self._thread.start()
        with self._wake:
            self._waiting = state  # replaces an older state that is not written yet
            self._wake.notify_all()

    def poll(self) -> None:
        """Raise the error of the writing thread, if there was one."""
        # Once: the caller may handle the error, and ``flush`` looks again at the end.
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self) -> None:
        assert self.checkpoint is not None  # noqa: S101 - for the type checker
        while True:
            with self._wake:
                while self._waiting is None and not self._closing:
                    self._wake.wait(60.0)
                state, self._waiting = self._waiting, None
            if state is None:
                return
            begun = time.thread_time()
            try:
                facts, arrays = state.flat()
                seed = self._run["seed"]
                run = {name: value for name, value in self._run.items() if name != "seed"}
                self.checkpoint.store.save({**facts, "run": run, "seed": seed}, arrays)
            # Raised by ``poll`` in the thread that trains. Here the exception would end only this thread, without a
            # message.
            except BaseException as error:
                self._error = error
            self.busy += time.thread_time() - begun

    def flush(self) -> None:
        """Wait until all states are written, for at most 600 seconds.

        Raises:
            CheckpointError: a state could not be written.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(_WRITE_SECONDS)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"A checkpoint is still being written after {_WRITE_SECONDS:.0f} s: check the disk."
                )
            self._thread = None
        # The next ``store_state`` may start a new thread: a fit can flush more than once.
        self._closing = False
        self.poll()

    @contextmanager
    def listening(self, then: Any = lambda: None) -> Iterator[None]:
        """Handle the signals of the checkpoint within this context, and write all states at its end."""
        if self.checkpoint is None:
            yield
            return
        try:
            with self.checkpoint.listening(then):
                yield
        except BaseException:
            # An error of the disk must not replace the error that ended training.
            with suppress(Exception):
                self.flush()
            raise
        self.flush()

    def flush_for_exit(self) -> SystemExit:
        """Write all states, and return the ``SystemExit`` that ends this process."""
        assert self.checkpoint is not None  # noqa: S101 - only the signals of a checkpoint request it
        self.flush()
        if self.latest is None:
            logger.info("stop requested: no state is saved, so training starts from the beginning")
        else:
            facts = self.latest.facts
            place = (
                "each worker after its last exchange"
                if self._asynchronous
                else f"after {facts['batch']} of its batches"
            )
            position = f"epoch {facts['epoch'] + 1}, {place}"
            logger.info(f"stop requested: {position}, is saved in {self.checkpoint.store.directory}")
        return SystemExit(self.checkpoint.code())


def mean_of(averages: dict[int, tuple[int, Array]]) -> Array:
    """Return the mean of the workers' moving averages, weighted by the rows that each worker trained.

    Args:
        averages: by rank, the rows trained and the moving average.
    """
    rows = np.array([count for count, _ in averages.values()], np.float64)
    mean: Array = np.average([average for _, average in averages.values()], 0, rows if rows.any() else None)
    return mean


def unlike(name: str, saved: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the name of the first difference between two unequal JSON values, and both values there.

    Example:
        >>> unlike("variables", [[3], [4, 5]], [[3], [4, 6]])
        ('variables[1]', [4, 5], [4, 6])
        >>> unlike("variables", [[3]], [[3], [4, 6]])
        ('number of variables', 1, 2)
        >>> unlike("optimizer", ["Adam", {"beta_1": 0.9}], ["Adam", {"beta_1": 0.8}])
        ("optimizer[1]['beta_1']", 0.9, 0.8)
    """
    if isinstance(saved, list) and isinstance(other, list):
        if len(saved) != len(other):
            return f"number of {name}", len(saved), len(other)
        key: Any = next(key for key, (a, b) in enumerate(zip(saved, other, strict=True)) if a != b)
    elif isinstance(saved, dict) and isinstance(other, dict) and saved.keys() == other.keys():
        key = next(key for key in saved if saved[key] != other[key])
    else:
        return name, saved, other
    if name == "variables":
        return f"{name}[{key}]", saved[key], other[key]
    return unlike(f"{name}[{key!r}]", saved[key], other[key])


def facts_of(model: keras.Model, source: Source) -> dict[str, Any]:
    """Return the properties of model and data that must be the same when training resumes."""
    facts = {
        "layers": layers_of(model),
        "rows": source.rows,
        "variables": [
            [list(variable.shape), str(np.dtype(variable.dtype).name)] for variable in model_variables(model)
        ],
        "backend": _backend_name(),
        "optimizer": optimizer_of(model.optimizer),
        "loss": named(model.loss),
    }
    if isinstance(source, ArraySource):  # other sources may yield batches in random order
        facts["first rows"] = digest(source.sample(32))
    return facts


def _backend_name() -> str:
    import keras

    return str(keras.backend.backend())


def kept_rate(facts: dict[str, Any]) -> float | None:
    """Return the learning rate that callbacks had set when the state was saved, or None.

    Args:
        facts: metadata of a checkpoint. In older ones the key is "rate", and 0 means that no rate was set.
    """
    rate: float | None = facts.get("ordered_rate", facts.get("rate") or None)
    return rate
