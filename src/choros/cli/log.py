"""``choros log [-f] JOB``: print a job's log, with ``-f`` until the job ends."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from choros.cli.arguments import job_parser
from choros.launch.schedulers import find_scheduler, follow_log

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = job_parser(subparsers, "log", "print a job's log")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until the job ends")


def main(args: argparse.Namespace) -> int:
    """Print the log.

    Args:
        args: the parsed arguments.

    Returns:
        0.

    Raises:
        InvalidInputError: there is no log.
    """
    follow_log(find_scheduler(args.on), args.job, args.follow)
    return 0
