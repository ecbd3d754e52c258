"""``choros where``: print this process's rank, cores, threads and libraries. Imports no framework."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import TYPE_CHECKING, Any

from choros.backend_choice import keras_backend, problem
from choros.cli.terminal import write_rows
from choros.cluster import Place, why
from choros.cluster.hardware import physical_cores, usable_cores, variables, version
from choros.cluster.hostlist import number_ranges
from choros.comm.bootstrap.discover_rank import uses_mpi_rank
from choros.comm.bootstrap.select import choose
from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_LIBRARIES = ("keras", "jax", "torch", "tensorflow", "numpy")


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "where",
        help="print this process's rank, cores, threads and libraries",
        description="Prints this process's rank, cores, threads and libraries, without importing a framework.",
        epilog="examples:\n  choros where\n  srun choros where --json\n\n"
        "Exit codes: 0 success; 2 the launcher's variables contradict each other.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the findings.

    Args:
        args: the parsed arguments.

    Returns:
        0.
    """
    report = findings()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    place, cores = report["place"], report["cores"]
    node = "unknown" if place["node"] is None else place["node"]
    nodes = "unknown" if place["nodes"] is None else place["nodes"]
    rows = {
        "place": f"rank {place['rank']} of {place['size']}, "
        f"local rank {place['local_rank']} of {place['local_size']}, node {node} of {nodes}",
        "launcher": place["launcher"],
        "why": report["why"],
        "group": report["group"],
        "hosts": ", ".join(place["hosts"]) or "not reported by the launcher",
        "coordinator": place["coordinator"] or "none",
        "this host": report["host"],
        "cores": f"{len(cores['usable'])} usable ({number_ranges(cores['usable'])}), {len(cores['physical'])} physical",
        "threads": ", ".join(f"{name}={value}" for name, value in report["threads"].items()) or "no variable is set",
        "backend": report["backend"],
        "libraries": ", ".join(f"{name} {version or 'not installed'}" for name, version in report["libraries"].items()),
        "choros": f"{report['choros']}, Python {report['python']}",
    }
    if report["problem"]:
        rows["problem"] = report["problem"]
    write_rows(rows)
    return 0


def findings() -> dict[str, Any]:
    """Return the output of ``choros where`` as a dict of JSON types.

    Returns:
        The place and its source, the ranks' transport, host, cores, thread variables, Keras' backend and the reason
        why it cannot be imported, versions.

    Example:
        >>> sorted(findings()["place"])[:3]
        ['coordinator', 'hosts', 'launcher']
    """
    place = Place.here()
    names = ("OMP_WAIT_POLICY", *variables(1))
    return {
        "place": {name: getattr(place, name) for name in Place.__dataclass_fields__},
        "why": why(),
        "group": _group(place),
        "host": platform.node(),
        "cores": {"usable": list(usable_cores()), "physical": [list(core) for core in physical_cores()]},
        "threads": {name: os.environ[name] for name in names if name in os.environ},
        "backend": keras_backend(),
        "problem": problem(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "choros": version("choros"),
        "python": platform.python_version(),
    }


def _group(place: Place) -> str:
    """Return a description of the transport by which a job's ranks would communicate."""

    def wheel() -> str:
        return f"; mpi4py {version('mpi4py') or 'is not installed'}"

    if uses_mpi_rank(place):
        return "MPI (CHOROS_COMM=mpi), which also gives the ranks their numbers" + wheel()
    if place.size == 1:
        return "none needed: one rank"
    try:
        choice = choose(place)
    except InvalidInputError as error:
        return f"none: {error}"
    return choice.description + (wheel() if "MPI" in choice.description else "")
