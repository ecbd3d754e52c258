"""The program of every rank: build a replica, connect it to the other ranks, train it, and close all resources.

The caller passes two functions for the parts that differ. A worker of a pool (``training/worker/main.py``) connects
through shared memory of the driver, and sends its results to the driver. A rank of a job
(``training/executors/in_job.py``) connects through the group that the ranks have joined, and shares its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from choros.backends import Replica
from choros.training.checkpoint.snapshot import Part
from choros.training.spec import FitRequest
from choros.training.worker.comm_setup import CommHandles
from choros.training.worker.context import WorkerContext
from choros.training.worker.setup import adding, build_replica, seed_replica

if TYPE_CHECKING:
    import keras

ResultT = TypeVar("ResultT")


def run_rank(
    request: FitRequest,
    rank: int,
    connect: Callable[[Replica], CommHandles],
    train: Callable[[WorkerContext, CommHandles], ResultT],
    *,
    devices: Sequence[str] = (),
    layout: keras.distribution.ModelParallel | None = None,
    replica: Replica | None = None,
    state: Part | None = None,
    resumes: bool = False,
) -> ResultT:
    """Train one rank, and return what ``train`` returns.

    Args:
        request: the model and the sources of this rank, and its job.
        rank: int.
        connect: connects the replica to the other ranks. Random seeds are set after it, as they differ between ranks.
        train: sets the context's ``reporter``, trains, and returns the results.
        devices: the devices of this rank, if it has several.
        layout: the ``keras.distribution.ModelParallel`` with which the model was created (JAX).
        replica: a built replica, which the caller keeps; None builds one.
        state: the state from which this rank resumes. Of asynchronous ranks only the optimizer's state is used.
        resumes: whether this asynchronous rank has trained before, in an earlier process. It gets other random seeds.
    """
    job, algorithm = request.job, request.algorithm
    with ExitStack() as stack:
        if replica is None:
            sample, clone = request.source.sample(job.batch_size), request.written.unpack
            count = adding(job, algorithm)
            built: Replica = build_replica(request.model, sample, count, job.averaged_metrics, devices, layout, clone)
            stack.callback(built.close)
            replica = built
        # Before ``connect``, which gives rank 0's variables to all ranks of a job.
        if job.asynchronous and state is not None and (optimizer := state[1].get("optimizer")):
            replica.set_optimizer_state(optimizer)
        comm = connect(replica)
        stack.callback(comm.close)
        seed_replica(replica, job, rank, resumes)
        context = WorkerContext(
            rank=rank,
            job=job,
            algorithm=algorithm,
            replica=replica,
            source=request.source,
            validation=request.validation,
            group=comm.group,
            control_block=comm.control_block,
            weights=comm.weights,
            center=comm.center,
            arrived=request.begun,
            state=None if job.asynchronous else state,
            resumes=resumes,
            snapshots=comm.snapshots,
            best=comm.best,
        )
        return train(context, comm)
