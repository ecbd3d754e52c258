"""Argument types and parsers that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from choros.launch.schedulers import Scheduler


@dataclass(frozen=True)
class Known:
    """The known values of an option that takes others too; a shell completes them.

    Attributes:
        words: tuple of str. The values.
        is_list: bool. Whether the option takes several values with commas between them.
        has_sites: bool. Whether the names of the user's sites are values too.
    """

    words: tuple[str, ...]
    is_list: bool = False
    has_sites: bool = False


class SubParsers(Protocol):
    """The result of ``argparse.ArgumentParser.add_subparsers``, whose class is private."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add the parser of a command."""
        ...


def count(text: str, more: str = "") -> int:
    """Return text as an integer of 1 or more.

    Args:
        text: the text.
        more: the other values that the option takes, for the message.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> count("4")
        4
    """
    return _whole_number(text, 1, None, f" of 1 or more{more}")


def whole(text: str) -> int:
    """Return text as an integer of 0 or more.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> whole("0")
        0
    """
    return _whole_number(text, 0, None, " of 0 or more")


def level(text: str) -> int:
    """Return text as a level of compression, 0 to 9.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> level("9")
        9
    """
    return _whole_number(text, 0, 9, " from 0 to 9")


def seed(text: str) -> int:
    """Return text as a seed of random numbers, which has 31 bits.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> seed("7")
        7
    """
    return _whole_number(text, 0, 2**31 - 1, f" from 0 to {2**31 - 1}")


def _whole_number(text: str, least: int, most: int | None, words: str) -> int:
    """Return text as an integer within limits; ``words`` describes them in the message of ArgumentTypeError."""
    value = int(text) if text.isascii() and text.isdecimal() else None
    if value is None or value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"must be a whole number{words}, got {text}")
    return value


def seconds(text: str) -> float:
    """Return text as a number of seconds, 0 or more.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> seconds("0.5")
        0.5
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text}")
    return value


def some_seconds(text: str) -> float:
    """Return text as a number of seconds above 0.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> some_seconds("30")
        30.0
    """
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text}")
    return value


def list_of(of: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return the type of an option that takes several values with commas between them.

    Args:
        of: the type of one value.

    Example:
        >>> list_of(count)("1,2")
        [1, 2]
    """

    def parse(text: str) -> list[int]:
        return [of(part) for part in text.split(",")]

    return parse


def add_workers_option(add: Callable[..., Any], description: str) -> None:
    """Add the option for a number of ranks, with Horovod's names.

    Args:
        add: ``add_argument`` of a parser or of a group.
        description: the help text of the option.
    """
    add("-n", "-np", "--num-proc", "--workers", dest="workers", type=count, metavar="N", help=description)


def job_parser(
    subparsers: SubParsers, name: str, description: str, options: str = "", more: str = ""
) -> argparse.ArgumentParser:
    """Add the parser of a command about one job of a scheduler.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
        name: the command.
        description: the help text of the command.
        options: options of the examples.
        more: a text that continues the description on the help page.

    Returns:
        The parser.
    """
    from choros.launch.schedulers import SCHEDULERS

    verb, _, rest = description.partition(" ")
    parser = subparsers.add_parser(
        name,
        help=description,
        description=f"{verb.capitalize()}s {rest}{more}. A job of Spark runs in choros submit, which prints its "
        "output; Ctrl-C ends it.",
        epilog=f"examples:\n  choros {name} {options}1234567\n  choros {name} {options}--on k8s job.batch/train\n\n"
        "Exit codes: 0 success; 1 the scheduler does not know the job, does not answer, or its command failed;\n"
        "2 wrong usage, or the scheduler's command is not on PATH.",
    )
    parser.add_argument(
        "--on",
        default="",
        choices=sorted(name for name, scheduler in SCHEDULERS.items() if not scheduler.attached),
        help="scheduler (default: that of ~/.config/choros/config.toml, else the one whose command is on PATH; k8s "
        "must be named)",
    )
    parser.add_argument("job", help="id of the job, as choros submit printed it")
    return parser


def choose_scheduler(prog: str, name: str | None, attached: bool = False) -> Scheduler:
    """Return the scheduler of the given name, else the user's default, else that of this machine.

    A line on stderr says which one was chosen, and why.

    Args:
        prog: the command as the user typed it, such as "choros logs", for the line.
        name: the name; None or "" if none was given.
        attached: whether the command is for schedulers whose jobs have no status too. It then reads the user's defaults
            itself. Defaults to False.

    Raises:
        InvalidInputError: no scheduler has this name, or no command of a scheduler is on PATH.
    """
    from choros.launch.schedulers import config_file, default_scheduler, find_scheduler

    if not name and not attached and (default := default_scheduler()):
        scheduler = find_scheduler(default)
        if not scheduler.attached:
            print(f"{prog}: from {config_file()}: --on {default}", file=sys.stderr)
            return scheduler
    scheduler = find_scheduler(name or "", attached)
    if not name:
        reason = " and ".join(filter(None, (scheduler.program, scheduler.beside)))
        verb = "are" if scheduler.beside else "is"
        print(
            f"{prog}: using {scheduler.name} ({reason} {verb} on PATH); --on chooses another scheduler",
            file=sys.stderr,
        )
    return scheduler
