"""One daemon thread that starts processes and reads their output.

On Linux the kernel sends the parent-death signal when the thread that started a process ends. The caller's thread may
end before the process does, so this thread starts the processes.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from choros.launch.process.child_process import Child
from choros.launch.process.wake_pipe import WakePipe

Result = TypeVar("Result")

_MAX_LINE = 1 << 16  # bytes; a longer line is cut into several
_MAX_TAIL_LINE = 2000  # characters that ``tail`` keeps of a line
_TAIL_LINES = 40  # last lines that are kept of each rank
_SAMPLE_SECONDS = 0.5  # between two samples of the processes' memory


class Stream:
    """One pipe of one rank, cut into lines.

    Args:
        fd: the reading end; the stream owns it.
        rank: the rank that writes to the pipe.
        kind: ``"out"`` or ``"err"``.
        on_line: function of ``(rank, kind, line)``, called for each line without its line end.
    """

    def __init__(self, fd: int, rank: int, kind: str, on_line: Callable[[int, str, str], None]) -> None:
        os.set_blocking(fd, False)
        self.fd, self.rank, self.kind = fd, rank, kind
        self._on_line = on_line
        self._unfinished = b""
        # ``OutputPump.pull`` reads in another thread. Two reads at once could exchange parts of a line.
        self._lock = threading.RLock()

    def pull(self) -> bool:
        """Read all available output, without waiting; return False at the end of the stream."""
        with self._lock:
            while self.fd >= 0:
                try:
                    piece = os.read(self.fd, 1 << 16)
                except BlockingIOError:
                    return True
                if not piece:
                    self._emit(self._unfinished)
                    self._unfinished = b""
                    return False
                *lines, self._unfinished = (self._unfinished + piece).split(b"\n")
                for line in lines:
                    self._on_line(self.rank, self.kind, line.removesuffix(b"\r").decode(errors="replace"))
                if len(self._unfinished) > _MAX_LINE:
                    self._emit(self._unfinished)
                    self._unfinished = b""
            return False

    def close(self) -> None:
        """Pass on an unfinished line and close the pipe."""
        with self._lock:
            self._emit(self._unfinished)
            self._unfinished = b""
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1

    def _emit(self, line: bytes) -> None:
        if line:
            self._on_line(self.rank, self.kind, line.decode(errors="replace"))


class OutputPump:
    """The thread that starts processes and reads their output. It ends at ``stop``, or with the interpreter.

    Args:
        on_line: function of ``(rank, kind, line)``; its exceptions do not end the thread.
    """

    def __init__(self, on_line: Callable[[int, str, str], None] | None = None) -> None:
        self.children: list[Child] = []
        self._on_line = on_line
        self._tails: dict[int, deque[str]] = {}
        self._streams: list[Stream] = []
        self._calls: deque[Callable[[], None]] = deque()  # its append and popleft need no lock
        self._stopping = False
        self._pipe = WakePipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name="choros-output", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Result], timeout: float) -> Result:
        """Call a function in the thread, and return its result or raise its exception.

        Args:
            work: the function.
            timeout: seconds to wait for the result.
        """
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._calls.append(run)
        self._pipe.wake()
        return done.result(timeout)

    def start(self, rank: int, make: Callable[[int, int], Child], split: bool = False) -> Child:
        """Start a process and begin to read its output. Call this through ``call``.

        Args:
            rank: the rank of the process.
            make: function from the writing ends for stdout and stderr to the process.
            split: use a separate pipe for stderr. Defaults to False.

        Returns:
            The process that ``make`` returned.
        """
        pipes = {kind: os.pipe() for kind in (("out", "err") if split else ("out",))}
        try:
            child = make(pipes["out"][1], pipes.get("err", pipes["out"])[1])
        except BaseException:
            for reading, _ in pipes.values():
                os.close(reading)
            raise
        finally:
            # Only the child may have the writing ends, else the pipe would not end with the child.
            for _, writing in pipes.values():
                os.close(writing)
        self.children.append(child)
        for kind, (reading, _) in pipes.items():
            stream = Stream(reading, rank, kind, self._line)
            self._streams.append(stream)
            self._selector.register(reading, selectors.EVENT_READ, stream)
        return child

    def pull(self, rank: int) -> None:
        """Read all available output of a rank, in the thread of the caller."""
        for stream in list(self._streams):  # a copy, because the thread may start a process meanwhile
            if stream.rank == rank:
                stream.pull()

    def tail(self, rank: int) -> str:
        """Return the last lines that a rank has printed."""
        return "\n".join(list(self._tails.get(rank, ())))

    def stop(self) -> None:
        """Read the remaining output, close the pipes and end the thread; a second call does nothing."""
        self._stopping = True
        self._pipe.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _line(self, rank: int, kind: str, line: str) -> None:
        tail = self._tails.get(rank)
        if tail is None:
            tail = self._tails.setdefault(rank, deque(maxlen=_TAIL_LINES))
        tail.append(line[:_MAX_TAIL_LINE])
        if self._on_line is not None:
            try:
                self._on_line(rank, kind, line)
            except (OSError, ValueError):  # a closed stdout must not end the run
                return
            except Exception:  # neither must a defect in on_line; show it once
                self._on_line = None
                traceback.print_exc()

    def _loop(self) -> None:
        sampled = 0.0
        try:
            while not self._stopping:
                for key, _ in self._selector.select(_SAMPLE_SECONDS):
                    if key.data is None:
                        self._pipe.clear()
                    elif not key.data.pull():
                        self._selector.unregister(key.fileobj)
                        key.data.close()
                while self._calls:
                    self._calls.popleft()()
                if time.monotonic() > sampled + _SAMPLE_SECONDS:
                    sampled = time.monotonic()
                    for child in list(self.children):
                        child.sample()
        finally:
            # Processes may have written more since the last ``select``.
            for stream in self._streams:
                stream.pull()
                stream.close()
            self._selector.close()
            self._pipe.close()
