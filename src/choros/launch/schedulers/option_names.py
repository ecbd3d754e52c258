"""Names of a job's options in messages: those of ``choros submit``, or the keyword arguments of ``choros.submit``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_by_keyword: ContextVar[bool] = ContextVar("by_keyword", default=False)
_COMMAND_LINE_NAMES = {"directive": "-o"}  # options whose name on the command line is not that of the attribute
_KEYWORDS = {"directive": "directives"}
_NOT_BATCH = ("k8s", "spark")  # what choros.submit does not take


@contextmanager
def keyword_names() -> Iterator[None]:
    """Name keyword arguments within this context: the request comes from ``choros.submit``.

    Example:
        >>> with keyword_names():
        ...     named("ranks_per_node"), named("site", "polaris")
        ('ranks_per_node', "site='polaris'")
    """
    token = _by_keyword.set(True)
    try:
        yield
    finally:
        _by_keyword.reset(token)


def names_keywords() -> bool:
    """Return whether messages name keyword arguments."""
    return _by_keyword.get()


def named(name: str, value: object = None) -> str:
    """Return an option as the user gives it, with a value if there is one.

    Args:
        name: str. An attribute of ``JobOptions``.
        value: object. Defaults to None, which leaves it out.

    Example:
        >>> named("ranks_per_node"), named("directive", "-l filesystems=home"), named("time", "")
        ('--ranks-per-node', "-o '-l filesystems=home'", "--time ''")
    """
    if _by_keyword.get():
        name = _KEYWORDS.get(name, name)
        return name if value is None else f"{name}={[value] if name in _KEYWORDS.values() else value!r}"
    option = _COMMAND_LINE_NAMES.get(name, f"--{name.replace('_', '-')}")
    return option if value is None else f"{option} {shlex.quote(str(value))}"


def with_option_names(advice: str) -> str:
    """Return advice that has ``--filesystems NAMES``, with this option as the user gives it.

    Example:
        >>> with keyword_names():
        ...     with_option_names("give the file systems: --filesystems home:eagle")
        "give the file systems: filesystems='home:eagle'"
    """
    return re.sub(r"--filesystems (\S+)", lambda match: named("filesystems", match[1]), advice)


def scheduler_option(on: Iterable[str]) -> str:
    """Return the option that names one of several schedulers.

    Example:
        >>> scheduler_option(["pbs", "k8s"])
        '--on pbs, k8s'
        >>> with keyword_names():
        ...     scheduler_option(["slurm", "pbs", "k8s"])
        "on='slurm' or 'pbs'"
    """
    return f"on={' or '.join(map(repr, choices(on)))}" if _by_keyword.get() else f"--on {', '.join(on)}"


def choices(on: Iterable[str]) -> list[str]:
    """Return those of the given schedulers that the caller may name."""
    return [name for name in on if not (_by_keyword.get() and name in _NOT_BATCH)]
