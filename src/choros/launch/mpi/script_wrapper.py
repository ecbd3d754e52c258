"""Run a Python script as a rank under ``mpiexec`` or ``srun``.

Command: ``python -m choros.launch.mpi.script_wrapper SCRIPT ARGS``.

It runs the script as Python does, and reports a failure to ``choros run`` at once. The report must not be later: when
MPI aborts, or waits in its finalization for lost ranks, the launcher ends this process and its parent, and the exit
code is lost.
"""

from __future__ import annotations

import sys
import time
from io import TextIOWrapper
from types import TracebackType

from choros.comm.bootstrap.exit_hooks import ROOT_CAUSE_SECONDS, exit_code_of
from choros.errors import PeerLostError
from choros.launch.mpi.failure_notice import report_exit
from choros.launch.process.python_target import FILES, run_target


def main() -> None:
    """Run the script, or the module after ``-m``."""
    for stream in (sys.stdout, sys.stderr):  # flush whole lines, because the launcher marks each piece of output
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = _report_system_exit
    try:
        run_target(sys.argv[1:])
    except SystemExit as ending:
        if code := exit_code_of(ending):
            report_exit(code)
        raise
    except BaseException as error:
        if isinstance(error, PeerLostError):  # another rank failed; let its report arrive first
            time.sleep(ROOT_CAUSE_SECONDS)
        report_exit(exit_code_of(error))
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, *FILES):
            trace = trace.tb_next
        raise error.with_traceback(trace)  # noqa: B904 - without the frames of this wrapper


def _report_system_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report a SystemExit that reaches the hook as a failure: a Trainer ended the rank in the middle of training."""
    if isinstance(error, SystemExit):
        report_exit(exit_code_of(error) or 1)
    sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
