"""``choros check``: compare the training of a user's model by workers with plain Keras."""

from __future__ import annotations

import argparse
import json
import os
import traceback
from typing import TYPE_CHECKING

from choros.algorithms import ALL, by_name
from choros.argument_checks import check_model_file
from choros.cli.arguments import Known, count, list_of
from choros.cli.parser import plain, print_error
from choros.cli.terminal import write_report
from choros.errors import ChorosError, InvalidInputError, UnknownAlgorithmError, brief

if TYPE_CHECKING:
    from choros.algorithms import Algorithm
    from choros.cli.arguments import SubParsers

_HELP = """\
Runs a Python file that defines `model`, compiled (or `build()` or `make_model()`, which returns one), and `x` and `y`
(or `data()`, which returns them), trains the model in one process by plain fit, by 1, 2 and 3 workers and after a
resume, and compares weights, optimizer slots and metrics. Without data, rows are drawn by the shapes of the model's
inputs and outputs; a Sequential has them if its first layer is keras.Input.
"""
_EPILOG = """\
examples:
  choros check model.py
  choros check model.py --algorithm aeasgd --workers 1,2 --variables

Exit codes: 0 if all agree; 1 if something differs or failed, also the file; 2 if the command or the file is wrong; 3 if
the model is refused; 130 interrupted (Ctrl-C).
"""

KNOWN = {"--algorithm": Known(tuple(kind.__name__.lower() for kind in ALL))}


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "check", help="compare a model's training by workers with plain Keras", description=_HELP, epilog=_EPILOG
    )
    parser.add_argument("file", metavar="FILE", help="Python file that defines the model, such as model.py")
    add = parser.add_argument_group("trainings").add_argument
    add(
        "--algorithm",
        type=_algorithm,
        default="allreduce",
        metavar="NAME",
        help="name of an algorithm, such as aeasgd (default: allreduce)",
    )
    add(
        "-n",
        "--workers",
        type=list_of(count),
        default=[1, 2, 3],
        metavar="LIST",
        help="numbers of workers, each tried (default: 1,2,3)",
    )
    add("--batch-size", type=count, metavar="B", help="rows of a global batch (default: 16)")
    add("--epochs", type=count, default=2, metavar="N", help="number of epochs (default: 2)")
    add("--rows", type=count, metavar="N", help="number of rows used (default: four batches and two rows)")
    add("--no-resume", action="store_true", help="leave out the run that resumes from a checkpoint")
    add = parser.add_argument_group("report").add_argument
    add("--variables", action="store_true", help="list each variable and metric, not only those that differ")
    add("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    """Check the model and print the report.

    Args:
        args: the parsed arguments.

    Returns:
        The report's exit code.

    Raises:
        InvalidInputError: an argument is not valid, or the file has no model.
    """
    if args.epochs < 2 and not args.no_resume:
        raise InvalidInputError(
            f"--epochs {args.epochs}: the run that resumes needs 2 or more; --no-resume leaves it out"
        )
    check_model_file(args.file)  # before the import of Keras
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from choros.tools.check import check, load_model

    try:
        model, data = load_model(args.file)
    except ChorosError:
        raise
    except Exception as error:  # of the user's file
        traceback.print_exception(_without_callers(error, args.file))
        return print_error(args.parser.prog, f"{args.file} failed: {brief(error)}", 1)
    report = check(
        model,
        *data,
        algorithm=args.algorithm,
        workers=args.workers,
        resume=not args.no_resume,
        batch_size=args.batch_size,
        epochs=args.epochs,
        rows=args.rows,
    )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        write_report(report.table(args.variables))
    return report.exit_code


def _algorithm(name: str) -> Algorithm:
    """Return the algorithm of a name, before the user's file is run."""
    try:
        return by_name(name)
    except UnknownAlgorithmError as error:
        raise argparse.ArgumentTypeError(plain(str(error))) from None


def _without_callers(error: Exception, file: str) -> Exception:
    """Return an exception whose traceback begins in the file; it has none if the file could not be compiled."""
    begin = error.__traceback__
    while begin is not None and begin.tb_frame.f_code.co_filename != file:
        begin = begin.tb_next
    return error.with_traceback(begin)
