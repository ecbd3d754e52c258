"""``choros spark doctor | pack``: check the executors of a Spark cluster, pack an environment for them."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from choros.cli.arguments import level
from choros.cli.parser import print_error
from choros.console import write_line
from choros.errors import ChorosError, MissingPackageError, brief

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_EPILOG = """\
examples:
  choros spark doctor spark://head:7077
  choros spark pack environment.tar.gz

choros spark ACTION --help describes an action.

Exit codes: 0 success; 1 a failure, or a package is missing; 2 wrong usage; 130 interrupted (Ctrl-C).
"""
_DOCTOR = """\
examples:
  choros spark doctor                      the cluster of Spark's own settings
  choros spark doctor spark://head:7077
  choros spark doctor 'local[2]'           two slots on this machine

Exit codes: 0 nothing is wrong; 1 a problem was found, no server answers at the URL, no task could start, or pyspark or
Java is missing; 2 wrong usage, such as a URL of another form; 130 interrupted (Ctrl-C).
"""
_PACK = """\
examples:
  choros spark pack
  choros spark pack --prefix ~/venv --python-prefix /usr environment.tar.gz
  choros submit --on spark --master yarn --archive environment.tar.gz train.py

Exit codes: 0 success; 1 venv-pack2 or conda-pack is missing, or the file cannot be written; 2 wrong usage, the
file exists, or the environment cannot be packed; 130 interrupted (Ctrl-C).
"""


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "spark",
        help="check a Spark cluster, or pack an environment for its executors",
        description="Checks which packages and settings the executors lack, or packs this environment for them.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    doctor = actions.add_parser(
        "doctor",
        help="compare the packages and settings of the executors with the driver's",
        description="Starts a task in each slot of the cluster, and prints what the executors lack.",
        epilog=_DOCTOR,
    )
    doctor.add_argument("master", nargs="?", default="", help="URL of the cluster (default: Spark's own settings)")
    pack = actions.add_parser(
        "pack",
        help="pack this environment into one file for the executors",
        description="Packs a venv by venv-pack2, or an environment of conda by conda-pack. The executors need the "
        "Python of a venv at the same place, or --python-prefix; conda's environments contain Python.",
        epilog=_PACK,
    )
    add = pack.add_argument
    add("output", nargs="?", default="environment.tar.gz", help="file to write (default: environment.tar.gz)")
    add("--prefix", default=sys.prefix, metavar="DIR", help="directory of the environment (default: this Python's)")
    add("--python-prefix", default="", metavar="DIR", help="where executors have the venv's Python, such as /usr")
    add("--level", type=level, default=1, metavar="N", help="level of compression, 0 to 9 (default: 1)")
    add("--force", action="store_true", help="replace an existing file (default: refused)")


def main(args: argparse.Namespace) -> int:
    """Run the action.

    Args:
        args: the parsed arguments.

    Returns:
        0; 1 if the doctor found a problem.

    Raises:
        InvalidInputError: there is no such environment, the file exists, or the URL of the cluster has an unknown form.
        MissingPackageError: a package is missing.
    """
    if args.action == "pack":
        from choros.spark.pack_environment import pack, usage

        options = {"python_prefix": args.python_prefix, "level": args.level, "force": args.force}
        write_line(usage(pack(args.output, args.prefix, **options)))
        return 0
    from choros.spark.master_url import check_url
    from choros.spark.optional_import import require_pyspark

    check_url(args.master or os.environ.get("SPARK_REMOTE", ""))
    require_pyspark()
    from choros.spark.doctor import check

    try:
        return check(args.master)
    except (MissingPackageError, OSError):
        raise
    except Exception as error:  # of Spark, whose traceback names no line of the user
        return print_error(args.parser.prog, str(error) if isinstance(error, ChorosError) else brief(error), 1)
