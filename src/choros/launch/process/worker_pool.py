"""``Pool``: worker processes on this machine that serve calls, and whose end never goes unnoticed."""

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
from types import TracebackType
from typing import Any, Self

from choros.errors import ChorosError, CommTimeoutError, InvalidInputError, PeerLostError, WorkerFailedError
from choros.launch.process.child_process import Child, ExitStatus, python_variables
from choros.launch.process.failure_report import failure, is_echo
from choros.launch.process.frame import Message
from choros.launch.process.output_pump import OutputPump
from choros.launch.process.unix_socket import UnixConnection

Event = tuple[int, Message, list[bytearray]]

_LINGER = 2.0  # seconds a worker may live on after it has closed its connection
_EXIT = 5.0
_NOT_FOR_WORKERS = (
    "CHOROS_RANK",
    "CHOROS_SIZE",
    "CHOROS_LOCAL_RANK",
    "CHOROS_LOCAL_SIZE",
    "CHOROS_RUN",
    "CHOROS_COMM_FD",
)


class Pool:
    """``size`` workers: ``python -m choros.launch.process.pool_worker`` with the caller's directory and path.

    Workers are in sessions of their own (Ctrl-C reaches only the caller), end when the caller ends, however it ends,
    and have ``CHOROS_WORKER=1`` in their environment. Nothing is left behind when the pool is closed, collected, or
    the interpreter exits.

    Args:
        size: how many workers.
        environment: for each worker, variables that are set on top of the caller's environment.
        cores: for each worker, the logical cores that it is bound to before it imports anything.
        echo: gets ``(rank, line)`` for each line that a worker prints, in a thread of the pool.
        start_timeout: seconds within which all workers must have said hello.

    Raises:
        InvalidInputError: lengths that do not fit, or no Python to start.
        WorkerFailedError: a worker ended before it could say hello; the message has what it printed.
        CommTimeoutError: a worker said nothing in time.

    Example:
        >>> with Pool(1) as pool:
        ...     pool.send(0, {"call": "builtins:nothing"})
        ...     rank, event, blobs = pool.receive(timeout=30)
        >>> rank, event["event"], event["message"]
        (0, 'failed', 'the module builtins has no function nothing')
    """

    def __init__(
        self,
        size: int,
        *,
        environment: Sequence[Mapping[str, str]] | None = None,
        cores: Sequence[Sequence[int]] | None = None,
        echo: Callable[[int, str], None] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        if size < 1:
            raise InvalidInputError(f"a pool has 1 worker or more, got {size}")
        for what, given in (("environments", environment), ("bindings to cores", cores)):
            if given is not None and len(given) != size:
                raise InvalidInputError(f"{len(given)} {what} were given for {size} workers")
        if not sys.executable:
            raise InvalidInputError(
                "this interpreter does not know its own executable (sys.executable), so it starts no worker"
            )
        self.size = size
        self._events: deque[Event] = deque()
        self._ended: dict[int, ExitStatus] = {}
        self._hung_up: dict[int, float] = {}
        self._watched: dict[int, tuple[int, Message]] = {}
        self._poll: select.poll | None = None  # of all that is waited for; None where that has changed
        self._crew = _Crew(echo)
        self._finalizer = weakref.finalize(self, _Crew.end, self._crew)
        try:
            for rank in range(size):
                own = {**os.environ, **(environment[rank] if environment else {})}
                self._crew.hire(rank, size, own, tuple(cores[rank]) if cores else ())
            self._greet(start_timeout)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(child.pid for child in self._crew.children)

    def alive(self, rank: int) -> bool:
        """Return whether a worker's end has not been noticed yet."""
        return rank not in self._ended and bool(self._crew.children) and self._crew.children[rank].check() is None

    def send(self, rank: int, message: Message, blobs: Sequence[Any] = (), fds: Sequence[int] = ()) -> None:
        """Send a worker a call, or whatever the function that it runs receives through its link.

        To a worker that has ended unnoticed nothing is sent and nothing raised: ``receive`` gives its ``died`` event.

        Args:
            rank: the worker.
            message: what JSON can hold; ``{"call": "package.module:function", ...}`` calls.
            blobs: contiguous buffers; not copied.
            fds: descriptors; the worker gets its own copies.

        Raises:
            InvalidInputError: what cannot travel.
            PeerLostError: the worker has ended, as its ``died`` event has said.
            CommTimeoutError: the worker reads nothing any more.
        """
        if rank in self._ended or not self._finalizer.alive:
            raise PeerLostError(f"worker {rank} of {self.size} has ended, so nothing can be sent to it")
        with contextlib.suppress(PeerLostError):
            self._crew.wires[rank].send(message, blobs, fds)

    def receive(self, timeout: float) -> Event:
        """The next event of any worker.

        Besides what workers send through their links: ``{"event": "failed", "type", "message", "traceback", "host",
        "peak_memory", "output"}`` when a call raised, and ``{"event": "died", "signal", "exit", "peak_memory",
        "host", "output"}``, once, when a worker has ended for any reason.

        Args:
            timeout: seconds.

        Returns:
            The worker's rank, the event, its blobs.

        Raises:
            CommTimeoutError: no worker said anything.
            PeerLostError: no worker is left, and no event either.
        """
        limit = time.monotonic() + timeout
        while not self._events:
            if len(self._ended) == self.size:
                raise PeerLostError("no worker is left in this pool; start another")
            left = limit - time.monotonic()
            self._gather(left)
            if not self._events and left <= 0:
                silent = tuple(rank for rank in range(self.size) if rank not in self._ended)
                raise CommTimeoutError(f"no worker said anything for {timeout:g} s (waited for ranks {silent})", silent)
        return self._events.popleft()

    def watch(self, fd: int, rank: int, event: Message) -> None:
        """Have ``receive`` return this event of a rank whenever a descriptor is readable; who receives it reads.

        Args:
            fd: the descriptor, open until ``unwatch``.
            rank: whose event it is.
            event: what ``receive`` returns.
        """
        self._watched[fd], self._poll = (rank, event), None

    def wait_for(self, fd: int, timeout: float) -> bool:
        """Wait until a watched descriptor is readable, and return True; False where there is something else to receive.

        It costs less than ``receive``, for who reads the descriptor thousands of times a second.

        Args:
            fd: the descriptor.
            timeout: seconds.
        """
        if self._events or self._hung_up or not self._poll or not self._seen_by_kernel:
            return False
        return [ready for ready, _ in self._poll.poll(1000 * timeout)] == [fd]

    def unwatch(self, fd: int) -> None:
        """Take ``watch`` back; of a descriptor that is not watched, do nothing."""
        self._watched.pop(fd, None)
        self._poll = None

    def cause(self, rank: int, event: Message, grace: float = 1.0) -> tuple[int, Message]:
        """Return the first cause: a worker that only lost its peer is not to blame.

        When ``event`` is a ``failed`` one of type PeerLostError or CommTimeoutError, waits for the ``failed`` or
        ``died`` event of another worker and gives that; events of other kinds that come meanwhile are dropped.

        Args:
            rank: whose event it is.
            event: as ``receive`` gave it.
            grace: seconds to wait.

        Returns:
            The rank and event to make a ``failure`` of.
        """
        limit = time.monotonic() + grace
        with contextlib.suppress(ChorosError):
            while is_echo(event):
                other, found, _ = self.receive(limit - time.monotonic())
                if found.get("event") in ("failed", "died") and not is_echo(found):
                    return other, found
        return rank, event

    def failure(self, rank: int, event: Message, weights: list[Any] | None = None) -> WorkerFailedError:
        """The exception for a ``failed`` or ``died`` event, to be raised by the caller.

        Args:
            rank: the worker.
            event: as ``receive`` gave it.
            weights: the last centre, kept as ``error.weights``.

        Returns:
            The exception.
        """
        return failure(rank, self.size, event, weights)

    def end(self, rank: int) -> None:
        """Kill one worker; ``receive`` gives its ``died`` event."""
        self._crew.children[rank].send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """End all workers and what they started, at once; again does nothing."""
        self._finalizer()

    def close(self) -> None:
        """Ask the workers to end, wait 5 s, kill those that did not; again does nothing."""
        if not self._finalizer.alive:
            return
        try:
            for wire in self._crew.wires:
                with contextlib.suppress(ChorosError):
                    wire.send({"call": "exit"}, stalled=0.5)
            limit = time.monotonic() + _EXIT
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
        """Kill a worker, if it lives, and start another in its place, without waiting for it; its hello is an event.

        Args:
            rank: the worker; what it has said is dropped.
        """
        self._poll = None
        self._crew.replace(rank, self.size)
        self._ended.pop(rank, None)
        self._hung_up.pop(rank, None)
        self._events = deque(event for event in self._events if event[0] != rank)

    def _greet(self, timeout: float) -> None:
        """Wait for every worker's hello."""
        limit = time.monotonic() + timeout
        waiting = set(range(self.size))
        while waiting:
            try:
                rank, event, _ = self.receive(max(0.0, limit - time.monotonic()))
            except CommTimeoutError:
                missing = tuple(sorted(waiting))
                printed = "\n".join(self._crew.keeper.tail(rank) for rank in missing)
                raise CommTimeoutError(
                    f"the workers {missing} did not start within {timeout:g} s"
                    + (f"; they printed:\n{printed}" if printed.strip() else " and printed nothing"),
                    missing,
                ) from None
            if event.get("event") != "hello":
                raise self.failure(rank, event)
            waiting.discard(rank)

    def _gather(self, wait: float) -> None:
        """Wait for something to happen and note every event that there is."""
        crew = self._crew
        if self._poll is None:
            self._poll = self._register()
        wait = wait if self._seen_by_kernel else min(wait, 0.04)
        ready = {fd for fd, _ in self._poll.poll(max(0.0, min(wait, _LINGER) if self._hung_up else wait) * 1000)}
        watched = ready & self._watched.keys()
        self._events.extend((*self._watched[fd], []) for fd in watched)
        if watched and watched == ready:
            return
        each = bool(self._hung_up) or not (self._seen_by_kernel and ready)  # then all are looked at
        for rank, child in enumerate(crew.children):
            if rank in self._ended or not (each or {crew.wires[rank].fileno(), child.pidfd} & ready):
                continue
            self._read(rank)
            if not each and child.pidfd not in ready:
                continue
            if (ended := child.check()) is not None:
                self._read(rank)
                self._ended[rank], self._poll = ended, None
                event: Message = {"event": "died", "signal": ended.signal, "exit": ended.exit}
                event |= {"peak_memory": ended.peak_memory, "host": platform.node()}
                self._note(rank, event, [])
            elif time.monotonic() > self._hung_up.get(rank, float("inf")) + _LINGER:
                child.send_signal(signal.SIGKILL)

    def _register(self) -> select.poll:
        """Return the set of descriptors to wait on; made once, as a caller may wait thousands of times a second."""
        poll = select.poll()
        self._seen_by_kernel = True
        for rank, (child, wire) in enumerate(zip(self._crew.children, self._crew.wires, strict=True)):
            if rank not in self._ended:
                if rank not in self._hung_up:
                    poll.register(wire, select.POLLIN)
                if child.pidfd >= 0:
                    poll.register(child.pidfd, select.POLLIN)
                else:
                    self._seen_by_kernel = False
        for fd in self._watched:
            poll.register(fd, select.POLLIN)
        return poll

    def _read(self, rank: int) -> None:
        wire = self._crew.wires[rank]
        while rank not in self._hung_up and wire.poll():
            try:
                message, blobs, fds = wire.receive(0)
            except PeerLostError:
                self._hung_up[rank], self._poll = time.monotonic(), None
                return
            for fd in fds:
                os.close(fd)
            self._note(rank, message, blobs)

    def _note(self, rank: int, event: Message, blobs: list[bytearray]) -> None:
        if event.get("event") in ("failed", "died"):
            self._crew.keeper.pull(rank)
            event["output"] = self._crew.keeper.tail(rank)
        self._events.append((rank, event, blobs))


class _Crew:
    """The parts of a pool, apart from it, so that they can be ended when the pool has been collected."""

    def __init__(self, echo: Callable[[int, str], None] | None) -> None:
        self.wires: list[UnixConnection] = []
        self._hired: dict[int, tuple[Mapping[str, str], tuple[int, ...]]] = {}
        self._owner = os.getpid()
        self.keeper = OutputPump(None if echo is None else lambda rank, _, line: echo(rank, line))

    @property
    def children(self) -> list[Child]:
        return self.keeper.children

    def hire(self, rank: int, size: int, environment: Mapping[str, str], cores: tuple[int, ...]) -> None:
        """Start one worker."""
        self._hired[rank] = (environment, cores)
        environment = {name: value for name, value in environment.items() if name not in _NOT_FOR_WORKERS}
        environment |= {"CHOROS_WORKER": "1", **python_variables()}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.wires.append(UnixConnection(ours, f"worker {rank} of {size}"))
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
                self.keeper.call(lambda: self.keeper.start(rank, make), timeout=60.0)
            except OSError as error:
                raise InvalidInputError(
                    f"worker {rank} of {size} cannot be started with {sys.executable}: {error}"
                ) from error

    def replace(self, rank: int, size: int) -> None:
        """Kill one worker and start another as that one was."""
        child, wire = self.children[rank], self.wires[rank]
        child.send_signal(signal.SIGKILL)
        child.wait(10.0)
        self.hire(rank, size, *self._hired[rank])
        self.wires[rank] = self.wires.pop()
        self.children[rank] = self.children.pop()
        wire.close()

    def _slay(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGKILL)
        for child in self.children:
            child.wait(10.0)

    def end(self) -> None:
        """Kill, reap, close; in a forked copy of the caller, whose workers they are not, nothing."""
        if os.getpid() != self._owner:
            return
        self._slay()
        self.keeper.stop()
        self._slay()  # one that was being started meanwhile
        for wire in self.wires:
            wire.close()
