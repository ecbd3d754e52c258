"""``choros log [-f] JOB``: print a job's log, with ``-f`` until the job ends."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from choros.cli.arguments import choose_scheduler, job_parser
from choros.launch.schedulers import follow_log

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    where = ", from the file that the scheduler names, else from the current directory"
    parser = job_parser(subparsers, "log", "print a job's log", "-f ", where)
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until the job ends")


def main(args: argparse.Namespace) -> int:
    """Print the log.

    Args:
        args: the parsed arguments.

    Returns:
        0.

    Raises:
        SchedulerError: there is no log.
    """
    follow_log(choose_scheduler(args.parser.prog, args.on), args.job, args.follow)
    return 0
