"""The engine of ``choros run``: N ranks of one command on this host; the first failure ends all ranks.

Each rank has ``CHOROS_RANK``, ``CHOROS_SIZE``, ``CHOROS_LOCAL_RANK`` and ``CHOROS_LOCAL_SIZE`` in its environment. All
ranks of one run share the random ``CHOROS_RUN``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from choros.errors import AGAIN, InvalidInputError, counted
from choros.launch.process import exec_stub
from choros.launch.process.child_process import Child, ExitStatus
from choros.launch.process.failure_report import signalled
from choros.launch.process.output_pump import OutputPump
from choros.launch.process.rank_output import Output
from choros.launch.process.wake_pipe import WakePipe

GRACE = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # a scheduler's warning before its limit; ranks decide when to end


@dataclass(frozen=True)
class JobResult:
    """The outcome of a run.

    Attributes:
        code: int. 0 if all ranks succeeded; else the exit code of the rank that failed first, or 128 plus the number
            of the signal that ended that rank or this process; 75 if the ranks saved a checkpoint on that signal.
        signal: int. The signal that this process received, or 0.
        failed: tuple of (rank, ExitStatus, str). The ranks that failed first, and their last lines of output. There
            are several if they failed at the same time.
    """

    code: int
    signal: int = 0
    failed: tuple[tuple[int, ExitStatus, str], ...] = ()


def run(
    command: Sequence[str],
    size: int,
    *,
    environment: Sequence[Mapping[str, str]] | None = None,
    cores: Sequence[Sequence[int]] | None = None,
    pass_fds: Sequence[int] = (),
    own_fds: Sequence[Sequence[int]] | None = None,
    grace: float = GRACE,
    output: Output | None = None,
    announce: bool = True,
    on_end: Callable[[int], None] | None = None,
    on_failure: Callable[[ExitStatus], None] | None = None,
    first: int = 0,
    total: int | None = None,
) -> JobResult:
    """Run ``size`` ranks of a command until all have ended, or one has failed.

    When a rank exits with a code other than 0, or by a signal, the others get SIGTERM, and SIGKILL after ``grace``
    seconds. SIGINT, SIGTERM and SIGHUP to this process are forwarded to the ranks, with the same limit; a second signal
    kills them at once. SIGUSR1 and SIGUSR2 are forwarded without a limit. If this process is killed, the kernel kills
    the ranks (on Linux).

    Args:
        command: the program and its arguments.
        size: the number of ranks on this host.
        environment: for each rank, variables in addition to this process's environment.
        cores: for each rank, the logical cores to which it is bound before the program is loaded.
        pass_fds: file descriptors that all ranks inherit.
        own_fds: for each rank, file descriptors that only this rank inherits.
        grace: seconds between SIGTERM and SIGKILL. Defaults to 5.
        output: the receiver of the ranks' lines; closed at the end. Defaults to one that only shows them.
        announce: print on stderr which rank failed. Defaults to True.
        on_end: function of the local number of each rank that has ended, called as soon as this is seen.
        on_failure: function of the ExitStatus of the first rank that failed, called before the others get a signal.
        first: the number of the first of these ranks, if other ranks of the job are on other hosts. Defaults to 0.
        total: the number of ranks of the job. Defaults to ``size``.

    Returns:
        The outcome of the run.

    Raises:
        InvalidInputError: ``size`` is below 1, or a list does not have one entry for each rank.

    Example:
        >>> run(["true"], 2).code
        0
    """
    if size < 1:
        raise InvalidInputError(f"a run has 1 rank or more, got {size}")
    for kind, values in (("environments", environment), ("bindings to cores", cores), ("lists of fds", own_fds)):
        if values is not None and len(values) != size:
            raise InvalidInputError(f"{len(values)} {kind} were given for {counted(size, 'rank')}")
    token = secrets.token_hex(8)
    total = size if total is None else total
    ranks = RankSupervisor(grace, output or Output(size), announce, on_end, on_failure, (first, total))
    with ranks.signals():
        try:
            for rank in range(size):
                variables = {
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **(environment[rank] if environment else {}),
                    "CHOROS_RANK": str(first + rank),
                    "CHOROS_SIZE": str(total),
                    "CHOROS_LOCAL_RANK": str(rank),
                    "CHOROS_LOCAL_SIZE": str(size),
                    "CHOROS_RUN": token,
                }
                fds = (*pass_fds, *(own_fds[rank] if own_fds else ()))
                ranks.start(rank, command, variables, tuple(cores[rank]) if cores else (), fds)
            return ranks.watch()
        finally:
            ranks.end()


def fate(ended: ExitStatus) -> tuple[str, str]:
    """Return two texts for a message: how a rank ended, and what to do ("" if unknown).

    Example:
        >>> fate(ExitStatus(3, "", 3, 0))
        ('exited with code 3', '')
    """
    cause, remedy = signalled(ended.signal)
    ending = f"was ended by {ended.signal}" if ended.signal else f"exited with code {ended.exit}"
    return ending + (f" ({cause})" if cause else ""), remedy


class RankSupervisor:
    """The processes of the ranks of one run; see ``run`` for the arguments.

    ``numbering`` holds ``first`` and ``total``. ``on_line`` receives the lines instead of ``output``.

    ``run`` calls ``start`` for each rank, then ``watch`` and ``end``, within the context ``signals``.
    """

    def __init__(
        self,
        grace: float,
        output: Output,
        announce: bool = True,
        on_end: Callable[[int], None] | None = None,
        on_failure: Callable[[ExitStatus], None] | None = None,
        numbering: tuple[int, int] = (0, 0),
        on_line: Callable[[int, str, str], None] | None = None,
    ) -> None:
        self.grace, self.output, self.announce, self.on_end = grace, output, announce, on_end
        self.on_failure, (self.first, self.total) = on_failure, numbering
        self.ended: dict[int, ExitStatus] = {}
        self.failed: list[tuple[int, ExitStatus, str]] = []
        self._received_signals: list[int] = []  # INT, TERM and HUP that this process received
        self._pending_warnings: list[int] = []  # USR1 and USR2 that are not forwarded yet
        self._deadline = float("inf")  # the time at which remaining ranks are killed
        self._began = time.monotonic()
        self._pipe = WakePipe()
        self.wake = self._pipe.wake  # wakes ``watch``
        self._forwarded = False
        self._broken = False
        output.on_broken = self._handle_broken_output
        self.pump = OutputPump(on_line or output.write_line)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle the forwarded signals within the context, and restore the former handlers afterwards.

        Outside of the main thread this does nothing, because Python sets signal handlers there only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*_FORWARDED, *WARNINGS)}
        taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # nohup ignores SIGHUP
        for number in taken:
            signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number] or signal.SIG_DFL)

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: tuple[int, ...],
        fds: Sequence[int],
    ) -> None:
        """Start one rank, in the thread of the OutputPump."""
        argv = exec_stub.with_stub(command)

        def make(out: int, err: int) -> Child:
            return Child(argv, environment, cores=cores, pass_fds=fds, stdout=out, stderr=err)

        self.pump.call(lambda: self.pump.start(rank, make, split=True), timeout=60.0)

    def watch(self) -> JobResult:
        """Wait until all ranks have ended; return the outcome of the run."""
        children = self.pump.children
        while len(self.ended) < len(children):
            self._wait()
            failures = [
                (rank, ended)
                for rank, child in enumerate(children)
                if rank not in self.ended and (ended := child.check()) is not None
            ]
            for rank, ended in failures:
                self.ended[rank] = ended
                # Read its last lines now: the message about the failure shows them.
                self.pump.pull(rank)
                # Call it before ``_record_failures`` ends the others: those that wait for this rank can then name it.
                if self.on_end is not None:
                    self.on_end(rank)
            self._record_failures(failures)
            if self._received_signals and not self._forwarded:
                self._forwarded = True
                self._finish(self._received_signals[0])
            if self._broken and self._deadline == float("inf"):
                self._finish(signal.SIGTERM)
            if len(self._received_signals) > 1 or time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
        if self._received_signals:
            # Ranks that saved their state end with AGAIN. Ranks that had finished before the signal end with 0.
            codes = {ended.code for ended in self.ended.values()}
            number = self._received_signals[0]
            return JobResult(AGAIN if codes in ({AGAIN}, {0, AGAIN}) else 128 + number, number)
        if self.failed:
            return JobResult(self.failed[0][1].code, 0, tuple(self.failed))
        return JobResult(128 + signal.SIGPIPE if self._broken else 0)

    def end(self) -> None:
        """Kill all remaining processes, then end the thread and close the pipes."""
        # Twice, because the thread may start another process before it stops.
        for _ in range(2):
            self._signal(signal.SIGKILL)
            for child in self.pump.children:
                child.wait(10.0)
            self.pump.stop()
        self.output.close()
        self._broken = True  # a later line must not write to the closed pipe
        self._pipe.close()

    def _record_failures(self, failures: list[tuple[int, ExitStatus]]) -> None:
        """Record the first failure and end the other ranks; ignore failures after it, or after a signal to us."""
        failed = [(rank, ended) for rank, ended in failures if ended.code != 0]
        if not failed or self.failed or self._received_signals or self._broken:
            return
        # If several ended at the same time, a rank that a signal ended is the cause: ranks that lose a peer exit.
        failed.sort(key=lambda failure: not failure[1].signal)
        self.failed = [(rank, ended, self.pump.tail(rank)) for rank, ended in failed]
        rank, ended = failed[0]
        ending, remedy = fate(ended)
        remaining = len(self.pump.children) - len(self.ended)
        after = time.monotonic() - self._began
        others = "other one" if remaining == 1 else f"{remaining} that are left"
        consequence = f"; ending the {others}" if remaining else ""
        rank_name = (
            f"rank {self.first + rank} of {self.total} (pid {self.pump.children[rank].pid}, host {platform.node()})"
        )
        if self.announce:
            self.output.say(
                f"choros run: {rank_name} {ending} after {after:.1f} s{consequence}" + (f". {remedy}" if remedy else "")
            )
        if self.on_failure is not None:
            self.on_failure(ended)
        self._finish(signal.SIGTERM)

    def _finish(self, number: int) -> None:
        self._deadline = time.monotonic() + self.grace
        self.output.is_interrupted |= number == signal.SIGINT
        self._signal(number)

    def _signal(self, number: int) -> None:
        for child in self.pump.children:
            child.send_signal(number)
            if number != signal.SIGKILL:
                child.send_signal(signal.SIGCONT)  # a stopped rank handles no signal

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Record a signal to this process, and wake ``watch``, which forwards it."""
        # A handler may interrupt any line of the main thread, so it only records the signal.
        (self._pending_warnings if number in WARNINGS else self._received_signals).append(number)
        self.wake()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        longest = max(0.0, min(1.0, self._deadline - time.monotonic()))
        for rank, child in enumerate(self.pump.children):
            if rank not in self.ended:
                if child.pidfd >= 0:
                    poll.register(child.pidfd, select.POLLIN)
                else:  # without a pidfd, the end is seen only by a check at short intervals
                    longest = min(longest, 0.04)
        poll.poll(longest * 1000)
        self._pipe.clear()
        while self._pending_warnings:
            number = self._pending_warnings.pop(0)
            for child in self.pump.children:
                child.send_signal(number, process_only=True)

    def _handle_broken_output(self) -> None:
        if not self._broken:
            self._broken = True
            self.wake()
