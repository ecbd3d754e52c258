"""A Spark task as a worker: it joins the other tasks, trains on its rows, and returns the result."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choros.cluster.hardware.freed_memory import keep_freed_memory
from choros.comm.bootstrap.init import join_by_sockets, leave
from choros.comm.group import Group
from choros.comm.messages import decode, header_of
from choros.comm.single_rank_group import SingleRankGroup
from choros.comm.tcp.rpc import RpcAddress
from choros.errors import ChorosError, InvalidInputError
from choros.pickling import loads
from choros.spark.barrier import Task
from choros.spark.log_forwarding import LogForwarder
from choros.spark.task_data import BroadcastData, PartitionRows
from choros.spark.task_process import keras_there
from choros.training.callback_runner import CallbackRunner
from choros.training.executors import in_job
from choros.training.executors.remote_callbacks import RemoteCallbackRunner
from choros.training.model_io.serialization import PackedModel
from choros.training.payload import put, shown, unpack_algorithm
from choros.training.spec import FitConfig, FitRequest, WorkerStats
from choros.training.worker.main import redraw_member
from choros.training.worker.messages import CallbackGreeting
from choros.types import Array

_DIAL = 5.0  # seconds to connect to the driver; without a connection, the callbacks run in this task


@dataclass(frozen=True)
class TaskResult:
    """Result of rank 0, or of a member of an ensemble, without its arrays.

    Attributes:
        all_stats: list of WorkerStats.
        losses: list of tuples. As in ``RunRecord.of``.
        transport: str. The engine of the exchanges.
        lanes: int. The number of lanes of a timeline: the first arrays. The others are the weights.
        sizes: list of int. The number of bytes of each array.
        epochs: list of int, or None if the driver ran the callbacks. The epochs of the history.
        history: dict. The values of each epoch by name; empty if the driver ran the callbacks.
        score: float. The loss by which the members of an ensemble are compared.
    """

    all_stats: list[WorkerStats]
    losses: list[tuple[float, int, float]]
    transport: str
    lanes: int
    sizes: list[int]
    epochs: list[int] | None
    history: dict[str, Any]
    score: float


@dataclass(frozen=True)
class TrainTask:
    """A fit in the form that is sent to the tasks.

    Attributes:
        job: FitConfig as JSON.
        model: PackedModel.
        keras: dict. Backend and settings of the driver's Keras; see ``keras_here``.
        weights: list of bytes. The values of the variables of rank 0's model.
        home: RpcAddress. The address of the driver.
        callbacks: bytes or None. The user's callbacks by cloudpickle, for a task that cannot connect to the driver.
        rows: PartitionRows or BroadcastData. The source of the batches.
        steps: int or None. Global batches in an epoch.
        watched: bool. Whether there are user-defined callbacks.
        echo: bool. Whether the driver shows the output of the tasks.
    """

    job: dict[str, Any]
    model: PackedModel
    keras: dict[str, Any]
    weights: list[bytes]
    home: RpcAddress
    callbacks: bytes | None
    rows: PartitionRows | BroadcastData
    steps: int | None = None
    watched: bool = False
    echo: bool = False

    def __call__(self, task: Task) -> bytes:
        """Train; rank 0 returns the record of the run and the weights. In an ensemble, each member returns them."""
        if not task.gpus:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        keras_there(self.keras)
        keep_freed_memory(one_arena=self.keras["backend"] == "jax")
        job = FitConfig(**self.job)
        member = job.ensemble
        if member:
            job = _member(job, task.rank)
        try:
            with LogForwarder(self.home, task.rank) if self.echo else nullcontext():
                group: Group = SingleRankGroup()
                if task.size > 1 and not member:
                    how = (task.swap, task.secret, task.address, job.first_timeout)
                    group = join_by_sockets(task.rank, task.size, *how)
                return self._train(task, job, group, member)
        finally:
            # Spark uses this process for further tasks, which must not find the group of this run.
            leave()

    def _train(self, task: Task, job: FitConfig, group: Group, member: bool) -> bytes:
        rank = 0 if member else task.rank
        source, validation = self.rows.sources(task, job, group, member)
        if validation is None:
            job = replace(job, validation=None)
        begun, model = time.perf_counter(), self.model.unpack()
        if rank == 0:
            put(model, [np.frombuffer(array, np.uint8) for array in self.weights])
            if task.rank:  # a member of an ensemble, but not the first one
                redraw_member(model, int(self.job["seed"]), task.rank)
            callbacks = self._callback_runner(model, job, task)
        else:  # the weights come from rank 0
            callbacks = CallbackRunner(model, None, 0, job.epochs, self.steps)
        algorithm = unpack_algorithm(job, self.rows.code if isinstance(self.rows, BroadcastData) else [])
        request = FitRequest(model, algorithm, job, source, validation, callbacks, self.model, begun)
        result = in_job.run(request, rank)
        if rank:
            return b""
        arrays = [*(np.frombuffer(lane, np.uint8) for lane in result.lanes), *shown(model)]
        history = callbacks.history if isinstance(callbacks, CallbackRunner) else None
        values = history.history if history else {}
        head = TaskResult(
            result.all_stats,
            result.losses,
            result.transport,
            len(result.lanes),
            [array.size for array in arrays],
            list(history.epoch) if history else None,
            values,
            _score(values),
        )
        text = json.dumps(header_of(head), default=float).encode()
        return b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])

    def _callback_runner(self, model: Any, job: FitConfig, task: Task) -> CallbackRunner | RemoteCallbackRunner:
        """Return a runner for the driver's callbacks if the driver can be reached, else for copies in this task."""
        if task.rank == 0 and not (job.workers == 1 and task.size > 1):
            try:
                connection = self.home.dial(CallbackGreeting(0), "The driver", _DIAL)
            except ChorosError:
                pass
            else:
                return RemoteCallbackRunner(connection, model, job)
        if self.watched and self.callbacks is None:
            raise InvalidInputError(
                f"{os.uname().nodename} cannot connect to the driver at {self.home.place}, and the callbacks "
                "cannot be sent: allow that connection, or give callbacks that cloudpickle can write."
            )
        return CallbackRunner(model, loads(self.callbacks) if self.callbacks else None, 0, job.epochs, self.steps)


def results(payload: bytes) -> tuple[TaskResult, list[Array]]:
    """Split the result of a task into the message, and the lanes of a timeline and the weights, as arrays of bytes."""
    length = int.from_bytes(payload[:4], "little")
    head = decode(TaskResult, json.loads(payload[4 : 4 + length]))
    arrays, offset = [], 4 + length
    for size in head.sizes:
        arrays.append(np.frombuffer(payload, np.uint8, size, offset))
        offset += size
    return head, arrays


def _member(job: FitConfig, rank: int) -> FitConfig:
    """Return the fit of one member of an ensemble: one worker, with a separate seed, and no exchange."""
    return replace(
        job,
        algorithm={"name": "Single"},
        mode="sync",
        workers=1,
        batch_size=-(-job.batch_size // job.workers),
        seed=(job.seed + 7919 * rank) % 2**31,
        averaged_metrics=[],
    )


def _score(history: dict[str, list[float]]) -> float:
    """Return the last validation loss; without validation the last loss, or infinity if there is none."""
    for name in ("val_loss", "loss"):
        if history.get(name):
            return float(history[name][-1])
    return float("inf")
