"""The command ``choros`` with its subcommands, one module each.

Exit codes of all commands: 0; 1 for a failure; 2 for wrong usage, which is found before anything is started (an option
that argparse refuses, or ``InvalidInputError``); 130 if interrupted; 141 if the reader of stdout has closed it.
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

from choros.cli.parser import EXIT_CODES, Parser, did_you_mean
from choros.errors import ChorosError, InvalidInputError

COMMANDS = {
    "run": "run N ranks of a script on this machine or on hosts",
    "submit": "write the script of a job for a cluster's scheduler, and submit it",
    "site": "list clusters, or write the file of this one for choros submit --site",
    "status": "print the scheduler's status of a job",
    "log": "print a job's log",
    "cancel": "cancel a job",
    "where": "print this process's rank, cores, threads and libraries",
    "doctor": "diagnose a job's ranks and hosts",
    "check": "compare a model's training by workers with plain Keras",
    "tune": "find the ranks and threads with which a script trains fastest",
    "spark": "check a Spark cluster, or pack an environment for its executors",
    "completion": "print the completion of commands and options for a shell",
    "demo": "compare plain fit and several algorithms, and write a report",
}
ALIASES = {"logs": "log", "env": "where"}


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
    try:
        args = parse_arguments(arguments)
    except SystemExit as ending:  # argparse has printed the reason
        return ending.code if isinstance(ending.code, int) else 0
    except InvalidInputError as error:  # options that argparse does not know, such as those of retired machines
        return _failed(_asked(arguments), error)
    try:
        code = import_module(f"choros.cli.{args.command}").main(args)
        if sys.stdout is not None:  # None if the shell has closed it
            sys.stdout.flush()
    except BrokenPipeError:  # for example, `choros where | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python prints an error at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130
    except ChorosError as error:
        return _failed(args.command, error)
    return int(code)


def _failed(command: str, error: ChorosError) -> int:
    """Print an error, and return the exit code: 2 for wrong usage, else 1."""
    print(f"choros {command}: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, InvalidInputError) else 1


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed arguments; end with code 2 if the command or an option is unknown or missing."""
    name = _asked(arguments)
    command = ALIASES.get(name, name)
    if name in ALIASES:
        arguments[arguments.index(name)] = command
    parser = make_parser(command)
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if command and command not in COMMANDS:
        parser.error(
            f"there is no command {command!r}{did_you_mean(command, (*COMMANDS, *ALIASES))}: see choros --help"
        )
    if command:  # commands change values that argparse would take for options
        arguments = list(getattr(import_module(f"choros.cli.{command}"), "before_parsing", list)(arguments))
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        args.parser.refuse(unknown)
    if args.command is None:
        parser.error("a command is missing: see choros --help")
    return args


def _asked(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def command_parser(command: str) -> Parser:
    """Return the parser of one command."""
    commands = Parser(prog="choros").add_subparsers()
    import_module(f"choros.cli.{command}").add_parser(commands)
    parser: Parser = commands.choices[command]
    return parser


def make_parser(command: str) -> Parser:
    """Return the parser; it imports only the module of the given command."""
    parser = Parser(
        prog="choros",
        description="Train one Keras 3 model with many workers.",
        epilog=f"choros COMMAND --help describes a command. logs is log, and env is where.\n\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"choros {metadata.version('choros')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, text in COMMANDS.items():
        if name == command:
            import_module(f"choros.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    return parser
