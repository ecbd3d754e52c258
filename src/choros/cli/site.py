"""``choros site list | init``: the clusters that ``choros submit --site`` knows, and a file for this one."""

from __future__ import annotations

import argparse
import platform
import re
from typing import TYPE_CHECKING

from choros.cli.parser import print_error
from choros.cli.terminal import write_rows
from choros.cluster.hardware import find_mpi, physical_cores
from choros.console import write_line
from choros.errors import InvalidInputError
from choros.launch.schedulers import config_folder, find_scheduler, load_site, site_names

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_EPILOG = """\
examples:
  choros site list
  choros site init mine

choros site ACTION --help describes an action.

Exit codes: 0 success; 1 a failure; 2 wrong usage.
"""
_LIST = """\
examples:
  choros site list

Exit codes: 0 success; 2 wrong usage, or the file of a site is not valid.
"""
_INIT = """\
examples:
  choros site init mine                writes ~/.config/choros/sites/mine.toml (or XDG_CONFIG_HOME)
  choros submit --site mine train.py   uses it

Exit codes: 0 success; 1 the file cannot be written; 2 wrong usage, or the file exists.
"""
_FILE = """\
# Facts about a cluster for choros submit --site {name}. Found on {host}; check them, and complete them.
# choros.launch.schedulers.Site documents all keys.
name = "{name}"
scheduler = "{scheduler}"  # slurm, pbs, flux, lsf, sge, k8s; "" looks for a command on PATH at each call
mpi = "{mpi}"  # mpich, openmpi, intel, pals, or a value of srun --mpi=; "" takes that of mpi4py
ranks_per_node = 1
cores = 1  # of each rank
gpus = 0  # of each rank
cores_per_node = {cores}  # of this host, which may be a login node; 0: unknown
gpus_per_node = 0  # 0: unknown
needs_account = false
directives = []  # such as ["--constraint=cpu"]

[environment]  # variables to export, such as NCCL_SOCKET_IFNAME = "hsn0"
"""


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    text = "list clusters, or write the file of this one for choros submit --site"
    about = "Lists clusters, or writes the file of this one for choros submit --site."
    parser = subparsers.add_parser("site", help=text, description=about, epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    actions.add_parser(
        "list",
        help="print the name and the scheduler of each cluster",
        description="Prints the name and the scheduler of each cluster: of the presets, and of your own files.",
        epilog=_LIST,
    )
    init = actions.add_parser(
        "init",
        help="write the file of this cluster, from what is found here",
        description="Writes a file with the scheduler, the MPI and the cores that are found on this machine. Check it, "
        "and complete it.",
        epilog=_INIT,
    )
    init.add_argument("name", help="name of the cluster, for --site")


def main(args: argparse.Namespace) -> int:
    """Run the action.

    Args:
        args: the parsed arguments.

    Returns:
        0; 1 if the file cannot be written.

    Raises:
        InvalidInputError: the name cannot be that of a file, or the file exists.
    """
    if args.action == "list":
        write_rows({name: load_site(name).scheduler or "any scheduler" for name in site_names()})
        return 0
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", args.name):
        raise InvalidInputError(f"{args.name!r} is not a valid name of a site: use letters, digits, - and _")
    file = config_folder() / "sites" / f"{args.name}.toml"
    text = _FILE.format(
        name=args.name, host=platform.node(), scheduler=_scheduler(), mpi=find_mpi(), cores=len(physical_cores())
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise InvalidInputError(f"{file} exists: edit it, or give another name") from None
    except OSError as error:
        return print_error(args.parser.prog, f"{file} cannot be written: {error.strerror}", 1)
    write_line(f"{file}\nCheck it, then: choros submit --site {args.name} --dry-run train.py")
    return 0


def _scheduler() -> str:
    """Return the name of the scheduler whose command is on PATH, or ""."""
    try:
        return find_scheduler().name
    except InvalidInputError:
        return ""
