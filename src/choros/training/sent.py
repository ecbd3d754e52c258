"""A rank that a launcher started for a ``Trainer`` elsewhere: ``python -m choros.training.sent``.

It asks the process that called ``fit`` for its work, joins the other ranks as any rank of a job does, and trains. Rank
0 tells the caller of steps and epochs, and all do what the callbacks there decide.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from choros import algorithms
from choros.backend.base import model_variables
from choros.backend.caller import build_model
from choros.cluster import Place
from choros.data import packing
from choros.errors import PeerFailed
from choros.launch.failure import raised
from choros.training import joined
from choros.training.conductor import Conductor, values
from choros.training.job import Job, Orders, Plan, Tally
from choros.training.parcel import Parcel, read_code
from choros.training.ranks import join, part
from choros.training.travel import unpack_model
from choros.training.worker import configure_keras
from choros.transport import Group
from choros.transport.hosts_group import hosts_of
from choros.transport.local_group import LocalGroup
from choros.transport.segment import Segment
from choros.transport.shared_group import share
from choros.transport.tcp.channel import Channel
from choros.transport.tcp.wire import dial
from choros.types import Array

HOME = "CHOROS_HOME"  # where the caller waits, and its secret
_DIAL = 60.0  # seconds to reach it for
Result = tuple[Any, list[Tally], list[tuple[float, int, float]], str]


class Afar:
    """What a ``Conductor`` is for rank 0, where the callbacks are at the other end of a line."""

    def __init__(self, line: Channel, model: Any, job: Job, watched: bool) -> None:
        self.line, self.model, self.job, self.user = line, model, job, watched
        self.epoch: int | None = job.initial_epoch
        self.fetch: Callable[[], None] = lambda: None

    def begin(self, epoch: int) -> Orders:
        """Training begins."""
        return self._ask({"event": "begin", "epoch": epoch})

    def batch(self, epoch: int, step: int, logs: dict[str, float]) -> Orders:
        """A step is done."""
        return self._ask({"event": "batch", "epoch": epoch, "step": step, "logs": logs}, self.job.batch_weights)

    def epoch_end(self, epoch: int, logs: dict[str, float]) -> Orders:
        """An epoch has ended; its weights go along, so that the caller has them whatever happens."""
        return self._ask({"event": "epoch_end", "epoch": epoch, "logs": logs}, True)

    def end(self) -> None:
        """The caller ends training when it has the last weights."""

    def _ask(self, head: dict[str, Any], weights: bool = False) -> Orders:
        if weights:
            self.fetch()
        told, given = self.line.ask(head, shown(self.model, self.job.hand_back) if weights else ())
        self.epoch = told["epoch"]
        orders = Orders(**told["orders"])
        if orders.weights:
            put(self.model, given)
        return orders


def shown(model: Any, all_of_it: bool) -> list[Array]:
    """Return the model's variables, and the optimizer's where all of it is asked for, as bytes for a line."""
    found = values(model_variables(model) if all_of_it else model.variables)
    return [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in found]


def put(model: Any, arrays: list[Array]) -> None:
    """Give as many of a model's variables the values that ``shown`` made bytes of."""
    for variable, raw in zip(model_variables(model), arrays, strict=False):
        before = values([variable])[0]
        variable.assign(np.array(raw).view(before.dtype).reshape(before.shape))


def train_rank(
    parcel: Parcel,
    rank: int,
    lead: Callable[[Any], Any],
    sources: tuple[Any, Any],
    weights: Callable[[], list[Array]] | None = None,
    other: Callable[[Any], Any] | None = None,
) -> Result:
    """Train as one rank of a job that has been joined, or of one rank.

    Args:
        parcel: what to do.
        rank: int.
        lead: makes of the model what drives the callbacks, for rank 0.
        sources: to train on, and to validate with or None.
        weights: gives rank 0 all that the model holds; None leaves what is in its file.
        other: makes of the model that which is trained; None is the model itself.

    Returns:
        The trained model, the ranks' tallies, (seconds, epoch, loss) of each epoch, and what they met in.
    """
    begun, job = time.perf_counter(), parcel.job
    model = unpack_model(parcel.model, parcel.code[0])
    model = model if other is None else other(model)
    if not rank and weights is not None:
        build_model(model, sources[0].sample(job.batch_size))
        put(model, weights())
    conductor = Conductor(model, None, 0, job.epochs, parcel.steps) if rank else lead(model)
    algorithm = algorithms.from_config(job.algorithm)
    plan = Plan(model, algorithm, job, *sources, conductor, (parcel.model, parcel.code[0]), begun)
    return model, *joined.run(plan, rank)


def main() -> int:
    """Do the rank's work; the caller is told of what it raises.

    Returns:
        0.
    """
    home = json.loads(os.environ.pop(HOME))
    place = Place.here()
    hello = {"rank": place.rank, "host": os.uname().nodename}
    end = dial(home["place"], bytes.fromhex(home["secret"]), hello, _DIAL)
    line = Channel(end, "The process that called fit", home["timeout"])
    try:
        _work(line, place)
    except BaseException as error:
        with suppress(PeerFailed):
            line.ask(raised(error))
        raise
    return 0


def _work(line: Channel, place: Place) -> None:
    told, (raw,) = line.ask({"ask": "job"})
    model = raw.tobytes()  # the next answer takes its place
    job = Job(**told["job"])
    configure_keras(job.keras)
    group: Group = LocalGroup() if job.workers == 1 else join(place.rank, job.workers, job.first_timeout)
    data = _data(line, group, told["bytes"])
    arrays = packing.views(told["arrays"], data.array(np.uint8, told["bytes"], 0))
    code = read_code(told["code"])
    parcel = Parcel(job, model, code, arrays, told["watched"], told["steps"])
    validation = None if job.validation is None else packing.unpack(job.validation, arrays, code[1:])
    trained, tallies, losses, met = train_rank(
        parcel,
        place.rank,
        lambda model: Afar(line, model, job, parcel.watched),
        (packing.unpack(job.source, arrays, code[1:]), validation),
        lambda: line.ask({"ask": "weights"})[1],
    )
    done = {"event": "done", "tallies": [tally.json() for tally in tallies], "losses": losses, "met": met}
    line.ask(done, () if place.rank else shown(trained, job.hand_back))


def _data(line: Channel, group: Group, nbytes: int) -> Segment:
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
