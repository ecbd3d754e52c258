"""A rank that a launcher started for a ``Trainer`` elsewhere: ``python -m choros.training.worker.remote_main``.

It asks the process that called ``fit`` for its work, joins the other ranks as any rank of a job does, and trains. Rank
0 tells the caller of steps and epochs, and all do what the callbacks there decide.
"""

from __future__ import annotations

from choros.launch.process.hidden_packages import lean_keras_import

if __name__ == "__main__":
    with lean_keras_import():  # before anything else loads Keras
        import choros.backends.base  # noqa: F401

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from choros import algorithms
from choros.cluster import Place
from choros.cluster.hardware import raise_descriptors
from choros.comm.bootstrap.init import join, part
from choros.comm.group import Group
from choros.comm.hierarchical_group import hosts_of
from choros.comm.shm.group import share
from choros.comm.shm.segment import Segment
from choros.comm.single_rank_group import SingleRankGroup
from choros.comm.tcp.auth_socket import dial
from choros.comm.tcp.rpc import RpcConnection
from choros.data import serialization
from choros.errors import PeerLostError
from choros.launch.process.failure_report import raised
from choros.training.callback_runner import CallbackRunner
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.executors import in_job
from choros.training.executors.remote_callbacks import RemoteCallbackRunner, RemoteCheckpointManager, take_state
from choros.training.model_io.serialization import PackedModel
from choros.training.payload import HOME, RemotePayload, put, read_code, shown
from choros.training.spec import FitConfig, FitRequest, WorkerStats
from choros.training.worker.main import configure_keras
from choros.types import Array

_DIAL = 60.0  # seconds to reach it for
Result = tuple[Any, list[WorkerStats], list[tuple[float, int, float]], str]


def train_rank(
    parcel: RemotePayload,
    rank: int,
    lead: Callable[[Any], Any],
    sources: tuple[Any, Any],
    weights: Callable[[], list[Array]] | None = None,
    change: Callable[[Any], None] | None = None,
    saver: CheckpointManager | None = None,
) -> Result:
    """Train as one rank of a job that has been joined, or of one rank.

    Args:
        parcel: what to do.
        rank: int.
        lead: makes of the model what drives the callbacks, for rank 0.
        sources: to train on, and to validate with or None.
        weights: gives rank 0 all that the model holds; other ranks get it from rank 0.
        change: changes the model before it is trained.
        saver: keeps states, and has the one to go on from; or None.

    Returns:
        The trained model, the ranks' tallies, (seconds, epoch, loss) of each epoch, and what they met in.
    """
    begun, job = time.perf_counter(), parcel.job
    model = parcel.model.unpack()
    if not rank and weights is not None:
        put(model, weights())
    if change is not None:
        change(model)
    conductor = CallbackRunner(model, None, 0, job.epochs, parcel.steps) if rank else lead(model)
    algorithm = algorithms.from_config(job.algorithm)
    plan = FitRequest(model, algorithm, job, *sources, conductor, parcel.model, begun, saver)
    return model, *in_job.run(plan, rank)


def main() -> int:
    """Do the rank's work; the caller is told of what it raises.

    Returns:
        0.
    """
    raise_descriptors()
    home = json.loads(os.environ.pop(HOME))
    place = Place.here()

    def dial_home(aside: bool = True) -> RpcConnection:
        hello = {"rank": place.rank, "host": os.uname().nodename, "aside": aside}
        end = dial(home["place"], bytes.fromhex(home["secret"]), hello, _DIAL)
        return RpcConnection(end, "The process that called fit", home["timeout"])

    line = dial_home(aside=False)
    try:
        _work(line, place, dial_home)
    except in_job.Leaving:
        with suppress(PeerLostError):
            line.ask({"event": "left"})
        raise
    except BaseException as error:
        with suppress(PeerLostError):
            line.ask(raised(error))
        raise
    return 0


def _work(line: RpcConnection, place: Place, dial_home: Callable[[], RpcConnection]) -> None:
    told, _ = line.ask({"ask": "job"})
    job = FitConfig(**told["job"])
    configure_keras(job.keras)
    group: Group = SingleRankGroup() if job.workers == 1 else join(place.rank, job.workers, job.first_timeout)
    data = _data(line, group, told["bytes"])
    arrays = serialization.views(told["arrays"], data.array(np.uint8, told["bytes"], 0))
    model, *code = read_code(told["code"])
    parcel = RemotePayload(job, PackedModel(model, arrays[: told["model_arrays"]]), told["steps"])
    saver = None
    if job.keep is not None:
        saver = RemoteCheckpointManager(job, place.rank, dial_home, take_state(line, place.rank))
    validation = None if job.validation is None else serialization.unpack(job.validation, arrays, code)
    trained, tallies, losses, met = train_rank(
        parcel,
        place.rank,
        lambda model: RemoteCallbackRunner(line, model, job),
        (serialization.unpack(job.source, arrays, code), validation),
        lambda: line.ask({"ask": "weights"})[1],
        saver=saver,
    )
    done = {"event": "done", "tallies": [tally.json() for tally in tallies], "losses": losses, "met": met}
    line.ask(done, () if place.rank else shown(trained))


def _data(line: RpcConnection, group: Group, nbytes: int) -> Segment:
    """The data in memory that the ranks of a host share: the first of them fetches it."""
    near, made = group, None
    mine = next(ranks for ranks in hosts_of(group) if group.rank in ranks)
    if len(mine) < group.size:
        near = part(group, mine) or group
    if near.rank == 0:
        made = Segment.create(max(nbytes, 64), "choros-data")
        if nbytes:
            _, (whole,) = line.ask({"ask": "data"})
            made.array(np.uint8, nbytes, 0)[:] = whole
    if near.size == 1:
        assert made is not None  # noqa: S101 - the only rank is the first
        return made
    segment = share(near, made)
    if near is not group:
        near.close()
    return segment


if __name__ == "__main__":
    sys.exit(main())
