"""``Pool``: worker processes on this host that serve calls; the end of a worker is always reported."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from choros.comm.messages import Messages, header_of
from choros.errors import ChorosError, CommTimeoutError, InvalidInputError, PeerLostError, WorkerFailedError, counted
from choros.launch.process.child_process import Child, ExitStatus, module_path, python_variables
from choros.launch.process.failure_report import RankFailure, failure
from choros.launch.process.frame import Message
from choros.launch.process.output_pump import OutputPump
from choros.launch.process.unix_socket import UnixConnection
from choros.launch.process.worker_connection import Call, ExitRequest, WorkerStarted

Event = tuple[int, Message | RankFailure | WorkerStarted, list[bytearray]]
_POOL_EVENTS = Messages(RankFailure, WorkerStarted)

_LINGER_SECONDS = 2.0  # seconds that a worker may live after it has closed its connection
_EXIT_SECONDS = 5.0  # seconds that workers may take to end after an ``ExitRequest``
_CHECK_SECONDS = 0.5  # seconds between two checks for stopped workers while workers start
# With these variables of a job, a worker would take itself for a rank of that job.
_NOT_FOR_WORKERS = (
    "CHOROS_RANK",
    "CHOROS_SIZE",
    "CHOROS_LOCAL_RANK",
    "CHOROS_LOCAL_SIZE",
    "CHOROS_RUN",
    "CHOROS_COMM_FD",
)


class Pool:
    """``size`` workers: ``python -m choros.launch.process.pool_worker`` with the caller's directory and module path.

    Each worker has a separate session, so Ctrl-C reaches only the caller. Workers end when the caller ends, also when
    it is killed. They have ``CHOROS_WORKER=1`` in their environment. All processes end when the pool is closed or
    collected, or the interpreter exits.

    Args:
        size: the number of workers.
        environment: for each worker, variables in addition to the caller's environment.
        cores: for each worker, the logical cores to which it is bound before it imports anything.
        echo: function of ``(rank, line)``, called for each line that a worker prints, in a thread of the pool.
        start_timeout: seconds within which all workers must have started. Defaults to 120.
        stopped_timeout: seconds for which a signal may stop a worker that is starting. Defaults to 10.

    Attributes:
        called: set of int. The ranks whose current process was sent a call.

    Raises:
        InvalidInputError: ``size`` is below 1, a list does not have one entry for each worker, or a worker cannot be
            started.
        WorkerFailedError: a worker ended before it had started, did not start in time, or a signal has stopped it; the
            message includes its output.

    Example:
        >>> with Pool(1) as pool:
        ...     pool.call(0, "builtins:nothing", {})
        ...     rank, event, blobs = pool.receive(timeout=30)
        >>> rank, event.type, event.message
        (0, 'choros.errors.InvalidInputError', 'the module builtins has no function nothing')
    """

    def __init__(
        self,
        size: int,
        *,
        environment: Sequence[Mapping[str, str]] | None = None,
        cores: Sequence[Sequence[int]] | None = None,
        echo: Callable[[int, str], None] | None = None,
        start_timeout: float = 120.0,
        stopped_timeout: float = 10.0,
    ) -> None:
        if size < 1:
            raise InvalidInputError(f"a pool has 1 worker or more, got {size}")
        for kind, values in (("environments", environment), ("bindings to cores", cores)):
            if values is not None and len(values) != size:
                raise InvalidInputError(f"{len(values)} {kind} were given for {counted(size, 'worker')}")
        if not sys.executable:
            raise InvalidInputError(
                "this interpreter does not know its own executable (sys.executable), so it starts no worker"
            )
        self.size = size
        self.called: set[int] = set()
        self._events: deque[Event] = deque()
        self._ended: dict[int, ExitStatus] = {}
        self._disconnected: dict[int, float] = {}
        self._watched: dict[int, tuple[int, Message]] = {}
        self._poll: select.poll | None = None  # the descriptors to wait for; None if it must be made again
        self._workers = _WorkerProcesses(echo)
        self._finalizer = weakref.finalize(self, _WorkerProcesses.end, self._workers)
        try:
            for rank in range(size):
                variables = {**os.environ, **(environment[rank] if environment else {})}
                self._workers.start(rank, size, variables, tuple(cores[rank]) if cores else ())
            self._await_start(start_timeout, stopped_timeout)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers."""
        return tuple(child.pid for child in self._workers.children)

    def alive(self, rank: int) -> bool:
        """Return whether a worker is running."""
        return rank not in self._ended and bool(self._workers.children) and self._workers.children[rank].check() is None

    def stopped(self, rank: int) -> bool:
        """Return whether a worker is running, and a signal has stopped it."""
        return self.alive(rank) and self._workers.children[rank].stopped

    def responds(self, rank: int) -> bool:
        """Return whether a worker is running, and no signal has stopped it."""
        return self.alive(rank) and not self.stopped(rank)

    def call(
        self,
        rank: int,
        function: str,
        arguments: Mapping[str, Any],
        blobs: Sequence[Any] = (),
        fds: Sequence[int] = (),
    ) -> None:
        """Make a worker call ``function(link, arguments, blobs, fds)``; do not wait.

        The worker searches modules where this process does: a kept worker may have started with a shorter ``sys.path``.

        Args:
            rank: the worker.
            function: the module and the name, as in ``"package.module:function"``.
            arguments: dict of JSON types.
            blobs: contiguous buffers; not copied.
            fds: file descriptors; the worker gets duplicates.

        Raises:
            ChorosError: as in ``send``.
        """
        self.send(rank, header_of(Call(function, dict(arguments), module_path())), blobs, fds)
        self.called.add(rank)

    def send(self, rank: int, message: Message, blobs: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send a worker a message that its running function receives through its link.

        If the worker has ended but the event of its end is still to come, this sends nothing and raises nothing.

        Args:
            rank: the worker.
            message: dict of JSON types.
            blobs: contiguous buffers; not copied.
            fds: file descriptors; the worker gets duplicates.

        Raises:
            InvalidInputError: a part has a wrong type or is over a limit.
            PeerLostError: the worker has ended, and its end was seen before; or the pool is closed.
            CommTimeoutError: the worker does not read any more.
        """
        if rank in self._ended or not self._finalizer.alive:
            raise PeerLostError(f"worker {rank} of {self.size} has ended, so nothing can be sent to it")
        with contextlib.suppress(PeerLostError):
            self._workers.wires[rank].send(message, blobs, fds)

    def receive(self, timeout: float) -> Event:
        """Return the next event of any worker.

        An event that a worker sends through its link is a dict. If a call has raised, or a worker has ended for any
        reason, the event is a ``RankFailure``.

        Args:
            timeout: seconds to wait.

        Returns:
            The worker's rank, the event, its blobs.

        Raises:
            CommTimeoutError: no event came in time.
            PeerLostError: all workers have ended, and no event is left.
        """
        limit = time.monotonic() + timeout
        while not self._events:
            if len(self._ended) == self.size:
                raise PeerLostError("no worker is left in this pool; start another")
            remaining = limit - time.monotonic()
            self._gather(remaining)
            if not self._events and remaining <= 0:
                silent = tuple(rank for rank in range(self.size) if rank not in self._ended)
                raise CommTimeoutError(f"no worker sent an event for {timeout:g} s (waited for ranks {silent})", silent)
        return self._events.popleft()

    def watch(self, fd: int, rank: int, event: Message) -> None:
        """Make ``receive`` return this event of a rank whenever a descriptor is readable; the receiver must read it.

        Args:
            fd: the descriptor, which must stay open until ``unwatch``.
            rank: the rank that ``receive`` returns.
            event: the event that ``receive`` returns.
        """
        self._watched[fd], self._poll = (rank, event), None

    def wait_for(self, fd: int, timeout: float) -> bool:
        """Wait for a watched descriptor; return True if only it is readable, False if ``receive`` has other events.

        It also returns False after ``timeout``.

        It costs less than ``receive``, so a caller can read the descriptor thousands of times a second.

        Args:
            fd: the descriptor.
            timeout: seconds to wait.
        """
        if self._events or self._disconnected or not self._poll or not self._all_have_pidfds:
            return False
        return [ready for ready, _ in self._poll.poll(1000 * timeout)] == [fd]

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor; do nothing if it is not watched."""
        self._watched.pop(fd, None)
        self._poll = None

    def cause(self, rank: int, report: RankFailure, grace: float = 1.0) -> tuple[int, RankFailure]:
        """Return the report of the worker that caused a failure, rather than of one that only lost its peer.

        If ``report`` is of a PeerLostError or CommTimeoutError, this waits for the report of another worker and returns
        that. Other events that come meanwhile are dropped.

        Args:
            rank: the rank of the report.
            report: an event from ``receive``.
            grace: seconds to wait. Defaults to 1.

        Returns:
            The rank and the report to give to ``failure``.
        """
        limit = time.monotonic() + grace
        with contextlib.suppress(ChorosError):
            while report.is_echo:
                other, event, _ = self.receive(limit - time.monotonic())
                # A second rank that only lost its peer is not a cause either.
                if isinstance(event, RankFailure) and not event.is_echo:
                    return other, event
        return rank, report

    def failure(self, rank: int, report: RankFailure, weights: list[Any] | None = None) -> WorkerFailedError:
        """Return the exception for the report of a worker, which the caller raises.

        Args:
            rank: the worker.
            report: an event from ``receive``.
            weights: the last center variable, kept as ``error.weights``. Defaults to None.

        Returns:
            The exception.
        """
        return failure(rank, self.size, report, weights)

    def hung(self, rank: int, why: str, weights: list[Any] | None = None) -> WorkerFailedError:
        """Return the exception for a worker that lives and does not answer, which the caller raises.

        Args:
            rank: the worker.
            why: the end of the message, after the name of the worker and its host.
            weights: as in ``failure``.
        """
        child, pump, host = self._workers.children[rank], self._workers.pump, platform.node()
        pump.pull(rank)
        child.sample()
        output = pump.tail(rank)
        printed = f"\n\nThe last lines that it printed:\n{output.rstrip()}" if output.strip() else ""
        return WorkerFailedError(
            f"worker {rank} of {self.size} (counted from 0) on host {host} {why}{printed}",
            rank=rank,
            host=host,
            peak_memory=child.peak_memory,
            output=output,
            weights=weights,
        )

    def end(self, rank: int) -> None:
        """Kill one worker; ``receive`` returns its ``RankFailure``."""
        self._workers.children[rank].send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kill all workers and their process groups; a second call does nothing."""
        self._finalizer()

    def close(self) -> None:
        """Ask the workers to end, wait up to 5 s, kill the rest; a second call does nothing."""
        if not self._finalizer.alive:
            return
        try:
            for wire in self._workers.wires:
                with contextlib.suppress(ChorosError):
                    # A hung worker whose socket is full must not delay the end of the others.
                    wire.send(header_of(ExitRequest()), stalled=0.5)
            limit = time.monotonic() + _EXIT_SECONDS
            while len(self._ended) < self.size and time.monotonic() < limit:
                self._gather(limit - time.monotonic())
                self._events.clear()
        finally:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def replace(self, rank: int) -> None:
        """Kill a worker and start another one of the same rank, without waiting for its start.

        Args:
            rank: the worker; its unread events are dropped.
        """
        # The descriptors of the old process are closed, and the kernel may give their numbers to the new one.
        self._poll = None
        self._workers.replace(rank, self.size)
        self.called.discard(rank)
        self._ended.pop(rank, None)
        self._disconnected.pop(rank, None)
        self._events = deque(event for event in self._events if event[0] != rank)

    def _await_start(self, timeout: float, stopped_timeout: float) -> None:
        """Wait until all workers have started."""
        begun = time.monotonic()
        waiting = set(range(self.size))
        last_running = dict.fromkeys(waiting, begun)  # by rank: the last time at which no signal had stopped it
        while waiting:
            remaining = begun + timeout - time.monotonic()
            try:
                rank, event, _ = self.receive(max(0.0, min(remaining, _CHECK_SECONDS)))
            except CommTimeoutError:
                last_running |= {rank: time.monotonic() for rank in waiting if not self.stopped(rank)}
                for rank in sorted(waiting):
                    if time.monotonic() - last_running[rank] > stopped_timeout:
                        reason = f"has been stopped by a signal for {stopped_timeout:g} s, before it had started"
                        raise self.hung(rank, reason) from None
                if remaining <= 0:
                    raise self.hung(min(waiting), f"did not start within {timeout:g} s") from None
                continue
            if isinstance(event, RankFailure):
                raise self.failure(rank, event)
            waiting.discard(rank)

    def _gather(self, wait: float) -> None:
        """Wait until a worker or a watched descriptor is ready, and collect all events."""
        workers = self._workers
        if self._poll is None:
            self._poll = self._register()
        wait = wait if self._all_have_pidfds else min(wait, 0.04)  # without a pidfd, check at short intervals
        if self._disconnected:  # such a worker is killed after ``_LINGER_SECONDS``
            wait = min(wait, _LINGER_SECONDS)
        ready = {fd for fd, _ in self._poll.poll(max(0.0, wait) * 1000)}
        watched = ready & self._watched.keys()
        self._events.extend((*self._watched[fd], []) for fd in watched)
        if watched and watched == ready:
            return
        check_all = bool(self._disconnected) or not (self._all_have_pidfds and ready)  # else only those in ``ready``
        for rank, child in enumerate(workers.children):
            if rank in self._ended or not (check_all or {workers.wires[rank].fileno(), child.pidfd} & ready):
                continue
            self._read(rank)
            if not check_all and child.pidfd not in ready:
                continue
            if (ended := child.check()) is not None:
                # The worker may have sent more between the read above and its end.
                self._read(rank)
                self._ended[rank], self._poll = ended, None
                self._queue_event(rank, RankFailure.of_process(ended), [])
            elif time.monotonic() > self._disconnected.get(rank, float("inf")) + _LINGER_SECONDS:
                child.send_signal(signal.SIGKILL)

    def _register(self) -> select.poll:
        """Return the descriptors to wait on; kept, as a caller may wait thousands of times a second."""
        poll = select.poll()
        self._all_have_pidfds = True
        for rank, (child, wire) in enumerate(zip(self._workers.children, self._workers.wires, strict=True)):
            if rank not in self._ended:
                if rank not in self._disconnected:
                    poll.register(wire, select.POLLIN)
                if child.pidfd >= 0:
                    poll.register(child.pidfd, select.POLLIN)
                else:
                    self._all_have_pidfds = False
        for fd in self._watched:
            poll.register(fd, select.POLLIN)
        return poll

    def _read(self, rank: int) -> None:
        wire = self._workers.wires[rank]
        while rank not in self._disconnected and wire.poll():
            try:
                message, blobs, fds = wire.receive(0)
            except PeerLostError:
                self._disconnected[rank], self._poll = time.monotonic(), None
                return
            for fd in fds:
                os.close(fd)
            self._queue_event(rank, _POOL_EVENTS.decode(message) if _POOL_EVENTS.has(message) else message, blobs)

    def _queue_event(self, rank: int, event: Message | RankFailure | WorkerStarted, blobs: list[bytearray]) -> None:
        if isinstance(event, RankFailure):
            self._workers.pump.pull(rank)
            event = replace(event, output=self._workers.pump.tail(rank))
        self._events.append((rank, event, blobs))


class _WorkerProcesses:
    """The processes of a pool, separate from it, so that a finalizer can end them after the pool is collected."""

    def __init__(self, echo: Callable[[int, str], None] | None) -> None:
        self.wires: list[UnixConnection] = []
        self._started_with: dict[int, tuple[Mapping[str, str], tuple[int, ...]]] = {}
        self._owner = os.getpid()
        self.pump = OutputPump(None if echo is None else lambda rank, _, line: echo(rank, line))

    @property
    def children(self) -> list[Child]:
        return self.pump.children

    def start(self, rank: int, size: int, environment: Mapping[str, str], cores: tuple[int, ...]) -> None:
        """Start one worker."""
        self._started_with[rank] = (environment, cores)
        environment = {name: value for name, value in environment.items() if name not in _NOT_FOR_WORKERS}
        environment |= {"CHOROS_WORKER": "1", **python_variables()}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.wires.append(UnixConnection(ours, f"worker {rank} of {size}"))
        # Only the child may have its end: the connection then closes when the child dies.
        with theirs:
            argv = [
                sys.executable,
                "-P",
                "-m",
                "choros.launch.process.pool_worker",
                str(theirs.fileno()),
                str(rank),
                str(size),
            ]

            def make(out: int, err: int) -> Child:
                return Child(argv, environment, cores=cores, pass_fds=(theirs.fileno(),), stdout=out, stderr=err)

            try:
                self.pump.call(lambda: self.pump.start(rank, make), timeout=60.0)
            except OSError as error:
                raise InvalidInputError(
                    f"worker {rank} of {size} cannot be started with {sys.executable}: {error}"
                ) from error

    def replace(self, rank: int, size: int) -> None:
        """Kill one worker and start another one with the same environment and cores."""
        child, wire = self.children[rank], self.wires[rank]
        child.send_signal(signal.SIGKILL)
        child.wait(10.0)
        self.start(rank, size, *self._started_with[rank])
        # ``start`` has appended the new process. It takes the index of its rank.
        self.wires[rank] = self.wires.pop()
        self.children[rank] = self.children.pop()
        wire.close()

    def _kill_all(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGKILL)
        for child in self.children:
            child.wait(10.0)

    def end(self) -> None:
        """Kill and reap all workers, close all connections; do nothing in a fork of the caller."""
        if os.getpid() != self._owner:
            return
        self._kill_all()
        self.pump.stop()
        self._kill_all()  # also a worker whose start was under way
        for wire in self.wires:
            wire.close()
