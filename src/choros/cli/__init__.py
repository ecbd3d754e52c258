"""The command ``choros`` with its subcommands, one module each."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from choros.errors import ChorosError, InvalidInputError, WorkerFailedError

_COMMANDS = {
    "run": "run N ranks of a script on this machine or on hosts",
    "submit": "write the script of a job for a cluster's scheduler, and submit it",
    "status": "print the scheduler's status of a job",
    "log": "print a job's log",
    "cancel": "cancel a job",
    "where": "print this process's rank, cores, threads and libraries",
    "doctor": "diagnose a job's ranks and hosts",
    "check": "compare a model's training by workers with plain Keras",
    "tune": "find the ranks and threads with which a script trains fastest",
    "demo": "train one model by every algorithm and write a report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments. Defaults to those of this process.

    Returns:
        The exit code: 0, or that of the ranks; 2 for wrong usage, 1 if a worker failed, 130 if interrupted, 141 if the
        reader of stdout has closed it.

    Example:
        >>> main(["run", "-n", "1", "true"])
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(arguments).parse_args(_prepared(arguments))
    except SystemExit as ending:  # argparse has printed the reason
        return ending.code if isinstance(ending.code, int) else 0
    except InvalidInputError as error:  # options that argparse does not know, such as those of retired machines
        print(f"choros {_asked(arguments)}: {error}", file=sys.stderr)
        return 2
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
        print(f"choros {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorkerFailedError) else 2
    return int(code)


def _asked(arguments: Sequence[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _prepared(arguments: list[str]) -> list[str]:
    """Return the arguments for argparse; commands change values that argparse would take for options."""
    name = _asked(arguments)
    if name not in _COMMANDS:
        return arguments
    prepare = getattr(import_module(f"choros.cli.{name}"), "before_parsing", list)
    return list(prepare(arguments))


class _Parser(argparse.ArgumentParser):
    """A parser that takes no option with a single dash for an abbreviation of another one.

    argparse always does, also for arguments of the user's program: ``-c`` of ``sh -c`` would be ambiguous in ``choros
    run``, which has ``-cb`` and ``-cc``.
    """

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        matches: list[Any] = super()._get_option_tuples(option_string)  # type: ignore[misc]
        return [match for match in matches if option_string.startswith(("--", match[1]))]


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; it imports only the module of the given command."""
    parser = _Parser(prog="choros", description="Train one Keras 3 model with many workers.")
    parser.add_argument("--version", action="version", version=f"choros {metadata.version('choros')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = _asked(arguments)
    for name, text in _COMMANDS.items():
        if name == command:
            import_module(f"choros.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=text)
    return parser
