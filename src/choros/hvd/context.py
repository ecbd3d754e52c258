"""The ranks of this process's job: ``init``, ``shutdown``, ranks and sizes, process sets."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from choros.argument_checks import check_whole
from choros.cluster import Place
from choros.comm.bootstrap.discover_rank import find_place
from choros.comm.bootstrap.init import join, part
from choros.comm.collectives import Collectives
from choros.comm.group import Group, abort_waits, kind_of
from choros.comm.host_identity import machine
from choros.comm.single_rank_group import SingleRankGroup
from choros.device_choice import choose_device, prepare_rank
from choros.errors import CommTimeoutError, InvalidInputError
from choros.hvd import env_settings
from choros.hvd.elastic_client import membership

logger = logging.getLogger(__name__)

_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_USED_VARIABLES = {*env_settings.NAMES, *(f"HOROVOD_{name}" for name in _PLACE)}


class ProcessSet:
    """A set of ranks with separate collectives.

    Args:
        ranks: ints, in any order.

    Attributes:
        ranks: list of int, sorted. process_set_id: int, None until the set is registered.

    Raises:
        ValueError: no ranks, a rank is repeated, or a rank is negative.

    Example:
        >>> ProcessSet([2, 0]).ranks
        [0, 2]
    """

    ranks: list[int] = []  # noqa: RUF012 - never changed in place
    process_set_id: int | None = None
    collectives: Collectives | None = None

    def __init__(self, ranks: Sequence[int]) -> None:
        if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
            raise InvalidInputError(f"ranks={ranks!r}: give a list of ranks from 0, each of them once.")
        self.ranks = sorted(check_whole("ranks", rank, 0) for rank in ranks)
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise ValueError(f"A process set of ranks {list(ranks)}: give ranks from 0, each of them once.")

    def size(self) -> int:
        """Return the number of ranks in the set; raise ValueError if the set is not registered."""
        self._registered()
        return len(self.ranks)

    def rank(self) -> int:
        """Return this process's index in the set, from 0; -1 if it is not in the set."""
        self._registered()
        return self.ranks.index(rank()) if self.included() else -1

    def included(self) -> bool:
        """Return whether this process is in the set."""
        self._registered()
        return rank() in self.ranks

    def _registered(self) -> None:
        if self.process_set_id is None:
            raise ValueError(f"{self!r} is not registered: call hvd.add_process_set with it on every rank.")

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet.__new__(ProcessSet)  # all ranks; ``init`` sets them


@dataclass
class Context:
    """The result of ``init``: this rank's place, the group of all ranks, and the process sets by their id."""

    place: Place
    group: Group
    sets: dict[int, ProcessSet] = field(default_factory=dict)


_contexts: list[Context] = []  # the result of ``init``; empty before it and after ``shutdown``
_enter_arguments: dict[str, Any] = {"sync": True}  # arguments of this process's next ElasticClient.enter


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Find this process's rank, choose its GPU and connect to the other ranks; a second call does nothing.

    Thread variables that neither the launcher nor the user has set follow the rank's cores, as far as the backend has
    not started: import Choros before Keras.

    If a rank sees several GPUs, each loaded framework computes on the GPU of the local rank from here on. All GPUs stay
    visible to ``list_physical_devices`` and ``torch.cuda``, so a script may choose another one later.

    Every rank must call ``init`` within 30 s of the first one. ``choros run --start-timeout`` or
    ``HOROVOD_START_TIMEOUT`` sets another limit, in seconds. Without a launcher the job has one rank.

    Args:
        comm: None, a list of all ranks, or an mpi4py communicator of all ranks. For some of the ranks use a process
            set.
        process_sets: list of ProcessSet to register, or "dynamic", which is always allowed.

    Raises:
        InvalidInputError: the launcher's variables contradict each other, the ranks cannot connect, or two ranks
            compute on one GPU.
        CommTimeoutError: not all ranks called it in time; names the missing ranks.
        PeerLostError: a rank ended before it connected.
    """
    if _contexts:
        return
    entered: Group | None = None
    if (member := membership()) is not None:  # an elastic job: the driver assigns the place now
        # The client lives longer than this context: ``init`` runs again after each change of the ranks.
        if give_up not in member.on_broken:
            member.on_broken.append(give_up)
        entered = member.enter(env_settings.soonest(), **_enter_arguments)
        _enter_arguments.clear()
        _enter_arguments["sync"] = True
    place = find_place(env_settings.soonest())
    choose_device(place)
    prepare_rank(place)
    if comm is not None and _ranks_of(comm, place) != list(range(place.size)):
        raise InvalidInputError(
            f"init(comm={comm!r}) with {place.size} ranks: leave comm out, and give a part of the ranks as a "
            "ProcessSet."
        )
    warn_after, limit = env_settings.stalls()
    recorded, soonest = env_settings.timeline(), env_settings.soonest()
    try:
        group = entered or (SingleRankGroup() if place.size == 1 else join(place.rank, place.size, soonest))
        group.warn_after, group.timeout = warn_after, soonest
        if entered is None:
            group.barrier()
    except CommTimeoutError as error:
        raise CommTimeoutError(
            f"{error} This was hvd.init(), which all ranks must call within {soonest:g} s: if some ranks need more "
            "time, give choros run a longer --start-timeout.",
            error.missing,
        ) from None
    group.timeout = limit
    if place.node is None or place.nodes is None:
        place = _on_node(place, group)
    world = global_process_set
    world.ranks, world.process_set_id, world.collectives = list(range(place.size)), 0, Collectives(group)
    _contexts.append(Context(place, group, {0: world}))
    ignored = sorted(name for name in os.environ if name.startswith("HOROVOD_") and name not in _USED_VARIABLES)
    if ignored and place.rank == 0:
        logger.info(f"ignored, as it has no meaning here: {', '.join(ignored)}")
    for process_set in [] if process_sets in (None, "dynamic") else process_sets:
        add_process_set(process_set)
    if recorded is not None:
        from choros.hvd import timeline

        try:
            timeline.start_timeline(*recorded)
        except BaseException:
            shutdown()
            raise


def _ranks_of(comm: Any, place: Place) -> list[int]:
    if hasattr(comm, "Get_size"):  # a communicator counts only if it numbers the ranks as the launcher does
        return list(range(comm.Get_size())) if comm.Get_rank() == place.rank else []
    return sorted(comm)


def _on_node(place: Place, group: Group) -> Place:
    """Return the place with the number of this host and of all hosts, which its launcher did not give."""
    machines = list(dict.fromkeys(group.gather(machine().encode())))
    return replace(place, node=machines.index(machine().encode()), nodes=len(machines))


def shutdown() -> None:
    """Close the process sets and write the timeline, if one is recorded. Every rank calls it; ``init`` may follow."""
    if _contexts:
        from choros.hvd import timeline

        timeline.finish()
        for process_set in list(_contexts[0].sets.values()):
            _unregister(process_set)
        _contexts.clear()


def begin_anew(sync: bool, lost: BaseException | None = None) -> bool:
    """Shut down and initialize again; return whether the ranks must take rank 0's state afterwards.

    Args:
        sync: bool. Whether this rank needs rank 0's state.
        lost: the error by which this rank lost other ranks; None if all ranks restart at a commit.
    """
    if lost is not None:
        _enter_arguments.update(lost=str(lost) or type(lost).__name__, missing=tuple(getattr(lost, "missing", ())))
    _enter_arguments["sync"] = sync
    # The group is broken, or its ranks change. The next ``init`` reads the arguments that are set above.
    shutdown()
    init()
    member = membership()
    return sync if member is None else member.sync


def give_up(reason: str) -> None:
    """Make current and later waits of this rank, in all process sets, raise ``PeerLostError``; thread-safe."""
    for group in _groups():
        abort_waits(group, reason)


def failed() -> bool:
    """Return whether the group of any process set is broken; a broken group runs no more collectives."""
    return any(getattr(group, "broken", "") for group in _groups())


def _groups() -> list[Group]:
    """Return the groups of all process sets to which this rank belongs."""
    sets = [process_set for context_ in _contexts for process_set in list(context_.sets.values())]
    return [process_set.collectives.group for process_set in sets if process_set.collectives is not None]


def is_initialized() -> bool:
    """Return whether ``init`` has been called."""
    return bool(_contexts)


def context() -> Context:
    """Return the result of ``init``.

    Raises:
        ValueError: ``init`` has not been called.
    """
    if not _contexts:
        raise ValueError("Choros has not been initialized: call hvd.init() first.")
    return _contexts[0]


def rank() -> int:
    """Return this process's rank, from 0.

    Raises:
        ValueError: before ``init``.
    """
    return context().place.rank


def size() -> int:
    """Return the number of ranks.

    Raises:
        ValueError: before ``init``.
    """
    return context().place.size


def local_rank() -> int:
    """Return this process's rank on its host, from 0."""
    return context().place.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return context().place.local_size


def cross_rank() -> int:
    """Return the number of this host, from 0."""
    return context().place.node or 0


def cross_size() -> int:
    """Return the number of hosts."""
    return context().place.nodes or 1


def is_homogeneous() -> bool:
    """Return whether the job's size is this host's number of ranks times the number of hosts."""
    return context().place.size == local_size() * cross_size()


def mpi_built() -> bool:
    """Return whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether the ranks communicate by MPI; False before ``init``."""
    return bool(_contexts) and "MPI" in kind_of(_contexts[0].group)


def mpi_threads_supported() -> bool:
    """Return whether the script may call MPI from other threads while Choros uses MPI."""
    return mpi_enabled() and sys.modules["mpi4py.MPI"].Query_thread() == sys.modules["mpi4py.MPI"].THREAD_MULTIPLE


def collectives(process_set: ProcessSet | int | None = None) -> Collectives:
    """Return the collectives of a process set; of all ranks by default.

    Raises:
        ValueError: the set is not registered, or this rank is not in it.
    """
    chosen = global_process_set if process_set is None else process_set
    if not isinstance(chosen, ProcessSet):
        raise ValueError(f"process_set={chosen!r}: give a hvd.ProcessSet that hvd.add_process_set returned.")
    if chosen.process_set_id is None or chosen.process_set_id not in context().sets:
        raise ValueError(f"{chosen!r} is not registered: call hvd.add_process_set with it on every rank.")
    if chosen.collectives is None:
        raise ValueError(f"Rank {rank()} is not in {chosen!r}: only ranks {chosen.ranks} call collectives with it.")
    if compiled := sys.modules.get("choros.hvd.host_ops.jax"):
        compiled.settle()
    return chosen.collectives


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; every rank calls it with the same ranks, in the same order of calls.

    Raises:
        ValueError: a rank does not exist, or a registered set has the same ranks.
        RankMismatchError: the ranks register different sets.
    """
    new_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current = context()
    if new_set.ranks[-1] >= current.place.size:
        raise ValueError(f"{new_set!r}: there are ranks 0 to {current.place.size - 1} only.")
    for other in current.sets.values():
        if other.ranks == new_set.ranks:
            raise ValueError(f"{other!r} has these ranks already: use that one.")
    collectives().broadcast_object(None, name=f"add process set {new_set.ranks}")  # raises if the sets differ
    group: Group | None = SingleRankGroup() if current.place.rank in new_set.ranks else None
    if len(new_set.ranks) > 1:
        group = part(current.group, new_set.ranks)
    if group is not None:
        group.timeout, group.warn_after, group.trace = (
            current.group.timeout,
            current.group.warn_after,
            current.group.trace,
        )
    new_set.collectives = None if group is None else Collectives(group, new_set.ranks)
    new_set.process_set_id = next(i for i in range(len(current.sets) + 1) if i not in current.sets)
    current.sets[new_set.process_set_id] = new_set
    return new_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return False for the set of all ranks and for unregistered ones. Every rank calls it."""
    set_id = getattr(process_set, "process_set_id", None)
    if not set_id or context().sets.get(set_id) is not process_set:
        return False
    collectives().broadcast_object(None, name=f"remove process set {process_set.ranks}")
    del context().sets[set_id]
    _unregister(process_set)
    return True


def _unregister(process_set: ProcessSet) -> None:
    if process_set is not global_process_set and process_set.collectives is not None:
        process_set.collectives.group.close()
    process_set.process_set_id, process_set.collectives = None, None
