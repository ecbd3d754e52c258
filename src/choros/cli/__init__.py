"""The command ``choros`` with its subcommands, one module each.

Exit codes of all commands: 0; 1 for a failure, also for an optional package that is missing (``MissingPackageError``);
2 for wrong usage, which is found before anything is started (an option that argparse refuses, or another
``InvalidInputError``); 130 if interrupted; 141 if the reader of stdout has closed it.
``choros run`` ends with the code of the rank that failed first, and with 75 if the ranks saved their state on a signal
and the job can be submitted again. ``choros submit --on spark`` ends with the code of the job, ``choros check`` with 3
if the model is refused.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NoReturn

from choros.cli.parser import EXIT_CODES, Parser, did_you_mean, print_error
from choros.errors import ChorosError, InvalidInputError, MissingPackageError

GROUPS = {
    "train": {
        "run": "run N ranks of a script on this machine or on hosts",
        "submit": "write the script of a job for a cluster's scheduler, and submit it",
        "demo": "compare plain fit and several algorithms, and write a report",
    },
    "follow jobs": {
        "status": "print the scheduler's status of a job",
        "log": "print a job's log",
        "cancel": "cancel a job",
    },
    "check and measure": {
        "doctor": "diagnose a job's ranks and hosts",
        "check": "compare a model's training by workers with plain Keras",
        "tune": "find the ranks and threads with which a script trains fastest",
        "where": "print this process's rank, cores, threads and libraries",
    },
    "set up": {
        "site": "list clusters, or write the file of this one for choros submit --site",
        "spark": "check a Spark cluster, or pack an environment for its executors",
        "completion": "print the completion of commands and options for a shell",
    },
}
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}
_INTERRUPTED = 128 + signal.SIGINT
ALIASES = {"logs": "log", "env": "where"}
_EXAMPLES = """examples:
  choros doctor
  choros run -n 4 train.py
  choros submit --nodes 2 --ranks-per-node 4 --cores 8 --time 1h train.py"""


def run() -> NoReturn:
    """Run the command of this process, and exit: the entry point of ``choros`` and of ``python -m choros``."""
    from choros.launch.process.interrupts import ignored_interrupts_repeated

    with ignored_interrupts_repeated():
        code = main()
    if code == _INTERRUPTED and "jax" in sys.modules:
        from choros.launch.process.pool_worker import exit_quickly

        # A compilation that was interrupted continues in a thread of XLA. The interpreter's shutdown would destroy
        # JAX's client, which this thread uses: a segmentation fault.
        exit_quickly(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments. Defaults to those of this process.

    Returns:
        The exit code: 0, or that of the ranks; 2 for wrong usage, 1 for any other failure, 130 if interrupted, 141 if
        the reader of stdout has closed it.

    Example:
        >>> main(["run", "-n", "1", "true"])
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    prog = f"choros {asked}" if (asked := _asked(arguments)) in (*COMMANDS, *ALIASES) else "choros"
    try:
        try:
            args = parse_arguments(arguments)
        except SystemExit as ending:  # argparse has printed the help page, or the error
            code = ending.code if isinstance(ending.code, int) else 0
        else:
            prog = args.parser.prog
            code = int(import_module(f"choros.cli.{args.command}").main(args))
        if sys.stdout is not None:  # None if the shell has closed it
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # for example, `choros where | head`
        _drop_stdout()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ChorosError as error:
        is_failure = isinstance(error, MissingPackageError) or not isinstance(error, InvalidInputError)
        return print_error(prog, str(error), 1 if is_failure else 2)
    except OSError as error:  # for example a full disk, or a file that must not be read
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            _drop_stdout()
        file = f"{error.filename}: " if error.filename is not None else ""
        return print_error(prog, f"{file}{error.strerror or error}", 1)


def _drop_stdout() -> None:
    """Replace stdout, which would fail again when Python flushes it at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed arguments; end with code 2 if the command or an option is unknown or missing."""
    name = _asked(arguments)
    command = ALIASES.get(name, name)
    if name in ALIASES:
        arguments[arguments.index(name)] = command
    parser = make_parser(command, name)
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if command and command not in COMMANDS:
        parser.error(f"there is no command {command!r}{did_you_mean(command, (*COMMANDS, *ALIASES))}")
    if command:  # commands change values that argparse would take for options
        arguments = list(getattr(import_module(f"choros.cli.{command}"), "before_parsing", list)(arguments))
    args: argparse.Namespace
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        args.parser.refuse(unknown)
    if args.command is None:
        parser.error("a command is missing")
    return args


def _asked(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def command_parser(command: str) -> Parser:
    """Return the parser of one command."""
    commands = Parser(prog="choros").add_subparsers()
    import_module(f"choros.cli.{command}").add_parser(commands)
    parser: Parser = commands.choices[command]
    return parser


def make_parser(command: str, alias: str = "") -> Parser:
    """Return the parser; it imports only the module of the given command, whose alias the user may have typed."""
    aliases = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    groups = [
        "\n".join([f"{title}:", *(f"  {name:<12}{text}" for name, text in commands.items())])
        for title, commands in GROUPS.items()
    ]
    about = f"choros COMMAND --help describes a command. Aliases: {aliases}."
    parser = Parser(
        prog="choros",
        usage="choros [-h] [--version] COMMAND ...",
        description="\n\n".join(["Train one Keras 3 model with many workers.", *groups]),
        epilog="\n\n".join([_EXAMPLES, about, EXIT_CODES]),
    )
    parser.add_argument("--version", action="version", version=f"choros {metadata.version('choros')}")
    # argparse lists commands in one group only; the description lists them.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="choros", help=argparse.SUPPRESS)
    for name, text in COMMANDS.items():
        if name == command:
            import_module(f"choros.cli.{name}").add_parser(commands)
            commands.choices[name].prog = f"choros {alias or name}"
        else:
            commands.add_parser(name, help=text)
    return parser
