"""A worker that trains alone and begins anew: from its last exchange, with what it had counted until then."""

from __future__ import annotations

import time
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np

from choros.param_server import sharded_snapshot, snapshot
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.spec import WorkerStats
from choros.training.worker.context import WorkerContext


def leave(run: WorkerContext, place: tuple[int, int]) -> None:
    """Leave on the board what a new process would need, before the first step and right after each exchange.

    Args:
        run: WorkerContext.
        place: the epoch, and how many of its batches are done.
    """
    begun = time.thread_time()
    figures = list(astuple(run.counted()))[1:-1]
    run.board.leave(run.rank, place, run.replica.iterations, figures, run.replica.metric_state())
    run.tally.keeping += time.thread_time() - begun


def take_up(run: WorkerContext) -> bool:
    """Begin where the last exchange was, or where the run begins; True where metrics of that epoch go on.

    What was trained after that exchange was never brought to the centre, and is trained again. The optimizer's count
    of steps goes on from the same place. Its slots are those that it left itself at the end of its last epoch; in a
    job, and of ranks that a launcher started, they are rank 0's.
    """
    run.begin = state_of(run.centre).position_of(run.centre, run.rank) or run.begin
    left = run.board.left(run.rank)
    if left is None:
        return False
    (epoch, batch), iterations, tally, state = left
    run.replica.iterations = max(0, iterations + between(run, (epoch, batch), run.begin))
    if run.replica.averages:
        begin_average(run.replica)
    if run.job.counts_on:
        figures = zip(fields(WorkerStats)[1:-1], tally.tolist(), strict=False)
        counted: dict[str, Any] = {field.name: int(v) if field.type == "int" else v for field, v in figures}
        run.tally = replace(run.tally, **counted)
        run.before = run.tally.seconds
    if epoch != run.begin[0]:
        return False
    run.replica.set_metric_state(state[: len(run.replica.metric_state())])
    return True


def between(run: WorkerContext, start: tuple[int, int], end: tuple[int, int]) -> int:
    """Return the steps from one place to another: a worker may have ended between its exchange and ``leave``."""
    steps = run.job.steps or run.source.steps(run.job.batch_size)
    if start[0] != end[0] and not steps:
        return 0
    return (end[0] - start[0]) * (steps or 0) + end[1] - start[1]


def begin_average(replica: Any) -> None:
    """Begin the moving average at the weights, where the optimizer has none yet: Keras does so at step 0 only."""
    average, weights = np.empty(replica.size, replica.dtype), np.empty(replica.size, replica.dtype)
    replica.get_average(average)
    if not average.any():
        replica.get(weights)
        replica.set_average(weights)


def state_of(centre: Any) -> Any:
    """Return what takes and puts back a centre's state: ``centre_state``, or the same for one between hosts."""
    return snapshot if isinstance(centre, SharedMemoryParameterServer) else sharded_snapshot
