"""``choros demo``: train one network by plain ``fit`` and by several algorithms, print a table, write a report."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from choros.algorithms import ALL
from choros.backend_choice import BACKENDS
from choros.cli.arguments import Known, count, seed
from choros.cli.terminal import terminal
from choros.errors import InvalidInputError
from choros.tools.demo.datasets.common import Dataset
from choros.tools.demo.plan import (
    BATCHES,
    DEFAULT,
    EPOCHS,
    PLAIN_VARIABLES,
    TARGETS,
    Plan,
    check_installed,
    choose,
    choose_backend,
    prepare,
)

if TYPE_CHECKING:
    from choros.cli.arguments import SubParsers

_HELP = """\
Trains one network by plain model.fit on all cores, without Choros, and then by several algorithms with the same
optimizer, data and initial weights. Compares the seconds to a target accuracy, with intervals over the seeds. Data: a
CNN on scikit-learn's handwritten digits, enlarged to 28 x 28 pixels, or on MNIST (--data mnist.npz); or dist-keras' own
network on the ATLAS Higgs CSV of CERN Open Data record 328 (--data FILE.csv, plain or gzip).

It needs pip install 'choros[demo]' (scikit-learn, matplotlib). The default takes one to two minutes on 2 cores;
fewer --seeds or --epochs shorten it.
"""
_EPILOG = """\
examples:
  choros demo
  choros demo -n 2 --algorithms single,allreduce,aeasgd --epochs 5

Exit codes: 0 success; 1 an algorithm failed, or a package is missing; 2 wrong usage, and nothing was trained; 130
interrupted (Ctrl-C). After Ctrl-C the report has what was trained until then; without any, none is written.
"""

KNOWN = {"--algorithms": Known(("all", *(kind.__name__.lower() for kind in ALL)), is_list=True)}


def add_parser(subparsers: SubParsers) -> None:
    """Add this command to the parser.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser(
        "demo", help="compare plain fit and several algorithms, and write a report", description=_HELP, epilog=_EPILOG
    )
    add = parser.add_argument_group("data and training").add_argument
    add("--data", type=Path, metavar="FILE", help="mnist.npz or ATLAS Higgs CSV (default: scikit-learn's digits)")
    add("--epochs", type=count, metavar="N", help="number of epochs (default: 10; digits: 5)")
    add("--batch-size", type=count, metavar="B", help="rows of a global batch (default: 64; Higgs: 128)")
    add("--backend", choices=BACKENDS, help="Keras' backend (default: KERAS_BACKEND, else the first installed)")
    add = parser.add_argument_group("comparison").add_argument
    add("--algorithms", metavar="LIST", help=f"all, or names with commas between them (default: {DEFAULT})")
    add("-n", "--workers", type=count, default=2, metavar="N", help="number of workers (default: 2)")
    add("--target", type=_target, metavar="A", help="accuracy to reach (default: 0.9; MNIST: 0.97; Higgs: 0.8)")
    add("--seeds", type=count, default=3, metavar="N", help="trainings of each algorithm (default: 3)")
    add("--seed", type=seed, default=0, metavar="S", help="first seed (default: 0)")
    parser.add_argument_group("report").add_argument(
        "--out",
        type=Path,
        default=Path("choros-demo"),
        metavar="DIR",
        help="folder of the report (default: choros-demo)",
    )


def main(args: argparse.Namespace) -> int:
    """Train by all chosen algorithms, print the table, write the report.

    Args:
        args: the parsed arguments.

    Returns:
        0; 1 if an algorithm failed, 130 if the user interrupted. The report is written in each case, except after an
        interrupt before the end of the first training.

    Raises:
        InvalidInputError: an argument is not valid, or a package is missing; nothing was trained.
    """
    algorithms = choose(args.algorithms)
    backend = choose_backend(args.backend)
    if args.data is not None and not args.data.exists():
        raise InvalidInputError(
            f"--data {args.data} does not exist: give the path of mnist.npz or of the CSV of CERN Open Data record 328."
        )
    check_installed()
    images = args.data is None or args.data.suffix.lower() == ".npz"
    batch_size = args.batch_size or BATCHES[images]
    if batch_size < args.workers:
        raise InvalidInputError(f"--batch-size {batch_size} for {args.workers} workers: give one row a worker or more.")
    environment = dict(os.environ)  # without the limits of this process
    threads = prepare(backend, args.workers)
    print(f"Loading the data, Keras and {backend}", flush=True)
    data, name, classes = _load(args.data)
    made = not args.out.exists()
    _make_folder(args.out)
    seeds = tuple(range(args.seed, args.seed + args.seeds))
    target, epochs = args.target or TARGETS[data.name], args.epochs or EPOCHS[data.name]
    plan = Plan(algorithms, backend, args.workers, epochs, batch_size, seeds, threads, target)

    from choros.tools.demo import comparison
    from choros.tools.demo.load import LoadMeter
    from choros.tools.demo.progress import Display
    from choros.tools.demo.report import findings, text_table, write
    from choros.tools.demo.report.results import PLAIN
    from choros.training.executors.worker_pool import WorkerPool

    importlib.import_module("keras")  # now, so that messages of the backend's import come before the table
    setting = comparison.setting(plan, data, name, classes)
    console = terminal()
    waiting = "" if console else "Training; the line of an algorithm appears when it has trained from all seeds\n"
    print(f"{comparison.describe(setting)}\n{waiting}", flush=True)
    names = [PLAIN, *(type(algorithm).__name__ for algorithm in algorithms)]
    display = Display(names, len(seeds), plan.epochs, console)
    environment |= {name: os.environ[name] for name in PLAIN_VARIABLES if name in os.environ}
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    meter = LoadMeter()
    previous_handler = signal.getsignal(signal.SIGINT)
    if previous_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        with WorkerPool(plan.workers, backend=backend, threads=threads, echo=False) as pool:
            report = comparison.compare(
                plan,
                setting,
                comparison.trainer(plan, data, pool),
                display,
                lambda: bool(interrupts),
                comparison.plain_trainer(plan, data, environment),
            )
    finally:
        display.stop()
        signal.signal(signal.SIGINT, previous_handler)
    if not report.results:
        if made:
            with contextlib.suppress(OSError):  # another program may use it
                args.out.rmdir()
        print("Interrupted before a training had ended: no report is written.", flush=True)
        return 130
    report = replace(report, setting=replace(setting, other_load=meter.cores()))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if report.interrupted else None
    try:  # a second Ctrl-C must not end the writing of the report
        page = write(report, args.out)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    print(f"\n{text_table(report)}\n")
    for sentence in findings(report):
        print(sentence)
    if report.interrupted:
        print("Interrupted; the report holds what was measured until then.")
    print(f"Report, with the meaning of each column: {page}", flush=True)
    if report.interrupted:
        return 130
    return 1 if any(result.failed for result in report.results) else 0


def _load(path: Path | None) -> tuple[Dataset, str, tuple[str, ...]]:
    """Return the data, their name and the names of their classes for the report."""
    if path is None:
        from choros.tools.demo.datasets.images import load_enlarged_digits

        return load_enlarged_digits(), "scikit-learn's digits, enlarged", tuple("0123456789")
    if path.suffix.lower() == ".npz":
        from choros.tools.demo.datasets.images import load_mnist

        return load_mnist(path), f"MNIST ({path.name})", tuple("0123456789")
    from choros.tools.demo.datasets.higgs import load_higgs

    return load_higgs(path), f"ATLAS Higgs ({path.name})", ("background", "signal")


def _make_folder(folder: Path) -> None:
    """Create the folder of the report; raise InvalidInputError before the training if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"--out {folder} cannot be made ({error.strerror}): give another folder.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInputError(f"--out {folder} cannot be written to: give another folder.")


def _target(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an accuracy between 0 and 1, such as 0.95")
    return value
