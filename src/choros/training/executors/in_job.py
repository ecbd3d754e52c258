"""A Trainer inside a job: ``choros run`` or a scheduler has started the ranks, and each process joins as its rank.

This module starts no process. Every rank runs the same script with the same model. All ranks take the weights of rank
0, which runs the callbacks. ``training/worker/comm_setup.py`` connects the ranks, by shared memory on one host.
"""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from choros.backends import Replica
from choros.backends.driver_model import assign_optimizer, assign_vectors
from choros.backends.host_values import to_host
from choros.backends.optimizers import model_variables
from choros.cluster.hardware.freed_memory import return_freed_memory
from choros.comm.bootstrap.init import give_up, join
from choros.comm.gather_bytes import collect
from choros.comm.group import Group
from choros.comm.hierarchical_group import hosts_of
from choros.comm.shared_values import gather_messages, share_message, share_value
from choros.comm.single_rank_group import SingleRankGroup
from choros.consistency.rank_agreement import agree, facts_of
from choros.data import FileSource
from choros.errors import PeerLostError
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.center_snapshots import SLOTS
from choros.training.async_control.hang_detection import JobHangs
from choros.training.async_control.optimizer_states import EpochOptimizerStates
from choros.training.async_control.pause import PauseClient, ShardedCheckpointer
from choros.training.async_control.recovery import state_of
from choros.training.async_control.supervisor import AsyncCheckpointer
from choros.training.callback_runner import CallbackRunner
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.checkpoint.snapshot import Part, Snapshot, packed, unpacked
from choros.training.executors.executor import FitResult
from choros.training.run_record import RunRecord
from choros.training.spec import FitConfig, FitRequest, Show, TrainerControl, WorkerStats
from choros.training.worker.comm_setup import CommHandles, connect_ranks
from choros.training.worker.context import SavedState, WorkerContext, blank_vectors, vectors
from choros.training.worker.loop.rank_means import mean_average
from choros.training.worker.loop.train import train
from choros.training.worker.messages import Logs
from choros.training.worker.rank_program import run_rank
from choros.training.worker.setup import rank_devices, transport_name
from choros.types import Array

if TYPE_CHECKING:
    import keras

    from choros.comm.group import ParameterServer


logger = logging.getLogger(__name__)

_WARN_SECONDS = 60.0  # of waiting for another rank, after which a rank logs a warning
_CALLBACK_SECONDS = 7 * 86400.0  # to wait for callbacks at an epoch's end, or for slower ranks that make steps
_POLL_SECONDS = 0.05  # between two polls of the epoch log and the control block
_QUIET_SECONDS = 5.0  # without a heartbeat of any rank, after which rank 0 waits in the barrier as the others do


MessageT = TypeVar("MessageT")


@dataclass(frozen=True)
class EpochCallbacksDone:
    """Rank 0 has run the callbacks of an epoch's end. ``logs``: of the epoch, or None; ``seconds``: of training."""

    control: TrainerControl
    logs: Logs | None
    seconds: float


@dataclass(frozen=True)
class RankResult:
    """The result of a rank of a job.

    Attributes:
        all_stats: list of WorkerStats. The counts of all ranks.
        losses: list of (seconds of training, epoch, loss). One for each epoch.
        transport: str. The name of the means of exchange, as in ``RunRecord``.
        lanes: list of bytes. On rank 0, the lanes of all ranks if a timeline is recorded; else empty.
    """

    all_stats: list[WorkerStats]
    losses: list[tuple[float, int, float]]
    transport: str
    lanes: list[bytes]


class InJobCallbackChannel:
    """The channel to callbacks inside a job. Rank 0 runs them, and sends control messages to the other ranks.

    Every rank keeps the history.
    """

    def __init__(
        self, run: WorkerContext, callbacks: CallbackRunner, base: Group, epoch_log: Any, checkpoints: CheckpointManager
    ) -> None:
        self.checkpoints = checkpoints
        self.checkpointer: AsyncCheckpointer | None = None  # on rank 0, saves the center
        self.pause_client: PauseClient | None = None  # on other ranks, if the center is divided among hosts
        self.hangs: JobHangs | None = None  # of asynchronous ranks
        self.run, self.callbacks, self.base, self.epoch_log, self.lead = run, callbacks, base, epoch_log, run.rank == 0
        self.synchronous = run.job.synchronous
        self.losses: list[tuple[float, int, float]] = []
        self.saved_state: SavedState | None = None  # of this rank, while callbacks use the model
        self.metrics: list[Array] = []  # likewise the values of its metrics' variables
        self.show: Show | None = None  # writes the weights within an epoch
        self.set_values: list[Array] = []  # rank 0's variables after the callbacks
        self.control = TrainerControl()  # the control message of the last batch's callbacks
        self.polled_at = 0.0
        self.epoch_states = EpochOptimizerStates()  # rank 0's optimizer state at epochs' ends

    def begin(self) -> TrainerControl:
        """Run the callbacks for the beginning of training, and return rank 0's control message."""
        with self.aside():
            control = self.callbacks.begin(self.run.job.initial_epoch)
        return self.spread_control(control)

    def batch(self, epoch: int, step: int, logs: dict[str, float] | None, show: Show | None = None) -> TrainerControl:
        """Run the callbacks of rank 0's step. With batch hooks, all synchronous ranks take the control message."""
        control = TrainerControl()
        if logs is not None:
            self.done(epoch, step, logs, show)
            control = self.control
            # No collective call: asynchronous ranks are in different steps, and poll the control block instead.
            if not self.synchronous:
                self.command(control)
                self.run_epoch_callbacks()
        # Without batch hooks no rank enters this collective call, so a step needs no message from rank 0.
        if self.synchronous and self.run.job.per_batch:
            return self.spread_control(control)
        return control

    def done(self, epoch: int, step: int, logs: dict[str, float], show: Show | None = None) -> None:
        """Run the callbacks of a step in this process, while the other ranks calculate."""
        self.show = show
        with self.aside(lazy=True):
            self.control = self.callbacks.batch(epoch, step, logs)
        self.show = None

    def decided(self, show: Show) -> TrainerControl:
        """Return the control message of the callbacks that ``done`` ran."""
        return self.control

    def spread_control(self, control: TrainerControl) -> TrainerControl:
        """Broadcast rank 0's control message, apply its variables, and return it. Collective."""
        return self.apply_control(self.share(control))

    def epoch_end(
        self, epoch: int, logs: dict[str, float] | None, seconds: float, metric_values: list[float]
    ) -> TrainerControl:
        """Report the end of an epoch: if synchronous, wait for the control message; else write the logs for rank 0."""
        if not self.synchronous:
            if logs is not None:
                self.epoch_log.write(epoch, logs, seconds, metric_values)
            if self.lead:
                self.run_epoch_callbacks()
            return TrainerControl()
        control = TrainerControl()
        if self.lead and logs is not None:
            control = self.record(epoch, logs, seconds, metric_values)
        # The other ranks need the logs too, because every rank keeps the history.
        end = self.share(EpochCallbacksDone(control, logs, seconds))
        if not self.lead and end.logs is not None:
            self.record(epoch, end.logs, end.seconds, [])
        return self.apply_control(end.control)

    def record(self, epoch: int, logs: dict[str, float], seconds: float, metric_values: list[float]) -> TrainerControl:
        """Record an epoch's loss, and run the callbacks of its end."""
        if "loss" in logs:
            self.losses.append((seconds, epoch, logs["loss"]))
        with self.aside(lazy=True):
            return self.callbacks.epoch_end(epoch, logs, metric_values)

    @contextmanager
    def aside(self, lazy: bool = False) -> Iterator[None]:
        """Lend the model to callbacks within this context, because rank 0 also trains with it.

        At the end, store the variables that the callbacks have set, and restore this rank's training state.

        Args:
            lazy: whether to copy the training state only when a callback touches the model.
        """
        with self._in_callbacks():
            yield from self._lend(lazy)

    @contextmanager
    def _in_callbacks(self) -> Iterator[None]:
        """Mark in the control block that rank 0 runs callbacks. Asynchronous ranks do not take it for a hung rank."""
        marked = self.lead and not self.synchronous
        if marked:
            self.run.control_block.in_callbacks = True
        try:
            yield
        finally:
            if marked:
                self.run.control_block.in_callbacks = False

    def _lend(self, lazy: bool) -> Iterator[None]:
        # Without callbacks of the user no code touches the model, so the copies are not needed.
        if not (self.lead and self.callbacks.user):
            yield
            return
        self.saved_state = None
        if not lazy:
            self._copy_state()
        try:
            yield
            if self.saved_state is not None:
                # Callbacks may have set any variable. Read all of them before the training state is restored.
                self.set_values = to_host(model_variables(self.callbacks.model))
        finally:
            if self.saved_state is not None:
                self.run.restore_state(self.saved_state)
                for variable, value in zip(self.callbacks.model.metrics_variables, self.metrics, strict=False):
                    variable.assign(value)
                self.saved_state = None

    def _copy_state(self) -> None:
        import keras

        self.saved_state = self.run.copy_state()
        # On JAX the replica holds the metrics' values outside of the model, whose own arrays are no longer valid.
        if keras.backend.backend() != "jax":
            self.metrics = to_host(self.callbacks.model.metrics_variables)

    def fetching(self) -> None:
        """Copy this rank's training state and write the weights, before callbacks touch the model."""
        if self.saved_state is None:
            self._copy_state()
            if self.show is not None:
                self.callbacks.show_metrics(self.show())

    def command(self, control: TrainerControl) -> None:
        """Publish rank 0's control message for asynchronous ranks. New weights replace the center."""
        if control.weights and self.run.center is not None:
            # ``take`` changes this rank's model only to make the new center. Rank 0 keeps its weights until its next
            # exchange. Like the other ranks, it then takes the new center without a merge.
            with self.run.aside():
                self.run.take(self.set_values, control)
                self.run.center.replace(*self.run.vectors())
        self.run.control_block.publish(control, self.callbacks.epoch)

    def run_epoch_callbacks(self) -> None:
        """Record the epochs whose logs have arrived, and run their callbacks on rank 0."""
        for epoch, logs, seconds, metric_values in self.epoch_log.read_new():
            control = self.record(epoch, logs, seconds, metric_values)
            if self.lead:
                self.command(control)
                next_epoch = self.callbacks.epoch  # callbacks of an epoch that was reported too early have not run yet
                self.run.control_block.allow_epoch(epoch + 1 if next_epoch is None else next_epoch)
                if self.checkpointer is not None:
                    self.checkpointer.ended()

    def save_state(self, part: Part, end_requested: bool) -> None:
        """Collect the states of all ranks on rank 0. Collective. If the end is requested, end after they are written.

        Raises:
            SystemExit: on every rank, if ``end_requested``.
        """
        group = self.run.group
        parts = collect(group, packed(part))
        if self.lead:
            facts = {name: part[0][name] for name in ("epoch", "batch", "over")}
            self.checkpoints.store_state(
                Snapshot(facts, {rank: unpacked(part) for rank, part in enumerate(parts)}), end_requested
            )
        if end_requested:
            exit_error = self.checkpoints.flush_for_exit() if self.lead else SystemExit(0)
            # No rank may end before the state is written: rank 0 writes it before this collective call.
            raise RequestedExit(share_value(group, exit_error.code))

    def optimizer(self, part: Part) -> None:
        """Hold rank 0's optimizer state of an epoch's end for callbacks, which run in this process."""
        epoch = part[0]["epoch"]
        self.epoch_states.put(0, epoch, part, epoch if self.callbacks.epoch is None else self.callbacks.epoch)

    def poll(self) -> None:
        """Poll, on an asynchronous rank, at most every 0.05 seconds.

        Rank 0 runs the callbacks of ended epochs, because the rank that ends an epoch only writes its logs. It also
        checks for hangs and saves due checkpoints. The other ranks join a pause. All ranks end on a request to end.
        """
        if self.synchronous or time.monotonic() - self.polled_at <= _POLL_SECONDS:
            return
        self.polled_at = time.monotonic()
        if self.lead:
            self.run_epoch_callbacks()
            if self.hangs is not None:
                self.hangs.check()
        if self.checkpointer is not None:
            self.checkpointer.poll()
            if self.run.control_block.end_requested:
                self.checkpointer.save(end_requested=True)
                code = self.checkpoints.flush_for_exit().code  # first writes the state: no rank may end before
                self.run.control_block.set_exit_code(code if isinstance(code, int) else 1)
                self.checkpointer.wait_for_exits()
        if self.pause_client is not None:
            self.pause_client.poll()
        self.exit_if_requested()

    def exit_if_requested(self) -> None:
        """End this process if all asynchronous ranks must end.

        Raises:
            SystemExit: the control block has an exit code.
        """
        code = self.run.control_block.exit_code if self.checkpoints.checkpoint is not None else None
        if code is not None:
            if self.pause_client is not None:
                # Rank 0 waits for this mark before its host stops to serve the control block (``wait_for_exits``).
                self.pause_client.done()
            raise RequestedExit(code)

    def run_late_callbacks(self) -> None:
        """Run the callbacks of epochs that other ranks end, after rank 0's last step.

        Return when all epochs have ended, or when the heartbeats have stopped for some time.
        """
        last_moved, beats, job = time.monotonic(), b"", self.run.job
        while not self.run.control_block.stopped and self.callbacks.epoch is not None:
            no_rank_waits = self.callbacks.epoch + SLOTS >= job.epochs  # each epoch that is left has a free slot
            # A rank that waits for a free slot of the center's snapshots makes no step, but rank 0's callbacks will
            # free the slot. So ranks have the whole timeout while such a wait is possible.
            if time.monotonic() - last_moved > (_QUIET_SECONDS if no_rank_waits else job.timeout):
                break
            latest = self.run.control_block.step_counts().tobytes()
            last_moved, beats = (last_moved if latest == beats else time.monotonic()), latest
            self.poll()
            time.sleep(_POLL_SECONDS)

    def wait_for_all(self) -> None:
        """Wait until all ranks have arrived. An asynchronous rank waits as long as the others make steps.

        Raises:
            PeerLostError: a rank has ended, or hangs.
        """
        if self.hangs is None:
            self.base.barrier()
            return
        # Slower ranks may train for hours, so a short timeout of the barrier would be wrong. The thread of ``watching``
        # looks for ranks that hang instead.
        with _long_timeout(self.base), self.hangs.watching(give_up):
            self.base.barrier()

    def share(self, message: MessageT) -> MessageT:
        """Return rank 0's message. Collective. Other ranks wait for up to seven days, because callbacks may be slow.

        The death of rank 0 is noticed at once. Callbacks that never return only cause a warning, which names the rank.
        """
        group = self.run.group if self.synchronous else self.base
        with _long_timeout(group):
            return share_message(group, message)

    def apply_control(self, control: TrainerControl) -> TrainerControl:
        """Take the new variables of rank 0's control message, and return the message. The loop applies the rest."""
        if control.variables:
            group = self.run.group if self.synchronous else self.base
            arrays = self.set_values if self.lead else self.run.replica.snapshot()
            # On the other ranks the arrays only give the broadcast its shapes and types.
            self.run.take([group.broadcast(array) for array in arrays], control)
            if control.weights and self.lead and self.run.center is not None:
                self.run.center.replace(*self.run.vectors())
            if not self.synchronous:
                # The loop reads the center next. No rank may do that before rank 0 has replaced it.
                group.barrier()
        return control


@contextmanager
def _long_timeout(group: Group) -> Iterator[None]:
    """Raise the timeout of a group within this context, because callbacks may be slow."""
    timeout, group.timeout = group.timeout, _CALLBACK_SECONDS
    try:
        yield
    finally:
        group.timeout = timeout


def fit(plan: FitRequest, rank: int, replica: Replica | None = None) -> FitResult:
    """Train as one rank of a job. Every rank ends with the same weights in its model, and returns the run's record.

    Args:
        plan: the request.
        rank: int.
        replica: a built replica for a job of one rank, which the caller keeps. None builds one.
    """
    result = run(plan, rank, replica)
    record = RunRecord.of(plan.algorithm, plan.job.mode, result.all_stats, 0.0, result.losses, result.transport)
    return FitResult(record, lanes=result.lanes)


def run(plan: FitRequest, rank: int, replica: Replica | None = None) -> RankResult:
    """Train as ``fit`` does, and return the results of this rank."""
    checkpoints = plan.checkpoints or CheckpointManager(None)
    base, job = _join(plan, rank)
    state = None
    if checkpoints.latest is not None:  # in a job only rank 0's optimizer state is saved if asynchronous
        state = checkpoints.latest.parts.get(0) if job.asynchronous else checkpoints.latest.of_rank(rank)

    def connect(replica: Replica) -> CommHandles:
        """Give all ranks the variables of rank 0, and connect them."""
        # Each rank has built its own model, with its own random weights.
        replica.restore([base.broadcast(value) for value in replica.snapshot()])
        comm = connect_ranks(
            base, job, plan.algorithm, replica.size * replica.dtype.itemsize, partial(vectors, replica)
        )
        for group in (base, comm.group):
            group.warn_after = min(group.warn_after, _WARN_SECONDS)
        return comm

    def train_rank(context: WorkerContext, comm: CommHandles) -> RankResult:
        """Train, and share the results among all ranks."""
        context.reporter = reporter = InJobCallbackChannel(context, plan.callbacks, base, comm.epoch_log, checkpoints)
        if job.asynchronous:
            hosts = [name.decode() for name in base.gather(platform.node().encode())]
            reporter.hangs = JobHangs(comm.control_block, job, rank, hosts)
            if checkpoints.checkpoint is not None:
                _set_up_checkpoints(reporter, comm.center)
        buffers = blank_vectors(context.replica)
        plan.callbacks.fetch = partial(_fetch, reporter, plan.model, buffers)
        with checkpoints.listening(comm.control_block.request_end):
            with report_exit(rank, job.workers):
                train(context)
            # Within ``listening``, so that a signal also saves the state while this rank waits for slower ones.
            _wait_for_the_others(reporter)
        all_stats = _finish(reporter, plan.model, buffers)
        transport = "nothing" if job.ensemble else transport_name(comm.group, comm.center)
        return RankResult(all_stats, reporter.losses, transport, _gather_lanes(base, context))

    devices, request = rank_devices(job, rank), replace(plan, job=job)
    resumes = job.asynchronous and checkpoints.checkpoint is not None and checkpoints.latest is not None
    try:
        return run_rank(
            request, rank, connect, train_rank, devices=devices, replica=replica, state=state, resumes=resumes
        )
    finally:
        return_freed_memory()


def _join(plan: FitRequest, rank: int) -> tuple[Group, FitConfig]:
    """Join the other ranks and compare their arguments. Return the group and the common job."""
    job = plan.job
    if job.workers == 1:
        return SingleRankGroup(), job
    base = join(rank, job.workers, job.first_timeout)
    base.timeout = job.first_timeout
    facts = facts_of(plan.model, plan.source, plan.validation, job.batch_size)
    job = agree(base, job, facts, plan.model)
    for source in (plan.source, plan.validation):
        decode_together(base, source)
    return base, job


def _set_up_checkpoints(reporter: InJobCallbackChannel, center: ParameterServer) -> None:
    """Set up checkpoints of the center by rank 0, and load the latest one if there is one. Collective."""
    context, checkpoints = reporter.run, reporter.checkpoints
    is_sharded = not isinstance(center, SharedMemoryParameterServer)
    if context.rank == 0:
        checkpointer_class = ShardedCheckpointer if is_sharded else AsyncCheckpointer
        reporter.checkpointer = checkpointer_class(
            center, context.control_block, checkpoints, context.job, reporter.callbacks
        )
        reporter.checkpointer.slots_of = lambda rank: (
            {"rows": context.stats.rows},
            {"optimizer": context.replica.optimizer_state()},
        )
    elif is_sharded:
        reporter.pause_client = PauseClient(context.control_block, context.rank, context.job.timeout)
    # The constructor of rank 0's checkpointer has restored the center. No rank may read it earlier.
    reporter.base.barrier()
    state_of(center).refresh(center)


def _fetch(reporter: InJobCallbackChannel, model: keras.Model, buffers: tuple[Array, Array], epoch: int | None) -> None:
    """Load the weights of an epoch's end, or the latest ones for None, into the model for callbacks."""
    context = reporter.run
    reporter.fetching()
    if context.center is not None:
        trainable, statistics = buffers
        if epoch is None or context.snapshots is None or not context.snapshots.read(epoch, trainable, statistics):
            context.center.read(trainable, statistics)
        assign_vectors(model, trainable, statistics)
        optimizer_state = None if epoch is None else reporter.epoch_states.optimizer(epoch)
        assign_optimizer(model, optimizer_state or context.replica.optimizer_state())
    elif context.latest:
        for variable, value in zip(model_variables(model), context.latest, strict=True):
            variable.assign(value)


def _wait_for_the_others(reporter: InJobCallbackChannel) -> None:
    """Wait until all ranks have trained. Rank 0 runs callbacks until then."""
    if reporter.pause_client is not None:
        # This rank makes no more exchanges and may wait long in the barrier, where it could not join a pause.
        reporter.pause_client.done()
    if reporter.run.job.asynchronous and reporter.lead:
        reporter.run_late_callbacks()
    try:
        reporter.wait_for_all()
    except PeerLostError:
        # Ranks that end on request close their connections, which looks like a failure to a rank that waits.
        reporter.exit_if_requested()
        raise


def _finish(reporter: InJobCallbackChannel, model: keras.Model, buffers: tuple[Array, Array]) -> list[WorkerStats]:
    """Set the trained weights and the history in every rank; return the counts of all ranks. Collective."""
    context, base, checkpoints = reporter.run, reporter.base, reporter.checkpoints
    replica, center = context.replica, context.center
    if center is not None:
        # All ranks have passed the barrier, so the logs of all epochs have arrived.
        reporter.run_epoch_callbacks()
        if reporter.checkpointer is not None:
            reporter.checkpointer.save()
            checkpoints.flush()
        trainable, statistics = buffers
        center.read(trainable, statistics)
        replica.set(trainable)
        replica.set_statistics(statistics)
        if replica.averages:
            replica.set_average(mean_average(replica, base, context.stats.rows))
            replica.finish()
        if (rate := context.control_block.rate()) is not None:  # set by callbacks after this rank's last exchange
            replica.learning_rate = rate
    for variable, value in zip(model_variables(model), replica.snapshot(), strict=True):
        variable.assign(value)
    code = _run_last_callbacks(reporter.callbacks)
    for variable in model_variables(model):  # a callback may have set them in on_train_end
        variable.assign(base.broadcast(np.array(to_host([variable])[0])))
    _share_history(base, reporter.callbacks)
    if (code := share_value(base, code)) is not None:
        raise SystemExit(code)
    return gather_messages(base, context.stats)


def _gather_lanes(base: Group, context: WorkerContext) -> list[bytes]:
    """Return the lanes of all ranks' timelines on rank 0, and an empty list on the others. Collective."""
    return [lane.tobytes() for text in context.lane() for lane in collect(base, np.frombuffer(text, np.uint8))]


class RequestedExit(SystemExit):
    """The requested end of all ranks, after the state was saved."""


@contextmanager
def report_exit(rank: int, size: int) -> Iterator[None]:
    """Treat ``sys.exit`` within this context as a failure of the rank, because the other ranks wait for it."""
    try:
        yield
    except RequestedExit:
        raise
    except SystemExit as error:
        logger.warning(
            f"rank {rank} of {size} on {platform.node()} ended in the middle of training, by "
            f"sys.exit({error.code!r}), which ends the job"
        )
        sys.excepthook(SystemExit, error, error.__traceback__)  # Python does not call it for SystemExit
        raise


def _run_last_callbacks(callbacks: CallbackRunner) -> int | None:
    """Run the last callbacks. If one of them raises ``SystemExit``, return its code, so that all ranks end with it."""
    try:
        callbacks.end()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    return None


def _share_history(base: Group, callbacks: CallbackRunner) -> None:
    """Copy rank 0's history to every rank, because its callbacks may have stopped training or added logs."""
    history = getattr(callbacks, "history", None)
    contents = share_value(base, None if history is None else [history.epoch, history.history])
    if contents is not None and history is not None and base.rank:
        history.epoch, history.history = contents


def decode_together(group: Group, source: Any) -> None:
    """Share decoded files among the ranks of a host: the first rank's cache is used by all. Collective."""
    source = getattr(source, "inner", source)
    files = isinstance(source, FileSource)
    # A rank without files takes part too, because the call is collective.
    paths = group.gather(source.spill.path.encode() if files else b"")
    for ranks in hosts_of(group):
        if files and group.rank in ranks[1:]:
            source.join(paths[ranks[0]].decode())
