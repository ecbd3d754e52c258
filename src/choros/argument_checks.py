"""Checks of arguments that many constructors have. Each refuses a value by ``InvalidInputError`` with a remedy."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from choros.errors import InvalidInputError
from choros.object_text import value_text


def check_path(name: str, value: object) -> str:
    """Return the path of a file or directory as a str; refuse other types and an empty path.

    Example:
        >>> check_path("directory", 3)
        Traceback (most recent call last):
            ...
        choros.errors.InvalidInputError: directory=3: give a path, such as 'results' or pathlib.Path('results').
    """
    path = os.fsdecode(value) if isinstance(value, str | bytes | os.PathLike) else ""
    return path or _refuse(name, value, "a path, such as 'results' or pathlib.Path('results')")


def check_model_file(path: str | os.PathLike[str]) -> None:
    """Refuse a path that is not a file, for commands that read a model from a Python file.

    Example:
        >>> check_model_file("absent.py")
        Traceback (most recent call last):
            ...
        choros.errors.InvalidInputError: There is no file absent.py: give a Python file that defines `model` or \
`build()`.
    """
    if not os.path.isfile(path):
        problem = f"{path} is a folder" if os.path.isdir(path) else f"There is no file {path}"
        raise InvalidInputError(f"{problem}: give a Python file that defines `model` or `build()`.")


def check_text(name: str, value: object, remedy: str) -> str:
    """Return a str that is not empty. The message ends with ``remedy``, a noun phrase with an example."""
    return value if isinstance(value, str) and value.strip() else _refuse(name, value, remedy)


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Return texts, given as a list or a tuple, as a tuple. One text alone is refused: its letters would be taken.

    Example:
        >>> check_texts("setup", "module load python")
        Traceback (most recent call last):
            ...
        choros.errors.InvalidInputError: setup='module load python': give a list of texts, such as \
setup=['module load python'].
    """
    if isinstance(value, str) or not (isinstance(value, Sequence) and all(isinstance(item, str) for item in value)):
        _refuse(name, value, f"a list of texts, such as {name}=[{value_text(str(value))}]")
    return tuple(value)


def check_variables(name: str, value: Any) -> dict[str, str]:
    """Return environment variables, given as a dict of texts and numbers, as a dict of texts.

    Example:
        >>> check_variables("env", {"OMP_NUM_THREADS": 2})
        {'OMP_NUM_THREADS': '2'}
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(item, str | int | float) for key, item in value.items()
    ):
        _refuse(name, value, "a dict of texts and numbers, by the names of the variables")
    return {str(key): str(item) for key, item in value.items()}


def check_flag(name: str, value: object) -> bool:
    """Return True or False, also for 1 and 0 and for bools of numpy.

    Example:
        >>> check_flag("bind", "x")
        Traceback (most recent call last):
            ...
        choros.errors.InvalidInputError: bind='x': give True or False.
    """
    plain = isinstance(value, bool | Integral) or type(value).__name__ in ("bool", "bool_")  # bool_: before numpy 2
    return bool(value) if plain and value in (True, False) else bool(_refuse(name, value, "True or False"))


def check_whole(name: str, value: Any, least: int, unit: str = "") -> int:
    """Return an integer of any library, ``least`` or more. Bools do not count."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        _refuse(name, value, f"a whole number{unit and f' of {unit}'}, {least} or more")
    return int(value)


def check_number(name: str, value: Any, remedy: str = "a finite number, 0 or more") -> float:
    """Return a finite number of 0 or more, also of a scalar array, as a float."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return number if math.isfinite(number) and number >= 0 else float(_refuse(name, value, remedy))


def check_signals(signals: Any) -> tuple[str, ...]:
    """Return names of signals that a process can catch, each of them once."""
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        _refuse("signals", signals, "a list of names, such as ['SIGTERM']")
    names = tuple(dict.fromkeys(map(str, signals)))
    unknown = [name for name in names if name not in signal.Signals.__members__]
    if unknown:
        raise InvalidInputError(f"{', '.join(unknown)} is not a signal: give names such as SIGTERM.")
    if refused := [name for name in names if name in ("SIGKILL", "SIGSTOP")]:
        raise InvalidInputError(
            f"{', '.join(refused)} cannot be caught by a process: give other signals, such as SIGTERM."
        )
    return names


def _refuse(name: str, value: object, remedy: str) -> Any:
    raise InvalidInputError(f"{name}={value_text(value)}: give {remedy}.")
