"""Wrapper of one rank under ``mpiexec`` or ``srun``: ``python -m choros.launch.mpi.rank_wrapper COMMAND``.

``choros run --launcher`` starts each rank through it. The wrapper sets the rank's threads, binds it if the launcher has
not, and starts it as a child process. If the rank fails, the wrapper reports the rank and its code to ``choros run``
before the launcher sees the exit, because launchers change exit codes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from choros.cluster import Place
from choros.cluster.hardware import plan, usable_cores, variables
from choros.cluster.rank_threads import shares_cores
from choros.launch.mpi.failure_notice import RunAddress, report_exit


def settle(place: Place, bind: bool = True, threads: int | None = None) -> None:
    """Set cores and threads of this process, which the rank inherits.

    Args:
        place: the rank's place.
        bind: bind to separate cores if the launcher has bound nothing. Defaults to True.
        threads: int or None. The number of threads. Defaults to None, the number of its cores.
    """
    usable, shared = usable_cores(), shares_cores(place)
    bindings = plan(place.local_size if shared else 1, threads, bind)
    binding = bindings[place.local_rank if shared else 0]
    if shared and binding.cores:
        os.sched_setaffinity(0, binding.cores)
    crowded = shared and place.local_size * binding.threads > len(usable)
    bound = bool(binding.cores) or not shared
    os.environ.update(variables(binding.threads, keep=dict(os.environ), shared=crowded, bound=bound))


def main() -> int:
    """Run the rank.

    Returns:
        The rank's exit code, or 128 plus the number of the signal that ended it.
    """
    run_address = RunAddress.read()
    settle(Place.here(), run_address.bind, run_address.threads)
    program, *rest = sys.argv[1:]
    python = program == sys.executable and rest and (rest[0] == "-m" or not rest[0].startswith("-"))
    command = [sys.executable, "-m", "choros.launch.mpi.script_wrapper", *rest] if python else sys.argv[1:]
    rank = subprocess.Popen(command, close_fds=False, stdin=subprocess.DEVNULL)  # some launchers leave stdin open
    # A launcher signals this process. Only the rank can react, for example with a checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: rank.send_signal(number))
    code = rank.wait()
    code = code if code >= 0 else 128 - code
    if code:
        report_exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
