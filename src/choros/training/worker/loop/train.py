"""Training of one rank: the choice of its loop, and its end."""

from __future__ import annotations

from contextlib import suppress

from choros.errors import CommTimeoutError, PeerLostError
from choros.training.worker.context import WorkerContext
from choros.training.worker.loop.async_loop import AsyncLoop
from choros.training.worker.loop.sync_loop import SyncLoop


def train(run: WorkerContext) -> None:
    """Train one rank to the end. If a peer fails, write the last center for the caller if it can be read, and raise."""
    loop = SyncLoop(run) if run.job.synchronous else AsyncLoop(run)
    try:
        loop.train()
    except (PeerLostError, CommTimeoutError):
        with suppress(PeerLostError, CommTimeoutError):  # a host of the center has gone: the first error says so
            loop.write_last()
        raise
    finally:
        if run.profiler is not None:
            run.profiler.end()
    run.stop_clock()
    loop.finish()
