"""The target of a command: a script, a module or a program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from choros.errors import InvalidInputError

_SCRIPTS = (".py", ".pyc", ".pyz")


def command_of(
    target: Sequence[str], module: bool, *, name: str = "run", python: str = sys.executable, here: bool = True
) -> list[str]:
    """Return the program and its arguments that a rank runs.

    Args:
        target: the words on the command line.
        module: whether the target is a module, as in ``python -m``.
        name: the command of ``choros``, for messages. Defaults to ``"run"``.
        python: the interpreter for scripts and modules. Defaults to this one.
        here: whether the target must exist on this host. Defaults to True.

    Raises:
        InvalidInputError: the target is empty or does not exist.

    Example:
        >>> command_of(["train.py", "--fast"], False, python="python", here=False)
        ['python', 'train.py', '--fast']
    """
    target = list(target[1:] if target[:1] == ["--"] else target)
    if not target:
        raise InvalidInputError("nothing to run: give a script, -m and a module, or a program")
    if module:
        return [python, "-m", *target]
    first = target[0]
    if first.startswith("-"):
        raise InvalidInputError(f"{first} is not an option of 'choros {name}'; see choros {name} --help")
    if is_script(first) or (here and os.path.isdir(first)):
        if here:
            check_script(first)
        return [python, *target]
    if here and shutil.which(first) is None:
        reason = "is not executable" if os.path.exists(first) else "is neither a file nor a program on PATH"
        raise InvalidInputError(f"{first} {reason}; a Python script ends in .py, a module comes after -m")
    return target


def is_script(name: str) -> bool:
    """Return whether the name is that of a Python script.

    Example:
        >>> is_script("train.py"), is_script("hostname")
        (True, False)
    """
    return name.endswith(_SCRIPTS)


def check_script(name: str) -> None:
    """Refuse a script that is not here.

    Raises:
        InvalidInputError: it does not exist, or is a directory that Python cannot run.
    """
    if not os.path.exists(name):
        raise InvalidInputError(f"the script {name} does not exist (the directory is {os.getcwd()})")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
        raise InvalidInputError(f"{name} is a directory without a __main__.py: give a script in it")
