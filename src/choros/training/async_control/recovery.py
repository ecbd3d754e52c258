"""Recovery of an asynchronous worker: its new process resumes from its last exchange, with the counts of that time."""

from __future__ import annotations

import time
from dataclasses import astuple, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.param_server import center_state, sharded_center_state
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.spec import WorkerStats
from choros.training.worker.context import WorkerContext

if TYPE_CHECKING:
    from choros.backends.replica import Replica
    from choros.comm.group import ParameterServer


def save_position(run: WorkerContext, position: tuple[int, int]) -> None:
    """Save in the control block the counts and metrics of a position. The position itself is in the center's header.

    Called before the first step, and right before each exchange commits its position in the center. The control block
    keeps this state and the one before, so the state of the center's position is one of the two at any time.

    Args:
        run: WorkerContext.
        position: the epoch, and the number of its batches that are done.
    """
    begun = time.thread_time()
    figures = list(astuple(run.counted()))[1:-1]
    run.control_block.save_position(run.rank, position, run.replica.iterations, figures, run.replica.metric_state())
    run.stats.keeping += time.thread_time() - begun


def resume_worker(run: WorkerContext) -> bool:
    """Resume at the last exchange, or at the beginning of the run.

    Batches after that exchange never reached the center, so they are trained again. The optimizer's count of steps
    continues from the same position. Its slots are those that the rank saved at the end of its last epoch. In a job,
    and for ranks that a launcher started, they are those of rank 0.

    Returns:
        Whether the metrics of the current epoch were restored.
    """
    position = state_of(run.center).position_of(run.center, run.rank) or run.begin
    # With ``whole_epochs`` an earlier epoch was trained to its end, and the data begin with the epoch of the callbacks.
    run.begin = max(position, (run.job.initial_epoch, 0)) if run.job.whole_epochs else position
    saved = run.control_block.saved_position(run.rank, run.begin)
    if saved is None:
        return False
    (epoch, batch), iterations, stats, state = saved
    run.replica.iterations = max(0, iterations + between(run, (epoch, batch), run.begin))
    if run.replica.averages:
        begin_average(run.replica)
    if run.job.continues_counts:
        figures = zip(fields(WorkerStats)[1:-1], stats.tolist(), strict=False)
        counted: dict[str, Any] = {field.name: int(v) if field.type == "int" else v for field, v in figures}
        run.stats = replace(run.stats, **counted)
        run.earlier_seconds = run.stats.seconds
    if epoch != run.begin[0]:
        return False
    run.replica.set_metric_state(state[: len(run.replica.metric_state())])
    return True


def between(run: WorkerContext, start: tuple[int, int], end: tuple[int, int]) -> int:
    """Return the number of steps from a saved position to the center's; 0 if it is not known.

    The positions differ for ranks of other hosts, which send their state only when they join a pause. The result is
    negative if the saved state is newer than the center's position.
    """
    steps = run.job.steps or run.source.steps(run.job.batch_size)
    if start[0] != end[0] and not steps:
        return 0
    return (end[0] - start[0]) * (steps or 0) + end[1] - start[1]


def begin_average(replica: Replica) -> None:
    """Set the moving average to the weights if it is still zero. Keras does so at step 0 only."""
    average, weights = np.empty(replica.size, replica.dtype), np.empty(replica.size, replica.dtype)
    replica.get_average(average)
    if not average.any():
        replica.get(weights)
        replica.set_average(weights)


def state_of(center: ParameterServer) -> Any:
    """Return the module that exports and imports a center's state, on one host or divided among hosts."""
    return center_state if isinstance(center, SharedMemoryParameterServer) else sharded_center_state
