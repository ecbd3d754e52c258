"""``choros cancel JOB``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from choros.cli.arguments import choose_scheduler, job_parser
from choros.launch.schedulers import cancel_job

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    job_parser(subparsers, "cancel", "cancel a job")


def main(args: argparse.Namespace) -> int:
    """Cancel the job.

    Args:
        args: the parsed arguments.

    Returns:
        0.

    Raises:
        SchedulerError: the scheduler does not know the job, or refuses.
    """
    if not cancel_job(choose_scheduler(args.parser.prog, args.on), args.job):
        print(f"job {args.job} is over already: there is nothing to cancel")
    return 0
