"""The parts of a rank, wherever it was started: its replica, and its connections to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from choros.algorithms import Algorithm
from choros.backends import Replica, make_replica
from choros.backends.devices import choose_devices
from choros.backends.devices.mirrored import MirroredReplica
from choros.comm.group import Group, kind_of
from choros.comm.shm.futex import SPIN
from choros.comm.shm.group import SharedGroup
from choros.comm.shm.segment import Segment
from choros.comm.single_rank_group import SingleRankGroup
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.spec import FitConfig
from choros.training.worker.gradient_tail import Tail
from choros.types import Array, Batch

_LEAST = 1 << 16  # bytes of a slot: room for metrics and messages beside a tiny model


def build_replica(
    model: Any,
    sample: Batch,
    workers: int,
    averaged: Sequence[int] = (),
    devices: Sequence[str] = (),
    layout: Any = None,
    clone: Callable[[], Any] | None = None,
) -> Any:
    """Return the model's replica, with all that the first step needs.

    Args:
        model: compiled.
        sample: a batch with rows.
        workers: ``adding`` of the job.
        averaged: metric variables that do not add over ranks.
        devices: several of this process, each to have its share of this rank's rows.
        layout: the ``keras.distribution.ModelParallel`` with which the model was made (JAX).
        clone: makes another such model, where a device has one of its own (PyTorch, TensorFlow).
    """
    if clone is not None and several_models(len(devices)):
        replica: Any = MirroredReplica(model, workers, devices, clone)
    else:
        replica = make_replica(model, workers, devices if len(devices) > 1 else (), layout)
    replica.build(sample)
    replica.averaged = averaged
    return replica


def adding(job: FitConfig, algorithm: Algorithm) -> int:
    """Return how many ranks' gradients are added; 1 where none are."""
    return job.workers if algorithm.level == "gradients" else 1


def dividing(job: FitConfig, algorithm: Algorithm, rank: int) -> int:
    """Return how many models one step's batch of a rank is divided among: all ranks' where gradients are added."""
    ranks = range(job.workers) if algorithm.level == "gradients" else [rank]
    several = job.devices and several_models(max(job.devices))
    return sum(job.devices[each] for each in ranks) if several else len(ranks)


def first_replica(job: FitConfig, rank: int) -> int:
    """Return how many models the ranks before this one have: the number of its first, by which seeds differ.

    Args:
        job: FitConfig; ``devices`` are those of each worker, which may be unequal.
        rank: int. ``job.workers`` gives how many models there are in all.
    """
    several = job.devices and several_models(max(job.devices))
    return sum(job.devices[:rank]) if several else rank


def rank_devices(job: FitConfig, rank: int) -> list[str]:
    """Return the names of a rank's devices, where ranks have several; else none."""
    return choose_devices(job.devices[rank]) if job.devices else []


def seed_replica(replica: Replica, job: FitConfig, rank: int, again: bool = False) -> None:
    """Give a replica the random numbers of its rank.

    Args:
        replica: of this rank, built.
        job: FitConfig.
        rank: int.
        again: whether a restarted rank trains on, with other numbers than the first time.
    """
    replica.fold_seeds(first_replica(job, rank), job.fold_seed)
    replica.seed_generators(rank, job.seed)
    if again:
        replica.fold_seeds(first_replica(job, rank) + first_replica(job, job.workers), None)
        replica.seed_generators(rank + job.workers, job.seed)


def several_models(devices: int) -> bool:
    """Tell whether each of so many devices has a model of its own: but for JAX, whose one program spans them."""
    import keras

    return devices > 1 and keras.backend.backend() != "jax"


def create_meeting(job: FitConfig, algorithm: Algorithm, trainable: Array, others: Array) -> Segment | None:
    """Make the segment in which a job's ranks meet: the group's, the centre's, or None where they do not."""
    if job.alone:
        memory = algorithm.start(trainable, job.workers)
        return SharedMemoryParameterServer.create(trainable, others, memory, job.workers)
    if job.together and job.workers > 1:
        more = Tail.of(job, 0).size if job.per_batch else 0
        return SharedGroup.create(job.workers, max((len(trainable) + 2 + more) * trainable.itemsize, _LEAST))
    return None


def met_in(group: Group, centre: Any) -> str:
    """Say what a run's workers met in, for ``RunRecord.group``; the one place that says it.

    Args:
        group: the ranks together, one where they never meet so.
        centre: for meetings alone, or None.

    Example:
        >>> met_in(SingleRankGroup(), None)
        'nothing'
    """
    if centre is not None:
        return str(centre.kind)
    return kind_of(group) if group.size > 1 else "nothing"


def join_meeting(
    job: FitConfig, algorithm: Algorithm, segment: Segment | int | None, rank: int
) -> tuple[Group, SharedMemoryParameterServer | None]:
    """Return the group and the centre of a rank: a group of one where it meets alone or never.

    Args:
        job: FitConfig.
        algorithm: the bound algorithm.
        segment: what ``create_meeting`` made, or a descriptor of it, which is then owned.
        rank: int.
    """
    spin = SPIN if job.spin else 0.0
    if segment is None:
        return SingleRankGroup(), None
    if job.alone:
        centre = SharedMemoryParameterServer(segment, algorithm, rank, job.workers, timeout=job.timeout, spin=spin)
        return SingleRankGroup(), centre
    return SharedGroup(segment, rank, timeout=job.first_timeout, spin=spin), None
