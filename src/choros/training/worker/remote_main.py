"""A rank that a launcher started for a ``Trainer`` elsewhere: ``python -m choros.training.worker.remote_main``.

It requests the job from the process that called ``fit``, joins the other ranks as any rank of a job does, and trains.
Rank 0 reports steps and epochs to the caller, which runs the callbacks. All ranks follow its control messages.
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

import numpy as np

from choros.cluster import Place
from choros.cluster.hardware import raise_descriptors
from choros.comm.bootstrap.init import join, part
from choros.comm.group import Group
from choros.comm.hierarchical_group import hosts_of
from choros.comm.messages import ask, decode, header_of
from choros.comm.shm.group import share
from choros.comm.shm.segment import Segment
from choros.comm.single_rank_group import SingleRankGroup
from choros.comm.tcp.rpc import RpcAddress, RpcConnection
from choros.errors import ChorosError, PeerLostError
from choros.launch.process.failure_report import raised
from choros.training.callback_runner import CallbackRunner
from choros.training.executors import in_job
from choros.training.executors.remote_callbacks import RemoteCallbackRunner, RemoteCheckpointManager, take_state
from choros.training.payload import HOME, put, read_code, shown, unpack_algorithm, unpack_payload
from choros.training.spec import FitRequest
from choros.training.worker.main import configure_keras
from choros.training.worker.messages import (
    CallbackGreeting,
    EndedOnRequest,
    GetData,
    GetJob,
    GetWeights,
    JobReply,
    RanksDone,
)
from choros.training.worker.setup import rank_devices

_DIAL_SECONDS = 60.0  # to try to connect to the caller


def main() -> int:
    """Run the rank. If it raises, report the error to the caller, and raise.

    Returns:
        0.
    """
    raise_descriptors()
    home = decode(RpcAddress, json.loads(os.environ.pop(HOME)))
    place = Place.here()

    def dial_home(aside: bool = True) -> RpcConnection:
        return home.dial(CallbackGreeting(place.rank, aside=aside), "The process that called fit", _DIAL_SECONDS)

    connection = dial_home(aside=False)
    try:
        _run_rank(connection, place, dial_home)
    except in_job.RequestedExit:
        # The state is saved already, and the caller may have ended.
        with suppress(PeerLostError):
            connection.request(header_of(EndedOnRequest()))
        raise
    except BaseException as error:
        with suppress(ChorosError):
            # After an error within a request, a reply to it could be taken for the reply to this report.
            (dial_home() if connection.broken else connection).request(header_of(raised(error)))
        raise
    return 0


def _run_rank(connection: RpcConnection, place: Place, dial_home: Callable[[], RpcConnection]) -> None:
    reply = ask(connection, GetJob(), JobReply)
    job = reply.job
    configure_keras(job.keras)
    rank_devices(job, place.rank)  # before the model starts the backend: a CPU cannot be divided later
    group: Group = SingleRankGroup() if job.workers == 1 else join(place.rank, job.workers, job.first_timeout)
    data = _shared_data(connection, group, reply.nbytes)
    code = read_code(reply.code)
    source, validation, written = unpack_payload(job, reply.data, code, data)
    checkpoints = None
    if job.checkpoint_schedule is not None:
        checkpoints = RemoteCheckpointManager(job, place.rank, dial_home, take_state(connection, place.rank))
    begun, model = time.perf_counter(), written.unpack()
    callbacks: CallbackRunner | RemoteCallbackRunner
    if place.rank == 0:
        put(model, connection.request(header_of(GetWeights()))[1])
        callbacks = RemoteCallbackRunner(connection, model, job)
    else:  # the other ranks get the weights from rank 0
        callbacks = CallbackRunner(model, None, 0, job.epochs, reply.steps)
    algorithm = unpack_algorithm(job, code[1:])
    request = FitRequest(model, algorithm, job, source, validation, callbacks, written, begun, checkpoints)
    result = in_job.run(request, place.rank)
    done = RanksDone(result.all_stats, result.losses, result.transport, len(result.lanes))
    lanes = [np.frombuffer(lane, np.uint8) for lane in result.lanes]
    connection.request(header_of(done), () if place.rank else [*lanes, *shown(model)])


def _shared_data(connection: RpcConnection, group: Group, nbytes: int) -> Segment:
    """Return the data in memory that the ranks of a host share. The first of these ranks requests them."""
    host_group, created = group, None
    local_ranks = next(ranks for ranks in hosts_of(group) if group.rank in ranks)
    if len(local_ranks) < group.size:
        host_group = part(group, local_ranks) or group
    if host_group.rank == 0:
        created = Segment.create(max(nbytes, 64), "choros-data")
        if nbytes:
            _, (data,) = connection.request(header_of(GetData()))
            created.array(np.uint8, nbytes, 0)[:] = data
    segment = share(host_group, created)
    if host_group is not group:
        host_group.close()
    return segment


if __name__ == "__main__":
    sys.exit(main())
