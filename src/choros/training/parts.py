"""What a rank is put together from, wherever it was started: its replica, and where it meets the others."""

from __future__ import annotations

from typing import Any

from choros.algorithms import Algorithm
from choros.backend import make_replica
from choros.training.job import Job
from choros.transport import Group
from choros.transport.local_group import LocalGroup
from choros.transport.segment import Segment
from choros.transport.shared_centre import SharedCentre
from choros.transport.shared_group import SharedGroup
from choros.transport.waiting import SPIN
from choros.types import Array

_LEAST = 1 << 16  # bytes of a slot: room for metrics and messages beside a tiny model


def build_replica(model: Any, job: Job, algorithm: Algorithm, source: Any) -> Any:
    """Return the model's replica, with all that the first step needs."""
    replica = make_replica(model, workers=job.workers if algorithm.level == "gradients" else 1)
    replica.build(source.sample(job.batch_size))
    replica.averaged = job.averaged_metrics
    return replica


def create_meeting(job: Job, algorithm: Algorithm, trainable: Array, others: Array) -> Segment | None:
    """Make the segment in which a job's ranks meet: the group's, the centre's, or None where they do not."""
    if job.alone:
        memory = algorithm.start(trainable, job.workers)
        return SharedCentre.create(trainable, others, memory, job.workers)
    if job.together and job.workers > 1:
        return SharedGroup.create(job.workers, max((len(trainable) + 2) * trainable.itemsize, _LEAST))
    return None


def join_meeting(
    job: Job, algorithm: Algorithm, segment: Segment | int | None, rank: int
) -> tuple[Group, SharedCentre | None]:
    """Return the group and the centre of a rank: a group of one where it meets alone or never.

    Args:
        job: Job.
        algorithm: the bound algorithm.
        segment: what ``create_meeting`` made, or a descriptor of it, which is then owned.
        rank: int.
    """
    spin = SPIN if job.spin else 0.0
    if segment is None:
        return LocalGroup(), None
    if job.alone:
        centre = SharedCentre(segment, algorithm, rank, job.workers, timeout=job.timeout, spin=spin)
        return LocalGroup(), centre
    return SharedGroup(segment, rank, timeout=job.first_timeout, spin=spin), None
