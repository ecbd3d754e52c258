"""Argument types and parsers that several commands share."""

from __future__ import annotations

import argparse
from typing import Any, Protocol


class SubParsers(Protocol):
    """The result of ``argparse.ArgumentParser.add_subparsers``, whose class is private."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add the parser of a command."""
        ...


def count(text: str) -> int:
    """Return text as an integer of 1 or more.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> count("4")
        4
    """
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text}")
    return int(text)


def whole(text: str) -> int:
    """Return text as an integer of 0 or more.

    Raises:
        ArgumentTypeError: the text is something else.

    Example:
        >>> whole("0")
        0
    """
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, got {text}")
    return int(text)


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


def job_parser(subparsers: SubParsers, name: str, description: str) -> argparse.ArgumentParser:
    """Add the parser of a command about one job of a scheduler.

    Args:
        subparsers: the result of ``argparse.ArgumentParser.add_subparsers``.
        name: the command.
        description: the help text of the command.

    Returns:
        The parser.
    """
    from choros.launch.schedulers import SCHEDULERS

    parser = subparsers.add_parser(name, help=description)
    parser.add_argument(
        "--on", default="", choices=sorted(SCHEDULERS), help="the scheduler (default: the one found on this machine)"
    )
    parser.add_argument("job", help="the job's id, printed by choros submit")
    return parser
