"""Marks of the files of loaded modules, which tell later whether a file has changed."""

from __future__ import annotations

import os
import site
import sys

FileMarks = dict[str, list[int]]  # by path: the time of the last change in nanoseconds, and the size in bytes


def mark(path: str) -> list[int]:
    """Return the time of a file's last change and its size; [] if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_mtime_ns, status.st_size]


def loaded_files(since: float) -> FileMarks:
    """Return marks of the files of all modules of this process, except those of installed packages.

    Args:
        since: the time at which this process began, in seconds. A file that was changed later gets the mark [-1]: it is
            unknown whether the module was loaded before or after the change.
    """
    # Not all below sys.prefix: a virtual environment can lie in the folder of the user's modules.
    folders = [os.path.dirname(os.__file__), *site.getsitepackages([sys.prefix, sys.base_prefix])]
    installed = tuple(os.path.join(folder, "") for folder in folders)
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # PyTorch has modules without a file, whose names are relative.
    user_files = [path for path in paths if path and os.path.isabs(path) and not path.startswith(installed)]
    marks = {path: mark(path) for path in user_files}
    return {path: marked if marked and marked[0] < 1e9 * since else [-1] for path, marked in marks.items()}
