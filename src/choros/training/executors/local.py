"""The caller's side of a run on local workers: send the job, process the workers' events, collect the result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from choros.backends import averages_of
from choros.backends.driver_model import (
    assign_average,
    assign_optimizer,
    assign_vectors,
    assign_views,
    flat_vectors,
    host_views,
    split_vector,
    vector_nbytes,
)
from choros.backends.optimizers import model_variables, optimizer_variables
from choros.backends.replica_state import Groups
from choros.backends.variable_groups import large_frozen
from choros.comm.messages import header_of
from choros.comm.shm.group import SharedGroup
from choros.comm.shm.segment import Segment
from choros.data import StreamSource, serialization
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError, WorkerFailedError, counted
from choros.launch.process.failure_report import RankFailure
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.best_member import BestMemberSlots
from choros.training.async_control.center_snapshots import CenterSnapshots
from choros.training.async_control.control_block import ControlBlock
from choros.training.async_control.hang_detection import HeartbeatMonitor, hung_rank, without_progress
from choros.training.async_control.optimizer_states import EpochOptimizerStates
from choros.training.async_control.supervisor import AsyncSupervisor
from choros.training.checkpoint.manager import CheckpointManager, mean_of
from choros.training.checkpoint.snapshot import Part, from_blobs, to_blobs
from choros.training.executors.batch_channel import BatchChannel
from choros.training.executors.restart_policy import RestartPolicy
from choros.training.executors.shared_weights import SharedWeights
from choros.training.executors.stream_feeder import StreamFeeder
from choros.training.executors.worker_pool import WorkerPool
from choros.training.payload import FitPayload, unpack_members
from choros.training.run_record import RunRecord
from choros.training.spec import NO_CHANGE, FitRequest, TrainerControl, WorkerStats
from choros.training.worker import messages
from choros.training.worker.setup import create_exchange_segment
from choros.types import Array

Event = tuple[int, Any, Any]  # rank; a message of ``WORKER_EVENTS``, a WorkerStarted or RankFailure; blobs
_POLL_SECONDS = 0.25  # between two polls of the heartbeats while records of batches arrive


class LocalRun:
    """One fit on local workers. ``run`` is called once.

    Args:
        plan: FitRequest, whose job describes its sources.
        payload: FitPayload.
        pool: WorkerPool with at least ``job.workers`` workers.
        restarts: int. Number of restarts after failures. Defaults to 0.
    """

    def __init__(self, plan: FitRequest, payload: FitPayload, pool: WorkerPool, restarts: int = 0) -> None:
        self.model, self.algorithm, self.job, self.callbacks = plan.model, plan.algorithm, plan.job, plan.callbacks
        self.first_job, self.started = plan.job, 0.0
        self.payload, self.workers, self.begun, self.ranks = payload, pool, plan.begun, range(plan.job.workers)
        self.stream = plan.source if isinstance(plan.source, StreamSource) else None
        self.members: dict[int, tuple[float, list[Array]]] = {}
        self.files: dict[str, list[int]] = {}  # ``loaded_files`` of the workers
        self.lanes: dict[int, list[bytes]] = {}  # by rank: its lane of the timeline, if it recorded one
        self.losses: dict[int, tuple[float, int, float]] = {}
        self.slots: dict[int, list[Array]] = {}  # by asynchronous rank: its optimizer variables
        self.averages: dict[int, tuple[int, Array]] = {}  # by rank: rows trained, moving average of the weights
        self.epoch_states = EpochOptimizerStates()  # the slots and averages at epochs' ends
        self.resumes = False  # True if it resumes from a saved state
        self.checkpoints: CheckpointManager = plan.checkpoints or CheckpointManager(None)
        self.restart_policy = RestartPolicy(restarts, plan.job.workers, rereadable=self.stream is None)
        self.initial: list[Array] = []  # the model's variables before this fit
        self.initial_copied = False  # whether ``initial`` is unaffected by changes of the model
        self.supervisor: AsyncSupervisor | None = None
        self.hangs: HeartbeatMonitor | None = None  # if workers do not wait for each other
        self.ready: set[int] = set()
        self.all_stats: dict[int, WorkerStats] = {}  # of ranks that have finished
        self.receiving = 0.0  # CPU time of this thread when it began to receive the last event
        self.waiting_rank: int | None = None  # the rank that waits for the control message after a batch
        self.postponed: deque[Event] = deque()  # events received while weights were fetched
        self.departed: list[Event] = []  # deaths of workers that had finished

    # -- the segments
    def open(self) -> None:
        """Create the segments: control block, weights, data, and that of the group or the center."""
        self.postponed.clear()
        self.departed.clear()
        self.waiting_rank, job, self.variables = None, self.job, model_variables(self.model)
        values = host_views(self.variables)
        self.initial = self.initial or list(values)
        index_of = {id(variable): index for index, variable in enumerate(self.variables)}
        self.optimizer_indices = [index_of[id(variable)] for variable in optimizer_variables(self.model)]
        slots = [values[index] for index in self.optimizer_indices]
        if job.asynchronous:  # copied, because on PyTorch a view changes with its variable
            slots = [np.array(array) for array in slots]
        slots = self.checkpoints.optimizer() or slots
        self.slots = {rank: self.checkpoints.optimizer(rank) or slots for rank in self.ranks}
        self.averages = self.checkpoints.averages()
        self.epoch_states, self.resumes = EpochOptimizerStates(), self.checkpoints.latest is not None
        for index, array in zip(self.optimizer_indices, self.slots[0], strict=True):
            values[index] = array
        self.control_block = ControlBlock.create(job.workers, job.epochs - job.initial_epoch, job.epoch_values)
        self.weights = SharedWeights.create(values, [index_of[id(variable)] for variable in large_frozen(self.model)])
        if not job.asynchronous:
            self.slots = {}
        self.entries, nbytes = serialization.layout(self.payload.arrays)
        self.data = Segment.create(max(nbytes, 64), "choros-data")
        for entry, array in zip(self.entries, self.payload.arrays, strict=True):
            self.data.write(array, entry["offset"])
        self.exchange_segment = create_exchange_segment(
            job, self.algorithm, vector_nbytes(self.model), partial(flat_vectors, self.model)
        )
        self.feeder = None if self.stream is None else StreamFeeder(self.stream, job)
        self.channel = BatchChannel() if job.synchronous and job.per_batch else None
        self.hangs = None if job.synchronous else HeartbeatMonitor(self.control_block, job)
        self.center: SharedMemoryParameterServer | None = None
        self.snapshots: CenterSnapshots | None = None
        if job.asynchronous and self.exchange_segment is not None:
            self.center = SharedMemoryParameterServer(self.exchange_segment, self.algorithm, None, job.workers)
            self.supervisor = AsyncSupervisor(self, self.center)
            if job.watched:
                self.snapshots = CenterSnapshots.create(*flat_vectors(self.model))
        best = BestMemberSlots.create(self.weights.nbytes) if job.ensemble else None
        self.best = None if best is None else BestMemberSlots(best, self.weights.entries, self.control_block)

    def close(self) -> None:
        """Release the segments."""
        if self.channel is not None:
            self.pool.unwatch(self.channel.records)
        shared = (self.center, self.snapshots, self.best, self.channel, self.control_block, self.weights, self.data)
        for part in (self.feeder, *shared, self.exchange_segment):
            if part is not None:
                part.close()

    # -- the run
    def run(self) -> RunRecord:
        """Train the model, and return the record of the run.

        Raises:
            WorkerFailedError: a worker raised, died or hung, and no restart was left.
        """
        with self.checkpoints.listening(self.ask):
            self.callbacks.fetch = self.fetch
            self.callbacks.lazy.stays = True  # no other code in this process uses the model: workers have copies
            while True:
                try:
                    self.pool = self.restart_policy.start(self.workers)
                    return self._run()
                except WorkerFailedError as error:
                    if not self.prepare_restart(error):
                        raise

    def ask(self) -> None:
        """Request a checkpoint from the workers, after which this process ends."""
        self.control_block.request_end()

    def prepare_restart(self, error: WorkerFailedError) -> bool:
        """Prepare a restart of all workers from the last saved state. Return False if no restart is possible."""
        if not self.restart_policy.retry:
            return False
        self.checkpoints.drop_incomplete()
        self.job = self.checkpoints.resumed_config(self.first_job)
        position = (self.job.initial_epoch, self.job.initial_batch)
        self.restart_policy.count(error, position, all_ranks=True)
        return True

    def _run(self) -> RunRecord:
        self.open()
        try:
            self.send()
            all_stats = self.follow()
            self.initial = []  # frees each initial value when the trained one replaces it
            self.fetch()
            if self.averages:
                assign_average(self.model, mean_of(self.averages), finalize=True)
        except (KeyboardInterrupt, SystemExit) as error:
            # First the kill: no worker may write the weights while they are read.
            self.workers.kill()
            self.waiting_rank = None  # no rank replies to a request for weights any more
            self.fetch()  # an interrupted run keeps what it has learned, as ``fit`` of plain Keras does
            if isinstance(error, SystemExit):  # the end was requested
                self.callbacks.end()
            raise
        except WorkerFailedError:
            if not self.restart_policy.retry:
                self.workers.kill()
            for variable, value in zip(self.variables, self.initial, strict=False):  # empty if all workers had finished
                variable.assign(value)  # later weights may have been fetched for callbacks
            raise
        except BaseException:
            self.workers.kill()
            raise
        finally:
            self.callbacks.lazy.disarm()
            self.close()
        transport = SharedMemoryParameterServer.kind if self.job.asynchronous else "nothing"
        if self.job.synchronous and self.job.workers > 1:
            transport = SharedGroup.kind
        startup, losses = self.started - self.begun, list(self.losses.values())
        record = RunRecord.of(self.algorithm, self.job.mode, all_stats, startup, losses, transport)
        return replace(record, restarts=tuple(self.restart_policy.done), keeping=record.keeping + self.checkpoints.busy)

    def send(self) -> None:
        """Send the job to its ranks."""
        task = messages.WorkerTask(
            self.job,
            self.weights.layout,
            messages.DataLayout(self.entries, len(self.payload.model.arrays), self.payload.model.foreign),
            depth=0 if self.stream is None else self.stream.depth,
            ahead=0 if self.stream is None else self.stream.ahead,
            resumes=self.job.asynchronous and self.checkpoints.latest is not None,
            snapshots=self.snapshots is not None,
            best=self.best is not None,
        )
        ring = self.feeder and self.feeder.ring.segment
        shared = (self.snapshots and self.snapshots.segment) or (self.best and self.best.segment)
        weights = (self.weights.common, self.weights.frozen)
        segments = (self.control_block.segment, *weights, self.data, ring, self.exchange_segment, shared)
        self.fds = [segment.fd for segment in segments if segment]
        self.started = self.started or time.perf_counter()
        for rank in self.ranks:
            part = None
            if self.checkpoints.latest is not None:
                part = self.slots_of(rank) if self.job.asynchronous else self.checkpoints.latest.of_rank(rank)
            self.send_task(rank, task, part, [] if self.channel is None or rank else self.channel.fds)
        self.weights.fill()
        self.task = task
        if self.channel is not None:
            self.pool.watch(self.channel.records, 0, header_of(messages.BatchRecorded()))
        if self.feeder is not None:
            self.feeder.start()

    def send_task(self, rank: int, task: messages.WorkerTask, part: Part | None, fds: Sequence[int] = ()) -> None:
        """Send a rank its task, the state from which it resumes, and its descriptors of the batch channel."""
        state_layout, state = to_blobs(part) if part else ({}, [])
        task = replace(task, state=state_layout, batch_channel=bool(fds))
        blobs = [self.payload.model.code, *self.payload.blobs, *state]
        self.pool.call(rank, "choros.training.worker.main:serve", header_of(task), blobs, [*self.fds, *fds])

    def follow(self) -> list[WorkerStats]:
        """Process events until all ranks have finished: start training, run callbacks, detect failures and hangs."""
        self.ready, self.all_stats, self.begun_training = set(), {}, False
        beats, last_moved, polled_at = self.control_block.step_counts(), time.monotonic(), 0.0
        while len(self.all_stats) < self.job.workers:
            # Thousands of records may come in a second. The checks of ``poll`` must not wait for the last one.
            while self.channel is not None and last_moved - polled_at < _POLL_SECONDS and not self.postponed:
                if not self.pool.wait_for(self.channel.records, _POLL_SECONDS):
                    break
                last_moved = self.record()
            self.receiving = time.thread_time()
            event = self.next(0.5)
            if event is not None and isinstance(event[1], messages.BatchRecorded):
                last_moved = self.record()
            self.poll()
            polled_at = time.monotonic()
            if not np.array_equal(beats, latest := self.control_block.step_counts()) or event is not None:
                beats, last_moved = latest, polled_at
            if event is None:
                self.check_progress(beats, last_moved)
            elif not isinstance(event[1], messages.BatchRecorded):
                self.handle(*event)
                last_moved = time.monotonic()
        if self.supervisor is not None:
            self.supervisor.save()
        return [self.all_stats[rank] for rank in self.ranks]

    def poll(self) -> None:
        """Check for conditions without an event: an error of a writer or reader thread, a request to end, a hang."""
        self.checkpoints.poll()
        if self.feeder is not None and self.feeder.error is not None:
            raise self.feeder.error
        if self.hangs is not None:
            self.hangs.poll()
        if self.supervisor is not None:
            self.supervisor.watch(self.all_stats)
        if self.hangs is not None and (late := self.hangs.overdue(self.job.timeout, self.all_stats, self.pool.stopped)):
            self.hung(self.hangs.beats, self.job.timeout, late[0])

    def check_progress(self, beats: Array, last_moved: float) -> None:
        """Fail if no rank has made a step since the time ``last_moved``, for longer than ranks wait for each other."""
        starting = not beats.all() or (self.hangs is not None and self.hangs.starting)
        exceeded = without_progress(self.job, bool(starting), time.monotonic() - last_moved, self.pool.stopped)
        if exceeded is not None:
            self.hung(beats, *exceeded)

    def handle(self, rank: int, message: Any, blobs: Any) -> None:
        """Process an event of a worker: a message of ``WORKER_EVENTS``, or a RankFailure; ignore other events."""
        if isinstance(message, RankFailure):
            self.handle_failure(rank, message)
        elif isinstance(message, messages.Ready):
            self.handle_ready(rank)
        elif isinstance(message, messages.BatchEnded):
            self.handle_batch(rank, message)
        elif isinstance(message, messages.EpochEnded):
            self.handle_epoch_end(message)
        elif isinstance(message, messages.StateSaved):
            complete = self.checkpoints.take(rank, from_blobs(message.part, blobs), message.asked, self.job.workers)
            self.checkpoints.busy += time.thread_time() - self.receiving
            if complete and self.checkpoints.end_requested:
                raise self.checkpoints.flush_for_exit()
        elif isinstance(message, messages.OptimizerSent):
            self.take_optimizer(rank, *from_blobs(message.part, blobs))
        elif isinstance(message, messages.WorkerDone):
            self.all_stats[rank] = message.stats
            self.files |= message.files
            self.lanes[rank] = [bytes(blobs.pop(0)) for _ in range(message.lanes)]
            if blobs:
                self.members[rank] = (message.score, [np.frombuffer(bytes(blob), np.uint8) for blob in blobs])

    def handle_failure(self, rank: int, report: RankFailure) -> None:
        """End the run, unless the worker had finished or is replaced."""
        if report.died and rank in self.all_stats:  # recorded: it may be the cause of a later failure
            self.departed.append((rank, report, []))
        elif rank in self.all_stats or self.supervisor is None or not self.supervisor.revive(rank, report):
            self.fail(rank, report, self.all_stats)

    def handle_ready(self, rank: int) -> None:
        """Start training when all ranks are ready. A rank that is restarted later starts at once."""
        self.ready.add(rank)
        if self.begun_training:
            self.publish(self.callbacks.begin(self.job.initial_epoch), ranks=[rank])
        elif len(self.ready) == self.job.workers:
            self.begun_training, self.restart_policy.idle = True, set()
            self.publish(self.callbacks.begin(self.job.initial_epoch), everyone=True)

    def handle_batch(self, rank: int, message: messages.BatchEnded) -> None:
        """Run the callbacks of a batch."""
        if self.channel is not None:
            self.channel.learn(message.logs)
        if self.job.per_batch:
            self.batch(rank, message.epoch, message.step, message.logs)
        else:
            self.callbacks.batch(message.epoch, message.step, message.logs)

    def handle_epoch_end(self, message: messages.EpochEnded) -> None:
        """Run the callbacks of an epoch's end, and open the next epoch for asynchronous ranks."""
        epoch, logs = message.epoch, message.logs
        if self.job.asynchronous and self.job.per_batch:
            self.receive_states(epoch)  # rank 0 has sent its batches already, but on another connection than this event
            batches = [item for item in self.postponed if isinstance(item[1], messages.BatchEnded)]
            for event in [item for item in batches if item[1].epoch <= epoch]:
                self.postponed.remove(event)
                self.handle(*event)
        if "loss" in logs:
            self.losses[epoch] = (message.seconds, epoch, logs["loss"])
        self.publish(self.callbacks.epoch_end(epoch, logs, message.metrics))
        next_epoch = self.callbacks.epoch  # the callbacks of an epoch that was reported too early have not run yet
        self.control_block.allow_epoch(epoch + 1 if next_epoch is None else next_epoch)
        if self.hangs is not None:  # ranks that waited for these callbacks do not count as hung
            self.hangs.restart_clock()
        if self.supervisor is not None:
            self.supervisor.ended()

    def record(self) -> float:
        """Process a record of rank 0's batch channel; return the time."""
        assert self.channel is not None  # noqa: S101 - only a batch channel has such events
        self.batch(0, *self.channel.read())
        return time.monotonic()

    def batch(self, rank: int, epoch: int, step: int, logs: dict[str, float]) -> None:
        """Run the callbacks of a batch, and reply to the rank that waits for the control message."""
        self.waiting_rank = None if self.job.asynchronous else rank
        control = self.callbacks.batch(epoch, step, logs)
        self.waiting_rank = None
        if self.hangs is not None:
            self.hangs.restart_clock(rank)
        if self.channel is not None and control == NO_CHANGE:
            self.channel.send_no_change()
        else:
            self.publish(control, ranks=[rank])

    def next(self, timeout: float) -> Event | None:
        """Return the next event of any worker, or None.

        Raises:
            PeerLostError: all workers have ended, and all their events were returned.
        """
        if self.postponed:
            return self.postponed.popleft()
        try:
            return self.receive(timeout)
        except CommTimeoutError:
            return None

    def receive(self, timeout: float) -> Event:
        """Return the next event that arrives; raise as ``Pool.receive`` does."""
        rank, event, blobs = self.pool.receive(timeout)
        return rank, messages.WORKER_EVENTS.decode(event) if isinstance(event, dict) else event, blobs

    def publish(self, control: TrainerControl, *, everyone: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Send a control message to waiting ranks; for asynchronous ranks publish it in the control block."""
        if control.weights and self.job.ensemble and not everyone:
            raise InvalidInputError(
                "A callback has set weights of an Ensemble, whose members never take any: set those that all are to "
                "begin with before training begins, or use an algorithm whose workers exchange."
            )
        if control.variables:
            # Before the message: a worker reads the values as soon as it sees it.
            self.weights.write(host_views(self.variables))
            if self.center is not None and control.weights:
                self.center.replace(*flat_vectors(self.model))
        if not self.job.synchronous:
            self.control_block.publish(control, self.callbacks.epoch)
        waiting = self.ranks if self.job.synchronous or everyone else []
        for rank in waiting if ranks is None else ranks:
            self.send_to(rank, messages.Control(control))

    def send_to(self, rank: int, message: object) -> None:
        """Send a worker a message. If it has ended, raise nothing, because the report of its end follows."""
        with suppress(PeerLostError):
            self.pool.send(rank, header_of(message))

    # -- weights
    def fetch(self, epoch: int | None = None) -> None:
        """Load weights and rank 0's optimizer variables into the given model.

        Args:
            epoch: int. If asynchronous, load the center that was validated at this epoch's end. None: the latest.
        """
        self.copy_initial()
        if self.center is not None:
            vectors = flat_vectors(self.model)
            if epoch is None or self.snapshots is None or not self.snapshots.read(epoch, *vectors):
                self.center.read(*vectors)
            assign_vectors(self.model, *vectors)
            optimizer, averages = None, self.averages
            if epoch is not None:
                self.receive_states(epoch)
                optimizer = self.epoch_states.optimizer(epoch)
                averages = {**averages, **self.epoch_states.averages(epoch)}
            assign_optimizer(self.model, optimizer or self.slots[0])
            if averages:
                assign_average(self.model, mean_of(averages))
            return
        if self.waiting_rank is not None:
            self.have_written(self.waiting_rank)
        elif self.best is not None:
            self.best.show(self.model, max(self.losses, default=None) if epoch is None else epoch)
            return
        changed, views = self.weights.changed(), self.weights.views()
        assign_views([self.variables[index] for index in changed], [views[index] for index in changed])

    def copy_initial(self) -> None:
        """Copy the initial weights if they share memory with the model, which is about to change (PyTorch).

        Frozen weights are not copied: the shared memory that holds them is never written.
        """
        if self.workers.backend != "torch" or self.initial_copied or not self.initial:
            return
        frozen = self.weights.initial_values()
        self.initial = [frozen[i] if i in frozen else np.array(array) for i, array in enumerate(self.initial)]
        self.initial_copied = True

    def have_written(self, rank: int) -> None:
        """Request the weights for callbacks from a rank that waits for a control message, and wait for them.

        Raises:
            WorkerFailedError: the rank has failed.
            CommTimeoutError: the rank does not reply in time.
        """
        for sender, event, _ in self.postponed:
            if sender == rank and isinstance(event, RankFailure):
                self.fail(sender, event)
        self.send_to(rank, messages.ShowWeights())
        deadline = time.monotonic() + self.job.timeout
        while time.monotonic() < deadline:
            with suppress(CommTimeoutError):
                sender, event, blobs = self.receive(0.5)
                if sender == rank and isinstance(event, messages.WeightsShown):
                    self.callbacks.show_metrics(event.metrics)
                    return
                if sender == rank and isinstance(event, RankFailure):
                    self.fail(sender, event)
                self.postponed.append((sender, event, blobs))
        raise CommTimeoutError(f"rank {rank} sent no weights for a callback in {self.job.timeout:g} s: see its output.")

    def receive_states(self, epoch: int) -> None:
        """Receive the optimizers' states of an epoch's end. Each rank has sent its state before it ended the epoch.

        If training resumes from a checkpoint, a rank may have ended that epoch in the earlier run.
        """
        ranks = self.ranks if averages_of(self.model.optimizer) else self.ranks[:1]
        deadline = time.monotonic() + self.job.timeout

        def missing(rank: int) -> bool:
            last = self.epoch_states.last(rank)
            return last < epoch and (last >= 0 or not self.resumes)

        while any(map(missing, ranks)):
            try:
                rank, event, blobs = self.receive(0.5)
            except CommTimeoutError:
                if time.monotonic() > deadline:
                    return
                continue
            except PeerLostError:  # all workers have ended
                return
            if isinstance(event, messages.OptimizerSent):
                self.take_optimizer(rank, *from_blobs(event.part, blobs))
                continue
            self.postponed.append((rank, event, blobs))
            if isinstance(event, RankFailure) and rank in ranks:
                return

    def take_optimizer(self, rank: int, facts: dict[str, Any], groups: Groups) -> None:
        """Store the optimizer's state of an asynchronous worker; see ``CallbackChannel.optimizer``."""
        if groups["average"]:
            self.averages[rank] = (facts["rows"], np.array(groups["average"][0]))
        if groups["optimizer"]:
            self.slots[rank] = [np.array(array) for array in groups["optimizer"]]
        if (epoch := facts["epoch"]) is not None:
            average = [self.averages[rank][1]] if groups["average"] else []
            part = facts, {"optimizer": self.slots[rank] if groups["optimizer"] else [], "average": average}
            self.epoch_states.put(rank, epoch, part, epoch if self.callbacks.epoch is None else self.callbacks.epoch)

    def slots_of(self, rank: int) -> Part:
        """Return an asynchronous worker's last optimizer state, for a checkpoint or for its new process."""
        rows, average = self.averages.get(rank, (0, None))
        return {"rows": rows}, {"optimizer": self.slots[rank], "average": [] if average is None else [average]}

    def last(self) -> list[Array]:
        """Return the last center as a list of arrays in the order of ``model.trainable_variables``."""
        if self.center is not None:
            trainable, statistics = flat_vectors(self.model)
            self.center.read(trainable, statistics)
            return split_vector(self.model, trainable)
        views = self.weights.views()
        index_of = {id(variable): index for index, variable in enumerate(self.variables)}
        return [np.array(views[index_of[id(variable)]]) for variable in self.model.trainable_variables]

    def gather_members(self) -> list[Any]:
        """Return an Ensemble's models, and set the given model to the best one; [] for other algorithms."""
        if not self.members:
            return []
        scores, weights = zip(*(self.members[rank] for rank in self.ranks), strict=True)
        return unpack_members(self.model, scores, weights)

    # -- failure
    def fail(self, rank: int, report: RankFailure, done: Iterable[int] = ()) -> None:
        """End the run: wait at most 5 seconds for unfinished ranks to write the last center, then raise the failure."""
        reason = f"rank {rank} failed"
        if self.channel is not None:  # records are no longer read
            self.pool.unwatch(self.channel.records)
        # Synchronous ranks wait for the failed one inside the group, asynchronous ones poll the control block.
        if self.exchange_segment is not None and self.center is None:
            SharedGroup.abort(self.exchange_segment, reason)
        self.control_block.publish(TrainerControl(stop=True))
        self.postponed.extend(self.departed)
        first, finished, deadline = (rank, report), {rank, *done}, time.monotonic() + 5.0
        finished |= set(report.missing)  # they do not answer
        finished -= {other for other, *_ in self.departed}  # their events are read again, because one may be the cause
        died = {rank} if report.died else set()
        while len(finished) < self.job.workers and time.monotonic() < deadline:
            try:
                item = self.next(0.2)
            except PeerLostError:  # the remaining ranks had finished before they ended
                break
            if item is None:
                continue
            other, event, _ = item
            if isinstance(event, (RankFailure, messages.WorkerDone)):
                finished.add(other)
            if isinstance(event, RankFailure) and event.died:
                died.add(other)
            # Until now only ranks that lost a peer have reported. This report may be that of the peer.
            if isinstance(event, RankFailure) and first[1].is_echo:
                first = (other, event)
            # Such a rank waits for a control message, and looks at neither the group nor the control block.
            if isinstance(event, (messages.Ready, messages.EpochEnded)):
                self.publish(TrainerControl(stop=True), everyone=True)
        (rank, report), weights = first, self.last()
        self.restart_policy.unfit = died | set(report.missing) | (set(self.ranks) - finished)
        self.restart_policy.judge(report, rank)
        if len(report.missing) == 1:  # the rank that waited in vain is not the cause
            raise self.pool.hung(report.missing[0], f"does not answer: {report.message}", weights)
        raise self.pool.failure(rank, report, weights)

    def hung(self, beats: Array, limit: float, rank: int | None = None) -> None:
        """Raise for a hung rank, by default the one for which the others wait."""
        rank = hung_rank(beats, self.exchange_segment if self.center is None else None) if rank is None else rank
        # All ranks get new processes: those that wait for the hung one do not read messages either.
        self.restart_policy.unfit = set(self.ranks)
        self.restart_policy.judge(None)
        reason = f"made no step for {limit:.0f} s (after {counted(int(beats[rank]), 'step')}); the run was ended. "
        reason += "If a step really takes that long, give the Trainer a larger timeout."
        raise self.pool.hung(rank, reason, self.last())
