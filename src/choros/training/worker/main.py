"""The work of a worker process: unpack model and data, connect to the other ranks, train, send the results."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from choros.backends import Replica, backend_name, forget
from choros.backends.devices import list_devices
from choros.backends.devices.weight_layout import laid_out
from choros.backends.hide_tensorflow import lean
from choros.cluster.hardware.freed_memory import keep_freed_memory, return_freed_memory
from choros.cluster.hardware.gpus import GIVEN
from choros.comm.group import Group
from choros.comm.messages import decode, header_of
from choros.comm.shared_values import share_message
from choros.comm.shm.ring_buffer import Ring
from choros.comm.shm.segment import Segment
from choros.consistency.versions import check_versions
from choros.data import Source
from choros.errors import InvalidInputError
from choros.training.async_control.best_member import BestMemberSlots
from choros.training.async_control.center_snapshots import CenterSnapshots
from choros.training.async_control.control_block import ControlBlock
from choros.training.checkpoint.snapshot import Part, from_blobs, raw, to_blobs
from choros.training.executors.batch_channel import WorkerBatchChannel
from choros.training.executors.shared_weights import SharedWeights
from choros.training.executors.stream_feeder import StreamReader
from choros.training.model_io.redraw import redraw
from choros.training.payload import unpack_algorithm, unpack_payload
from choros.training.spec import FitRequest, Show, TrainerControl
from choros.training.worker import reuse
from choros.training.worker.comm_setup import CommHandles
from choros.training.worker.context import WorkerContext
from choros.training.worker.loaded_files import loaded_files
from choros.training.worker.loop.train import train
from choros.training.worker.messages import (
    REPLIES,
    BatchEnded,
    Control,
    EpochEnded,
    OptimizerSent,
    Ready,
    StateSaved,
    WeightsShown,
    WorkerDone,
    WorkerTask,
)
from choros.training.worker.rank_program import run_rank
from choros.training.worker.setup import adding, build_replica, join_exchange, rank_devices

if TYPE_CHECKING:
    import keras

_LARGE_MODEL_BYTES = 64 << 20  # bytes of weights from which a model is freed after its job
_MODELS_PER_CLEANUP = 16  # number of models after which a worker frees their compiled functions
_models = count(1)
_process_begun = time.time()  # before this process has loaded a module of the user


class PipeCallbackChannel:
    """The channel to callbacks over the worker's socket connection with the caller that started it."""

    def __init__(
        self,
        link: Any,
        group: Group,
        *,
        synchronous: bool,
        per_batch: bool,
        batch_channel: WorkerBatchChannel | None = None,
    ) -> None:
        self.link, self.group, self.synchronous, self.per_batch = link, group, synchronous, per_batch
        self.batch_channel = batch_channel

    def begin(self) -> TrainerControl:
        """Report that this rank is ready, and wait for the control message that starts training."""
        self._send(Ready())
        return self._control()

    def batch(self, epoch: int, step: int, logs: dict[str, float] | None, show: Show | None = None) -> TrainerControl:
        """Report a step. With batch hooks, all synchronous ranks return rank 0's control message."""
        control = TrainerControl()
        if logs is not None:
            self.done(epoch, step, logs)
            control = self.decided(show) if self.per_batch else control
        return self.spread_control(control) if self.per_batch and self.synchronous else control

    def done(self, epoch: int, step: int, logs: dict[str, float], show: Show | None = None) -> None:
        """Send the logs of a step."""
        if self.batch_channel is None or not self.batch_channel.report(epoch, step, logs):
            self._send(BatchEnded(epoch, step, logs))

    def decided(self, show: Show | None) -> TrainerControl:
        """Wait for the control message; serve requests for weights until it arrives."""
        # The reply "continue" comes over the pipe; all other messages come over the socket.
        while self.batch_channel is None or not self.batch_channel.no_change_arrived():
            control = self._message(show)
            if control is not None:
                return control
        return TrainerControl()

    def spread_control(self, control: TrainerControl) -> TrainerControl:
        """Return rank 0's control message. Collective."""
        return share_message(self.group, control)

    def epoch_end(
        self, epoch: int, logs: dict[str, float] | None, seconds: float, metric_values: list[float]
    ) -> TrainerControl:
        """Report the end of an epoch. If synchronous, wait for the control message."""
        if logs is not None:
            self._send(EpochEnded(epoch, logs, metric_values, seconds))
        return self._control() if self.synchronous else TrainerControl()

    def save_state(self, part: Part, end_requested: bool) -> None:
        """Send this rank's state to the caller, which writes it."""
        head, blobs = to_blobs(part)
        self._send(StateSaved(head, end_requested), blobs)

    def optimizer(self, part: Part) -> None:
        """Send this rank's optimizer state to the caller."""
        head, blobs = to_blobs(part)
        self._send(OptimizerSent(head), blobs)

    def poll(self) -> None:
        """Do nothing: the callbacks run in the caller."""

    def _control(self) -> TrainerControl:
        while (control := self._message(None)) is None:
            pass
        return control

    def _message(self, show: Show | None) -> TrainerControl | None:
        """Receive one message: return a control message, or reply to a request for weights and return None."""
        message = REPLIES.decode(self.link.receive(None)[0])
        if isinstance(message, Control):
            return message.control
        self._send(WeightsShown([] if show is None else show()))
        return None

    def _send(self, message: object, blobs: Sequence[Any] = ()) -> None:
        self.link.send(header_of(message), blobs)


def run(link: Any, task: WorkerTask, blobs: list[Any], fds: list[int]) -> None:
    """Train one rank of a job.

    Args:
        link: the connection with the caller.
        task: the job of this rank.
        blobs: the model's pickle, the sources' pickles, then the arrays of the state to resume from.
        fds: descriptors of the segments: control block, weights, frozen weights, data; then, as far as they exist, of
            the stream, of the group or the center, of the snapshots or the best member; then two of ``BatchChannel``.
    """
    arrived = time.perf_counter()
    job, rank, state = task.job, link.rank, None
    if task.state:
        first = len(blobs) - len(task.state["kinds"])
        state, blobs = from_blobs(task.state, blobs[first:]), blobs[:first]
    keep_freed_memory(one_arena=backend_name() == "jax")  # before the backend starts its threads
    configure_keras(job.keras)
    check_gpus()
    batch_channel = WorkerBatchChannel(link, [fds.pop(-2), fds.pop(-1)]) if task.batch_channel else None
    with ExitStack() as stack:
        if batch_channel is not None:
            stack.callback(batch_channel.close)
        weights = stack.enter_context(closing(SharedWeights.attach(task.weights, fds[1], fds[2])))
        data = stack.enter_context(closing(Segment.attach(fds[3])))
        epochs = job.epochs - job.initial_epoch
        control_block = stack.enter_context(
            closing(ControlBlock(Segment.attach(fds[0]), job.workers, epochs, job.epoch_values))
        )
        stack.enter_context(signals_ignored((job.checkpoint_schedule or {}).get("signals", ())))
        devices = rank_devices(job, rank)
        layout = stack.enter_context(laid_out(job.layout))
        code = [bytes(blob) for blob in blobs]
        unpacked, validation, written = unpack_payload(job, task.data, code, data)
        algorithm = unpack_algorithm(job, code[1:])
        source: Source = unpacked
        if task.depth:  # a stream: the caller sends its first batch in place of the source
            ring = Ring(Segment.attach(fds.pop(4)), job.workers, task.depth)
            source = stack.enter_context(closing(StreamReader(unpacked, ring, rank, job.timeout, task.ahead)))
        small = weights.nbytes <= reuse.MOST and not (devices or weights.initial_values())
        sample = source.sample(job.batch_size) if small else None
        key = None if sample is None else reuse.key_of(job, adding(job, algorithm), written, sample)
        replica = reuse.take(key)
        if replica is not None:
            replica.renew(weights.read())
            model = replica.model
        else:
            # Not at the end of a job: the next one may use the kept replica with its compiled functions.
            if next(_models) % _MODELS_PER_CLEANUP == 0:
                forget()
            model = written.unpack(*weights.lend(), weights.wait)
            weights.wait(len(weights.entries) - 1)  # from here on the worker writes weights
        if job.ensemble and rank > 0:  # the first member starts from the given weights
            redraw_member(model, job.seed, rank)
        if job.ensemble:
            source = source.part(rank, job.workers, job.seed)

        def connect(replica: Replica) -> CommHandles:
            """Connect to the other ranks through the driver's shared memory."""
            snapshots = CenterSnapshots(Segment.attach(fds.pop())) if task.snapshots else None
            best = BestMemberSlots(Segment.attach(fds.pop()), weights.entries, control_block) if task.best else None
            group, center = join_exchange(job, algorithm, fds[4] if fds[4:] else None, rank)
            return CommHandles(
                group, center, control_block, None, weights, snapshots, best, resources=[best, snapshots]
            )

        def train_rank(context: WorkerContext, comm: CommHandles) -> None:
            """Train, and send the results to the driver."""
            context.reporter = PipeCallbackChannel(
                link, comm.group, synchronous=job.synchronous, per_batch=job.per_batch, batch_channel=batch_channel
            )
            train(context)
            trained = raw(context.replica.snapshot()) if job.ensemble else []
            lanes = context.lane()
            done = WorkerDone(context.stats, context.score, len(lanes), loaded_files(_process_begun))
            link.send(header_of(done), [*lanes, *trained])

        if replica is None and key is not None and sample is not None:
            replica = build_replica(model, sample, adding(job, algorithm), job.averaged_metrics)
        request = FitRequest(model, algorithm, job, source, validation, None, written, arrived)
        with reuse.kept(key, replica):
            run_rank(
                request, rank, connect, train_rank,
                devices=devices, layout=layout, replica=replica, state=state, resumes=task.resumes,
            )  # fmt: skip


def serve(link: object, header: dict[str, Any], blobs: list[Any], fds: list[int]) -> None:
    """Train one rank of a job by ``run``, then free its model if it is large, and all memory that it does not use.

    ``pool_worker`` calls it. ``header`` is that of a ``WorkerTask``; ``blobs`` and ``fds`` are those of ``run``.

    A model is part of reference cycles. Without a garbage collection, which takes 30 ms, the models of several jobs
    would be in memory at once.
    """
    task = decode(WorkerTask, header)
    try:
        run(link, task, blobs, fds)
    finally:
        if task.weights["nbytes"] >= _LARGE_MODEL_BYTES:
            gc.collect()
        return_freed_memory()


def check_gpus() -> None:
    """Check that the backend uses a GPU, if this worker was given GPUs.

    Raises:
        InvalidInputError: the backend finds no GPU.
    """
    if os.environ.get(GIVEN) and not list_devices("gpu"):
        raise InvalidInputError(
            f"This worker on {os.uname().nodename} was given a GPU, and {backend_name()} sees none: it would train on "
            "the CPU. Repair what the backend needs for GPUs (driver, CUDA or ROCm libraries; see what it printed), or "
            "give devices='cpu'."
        )


@contextmanager
def signals_ignored(names: Sequence[str]) -> Iterator[None]:
    """Ignore these signals within this context, then restore their handlers.

    A scheduler signals all processes of a job, but only the caller may react.
    """
    before = {name: signal.signal(signal.Signals[name], signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


@lean()
def redraw_member(model: keras.Model, seed: int, rank: int) -> None:
    """Draw the weights of one member of an ensemble again, from (seed, rank)."""
    import keras

    # The factor separates the members' seeds from those of runs with the seeds that follow.
    keras.utils.set_random_seed((seed + 7919 * rank) % 2**31)
    redraw(model)


@lean()
def configure_keras(settings: dict[str, Any]) -> None:
    """Check the versions on which a pickle depends, then apply the caller's Keras settings to this process.

    Raises:
        InvalidInputError: this process has other versions than the caller.
    """
    import keras

    check_versions(settings["versions"])

    keras.config.set_floatx(settings["floatx"])
    keras.config.set_epsilon(settings["epsilon"])
    keras.config.set_image_data_format(settings["image_data_format"])
    keras.config.set_dtype_policy(keras.saving.deserialize_keras_object(settings["dtype_policy"]))
