"""What a task of Spark does as a worker: join the others, train on the rows that it holds, hand back the result."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choros.data import ArraySource, HeldSource, packing
from choros.errors import BadInput, ChorosError
from choros.spark.barrier import Task
from choros.spark.process import keras_there
from choros.spark.spill import Data
from choros.training.conductor import Conductor
from choros.training.job import Job
from choros.training.parcel import Parcel
from choros.training.ranks import join_by_sockets, leave
from choros.training.sent import Afar, shown, train_rank
from choros.training.travel import unpack_code
from choros.training.worker import member
from choros.transport import Group
from choros.transport.local_group import LocalGroup
from choros.transport.tcp.channel import Channel
from choros.transport.tcp.wire import dial
from choros.types import Array, Batch

_DIAL = 5.0  # seconds to reach the caller for; who cannot runs the callbacks here


@dataclass(frozen=True)
class Rank:
    """A fit as it travels to the tasks.

    Attributes:
        job: Job. As JSON.
        model: bytes. custom: bytes. As ``pack_model`` wrote them.
        keras: dict. The caller's Keras, see ``keras_here``.
        weights: list of bytes. All that rank 0's model is to hold.
        home: dict. Where the caller is to be reached.
        callbacks: bytes or None. The user's callbacks by cloudpickle, for when it is not.
        steps: int or None. Global batches in an epoch.
        first: (tree, arrays). Some rows, as ``packing.flat`` took them apart.
        watched: bool. Whether there are callbacks of the user's.
    """

    job: dict[str, Any]
    model: bytes
    custom: bytes
    keras: dict[str, Any]
    weights: list[bytes]
    home: dict[str, Any]
    callbacks: bytes | None
    first: tuple[Any, list[Array]]
    steps: int | None = None
    watched: bool = False

    def __call__(self, task: Task) -> bytes:
        """Train; rank 0 returns the record of the run and the weights, members of an ensemble each their own."""
        if not task.gpus:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        keras_there(self.keras)
        job = Job(**self.job)
        alone = job.ensemble
        if alone:
            job = _member(job, task.rank)
        try:
            group: Group = LocalGroup()
            if task.size > 1 and not alone:
                group = join_by_sockets(task.rank, task.size, task.swap, task.secret, task.address, job.first_timeout)
            return self._train(task, job, group, alone)
        finally:
            leave()

    def _train(self, task: Task, job: Job, group: Group, alone: bool) -> bytes:
        first, rank = _batch(self.first), 0 if alone else task.rank
        floatx = job.keras["floatx"]
        source = _held(task.data, task.rows, first, floatx, alone)
        validation: Any = None
        if task.validation is not None and any(task.validation_rows):
            validation = _held(task.validation, task.validation_rows, first, floatx, alone)
            if job.alone:  # whoever ends an epoch last validates, by itself
                validation = _all_of(validation, group)
        else:
            job = replace(job, validation=None)
        conductors: list[Any] = []

        def lead(model: Any) -> Any:
            conductors.append(self._conductor(model, job, task))
            return conductors[0]

        def fresh(model: Any) -> Any:
            return member(model, self.custom, int(self.job["seed"]), task.rank)

        parcel = Parcel(job, self.model, [self.custom], steps=self.steps)
        given = lambda: [np.frombuffer(one, np.uint8) for one in self.weights]  # noqa: E731
        how = (None, fresh) if alone and task.rank else (given, None)
        model, tallies, losses, met = train_rank(parcel, rank, lead, (source, validation), *how)
        if rank:
            return b""
        told: dict[str, Any] = {
            "tallies": [tally.json() for tally in tallies],
            "losses": losses,
            "met": met,
            "history": None,
        }
        if isinstance(conductors[0], Conductor):
            history = conductors[0].history
            told["history"] = {"epoch": list(history.epoch), "history": history.history}
            told |= {"score": _score(history.history)}
        arrays = shown(model, job.hand_back)
        head = json.dumps(told | {"sizes": [array.size for array in arrays]}, default=float).encode()
        return b"".join([len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays)])

    def _conductor(self, model: Any, job: Job, task: Task) -> Any:
        """What drives the callbacks: the caller's, where it is reached, else those that have travelled."""
        if task.rank == 0 and not (job.workers == 1 and task.size > 1):
            hello = {"rank": 0, "host": os.uname().nodename}
            try:
                end = dial(self.home["place"], bytes.fromhex(self.home["secret"]), hello, _DIAL)
            except ChorosError:
                pass
            else:
                return Afar(Channel(end, "The driver", self.home["timeout"]), model, job, self.watched)
        if self.watched and self.callbacks is None:
            raise BadInput(
                f"{os.uname().nodename} does not reach the driver at {self.home['place']}, and the callbacks cannot "
                "travel: open that way, or give callbacks that cloudpickle can write."
            )
        return Conductor(model, unpack_code(self.callbacks) if self.callbacks else None, 0, job.epochs, self.steps)


def results(payload: bytes) -> tuple[dict[str, Any], list[Array]]:
    """Take apart what a task returned: what it told, and the weights as bytes."""
    length = int.from_bytes(payload[:4], "little")
    told: dict[str, Any] = json.loads(payload[4 : 4 + length])
    arrays, at = [], 4 + length
    for size in told["sizes"]:
        arrays.append(np.frombuffer(payload, np.uint8, size, at))
        at += size
    return told, arrays


def _member(job: Job, rank: int) -> Job:
    """The work of one member of an ensemble: its own rows, its own order, nobody to meet."""
    return replace(
        job,
        algorithm={"name": "Single"},
        meet="together",
        workers=1,
        batch_size=max(1, job.batch_size // job.workers),
        seed=(job.seed + 7919 * rank) % 2**31,
        averaged_metrics=[],
        hand_back=False,
    )


def _score(history: dict[str, list[float]]) -> float:
    """The last loss, of validation where there is one."""
    for name in ("val_loss", "loss"):
        if history.get(name):
            return float(history[name][-1])
    return float("inf")


def _batch(flat: tuple[Any, list[Array]]) -> Batch:
    tree, arrays = flat
    rows = len(arrays[0])
    return Batch(*packing.nested(tree, arrays), rows=rows, total=rows)


def _held(data: Data, counts: list[int], first: Batch, floatx: str, alone: bool) -> HeldSource:
    own = ArraySource(data.x, data.y, data.weight, floatx) if data.rows else None
    if alone:
        counts = [data.rows]
        if own is None:
            raise BadInput("A member of an ensemble has no rows: give more rows, or fewer workers.")
    return HeldSource(own, counts, first)


def _all_of(held: HeldSource, group: Group) -> ArraySource:
    """Return the rows of all ranks, for each of them."""
    if group.size == 1:
        assert held.inner is not None  # noqa: S101 - there are rows, and nobody else has any
        return held.inner
    own = held.inner
    mine = held.first if own is None else Batch(own.x, own.y, own.sample_weight, rows=own.rows, total=own.rows)
    tree, arrays = packing.flat(mine)
    whole = []
    for array in arrays:
        parts = []
        for root, rows in enumerate(held.counts):
            if rows:
                there = array if group.rank == root else np.empty((rows, *array.shape[1:]), array.dtype)
                parts.append(group.broadcast(np.ascontiguousarray(there), root))
        whole.append(np.concatenate(parts))
    return ArraySource(*packing.nested(tree, whole))
