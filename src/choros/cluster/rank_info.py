"""``Place``: the rank of this process in its run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from choros.cluster.hostlist import expand_hosts, expand_tasks
from choros.cluster.launcher_env import LauncherEnv, tables
from choros.errors import InvalidInputError, counted

_PMI_VARIABLES = ("PMI_RANK", "PMI_ID", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE")


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of ranks, and its node.

    Attributes:
        rank, size: int. The rank of this process and the number of ranks, ``0 <= rank < size``.
        local_rank, local_size: int. The same on this node. They are not computed as ``rank % local_size``, as Open
            MPI 5 has another order of local ranks when it oversubscribes.
        node, nodes: int or None. Index of this node and number of nodes; None if the launcher does not report it.
        hosts: tuple of str. Names of the nodes in the order of ``node``; empty if the launcher does not report them.
        coordinator: str or None. Host of rank 0, with ``:port`` if the launcher provides a port.
        launcher: str. The launcher of this process: ``single``, or the ``launcher`` of a launcher entry in
            ``choros.cluster.TABLES``.

    Example:
        >>> environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        >>> Place.here(environ).size
        4
        >>> Place.here({}).launcher
        'single'
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int | None = 0
    nodes: int | None = 1
    hosts: tuple[str, ...] = ()
    coordinator: str | None = None
    launcher: str = "single"

    @staticmethod
    def here(environ: Mapping[str, str] | None = None) -> Place:
        """Return the place from the environment. Launchers are tried in the order of ``choros.cluster.TABLES``.

        Args:
            environ: an environment. Defaults to ``os.environ``.

        Returns:
            The place; rank 0 of 1 if no launcher is detected.

        Raises:
            InvalidInputError: some of the launcher's variables are missing, are not numbers, or contradict each other.
        """
        environ = os.environ if environ is None else environ
        table, environ = _table(environ)
        return Place() if table is None else _read(table, environ)


def why(environ: Mapping[str, str] | None = None) -> str:
    """Return a text with the variables that determine the place.

    Args:
        environ: an environment. Defaults to ``os.environ``.

    Returns:
        One line of text.

    Example:
        >>> why({"CHOROS_RANK": "1", "CHOROS_SIZE": "4"})
        'choros: CHOROS_RANK=1, CHOROS_SIZE=4'
    """
    environ = os.environ if environ is None else environ
    table, environ = _table(environ)
    if table is None:
        known = ", ".join(table.launcher for table in tables())
        return f"no launcher's variables are set (looked for {known})" + _pmi_note(strange(environ))
    names = dict.fromkeys(
        table.detect_all + table.detect_any + table.rank + table.size + table.local_rank + table.local_size
        + table.tasks + table.node + table.nodes + table.hosts + table.address + table.port
    )  # fmt: skip
    return f"{table.launcher}: " + ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def strange(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return variables of PMI or PMIx if no launcher entry gives the rank of this process.

    They show that an unknown MPI launcher started it. MPI libraries use PMI or PMIx under every launcher.

    Args:
        environ: an environment. Defaults to ``os.environ``.

    Returns:
        The variables as ``name=value``; empty if a launcher entry matches, there is no such variable, or PMI_SIZE is
        1.

    Example:
        >>> strange({"PMI_FD": "7"}), strange({"PMI_FD": "7", "CHOROS_RANK": "0", "CHOROS_SIZE": "2"})
        (('PMI_FD=7',), ())
    """
    environ = os.environ if environ is None else environ
    if _table(environ)[0] is not None or environ.get("PMI_SIZE") == "1":
        return ()
    return tuple(f"{name}={environ[name]}" for name in _PMI_VARIABLES if environ.get(name))


def _pmi_note(signs: tuple[str, ...]) -> str:
    if not signs:
        return ""
    return f", but {', '.join(signs)}: an unknown MPI launcher; set CHOROS_COMM=mpi to get the rank from MPI"


def connects_by_mpi(launcher: str) -> bool:
    """Return whether the ranks that a launcher starts can communicate by MPI.

    Args:
        launcher: as in ``Place.launcher``.

    Example:
        >>> connects_by_mpi("openmpi"), connects_by_mpi("torchrun")
        (True, False)
    """
    return any(table.launcher == launcher and table.mpi for table in tables())


def _table(environ: Mapping[str, str]) -> tuple[LauncherEnv | None, Mapping[str, str]]:
    """Return the entry of the launcher, and the environment with its derived variables."""
    for table in tables():
        if any(environ.get(name) for name in table.detect_any) and all(environ.get(name) for name in table.detect_all):
            return table, environ if table.derive is None else {**environ, **table.derive(environ)}
    return None, environ


def _read(table: LauncherEnv, environ: Mapping[str, str]) -> Place:
    rank = _required_number(table, environ, table.rank)
    size = _required_number(table, environ, table.size)
    node = _number(table, environ, table.node)
    nodes = _number(table, environ, table.nodes)
    # A launcher may list a host once for each rank, and may put spaces after the commas.
    hosts = tuple(dict.fromkeys(host.strip() for host in expand_hosts(_text(environ, table.hosts))))
    tasks = _text(environ, table.tasks)
    counts = expand_tasks(tasks) if tasks else ()
    local_rank = _number(table, environ, table.local_rank)
    local_size = _number(table, environ, table.local_size)
    if counts:
        if sum(counts) != size:
            raise _place_error(
                table, f"{table.tasks[0]}={tasks} adds up to {counted(sum(counts), 'rank')} but the size is {size}"
            )
        nodes = len(counts) if nodes is None else nodes
        if node is not None and node < len(counts):
            local_size = counts[node] if local_size is None else local_size
    if size == 1:
        local_rank, local_size = local_rank or 0, local_size or 1
    if local_rank is None or local_size is None:
        if local_rank is None:
            names, quantity = table.local_rank, "the local rank (local_rank)"
        else:  # the tasks on each node give a local size only to a rank that has the index of its node
            names = table.local_size + (table.tasks if table.node else ())
            quantity = "the local size (local_size, or tasks and node)"
        problem = (
            f"{' or '.join(names)} is not set" if names else f"its launcher entry names no variable for {quantity}"
        )
        raise _place_error(table, f"{problem}, so this rank's place on its node is unknown")
    one_node = table.one_node and nodes in (None, 1)
    if one_node or local_size == size:
        node, nodes = node or 0, nodes or 1
    nodes = len(hosts) if nodes is None and hosts else nodes
    place = Place(
        rank, size, local_rank, local_size, node, nodes, hosts, _coordinator(table, environ, hosts), table.launcher
    )
    _check_place(table, place, one_node)
    return place


def _check_place(table: LauncherEnv, place: Place, one_node: bool) -> None:
    """Raise an error if the numbers contradict each other."""
    _check(table, "rank", place.rank, "size", place.size)
    _check(table, "local rank", place.local_rank, "local size", place.local_size)
    if place.local_size > place.size:
        raise _place_error(table, f"the local size {place.local_size} is more than the size {place.size}")
    if one_node and place.local_size != place.size:
        raise _place_error(
            table, f"the local size {place.local_size} is not the size {place.size}, yet there is one machine"
        )
    if place.nodes is None:
        return
    listed = f"{' or '.join(table.hosts)} lists {counted(len(place.hosts), 'host')}"
    if place.hosts and place.node is not None and place.node >= len(place.hosts):
        raise _place_error(table, f"{listed}, and this process is on node {place.node}, counted from 0")
    if place.node is not None:
        _check(table, "node", place.node, "nodes", place.nodes)
    if place.hosts and len(place.hosts) != place.nodes:
        raise _place_error(table, f"{listed}, but there are {counted(place.nodes, 'node')}")


def _coordinator(table: LauncherEnv, environ: Mapping[str, str], hosts: tuple[str, ...]) -> str | None:
    address, port = _text(environ, table.address), _text(environ, table.port)
    if not address:
        return hosts[0] if hosts else None
    return f"{address}:{port}" if port else address


def _text(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _number(table: LauncherEnv, environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text:
            if not (text.isascii() and text.isdecimal()):
                raise _place_error(table, f"{name}={text!r} is not a whole number of 0 or more")
            return int(text)
    return None


def _required_number(table: LauncherEnv, environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    value = _number(table, environ, names)
    if value is None:
        raise _place_error(table, f"{' or '.join(names)} is not set")
    return value


def _check(table: LauncherEnv, quantity: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        raise _place_error(table, f"the {quantity} {value} is not below the {limit_name} {limit}")


def _place_error(table: LauncherEnv, problem: str) -> InvalidInputError:
    names = ", ".join(table.detect_any + tuple(name for name in table.detect_all if name not in table.detect_any))
    mpi_advice = " set CHOROS_COMM=mpi on all ranks to get the ranks from MPI," if table.mpi else ""
    return InvalidInputError(
        f"this process's place, as {table.launcher} reports it, is inconsistent: {problem}. Start it through "
        f"{table.launcher} again,{mpi_advice} or unset {names} to run this process as a single rank."
    )
