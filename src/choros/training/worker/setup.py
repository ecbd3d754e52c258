"""Set-up of a rank: its replica, its seeds, and its connections to other ranks on the same host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from choros.training.worker.gradient_tail import GradientTail
from choros.types import Array, Batch

if TYPE_CHECKING:
    import keras


_VALUE_BYTES = 8  # bytes of the widest value of a vector
_MIN_SLOT_BYTES = 1 << 16  # metrics and messages must fit even with a tiny model


def build_replica(
    model: keras.Model,
    sample: Batch,
    workers: int,
    averaged: Sequence[int] = (),
    devices: Sequence[str] = (),
    layout: keras.distribution.ModelParallel | None = None,
    clone: Callable[[], Any] | None = None,
) -> Any:
    """Return the model's replica, built for the first step.

    Args:
        model: compiled.
        sample: a batch with rows.
        workers: the result of ``adding`` for the job.
        averaged: indices of metric variables that must not be summed over ranks.
        devices: devices of this process that divide this rank's rows, if there are several.
        layout: the ``keras.distribution.ModelParallel`` with which the model was created (JAX).
        clone: returns a copy of the model, for devices with separate models (PyTorch, TensorFlow).
    """
    if clone is not None and several_models(len(devices)):
        replica: Any = MirroredReplica(model, workers, devices, clone)
    else:
        replica = make_replica(model, workers, devices if len(devices) > 1 else (), layout)
    replica.build(sample)
    replica.averaged = averaged
    return replica


def adding(job: FitConfig, algorithm: Algorithm) -> int:
    """Return the number of ranks whose gradients are summed; 1 if gradients are not exchanged."""
    return job.workers if algorithm.level == "gradients" else 1


def dividing(job: FitConfig, algorithm: Algorithm, rank: int) -> int:
    """Return the number of model replicas that divide one step's batch: of all ranks if gradients are summed."""
    ranks = range(job.workers) if algorithm.level == "gradients" else [rank]
    has_several_models = job.devices and several_models(max(job.devices))
    return sum(job.devices[rank] for rank in ranks) if has_several_models else len(ranks)


def first_replica(job: FitConfig, rank: int) -> int:
    """Return the number of model replicas of all lower ranks. It is the number of this rank's first one, for seeds.

    Args:
        job: FitConfig. Ranks may have different numbers of ``devices``.
        rank: int. With ``job.workers`` the result is the number of all replicas.
    """
    has_several_models = job.devices and several_models(max(job.devices))
    return sum(job.devices[:rank]) if has_several_models else rank


def rank_devices(job: FitConfig, rank: int) -> list[str]:
    """Return the names of a rank's devices if ranks have several; else an empty list."""
    return choose_devices(job.devices[rank]) if job.devices else []


def seed_replica(replica: Replica, job: FitConfig, rank: int, resumes: bool = False) -> None:
    """Set the random seeds of a replica for its rank.

    Args:
        replica: the built replica of this rank.
        job: FitConfig.
        rank: int.
        resumes: whether this is a restarted rank, which gets other seeds than the first time. Defaults to False.
    """
    replica.fold_seeds(first_replica(job, rank), job.fold_seed)
    replica.seed_generators(rank, job.seed)
    # A restarted rank has trained with the first random numbers already. The numbers added here are above those of all
    # ranks, so no other rank has these seeds.
    if resumes:
        replica.fold_seeds(first_replica(job, rank) + first_replica(job, job.workers), None)
        replica.seed_generators(rank + job.workers, job.seed)


def several_models(devices: int) -> bool:
    """Return whether each of ``devices`` devices has a separate model. On JAX one program spans all devices."""
    import keras

    return devices > 1 and keras.backend.backend() != "jax"


def create_exchange_segment(
    job: FitConfig, algorithm: Algorithm, nbytes: int, vectors: Callable[[], tuple[Array, Array]]
) -> Segment | None:
    """Create the segment for a job's exchanges: of the group or of the center; None if ranks do not exchange.

    Args:
        job: FitConfig.
        algorithm: the bound algorithm.
        nbytes: int. Bytes of the trainable vector.
        vectors: returns the trainable vector and the moving statistics. It is called only for a center, because these
            copies take as much memory as the model.
    """
    if job.asynchronous:
        trainable, statistics = vectors()
        memory = algorithm.start(trainable, job.workers)
        return SharedMemoryParameterServer.create(trainable, statistics, memory, job.workers)
    if job.synchronous and job.workers > 1:
        tail_values = GradientTail.of(job, 0).size if job.per_batch else 0
        # Two values more: the loss and its divisor (``Replica.gradients``).
        return SharedGroup.create(job.workers, max(nbytes + (2 + tail_values) * _VALUE_BYTES, _MIN_SLOT_BYTES))
    return None


def transport_name(group: Group, center: Any) -> str:
    """Return the name of a run's means of exchange, for ``RunRecord.group``.

    Args:
        group: Group. All ranks if synchronous, else a group of one rank.
        center: the parameter server, or None.

    Example:
        >>> transport_name(SingleRankGroup(), None)
        'nothing'
    """
    if center is not None:
        return str(center.kind)
    return kind_of(group) if group.size > 1 else "nothing"


def join_exchange(
    job: FitConfig, algorithm: Algorithm, segment: Segment | int | None, rank: int
) -> tuple[Group, SharedMemoryParameterServer | None]:
    """Return the group and the center of a rank. An asynchronous rank, or one that never exchanges, is a group of one.

    Args:
        job: FitConfig.
        algorithm: the bound algorithm.
        segment: the result of ``create_exchange_segment``, or its descriptor, of which the result takes ownership.
        rank: int.
    """
    spin = SPIN if job.spin else 0.0
    if segment is None:
        return SingleRankGroup(), None
    if job.asynchronous:
        center = SharedMemoryParameterServer(segment, algorithm, rank, job.workers, timeout=job.timeout, spin=spin)
        return SingleRankGroup(), center
    return SharedGroup(segment, rank, timeout=job.first_timeout, spin=spin), None
