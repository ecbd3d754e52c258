"""``choros doctor``: check this host, or the job of this rank, and print the problems and their remedies."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from choros.backend_choice import BACKENDS
from choros.cli.arguments import Known, add_workers_option, some_seconds
from choros.cli.terminal import write_report

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_HELP = """\
Start it as you start the job: as one process for this machine, with choros doctor -n 4, or by the job's launcher
(mpiexec -n 4 choros doctor, srun choros doctor, choros run -n 4 -- choros doctor). Each rank reads its numbers, cores,
memory, versions and network. All ranks measure memory, clocks, stragglers and the communication between ranks, and
train a small model on each backend. Rank 0 prints one report, which ends with the problems and their remedies.
"""
_EPILOG = """\
examples:
  choros doctor                           this machine, one process
  choros doctor -n 4 --no-smoke           four ranks here, without trainings
  srun -N 2 -n 8 choros doctor --json     the ranks and hosts of a job

Exit codes: 0 without errors (warnings are possible); 1 with errors; 2 wrong usage; 130 interrupted (Ctrl-C).
"""

KNOWN = {"--backends": Known(BACKENDS, is_list=True)}


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser("doctor", help="diagnose a job's ranks and hosts", description=_HELP, epilog=_EPILOG)
    add = parser.add_argument_group("checks").add_argument
    add_workers_option(
        add, "number of ranks to start on this machine (default: none; this process is the only rank, or one of a job)"
    )
    add("--no-smoke", action="store_true", help="leave out the trainings, which take most of the time")
    add(
        "--backends",
        type=_backends,
        default=(),
        metavar="A,B",
        help="backends to train on, such as jax,torch (default: all that are installed)",
    )
    add = parser.add_argument_group("report").add_argument
    add("--json", action="store_true", help="print the report as JSON")
    add("--quiet", action="store_true", help="print nothing if there is nothing to change")
    add = parser.add_argument_group("limits of time").add_argument
    add(
        "--timeout",
        type=some_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for the other ranks (default: 60)",
    )
    add(
        "--smoke-timeout",
        type=some_seconds,
        default=180.0,
        metavar="S",
        help="seconds that the training on one backend may take (default: 180)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the checks and print the report.

    Args:
        args: the parsed arguments.

    Returns:
        0, or 1 if the report has an error.

    Raises:
        InvalidInputError: ``-n`` is given in a process that is already a rank.
    """
    if args.workers is not None:
        from choros.tools.doctor.launch_checks import visit_all

        return _print(visit_all(args.workers, _options(args)), args)
    return _rank(args)


def _rank(args: argparse.Namespace) -> int:
    """Run the checks as one rank of a job, or as the only one."""
    from choros.tools.doctor.rank_check import HAND, CheckOptions, RankCheck

    faulthandler.enable()
    visit = RankCheck(CheckOptions(not args.no_smoke, args.backends, args.timeout, args.smoke_timeout))
    seen = visit.run()
    from choros.tools.doctor.report import brief, code_of, summary
    from choros.tools.doctor.rules import judge

    handed = HAND in os.environ
    if visit.rank == 0:
        report = summary(seen)
        visit.hand(None if visit.broken else report)
        code = code_of(report) if handed else _print(report, args)
    else:
        code = int(visit.broken)
        if visit.broken and not handed:
            print(brief(judge(seen)), file=sys.stderr, flush=True)
    if visit.broken and visit.size > 1:
        sys.stdout.flush()
        time.sleep(1.0)  # let the other ranks print first: a launcher ends them when this one has ended
        if any(trouble["kind"] == "lost" for trouble in seen.troubles):
            os._exit(code)  # without exit functions of libraries, which would wait for lost ranks
    return code


def _print(report: dict[str, Any], args: argparse.Namespace) -> int:
    from choros.tools.doctor.report import code_of, text

    if args.json:
        print(json.dumps(report, indent=2), flush=True)
    elif not (args.quiet and report["healthy"]):
        write_report(text(report))
    return code_of(report)


def _options(args: argparse.Namespace) -> list[str]:
    """Return the options that are passed to the ranks."""
    options = ["--timeout", str(args.timeout), "--smoke-timeout", str(args.smoke_timeout)]
    options += ["--backends", ",".join(args.backends)] if args.backends else []
    return options + (["--no-smoke"] if args.no_smoke else [])


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{unknown[0] if unknown else 'nothing'} is none of {', '.join(BACKENDS)}")
    return names
