"""A worker that trains alone and begins anew: from its last exchange, with what it had counted until then."""

from __future__ import annotations

import time
from dataclasses import astuple, fields, replace
from typing import Any

from choros.training.job import Tally
from choros.training.run import Run
from choros.transport import centre_state, sharded_state
from choros.transport.shared_centre import SharedCentre


def leave(run: Run, epoch: int) -> None:
    """Leave on the board what a new process would need, right after an exchange."""
    begun = time.thread_time()
    run.board.leave(run.rank, epoch, list(astuple(run.counted()))[1:-1], run.replica.metric_state())
    run.tally.keeping += time.thread_time() - begun


def take_up(run: Run) -> bool:
    """Begin where the last exchange was, or where the run begins; True where metrics of that epoch go on.

    What was trained after that exchange was never brought to the centre, and is trained again.
    """
    run.begin = state_of(run.centre).place_of(run.centre, run.rank) or run.begin
    left = run.board.left(run.rank)
    if left is None:
        return False
    epoch, tally, state = left
    if run.job.counts_on:
        figures = zip(fields(Tally)[1:-1], tally.tolist(), strict=False)
        counted: dict[str, Any] = {field.name: int(v) if field.type == "int" else v for field, v in figures}
        run.tally = replace(run.tally, **counted)
        run.before = run.tally.seconds
    if epoch != run.begin[0]:
        return False
    run.replica.set_metric_state(state)
    return True


def state_of(centre: Any) -> Any:
    """Return what takes and puts back a centre's state: ``centre_state``, or the same for one between hosts."""
    return centre_state if isinstance(centre, SharedCentre) else sharded_state
