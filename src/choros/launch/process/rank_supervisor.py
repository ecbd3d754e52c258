"""The engine of ``choros run``: N ranks of one command on this machine, output marked, the first failure final.

A rank finds its place in ``CHOROS_RANK``, ``CHOROS_SIZE``, ``CHOROS_LOCAL_RANK`` and ``CHOROS_LOCAL_SIZE``; all ranks
of one run share the random ``CHOROS_RUN``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from choros.errors import AGAIN, InvalidInputError
from choros.launch.process import exec_stub
from choros.launch.process.child_process import Child, ExitStatus
from choros.launch.process.failure_report import signalled
from choros.launch.process.output_pump import OutputPump
from choros.launch.process.rank_output import Output

GRACE = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # of schedulers, which ranks end by in their own time


@dataclass(frozen=True)
class JobResult:
    """The outcome of a run.

    Attributes:
        code: int. 0 when all ranks succeeded; else the exit code of the rank that failed first, or 128 and the number
            of the signal that ended it or this process; 75 where that signal ended the ranks in a checkpoint.
        signal: int. The signal that this process was sent, 0 where none was.
        failed: tuple of (rank, Ended, str). Who failed before anything was done to the ranks, and the last lines that
            they printed; several where they failed together.
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

    The first rank that exits with a code other than 0, or by a signal, ends the others: SIGTERM, then SIGKILL after
    ``grace`` seconds. SIGINT, SIGTERM and SIGHUP are handed to the ranks, with the same limit; a second one kills.
    SIGUSR1 and SIGUSR2 are handed to the ranks, and that is all.
    When this process is killed, the kernel kills the ranks.

    Args:
        command: the program and its arguments.
        size: how many ranks.
        environment: for each rank, variables on top of this process's.
        cores: for each rank, the logical cores that it is bound to before the program is loaded.
        pass_fds: descriptors that all ranks inherit.
        own_fds: for each rank, descriptors that only it inherits.
        grace: seconds between SIGTERM and SIGKILL.
        output: where the ranks' lines go; shown only when None. Closed at the end.
        announce: say on stderr which rank failed.
        on_end: gets each rank that has ended, as soon as that is noticed.
        on_failure: gets how the first rank that failed ended, before anything is done to the others.
        first: the number of the first of these ranks, where others of the job are on other hosts.
        total: how many ranks the job has in all; ``size`` when None.

    Returns:
        What has become of it.

    Raises:
        InvalidInputError: lengths that do not fit.

    Example:
        >>> run(["true"], 2).code
        0
    """
    if size < 1:
        raise InvalidInputError(f"a run has 1 rank or more, got {size}")
    for what, given in (("environments", environment), ("bindings to cores", cores), ("lists of fds", own_fds)):
        if given is not None and len(given) != size:
            raise InvalidInputError(f"{len(given)} {what} were given for {size} ranks")
    token = secrets.token_hex(8)
    total = size if total is None else total
    ranks = RankSupervisor(grace, output or Output(size), announce, on_end, on_failure, (first, total))
    with ranks.signals():
        try:
            for rank in range(size):
                own = {
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
                ranks.start(rank, command, own, tuple(cores[rank]) if cores else (), fds)
            return ranks.watch()
        finally:
            ranks.end()


def fate(ended: ExitStatus) -> tuple[str, str]:
    """Return how a rank ended, and what to do, in words.

    Example:
        >>> fate(ExitStatus(3, "", 3, 0))
        ('exited with code 3', '')
    """
    cause, remedy = signalled(ended.signal)
    how = f"was ended by {ended.signal}" if ended.signal else f"exited with code {ended.exit}"
    return how + (f" ({cause})" if cause else ""), remedy


class RankSupervisor:
    """The ranks of one run, and what has become of them; ``run`` says what the arguments are."""

    def __init__(
        self,
        grace: float,
        output: Output,
        announce: bool = True,
        on_end: Callable[[int], None] | None = None,
        on_failure: Callable[[ExitStatus], None] | None = None,
        among: tuple[int, int] = (0, 0),
        on_line: Callable[[int, str, str], None] | None = None,
    ) -> None:
        self.grace, self.output, self.announce, self.on_end = grace, output, announce, on_end
        self.on_failure, (self.first, self.total) = on_failure, among
        self.ended: dict[int, ExitStatus] = {}
        self.failed: list[tuple[int, ExitStatus, str]] = []
        self._asked: list[int] = []  # the signals that this process was sent
        self._warned: list[int] = []  # those that it has yet to hand on
        self._deadline = float("inf")  # when those that are left are killed
        self._began = time.monotonic()
        self._waking = threading.RLock()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._forwarded = False
        self._broken = False
        output.on_broken = self._nobody_reads
        self.keeper = OutputPump(on_line or output.line)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take the signals that end this process, and give them back afterwards."""
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
        """Start one rank."""
        argv = [sys.executable, "-I", "-S", exec_stub.__file__, *command]

        def make(out: int, err: int) -> Child:
            return Child(argv, environment, cores=cores, pass_fds=fds, stdout=out, stderr=err)

        self.keeper.call(lambda: self.keeper.start(rank, make, split=True), timeout=60.0)

    def watch(self) -> JobResult:
        """Wait until every rank has ended; what has become of the run."""
        children = self.keeper.children
        while len(self.ended) < len(children):
            self._wait()
            found = [
                (rank, ended)
                for rank, child in enumerate(children)
                if rank not in self.ended and (ended := child.check()) is not None
            ]
            for rank, ended in found:
                self.ended[rank] = ended
                self.keeper.pull(rank)
                if self.on_end is not None:
                    self.on_end(rank)
            self._judge(found)
            if self._asked and not self._forwarded:
                self._forwarded = True
                self._finish(self._asked[0])
            if self._broken and self._deadline == float("inf"):
                self._finish(signal.SIGTERM)
            if len(self._asked) > 1 or time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
        if self._asked:
            codes = {ended.code for ended in self.ended.values()}
            return JobResult(AGAIN if codes in ({AGAIN}, {0, AGAIN}) else 128 + self._asked[0], self._asked[0])
        if self.failed:
            return JobResult(self.failed[0][1].code, 0, tuple(self.failed))
        return JobResult(128 + signal.SIGPIPE if self._broken else 0)

    def end(self) -> None:
        """Leave nothing: processes, threads, pipes."""
        for _ in range(2):
            self._signal(signal.SIGKILL)
            for child in self.keeper.children:
                child.wait(10.0)
            self.keeper.stop()
        self.output.close()
        self._broken = True  # a line that comes after this wakes nobody
        with self._waking:
            os.close(self._wake_out)
            os.close(self._wake_in)
            self._wake_in = self._wake_out = -1

    def _judge(self, found: list[tuple[int, ExitStatus]]) -> None:
        """The first failure decides; what follows from it, or from a signal to this process, does not count."""
        failed = [(rank, ended) for rank, ended in found if ended.code != 0]
        if not failed or self.failed or self._asked or self._broken:
            return
        self.failed = [(rank, ended, self.keeper.tail(rank)) for rank, ended in failed]
        rank, ended = failed[0]
        how, remedy = fate(ended)
        left = len(self.keeper.children) - len(self.ended)
        after = time.monotonic() - self._began
        rest = f"; ending the {left} that are left" if left else ""
        who = f"rank {self.first + rank} of {self.total} (pid {self.keeper.children[rank].pid}, host {platform.node()})"
        if self.announce:
            self.output.say(f"choros run: {who} {how} after {after:.1f} s{rest}" + (f". {remedy}" if remedy else ""))
        if self.on_failure is not None:
            self.on_failure(ended)
        self._finish(signal.SIGTERM)

    def _finish(self, number: int) -> None:
        self._deadline = time.monotonic() + self.grace
        self._signal(number)

    def _signal(self, number: int) -> None:
        for child in self.keeper.children:
            child.send_signal(number)
            if number != signal.SIGKILL:
                child.send_signal(signal.SIGCONT)  # a stopped rank sees no signal

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """A signal for this process: ``watch`` hands it on."""
        (self._warned if number in WARNINGS else self._asked).append(number)
        self.wake()

    def wake(self) -> None:
        """Have ``watch`` look at once; any thread may call."""
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_in >= 0:
                os.write(self._wake_in, b".")

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        longest = max(0.0, min(1.0, self._deadline - time.monotonic()))
        for rank, child in enumerate(self.keeper.children):
            if rank not in self.ended:
                if child.pidfd >= 0:
                    poll.register(child.pidfd, select.POLLIN)
                else:
                    longest = min(longest, 0.04)
        poll.poll(longest * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 1 << 12)
        while self._warned:
            number = self._warned.pop(0)
            for child in self.keeper.children:
                child.send_signal(number, alone=True)

    def _nobody_reads(self) -> None:
        if not self._broken:
            self._broken = True
            self.wake()
