"""``choros run --launcher``: ranks that ``srun`` or an ``mpiexec`` starts; return the code of the first failed rank."""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from choros.cluster import Slots, is_this_machine
from choros.cluster.hardware import MPICH_UNDER_PMI2, PMI, find_mpi
from choros.comm.messages import header_of
from choros.console import LAUNCHER
from choros.errors import AGAIN, CommTimeoutError, InvalidInputError, nearest
from choros.launch.local_job import LaunchOptions
from choros.launch.mpi.failure_notice import HEAD, RankExit, RunAddress
from choros.launch.process import exec_stub
from choros.launch.process.exec_stub import PARENT
from choros.launch.process.failure_report import signalled
from choros.launch.process.rank_limit import check_ranks
from choros.launch.process.rank_supervisor import WARNINGS, JobResult

if TYPE_CHECKING:
    from choros.comm.tcp.auth_socket import AuthListener

logger = logging.getLogger(LAUNCHER)

LAUNCHERS = ("srun", "mpiexec")
_REPORT_SECONDS = 1.0  # to wait for the report of the failed rank, after the launcher has ended with an error
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "FLUX_URI")
_PASSED_PREFIXES = ("KERAS_", "PYTHON", "JAX_", "XLA_", "TF_", "OMP_", "CHOROS_", "HOROVOD_", "CUDA_", "NCCL_")


def launch_command(
    launcher: str, size: int, slots: Slots, names: Sequence[str], version_text: str, mpi_name: str = ""
) -> list[str]:
    """Return the command that starts the ranks.

    Args:
        launcher: the program: ``srun``, or an ``mpiexec``.
        size: the number of ranks.
        slots: the hosts and their slots; if empty, the launcher finds the hosts.
        names: environment variables to pass to the ranks (Open MPI passes none by default).
        version_text: the output of ``mpiexec --version``, which identifies the MPI.
        mpi_name: the MPI that the ranks load, as ``find_mpi`` names it, for srun's ``--mpi``. Defaults to "".

    Example:
        >>> launch_command("srun", 4, (), (), "")
        ['srun', '--kill-on-bad-exit=1', '--label', '-n', '4']
        >>> launch_command("mpiexec", 2, (("n1", 1), ("n2", 1)), ("A",), "mpiexec (Open MPI) 5.0")
        ['mpiexec', '--oversubscribe', '--bind-to', 'none', '--tag-output', '--host', 'n1:1,n2:1', '-x', 'A', '-n', '2']
        >>> launch_command("mpiexec", 2, (("n1", 2),), (), "HYDRA build details")
        ['mpiexec', '-l', '-bind-to', 'none', '-hosts', 'n1:2', '-n', '2']
    """
    hosts = ",".join(f"{host}:{count}" for host, count in slots)
    if Path(launcher).name == "srun":
        node_options = [f"--nodelist={','.join(host for host, _ in slots)}"] if slots else []
        mpi = [f"--mpi={PMI[mpi_name]}"] if mpi_name in PMI else []
        return [launcher, "--kill-on-bad-exit=1", "--label", *mpi, *node_options, "-n", str(size)]
    if "Open MPI" in version_text or "prte" in version_text.lower():
        host_options = ["--host", hosts] if hosts else []
        options = [*host_options, *(option for name in names for option in ("-x", name))]
        return [launcher, "--oversubscribe", "--bind-to", "none", "--tag-output", *options, "-n", str(size)]
    if "PALS" in version_text or "Cray" in version_text:
        host_options = ["--hosts", ",".join(host for host, _ in slots)] if slots else []
        return [launcher, "--label", "--cpu-bind", "none", *host_options, "-n", str(size)]
    host_options = ["-hosts", hosts] if hosts else []
    return [launcher, "-l", "-bind-to", "none", *host_options, "-n", str(size)]


def start_under(
    launcher: str, command: Sequence[str], options: LaunchOptions, slots: Slots, network: str = ""
) -> JobResult:
    """Run a command as ranks that a launcher starts; the ranks connect by MPI, as without ``choros run``.

    Args:
        launcher: ``srun`` or ``mpiexec``, or the path of one.
        command: the program and its arguments.
        options: the options of the launch. The launcher decides the cores of a rank, and the threads if they are None.
        slots: the hosts and their slots; if empty, the launcher finds the hosts.
        network: the interface or domain by which the hosts reach this one. Defaults to "".

    Returns:
        The outcome; the code is that of the rank that failed first, or of the launcher if no rank reported a failure.

    Raises:
        InvalidInputError: the launcher does not exist, or srun finds no SLURM.
    """
    from choros.cluster.hardware.network_address import head_address
    from choros.comm.tcp.auth_socket import AuthListener

    program, version = find_launcher(launcher)
    mpi_name = find_mpi() if Path(program).name == "srun" else ""
    if Path(program).name != "srun" and not any(name in os.environ for name in _ALLOCATIONS):  # the ranks are here
        local = sum(count for host, count in slots if is_this_machine(host)) if slots else options.size
        check_ranks(min(options.size, local))
    secret = secrets.token_bytes(32)
    with AuthListener(head_address(network, Path(program).name != "srun" and not slots), secret, RankExit) as listener:
        run_address = header_of(RunAddress(listener.address, secret.hex(), options.bind, options.threads))
        environ = {**os.environ, **(options.variables or {}), "PYTHONUNBUFFERED": "1", HEAD: json.dumps(run_address)}
        names = sorted(k for k, v in environ.items() if os.environ.get(k) != v or k.startswith(_PASSED_PREFIXES))
        launcher_command = launch_command(program, options.size, slots, names, version, mpi_name)
        if mpi_name == "mpich":
            environ = {**MPICH_UNDER_PMI2, **environ}
        if "Open MPI" in version and os.geteuid() == 0:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        job = _Job(
            [*launcher_command, sys.executable, "-m", "choros.launch.mpi.rank_wrapper", *command],
            environ,
            options.grace,
        )
        threading.Thread(target=job.listen_at, args=(listener,), name="choros-head", daemon=True).start()
        return job.run()


class _Job:
    """The launcher process, and the failure that was reported first."""

    def __init__(self, command: list[str], environ: dict[str, str], grace: float) -> None:
        self.first: RankExit | None = None
        self._reported = threading.Event()  # the first failure is stored and logged
        self._received_signals: list[int] = []  # INT, TERM and HUP that this process received
        self._grace = grace
        environ = {**environ, PARENT: str(os.getpid())}
        self._process = subprocess.Popen(exec_stub.with_stub(command), env=environ, stdin=subprocess.DEVNULL)

    def listen_at(self, listener: AuthListener[RankExit]) -> None:
        """Wait for the first report of a failure; if the launcher does not end the job then, end the launcher."""
        try:
            self.first, sock = listener.next_peer(threading.TIMEOUT_MAX)
        except CommTimeoutError:
            return
        sock.close()
        rank_name = f"rank {self.first.rank} (host {self.first.host})"
        if not self._received_signals:  # else the rank ended because of the signal
            logger.warning(f"{rank_name} {_exit_text(self.first.code)}")
        self._reported.set()
        # Each signal follows a wait: launchers usually end the other ranks by themselves.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.wait(self._grace)
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)

    def run(self) -> JobResult:
        """Wait for the end of the launcher; forward signals to it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._forward)
        while (code := self._process.poll()) is None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
        if code:  # the launcher may end before the thread has handled the report of the rank that failed
            self._reported.wait(_REPORT_SECONDS)
        code = self.first.code if self.first else code if code >= 0 else 128 - code
        if self._received_signals:
            return JobResult(AGAIN if code == AGAIN else 128 + self._received_signals[0], self._received_signals[0])
        return JobResult(code)

    def _forward(self, number: int, _: FrameType | None) -> None:
        if number not in WARNINGS:
            self._received_signals.append(number)
        self._process.send_signal(number)


def find_launcher(launcher: str) -> tuple[str, str]:
    """Return a launcher's path, and its output of ``--version``.

    Args:
        launcher: ``srun`` or ``mpiexec``, or the path of one.

    Raises:
        InvalidInputError: ``launcher`` is another program, does not exist, or is srun without SLURM.

    Example:
        >>> find_launcher("qsub")
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: --launcher qsub is none of ssh, srun, mpiexec, or a path of one of them
    """
    program = _find(launcher)
    result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if result.returncode and Path(program).name == "srun":  # srun needs SLURM's configuration even for --version
        raise InvalidInputError(
            f"no SLURM answers on {platform.node()}, and srun starts nothing without it: run this inside an "
            "allocation (salloc, sbatch), or use the launcher ssh or mpiexec. srun printed: "
            f"{' '.join((result.stderr or result.stdout).split())}"
        )
    return program, result.stdout


def _find(launcher: str) -> str:
    if Path(launcher).name not in (*LAUNCHERS, "mpirun", "mpiexec.hydra"):
        near = nearest(Path(launcher).name, ("ssh", *LAUNCHERS))
        raise InvalidInputError(
            f"--launcher {launcher} is none of ssh, {', '.join(LAUNCHERS)}, or a path of one of them"
            + (f": did you mean {near}?" if near else "")
        )
    sibling = Path(sys.executable).parent / launcher
    if launcher != "srun" and sibling.exists():
        return str(sibling)  # it belongs to the MPI of this environment
    path = shutil.which(launcher)
    if path is None:
        raise InvalidInputError(
            f"there is no {launcher} on PATH on {platform.node()}: load its module, or take ssh (-H)"
        )
    return path


def _exit_text(code: int) -> str:
    """Return the text on how a rank ended, from its code: above 128, a signal ended it."""
    name = next((item.name for item in signal.Signals if item + 128 == code), "")
    cause, remedy = signalled(name)
    by = f": {name}" + (f" ({cause})" if cause else "") if name else ""
    return f"ended with code {code}{by}" + (f". {remedy}" if remedy else "")
