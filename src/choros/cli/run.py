"""``choros run -n 4 [--threads T] [--no-bind] script.py ARGS``: N ranks of a script on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from choros.cluster import Place
from choros.errors import BadInput
from choros.launch.run import GRACE, run
from choros.machine import plan, usable_cores, variables

_HELP = """\
Each rank finds its place in CHOROS_RANK, CHOROS_SIZE, CHOROS_LOCAL_RANK and CHOROS_LOCAL_SIZE, is bound to cores of its
own and told its number of threads before anything is imported. Lines that ranks print are marked with their rank. The
first rank that fails ends all others and gives its exit code.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the parser.

    Args:
        subparsers: what ``argparse.ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "run",
        help="run N ranks of a script on this machine",
        description=_HELP,
        usage="choros run -n N [--threads T] [--no-bind] [--grace S] (script.py | -m module | program) [ARGS ...]",
    )
    parser.add_argument("-n", "--workers", type=_count, required=True, metavar="N", help="how many ranks")
    parser.add_argument("--threads", type=_count, metavar="T", help="threads of each rank (default: its cores)")
    parser.add_argument("--no-bind", action="store_true", help="leave it to the system where ranks run")
    parser.add_argument(
        "--grace", type=_seconds, default=GRACE, metavar="S", help="seconds between SIGTERM and SIGKILL (default: 5)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module, as in python -m")
    parser.add_argument("target", nargs=argparse.REMAINDER, metavar="script.py ARGS", help="what the ranks run")


def main(args: argparse.Namespace) -> int:
    """Run the ranks.

    Args:
        args: as parsed.

    Returns:
        The exit code of the run.

    Raises:
        BadInput: nothing to run, or this process is a rank itself.
    """
    size: int = args.workers
    command = _command(args.target, args.module)
    here = Place.here()
    if here.size > 1:
        raise BadInput(
            f"this process is already rank {here.rank} of {here.size} (started by {here.launcher}): "
            "run the script itself there, without 'choros run'"
        )
    bindings = plan(size, args.threads, not args.no_bind)
    # what the user exported holds, unless --threads says otherwise
    keep = {} if args.threads else dict(os.environ)
    crowded = not bindings[0].cores or size * bindings[0].threads > len(usable_cores())
    threads = [variables(binding.threads, keep=keep, shared=crowded) for binding in bindings]
    from choros.transport.shared_group import SharedGroup

    segment = SharedGroup.create(size)
    try:
        return run(
            command,
            size,
            environment=[{**each, "CHOROS_GROUP_FD": str(segment.fd)} for each in threads],
            cores=[binding.cores for binding in bindings],
            pass_fds=(segment.fd,),
            grace=args.grace,
        )
    finally:
        segment.close()


def _command(target: Sequence[str], module: bool) -> list[str]:
    """The program and its arguments that a rank becomes."""
    target = list(target[1:] if target[:1] == ["--"] else target)
    if not target:
        raise BadInput("nothing to run: give a script, -m and a module, or a program")
    if module:
        return [sys.executable, "-m", *target]
    name = target[0]
    if name.startswith("-"):
        raise BadInput(f"{name} is no option of 'choros run'; see choros run --help")
    if name.endswith((".py", ".pyc", ".pyz")) or os.path.isdir(name):
        if not os.path.exists(name):
            raise BadInput(f"the script {name} does not exist (the directory is {os.getcwd()})")
        if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
            raise BadInput(f"{name} is a directory without a __main__.py: give a script in it")
        return [sys.executable, *target]
    if shutil.which(name) is None:
        what = "is not executable" if os.path.exists(name) else "is neither a file nor a program on PATH"
        raise BadInput(f"{name} {what}; a Python script ends in .py, a module comes after -m")
    return target


def _count(text: str) -> int:
    """A number of 1 or more."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text}")
    return value
