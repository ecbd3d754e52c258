"""The resources of a job's ranks in a Ray cluster: a placement group with an actor in each bundle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from choros.errors import WorkerFailedError
from choros.launch.ray_cluster.connection import cause, node_resources, resources_text
from choros.launch.ray_cluster.holder import CALLS, GPU_VARIABLES, RankHolder
from choros.launch.ray_cluster.shell_server import NodeActor

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

_REMOVE_SECONDS = 20.0  # seconds that a node may take to remove files


class Reservation:
    """Resources of the connected cluster for a number of ranks. ``close`` frees them.

    Args:
        ranks: int.
        cores: int. Cores of each rank.
        gpus: int. GPUs of each rank.
        strategy: str. The strategy of the placement group.
        timeout: float. Seconds to wait for the resources, and for the actors.

    Attributes:
        counts: dict. The number of ranks on each node, by its id.

    Raises:
        WorkerFailedError: the resources were not free in time, or a node cannot run the actors.
    """

    def __init__(self, ranks: int, cores: int, gpus: int, strategy: str, timeout: float) -> None:
        from ray.util.placement_group import placement_group

        bundle = {"CPU": cores, **({"GPU": gpus} if gpus else {})}
        self.counts: dict[str, int] = {}
        self._holders: list[ActorHandle] = []
        self._nodes: dict[str, NodeActor] = {}
        self._group: PlacementGroup | None = None
        deadline = time.monotonic() + timeout
        try:
            self._group = group = placement_group([bundle] * ranks, strategy=strategy)
            # A short wait: Ray notices no Ctrl-C in it.
            while not group.wait(1):
                if time.monotonic() > deadline:
                    raise WorkerFailedError(_missing(ranks, bundle, strategy, timeout), rank=0)
            self._hold(ranks, cores, gpus, deadline)
        except BaseException:
            self.close()
            raise

    def _hold(self, ranks: int, cores: int, gpus: int, deadline: float) -> None:
        """Start an actor in each bundle, and group them by node."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(RankHolder)
        for number in range(ranks):
            place = PlacementGroupSchedulingStrategy(self._group, number)
            options = {"num_cpus": cores, "num_gpus": gpus, "max_concurrency": CALLS, "max_restarts": 0}
            self._holders.append(actor_class.options(scheduling_strategy=place, **options).remote())
        try:
            seconds = max(deadline - time.monotonic(), _REMOVE_SECONDS)
            places = ray.get([holder.place.remote() for holder in self._holders], timeout=seconds)
        except Exception as error:
            raise WorkerFailedError(
                f"A node of the Ray cluster could not start a worker: {cause(error)}. All nodes need this Python, "
                "Choros and its packages at the same paths.",
                rank=0,
            ) from error
        shown: dict[str, list[Mapping[str, str]]] = {}
        first: dict[str, tuple[ActorHandle, str]] = {}
        for holder, (node, host, variables) in zip(self._holders, places, strict=True):
            self.counts[node] = self.counts.get(node, 0) + 1
            first.setdefault(node, (holder, host))
            shown.setdefault(node, []).append(variables)
        self._nodes = {
            node: NodeActor(holder, host, gpu_variables(shown[node] if gpus else ()))
            for node, (holder, host) in first.items()
        }

    @property
    def hosts(self) -> str:
        """The nodes and their ranks in the form of ``choros run -H``."""
        return ",".join(f"{node}:{count}" for node, count in self.counts.items())

    @property
    def nodes(self) -> Mapping[str, NodeActor]:
        """The actor of each node that runs its commands, by the node's id."""
        return self._nodes

    def place_files(self, directory: str, paths: Sequence[str]) -> None:
        """Create the working directory, and write files, on nodes that do not have them.

        Args:
            directory: the working directory of the ranks.
            paths: files of this host.

        Raises:
            WorkerFailedError: a node cannot create them.
        """
        import ray

        try:
            actors = [node.actor for node in self._nodes.values()]
            missing = ray.get([actor.missing.remote(directory, list(paths)) for actor in actors])
            if not any(missing):
                return
            # Once for all nodes: Ray sends an object from node to node.
            contents = ray.put({path: Path(path).read_bytes() for path in paths})
            ray.get([actor.write_files.remote(contents) for actor, some in zip(actors, missing, strict=True) if some])
        except Exception as error:
            raise WorkerFailedError(
                f"A node of the Ray cluster could not create {directory} or a file in it: {cause(error)}. Start this "
                "process in a directory that all nodes have, or that their user may create.",
                rank=0,
            ) from error

    def close(self) -> None:
        """Remove the files that were written, end the actors and free the resources."""
        import ray
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is None or not ray.is_initialized():
            return
        try:
            with suppress(Exception):  # the connection with the cluster was lost
                removals = [node.actor.remove_files.remote() for node in self._nodes.values()]
                if removals:  # also those of nodes that were lost, which end with an error at once
                    ray.wait(removals, num_returns=len(removals), timeout=_REMOVE_SECONDS)
        finally:
            for holder in self._holders:
                with suppress(Exception):
                    ray.kill(holder)
            with suppress(Exception):
                remove_placement_group(group)


def gpu_variables(holders: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the variables that show the agent of a node the GPUs of its holders; without holders, no GPU.

    Args:
        holders: for each holder, the variables that Ray has set.

    Example:
        >>> gpu_variables([{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "0"}])
        {'CUDA_VISIBLE_DEVICES': '2,0'}
    """
    variables = list(holders)
    if not variables:
        return dict.fromkeys(GPU_VARIABLES, "")
    merged = {}
    for name in GPU_VARIABLES:
        entries = [entry for visible in variables for entry in visible.get(name, "").split(",") if entry]
        if entries:
            merged[name] = ",".join(dict.fromkeys(entries))
    return merged


def _missing(ranks: int, bundle: Mapping[str, int], strategy: str, timeout: float) -> str:
    """Return the message for resources that were not free in time."""
    import ray

    nodes = "; ".join(resources_text(node) for node in node_resources())
    return (
        f"Ray has not reserved {resources_text(bundle)} for each of {ranks} workers in {timeout:g} s ({strategy}). The "
        f"cluster has {resources_text(ray.available_resources())} free now; its nodes have {nodes}. Ask for less, end "
        "other jobs, or give choros.Ray(timeout=) more seconds. A task or an actor that calls fit has resources too: "
        "start it with num_cpus=0."
    )
