"""``choros status JOB``: print the scheduler's status of a job."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from choros.cli.arguments import choose_scheduler, job_parser
from choros.launch.schedulers import job_status

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    job_parser(subparsers, "status", "print the scheduler's status of a job")


def main(args: argparse.Namespace) -> int:
    """Print the status.

    Args:
        args: the parsed arguments.

    Returns:
        0.

    Raises:
        SchedulerError: the scheduler does not know the job.
    """
    print(job_status(choose_scheduler(args.parser.prog, args.on), args.job))
    return 0
