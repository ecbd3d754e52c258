"""Execution of a user's script or module in this process, as ``python`` does it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

FILES = (__file__, runpy.__file__, "<frozen runpy>")  # of the frames below the user's code in a traceback


def run_target(words: Sequence[str]) -> None:
    """Run a script, or a module after ``-m``.

    Args:
        words: the script or ``-m`` and the module, then its arguments, which become ``sys.argv``.
    """
    is_module = words[0] == "-m"
    sys.argv = list(words[1:] if is_module else words)
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
