"""``choros tune``: find the ranks, threads, binding and spin time with which a script trains fastest here."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from choros.backend_choice import announce
from choros.cli.arguments import count, list_of, some_seconds, whole
from choros.cli.terminal import write_report
from choros.cluster.hardware import physical_cores
from choros.errors import InvalidInputError, WorkerFailedError, counted

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_HELP = """\
Starts a training script by `choros run` with several numbers of ranks and threads, with and without binding, and with
several spin times of OpenMP. Each trial makes a few steps of the script's own `fit` (of `choros.hvd`, `choros.Trainer`
or Keras) and is then ended. Then plain `model.fit` in one process with all cores does the same, for comparison.
Prints the times, and the line for the job script. Run it where the job will run: on a
compute node. What the script writes before its first steps, it writes in each trial.
"""
_EPILOG = """\
examples:
  choros tune train.py
  choros tune -n 2,4 --threads 1,2 --bind yes train.py --batch-size 256

Exit codes: 0 success; 1 all trials failed, or no fit was made; 2 wrong usage, and nothing was started;
130 interrupted (Ctrl-C).
"""


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "tune",
        help="find the ranks and threads with which a script trains fastest",
        description=_HELP,
        epilog=_EPILOG,
        usage="choros tune [OPTIONS] (script.py | -m module) [ARGS ...]",
    )
    add = parser.add_argument_group("settings to try").add_argument
    add(
        "-n",
        "--workers",
        "--ranks",
        dest="ranks",
        type=list_of(count),
        metavar="LIST",
        help="numbers of ranks, such as 2,4 (default: 1, 2, 4 ... cores)",
    )
    add(
        "--threads",
        type=list_of(count),
        default=[],
        metavar="LIST",
        help="numbers of threads of a rank, such as 1,2 (default: the number of its cores, and half of it)",
    )
    add(
        "--bind", choices=("yes", "no", "both"), default="both", help="whether ranks are bound to cores (default: both)"
    )
    add(
        "--blocktime",
        type=list_of(whole),
        default=[0, 200],
        metavar="LIST",
        help="KMP_BLOCKTIME in ms; 0 also sets OMP_WAIT_POLICY=PASSIVE, others ACTIVE (default: 0,200)",
    )
    add = parser.add_argument_group("measurement").add_argument
    add("--warmup", type=count, default=5, metavar="N", help="number of steps before the measurement (default: 5)")
    add("--steps", type=count, default=20, metavar="N", help="number of measured steps (default: 20)")
    add(
        "--timeout",
        type=some_seconds,
        default=300.0,
        metavar="S",
        help="seconds after which a trial is ended (default: 300)",
    )
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="the target is a module")
    add("target", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS]", help="the script and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the trials, and print their times and the line for the job script.

    Args:
        args: the parsed arguments.

    Returns:
        0.

    Raises:
        InvalidInputError: no script was given, or it does not exist, or no trial fits on this machine.
        WorkerFailedError: all trials failed.
    """
    from choros.cli.command_target import command_of
    from choros.tools.tune import HEAD, Outcome, Trial, grid, run_trial, search
    from choros.tools.tune.settings import TuneSettings

    program, *words = command_of(args.target, args.module, name="tune")
    if program != sys.executable:
        raise InvalidInputError(f"{program} is not a Python script: give one that ends in .py, or -m and a module.")
    cores = len(physical_cores())
    ranks = args.ranks or [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    trials = grid(ranks, args.threads, cores)
    if not trials:
        threads = ",".join(map(str, args.threads))
        raise InvalidInputError(
            f"No trial of --threads {threads} fits on {counted(cores, 'core')}: give smaller numbers."
        )
    settings = TuneSettings(args.warmup, args.steps)
    bindings = {"yes": [True], "no": [False], "both": [True, False]}[args.bind]

    def run(trial: Trial) -> Outcome:
        return run_trial(trial, words, settings, args.timeout)

    announce()
    write_report(HEAD)
    outcomes = []
    for outcome in search(trials, bindings, args.blocktime, run):
        outcomes.append(outcome)
        write_report(outcome.text())
    best = min(outcomes, key=lambda outcome: outcome.cost)
    if best.failure:
        failed = (
            "The first trial failed, and no other was made. It" if best.no_fit else "All trials failed. The first one"
        )
        raise WorkerFailedError(f"{failed} printed last:\n{best.failure}", rank=0)
    plain = run(Trial(1, cores, bind=False, plain=True))
    write_report(plain.text())
    similar = sum(best.may_be_as_fast(other) for other in outcomes if other is not best)
    if similar:
        others = "1 other setting differs" if similar == 1 else f"{similar} other settings differ"
        reason = "by so little that it may be chance, as the times of steps vary: more --steps tell them apart."
        write_report(f"\n{others} from the fastest {reason}")
    if comparison := best.against_plain(plain):
        write_report(f"\n{comparison}")
    write_report(f"\nThe fastest here; the line for the job script:\n    {best.trial.command_line(words)}")
    return 0
