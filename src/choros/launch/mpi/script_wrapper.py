"""Run a Python script as a rank under a foreign launcher.

Command: ``python -m choros.launch.mpi.script_wrapper SCRIPT ARGS``.

It runs the script as Python would, and tells the head of its failure while it can: once MPI aborts, or waits at its end
for ranks that will not come, the launcher ends this process and its parent, and the code is lost.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from io import TextIOWrapper
from types import TracebackType

from choros.comm.bootstrap.exit_hooks import ROOT_CAUSE_SECONDS, exit_code_of
from choros.errors import PeerLostError
from choros.launch.mpi.failure_notice import tell


def main() -> None:
    """Run the script, or the module after ``-m``."""
    for stream in (sys.stdout, sys.stderr):  # a line at once: the launcher marks what comes
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = _before_it_is_ended
    sys.argv = sys.argv[1:]
    try:
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        if code := exit_code_of(ending):
            tell(code)
        raise
    except BaseException as error:
        if isinstance(error, PeerLostError):  # another one failed
            time.sleep(ROOT_CAUSE_SECONDS)
        tell(exit_code_of(error))
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        raise error.with_traceback(trace)  # noqa: B904 - from the script on


def _before_it_is_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell of a rank that a Trainer ends as one that fails, since its script exits in the middle of training."""
    if isinstance(error, SystemExit):
        tell(exit_code_of(error) or 1)
    sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
