"""Full mesh of messages among all ranks: frames before each call, liveness checks, waits that name the missing ranks.

Before each call every rank sends a frame to every other rank. The frame holds the signature of the call, and the data
if they are small. So every rank knows that all ranks make the same call, and which ranks are missing at the time limit.

No operation blocks inside the transport. A rank polls its messages and sleeps between two polls; the sleeps grow with
the wait. So a waiting rank does not occupy a core that another rank needs.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable

import numpy as np

from choros.comm.call_signature import GATHER, LEAVE, Posted, describe_call, describe_difference
from choros.comm.group import Trace
from choros.comm.host_identity import Process, alive, machine, oversubscribed
from choros.comm.p2p.interface import DATA, FRAME, PointToPoint, RequestHandle, pieces
from choros.comm.shm.futex import SPIN
from choros.comm.shm.group_header import FAILURE_GRACE, format_ranks
from choros.errors import CallsDifferError, ChorosError, CommTimeoutError, InvalidInputError, PeerLostError
from choros.types import Array

logger = logging.getLogger(__name__)

_HEADER_WORDS = 4  # 64-bit words of a frame before its data
# Bytes of data in one frame, and in the frames of all ranks together: every call sends every frame to every rank.
_MAX_INLINE_BYTES, _ALL_FRAMES_BYTES = 1 << 14, 1 << 17
# A transfer at this speed or above ends before the first sleep: a sleep would delay its end.
_SLOW_BYTES_PER_SECOND = 2e8
_MAX_SLEEP = 5e-4  # seconds: longest sleep between two polls, so it bounds the delay of a message
_LIVENESS_SECONDS = 0.5  # seconds between two liveness checks of this machine's peers, which read /proc
_Arrays = list[tuple[int, Array]]


class FullMesh:
    """One rank's frames and transfers; the base of ``MessageGroup``.

    Args:
        messages: PointToPoint. The transport of the ranks.
        timeout: float. Seconds that one wait may last.
        spin: float or None. Seconds to poll before sleeping. None: 50 us, or 0 if a machine has more ranks than cores.

    Attributes:
        rank, size: int. timeout: float.
        warn_after: float. Seconds after which a wait is reported on stderr, once; infinite by default.
        doing: str. The caller's activity, which messages name instead of the call; ``""`` for none.
        trace: Trace or None. Receives the timing of every wait and every sum.

    Raises:
        CommTimeoutError: not all ranks joined within the time limit.
    """

    def __init__(self, messages: PointToPoint, timeout: float, spin: float | None) -> None:
        self.timeout, self.warn_after, self.doing = timeout, math.inf, ""
        self.trace: Trace | None = None
        self._messages, self._spin = messages, 0.0
        self.rank, self.size = messages.rank, messages.size
        self._rank_name = f"rank {self.rank} on {os.uname().nodename}"
        # Each rank starts with its next neighbour. If all started with rank 0, all messages would queue at that rank
        # first.
        self._others = [(self.rank + k) % self.size for k in range(1, self.size)]
        # Every rank computes the same value, as it decides whether data travel in the frame. Whole words, as frames are
        # int64.
        self._inline = min(_MAX_INLINE_BYTES, max(_ALL_FRAMES_BYTES // self.size // 8 * 8, 64))
        self._frames = np.zeros((self.size, _HEADER_WORDS + self._inline // 8), np.int64)
        self._broken, self._closed, self._freed = "", False, False
        self._leave_requests: list[RequestHandle] = []
        self._buffers_in_use: object = None
        self._host_processes: dict[int, Process] = {}  # by rank: the processes on this machine
        # A hash of the machine's name fits a 64-bit word of the frame. The start time tells this process from a later
        # one under the same process ID.
        digest = hashlib.blake2b(machine().encode(), digest_size=8).digest()
        identity = np.array([int.from_bytes(digest, "little", signed=True), *Process.current()], np.int64)
        # The first call also proves that every rank has joined. It sleeps between polls, as the ranks still import
        # frameworks at different speed.
        self._begin_call((GATHER, 0, 0, 0), identity)
        identities = {
            rank: self._frame_data(rank, identity.nbytes).view(np.int64).tolist() for rank in range(self.size)
        }
        self._host_processes = {
            rank: Process(*process) for rank, (host, *process) in identities.items() if host == identity[0]
        }
        pids = [process.pid for process in self._host_processes.values()]
        self._spin = spin if spin is not None else 0.0 if oversubscribed(pids) else SPIN
        # After the first call, which has the time limit: MPI's Dup waits for all ranks without one.
        messages.settle()
        # mpi4py ends MPI by Py_AtExit, which runs after all handlers of the atexit module. So MPI still works in
        # ``_finish``.
        atexit.register(self._finish)

    # -- start of a call
    def _begin_call(self, posted: Posted, data: Array | None = None) -> list[Posted]:
        """Send this rank's call to all ranks; return the calls of all ranks.

        Args:
            posted: the signature of the call, which must be equal on all ranks, except for the length of a gather.
            data: at most ``_inline`` bytes, which ``_frame_data`` returns on every rank.

        Raises:
            InvalidInputError: on every rank, if the calls differ; the next call works.
            PeerLostError: a rank died or left. CommTimeoutError: a rank did not call. The group is unusable then.
        """
        if self._broken or self._closed:
            reason = self._broken or "it was closed"
            raise PeerLostError(
                f"{self._rank_name}: this group failed before, so {self._activity(posted)} cannot start: {reason}"
            )
        if thread_problem := self._messages.check_thread():
            raise InvalidInputError(
                f"{self._rank_name}: {self._activity(posted)} cannot be called here: {thread_problem}"
            )
        frame = self._frames[self.rank]
        frame[:_HEADER_WORDS] = posted
        nbytes = 8 * _HEADER_WORDS
        if data is not None:
            frame.view(np.uint8)[nbytes : nbytes + data.nbytes] = data.view(np.uint8)
            nbytes += data.nbytes
        # The receives have the full length of a frame, as the other ranks may make another call with more data. The
        # transport accepts a shorter message.
        receives = [(rank, self._frames[rank]) for rank in self._others]
        begin = 0 if self.trace is None else time.monotonic_ns()
        message = frame.view(np.uint8)[:nbytes]
        self._exchange(
            FRAME, [(rank, message) for rank in self._others], receives, lambda: self._activity(posted), self._spin
        )
        self._record_trace("wait", begin, -1)
        calls: list[Posted] = [tuple(call) for call in self._frames[:, :_HEADER_WORDS].tolist()]
        # A leave message has the tag of a frame, so a rank that waits for a call receives it instead and need not time
        # out.
        if departed := [rank for rank, call in enumerate(calls) if call[0] == LEAVE]:
            self._broken = f"{format_ranks(departed)} left"
            raise PeerLostError(
                f"{self._rank_name}: {self._broken} while awaited at {self._activity(posted)}. This group cannot be "
                "used any more."
            )
        if problem := describe_difference(self._rank_name, calls):
            raise CallsDifferError(problem, calls)
        return calls

    def _activity(self, posted: Posted) -> str:
        return self.doing or describe_call(posted)

    def _record_trace(self, kind: str, begin: int, nbytes: int) -> None:
        if begin and self.trace is not None:
            self.trace((kind, kind, begin, time.monotonic_ns(), nbytes))

    def _frame_data(self, rank: int, nbytes: int) -> Array:
        """Return a view of the data in a rank's frame, valid until the next call."""
        data: Array = self._frames[rank].view(np.uint8)[8 * _HEADER_WORDS : 8 * _HEADER_WORDS + nbytes]
        return data

    def _transfer(self, sends: _Arrays, receives: _Arrays, posted: Posted) -> None:
        """Send and receive arrays, after all ranks have started the call; each receiver knows the length."""
        busy = (
            (1e-3 + sum(array.nbytes for _, array in [*sends, *receives]) / _SLOW_BYTES_PER_SECOND)
            if self._spin
            else 0.0
        )
        self._exchange(DATA, sends, receives, lambda: f"the data of {self._activity(posted)}", busy)

    def _exchange(self, tag: int, sends: _Arrays, receives: _Arrays, activity: Callable[[], str], busy: float) -> None:
        requests, ranks = [], []
        # Receives first: a message that finds its receive goes into the array at once, without a copy in the transport.
        for start, messages in ((self._messages.receive, receives), (self._messages.send, sends)):
            for rank, array in messages:
                for piece in pieces(array):
                    requests.append(start(piece, rank, tag))
                    ranks.append(rank)
        try:
            self._wait(requests, ranks, activity, busy)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            # The transport may still read and write these buffers: keep them alive.
            self._buffers_in_use = requests, sends, receives
            if isinstance(error, self._messages.errors) and not isinstance(error, ChorosError):
                raise PeerLostError(
                    f"{self._rank_name}: {self._messages.name} failed at {activity()}: {error}"
                ) from error
            raise

    def _wait(
        self,
        requests: list[RequestHandle],
        ranks: list[int],
        activity: Callable[[], str],
        busy: float,
        test: Callable[[list[RequestHandle]], bool] | None = None,
    ) -> None:
        """Return when all requests are done. Poll for ``busy`` seconds without sleeping, then sleep between polls."""
        test, sleep = test or self._messages.done, self._messages.sleep
        started, last_check, warn = time.perf_counter(), 0.0, self.warn_after
        while not test(requests):
            waited = time.perf_counter() - started
            if waited < busy:
                # Not a pure loop: with more ranks than cores the awaited rank may be ready to run on this core.
                os.sched_yield()
            else:
                # An eighth of the wait: the sleep delays a message by at most that part of its own time.
                sleep(min(max((waited - busy) / 8, 2e-5), _MAX_SLEEP))
            # Not at each poll: a test of each request and of /proc takes longer than a small message.
            if waited - last_check >= _LIVENESS_SECONDS or waited >= min(self.timeout, warn):
                last_check = waited
                missing = {
                    rank for rank, request in zip(ranks, requests, strict=True) if not self._messages.is_done(request)
                }
                self._check_peers(missing, waited, activity)
                if missing and waited >= warn:
                    warn = math.inf
                    self._warn(missing, waited, activity)

    def _check_peers(self, missing: set[int], waited: float, activity: Callable[[], str]) -> None:
        if self._broken:  # another thread called ``give_up``
            raise PeerLostError(
                f"{self._rank_name}: the run was aborted while it waited at {activity()}: {self._broken}"
            )
        # Only processes of this machine: /proc shows no others. A lost host is noticed by the socket's keepalive or the
        # time limit.
        for rank, process in self._host_processes.items():
            if rank in missing and not alive(process):
                raise PeerLostError(
                    f"{self._rank_name}: rank {rank} (process {process.pid}) died while it was awaited at "
                    f"{activity()}. This group cannot be used any more; see the last output of rank {rank}."
                )
        if missing and waited >= self.timeout:
            raise CommTimeoutError(
                f"{self._rank_name} waited {waited:.1f} s at {activity()} for {format_ranks(sorted(missing))} of "
                f"{self.size}, which may be busy, stopped or gone. Look at those processes, or set a longer timeout.",
                tuple(sorted(missing)),
            )

    def _warn(self, missing: set[int], waited: float, activity: Callable[[], str]) -> None:
        logger.warning(
            f"{self._rank_name} has waited {waited:.1f} s at {activity()} for {format_ranks(sorted(missing))} of "
            f"{self.size}. It waits for up to {self.timeout:g} s in all."
        )

    @property
    def broken(self) -> str:
        """The error after which the group cannot be used; "" before."""
        return self._broken

    def give_up(self, reason: str) -> None:
        """Abort: this rank's waits, now or later, raise ``PeerLostError``; any thread may call."""
        # One store of a reference, so no lock: the waiting thread reads it at its next check. The first reason stays.
        self._broken = self._broken or reason

    # -- calls of another library
    def wait_until_ready(self, ready: Callable[[], bool], posted: Posted) -> None:
        """Return when ``ready`` is true on every rank; check meanwhile whether the ranks live.

        Args:
            ready: polled with short sleeps; raises ``PeerLostError`` if it cannot become true.
            posted: signature of the call, for error messages.

        Raises:
            PeerLostError: a rank died or left. CommTimeoutError: the time limit passed. The group is unusable then.
        """
        # A rank sends its frame when its own part is ready. So the frames of all ranks mean that all parts are ready.
        # Posted before this rank is ready: a peer that leaves or fails sends a frame at once, and it must be seen
        # meanwhile.
        incoming = [self._messages.receive(self._frames[rank].view(np.uint8), rank, FRAME) for rank in self._others]
        header = self._frames[self.rank][:_HEADER_WORDS]
        header[:] = posted
        requests, done, deadline = list(incoming), False, time.perf_counter() + self.timeout

        def test(pending: list[RequestHandle]) -> bool:
            nonlocal done
            if not done and self._poll(ready, incoming, posted):
                done = True
                requests.extend(self._messages.send(header.view(np.uint8), rank, FRAME) for rank in self._others)
                ranks.extend(self._others)
            elif not done and time.perf_counter() > deadline:
                raise CommTimeoutError(
                    f"{self._rank_name}: {self._activity(posted)} did not end within {self.timeout:g} s.", ()
                )
            # Called also while this rank is not ready: MPI moves messages of other ranks only inside its calls.
            arrived = self._messages.done(pending)
            return (arrived and done) or bool(self._departed(incoming))

        ranks = list(self._others)
        try:
            self._wait(requests, ranks, lambda: self._activity(posted), 0.0, test)
            if departed := self._departed(incoming):
                raise PeerLostError(
                    f"{self._rank_name}: {format_ranks(departed)} left before the end of {self._activity(posted)}."
                )
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._buffers_in_use = requests
            if isinstance(error, self._messages.errors) and not isinstance(error, ChorosError):
                raise PeerLostError(
                    f"{self._rank_name}: {self._messages.name} failed at {self._activity(posted)}: {error}"
                ) from error
            raise

    def _departed(self, incoming: list[RequestHandle]) -> list[int]:
        """Return the ranks whose frame is a leave message."""
        arrived = [
            rank for rank, request in zip(self._others, incoming, strict=True) if self._messages.is_done(request)
        ]
        return [rank for rank in arrived if self._frames[rank][0] == LEAVE]

    def _poll(self, ready: Callable[[], bool], incoming: list[RequestHandle], posted: Posted) -> bool:
        """Call ``ready``; if it fails because a rank died, raise an error that names the rank."""
        try:
            return ready()
        except PeerLostError:
            # The library's error names no rank. Look for one that died or left, and report that one as the cause.
            started = time.perf_counter()
            while time.perf_counter() - started < FAILURE_GRACE and not self._departed(incoming):
                self._messages.done(incoming)
                missing = {
                    rank
                    for rank, request in zip(self._others, incoming, strict=True)
                    if not self._messages.is_done(request)
                }
                self._check_peers(missing, 0.0, lambda: self._activity(posted))
                self._messages.sleep(0.01)
            raise

    # -- leaving
    def leave_after_peers(self, limit: float) -> None:
        """Leave, then wait until all other ranks have left or died, for at most ``limit`` seconds."""
        started = time.perf_counter()
        death_seen_at = started if self._broken else math.inf
        # After a failure the other ranks may send no leave messages, and a pending receive could not be freed.
        self._leave(not self._broken)
        local_peers = [process for rank, process in self._host_processes.items() if rank != self.rank]
        while self._broken or not self._leave_messages_sent():
            now, living = time.perf_counter(), [process for process in local_peers if alive(process)]
            # A rank that died sends no leave message. After it the others get FAILURE_GRACE seconds to notice.
            if len(living) < len(local_peers):
                death_seen_at = min(death_seen_at, now)
            all_local_ended = not living and len(local_peers) == self.size - 1
            if all_local_ended or now - started >= limit or now - death_seen_at >= FAILURE_GRACE:
                return
            self._messages.sleep(0.02)

    def _leave(self, receive_others: bool) -> None:
        """Send leave messages to all ranks; with ``receive_others`` also receive the leave messages of all ranks."""
        if not self._closed:
            # Before the messages: a second ``close``, as by atexit, must not send them again.
            self._closed = True
            header = self._frames[self.rank]
            header[:_HEADER_WORDS] = (LEAVE, 0, 0, 0)
            if receive_others:
                self._leave_requests = [
                    self._messages.receive(self._frames[rank].view(np.uint8), rank, FRAME) for rank in self._others
                ]
            self._leave_requests += [
                self._messages.send(header[:_HEADER_WORDS].view(np.uint8), rank, FRAME) for rank in self._others
            ]

    def _finish(self, limit: float | None = None) -> None:
        """Leave, and free the transport once all ranks have left.

        Args:
            limit: float or None. Seconds to wait for the others; one second at most if a call has failed. None, at exit
                of Python: the transport's ``patience``, or a second if that is 0. Under MPI it is as long as the others
                live, as they may still work; MPI_Finalize would spin meanwhile.
        """
        if self._freed or self._messages.is_closed():
            return
        self._leave(not self._broken and bool(self._messages.patience))
        started = time.perf_counter()
        max_seconds = 1.0 if self._broken else (self._messages.patience or 1.0) if limit is None else limit
        while not self._leave_messages_sent():
            waited = time.perf_counter() - started
            # A dead peer never takes its message. To free the transport then could wait for it for ever, so it stays
            # allocated and the process ends with it.
            if waited >= max_seconds or not all(map(alive, self._host_processes.values())):
                return
            self._messages.sleep(min(max(waited / 8, 2e-5), 0.05))
        self._freed = True
        # Else atexit would keep this group, and its frames and slot, in memory until the process ends.
        atexit.unregister(self._finish)
        self._messages.free(bool(self._broken))

    def _leave_messages_sent(self) -> bool:
        """Return whether all leave requests are done; a rank whose connection broke is not awaited."""
        for _ in self._others:  # each attempt may raise for another broken connection
            try:
                return self._messages.done(self._leave_requests)
            except self._messages.errors:
                continue
        return True
