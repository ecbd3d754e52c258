"""``choros log [-f] JOB``: a job's log, and what is added to it until the job ends."""

from __future__ import annotations

import argparse
from typing import Any

from choros.submit import SCHEDULERS, find_scheduler, follow_log


def add_parser(subparsers: Any) -> None:
    """Add this command to the parser.

    Args:
        subparsers: what ``argparse.ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser("log", help="print a job's log")
    parser.add_argument("--on", default="", choices=sorted(SCHEDULERS), help="the scheduler (default: the one here)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument("job", help="its id, as choros submit printed it")


def main(args: argparse.Namespace) -> int:
    """Print it.

    Args:
        args: as parsed.

    Returns:
        0.

    Raises:
        BadInput: there is no log.
    """
    follow_log(find_scheduler(args.on), args.job, args.follow)
    return 0
