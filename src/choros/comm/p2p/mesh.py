"""Calls of all ranks by messages between every pair of them, where each wait names who is missing.

A call begins with a frame from every rank to every other one: what it is about to do, and its data where these are
few bytes. So every rank knows that all make the same call, and who has not come when the time is over.

Nothing here blocks: a rank tests whether its messages have come and sleeps in between, longer the longer it waits, so
that it takes no core from those that still compute.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from choros.comm.call_signature import GATHER, LEAVE, Posted, difference, spell
from choros.comm.host_identity import Process, alive, crowded, machine
from choros.comm.p2p.interface import DATA, FRAME, PointToPoint
from choros.comm.shm.futex import SPIN
from choros.comm.shm.group_header import GRACE, names
from choros.errors import CallsDifferError, ChorosError, CommTimeoutError, InvalidInputError, PeerLostError
from choros.types import Array

_HEAD = 4  # words of a frame before its data
_INLINE, _FRAMES = 1 << 14, 1 << 17  # bytes of data in one frame, and in those of all ranks together
_MOST = 1 << 30  # bytes of one message: MPI counts with 32 bits
_SLOW = 2e8  # bytes/s: while data may still be on their way at this speed, a rank looks without sleeping
_NAP = 5e-4  # seconds: the longest sleep between two looks
_LOOK = 0.5  # seconds between two looks at whether the peers of this machine live
_Arrays = list[tuple[int, Array]]
Trace = Callable[[tuple[str, str, int, int, int]], object]


class FullMesh:
    """One rank's end of the messages: what ``MessageGroup`` is built on.

    Args:
        messages: PointToPoint. Who carries them, among whom.
        timeout: float. Seconds that one wait may last.
        spin: float. Seconds to look before sleeping; None: 0 where ranks of a machine outnumber their cores.

    Attributes:
        rank, size: int. timeout: float.
        warn_after: float. Seconds after which a wait is told on stderr, once; never by default.
        doing: str. What the caller is about, in messages in place of the call's own name where it is not empty.
        trace: is told of every wait and every sum: (kind, name, begin, end, bytes), in nanoseconds of ``monotonic_ns``.

    Raises:
        CommTimeoutError: not all ranks have come.
    """

    def __init__(self, messages: PointToPoint, timeout: float, spin: float | None) -> None:
        self.timeout, self.warn_after, self.doing = timeout, math.inf, ""
        self.trace: Trace | None = None
        self._messages, self._spin = messages, 0.0
        self.rank, self.size = messages.rank, messages.size
        self._where = f"rank {self.rank} on {os.uname().nodename}"
        self._others = [(self.rank + k) % self.size for k in range(1, self.size)]
        self._inline = min(_INLINE, max(_FRAMES // self.size // 8 * 8, 64))
        self._frames = np.zeros((self.size, _HEAD + self._inline // 8), np.int64)
        self._broken, self._closed, self._ended = "", False, False
        self._leaving: list[Any] = []
        self._kept: Any = None
        self._beside: dict[int, Process] = {}  # by rank, those of this machine
        place = hashlib.blake2b(machine().encode(), digest_size=8).digest()
        mine = np.array([int.from_bytes(place, "little", signed=True), *Process.mine()], np.int64)
        self._meet((GATHER, 0, 0, 0), mine)
        found = {rank: self._framed(rank, mine.nbytes).view(np.int64).tolist() for rank in range(self.size)}
        self._beside = {rank: Process(*each) for rank, (where, *each) in found.items() if where == mine[0]}
        self._spin = spin if spin is not None else 0.0 if crowded(each.pid for each in self._beside.values()) else SPIN
        messages.settle()
        atexit.register(self._end)

    # -- meeting
    def _meet(self, posted: Posted, data: Array | None = None) -> list[Posted]:
        """Tell all what this rank is about to do; return what each said.

        Args:
            posted: the kind of call, and what must be equal on all ranks (of what is gathered the length may differ).
            data: at most ``_inline`` bytes, which ``_framed`` gives to all.

        Raises:
            InvalidInputError: on every rank, if the calls differ; the next call works.
            PeerLostError, CommTimeoutError: a rank has gone or does not come; nothing works from then on.
        """
        if self._broken or self._closed:
            why = self._broken or "it was closed"
            raise PeerLostError(
                f"{self._where}: this group failed before, so it cannot meet at {self._at(posted)}: {why}"
            )
        if wrong := self._messages.check_thread():
            raise InvalidInputError(f"{self._where}: {self._at(posted)} cannot be called here: {wrong}")
        mine = self._frames[self.rank]
        mine[:_HEAD] = posted
        nbytes = 8 * _HEAD
        if data is not None:
            mine.view(np.uint8)[nbytes : nbytes + data.nbytes] = data.view(np.uint8)
            nbytes += data.nbytes
        into = [(rank, self._frames[rank]) for rank in self._others]
        begin = 0 if self.trace is None else time.monotonic_ns()
        said_now = mine.view(np.uint8)[:nbytes]
        self._swap(FRAME, [(rank, said_now) for rank in self._others], into, lambda: self._at(posted), self._spin)
        self._told("wait", begin, -1)
        said: list[Posted] = [tuple(one) for one in self._frames[:, :_HEAD].tolist()]
        if gone := [rank for rank, one in enumerate(said) if one[0] == LEAVE]:
            self._broken = f"{names(gone)} left"
            raise PeerLostError(
                f"{self._where}: {names(gone)} left while awaited at {self._at(posted)}. This group cannot go on."
            )
        if problem := difference(self._where, said):
            raise CallsDifferError(problem, said)
        return said

    def _at(self, posted: Posted) -> str:
        return self.doing or spell(posted)

    def _told(self, kind: str, begin: int, nbytes: int) -> None:
        if begin and self.trace is not None:
            self.trace((kind, kind, begin, time.monotonic_ns(), nbytes))

    def _framed(self, rank: int, nbytes: int) -> Array:
        """A view of the data that came with a rank's frame, good until the next call."""
        found: Array = self._frames[rank].view(np.uint8)[8 * _HEAD : 8 * _HEAD + nbytes]
        return found

    def _carry(self, out: _Arrays, into: _Arrays, posted: Posted) -> None:
        """Send and receive arrays, once all have met; every rank that is sent to expects just that."""
        busy = (1e-3 + sum(array.nbytes for _, array in [*out, *into]) / _SLOW) if self._spin else 0.0
        self._swap(DATA, out, into, lambda: f"the data of {self._at(posted)}", busy)

    def _swap(self, tag: int, out: _Arrays, into: _Arrays, what: Callable[[], str], busy: float) -> None:
        requests, ranks = [], []
        for start, messages in ((self._messages.receive, into), (self._messages.send, out)):
            for rank, array in messages:
                flat = array.view(np.uint8)
                for at in range(0, flat.size, _MOST):
                    requests.append(start(flat[at : at + _MOST], rank, tag))
                    ranks.append(rank)
        try:
            self._wait(requests, ranks, what, busy)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._kept = requests, out, into  # they may still be written to
            if isinstance(error, self._messages.errors) and not isinstance(error, ChorosError):
                raise PeerLostError(f"{self._where}: {self._messages.name} failed at {what()}: {error}") from error
            raise

    def _wait(
        self,
        requests: list[Any],
        ranks: list[int],
        what: Callable[[], str],
        busy: float,
        test: Callable[[list[Any]], bool] | None = None,
    ) -> None:
        """Return when all messages have come or gone; ``busy`` seconds of it without sleeping."""
        test, rest = test or self._messages.done, self._messages.rest
        begin, looked, warn = time.perf_counter(), 0.0, self.warn_after
        while not test(requests):
            waited = time.perf_counter() - begin
            if waited < busy:
                os.sched_yield()
            else:
                rest(min(max((waited - busy) / 8, 2e-5), _NAP))
            if waited - looked >= _LOOK or waited >= min(self.timeout, warn):
                looked = waited
                missing = {rank for rank, one in zip(ranks, requests, strict=True) if not self._messages.came(one)}
                self._look(missing, waited, what)
                if missing and waited >= warn:
                    warn = math.inf
                    self._warn(missing, waited, what)

    def _look(self, missing: set[int], waited: float, what: Callable[[], str]) -> None:
        if self._broken:  # another thread has given up
            raise PeerLostError(f"{self._where}: the run was given up while it waited at {what()}: {self._broken}")
        for rank, process in self._beside.items():
            if rank in missing and not alive(process):
                raise PeerLostError(
                    f"{self._where}: rank {rank} (process {process.pid}) died while it was awaited at {what()}. "
                    f"This group cannot go on; see what rank {rank} printed last."
                )
        if missing and waited >= self.timeout:
            raise CommTimeoutError(
                f"{self._where} waited {waited:.1f} s at {what()} for {names(sorted(missing))} of {self.size}, which "
                "may be busy, stopped or gone. See what they are doing, or set a longer timeout.",
                tuple(sorted(missing)),
            )

    def _warn(self, missing: set[int], waited: float, what: Callable[[], str]) -> None:
        with suppress(OSError, ValueError):  # nobody reads it
            print(
                f"choros: {self._where} has waited {waited:.1f} s at {what()} for {names(sorted(missing))} of "
                f"{self.size}. It waits for up to {self.timeout:g} s in all.",
                file=sys.stderr,
                flush=True,
            )

    @property
    def broken(self) -> str:
        """The reason why nothing works any more; "" while it does."""
        return self._broken

    def give_up(self, reason: str) -> None:
        """Have this rank's waits, now or later, raise ``PeerLostError``; any thread may call."""
        self._broken = self._broken or reason

    # -- calls that another carries out
    def oversee(self, ready: Callable[[], bool], posted: Posted) -> None:
        """Return when ``ready`` is true on every rank; look meanwhile whether they live.

        Args:
            ready: is asked again and again, sleeping in between; raises ``PeerLostError`` where it cannot become true.
            posted: the call, for an error's message.

        Raises:
            PeerLostError, CommTimeoutError: a rank has gone, or it takes too long; nothing works from then on.
        """
        coming = [self._messages.receive(self._frames[rank].view(np.uint8), rank, FRAME) for rank in self._others]
        mine = self._frames[self.rank][:_HEAD]
        mine[:] = posted
        requests, done, until = list(coming), False, time.perf_counter() + self.timeout

        def test(under_way: list[Any]) -> bool:
            nonlocal done
            if not done and self._asked(ready, coming, posted):
                done = True
                requests.extend(self._messages.send(mine.view(np.uint8), rank, FRAME) for rank in self._others)
                ranks.extend(self._others)
            elif not done and time.perf_counter() > until:
                raise CommTimeoutError(f"{self._where}: {self._at(posted)} did not end within {self.timeout:g} s.", ())
            came = self._messages.done(under_way)
            return (came and done) or bool(self._left(coming))

        ranks = list(self._others)
        try:
            self._wait(requests, ranks, lambda: self._at(posted), 0.0, test)
            if gone := self._left(coming):
                raise PeerLostError(f"{self._where}: {names(gone)} left before the end of {self._at(posted)}.")
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self._kept = requests
            if isinstance(error, self._messages.errors) and not isinstance(error, ChorosError):
                raise PeerLostError(
                    f"{self._where}: {self._messages.name} failed at {self._at(posted)}: {error}"
                ) from error
            raise

    def _left(self, coming: list[Any]) -> list[int]:
        """Those who have said that they leave."""
        came = [rank for rank, one in zip(self._others, coming, strict=True) if self._messages.came(one)]
        return [rank for rank in came if self._frames[rank][0] == LEAVE]

    def _asked(self, ready: Callable[[], bool], coming: list[Any], posted: Posted) -> bool:
        """Ask; where it cannot become true, and that is because a rank has gone, tell of that one."""
        try:
            return ready()
        except PeerLostError:
            begin = time.perf_counter()
            while time.perf_counter() - begin < GRACE and not self._left(coming):
                self._messages.done(coming)
                missing = {r for r, one in zip(self._others, coming, strict=True) if not self._messages.came(one)}
                self._look(missing, 0.0, lambda: self._at(posted))
                self._messages.rest(0.01)
            raise

    # -- the end
    def outlive(self, limit: float) -> None:
        """Leave, and return when all others have left or died, or so many seconds are over."""
        begin = time.perf_counter()
        died = begin if self._broken else math.inf
        self._leave(not self._broken)
        near = [process for rank, process in self._beside.items() if rank != self.rank]
        while self._broken or not self._gone():
            now, living = time.perf_counter(), [process for process in near if alive(process)]
            if len(living) < len(near):
                died = min(died, now)
            alone = not living and len(near) == self.size - 1
            if alone or now - begin >= limit or now - died >= GRACE:
                return
            self._messages.rest(0.02)

    def _leave(self, listening: bool) -> None:
        """Say that this rank leaves, and take what the others say of it, if that is of interest."""
        if not self._closed:
            self._closed = True
            mine = self._frames[self.rank]
            mine[:_HEAD] = (LEAVE, 0, 0, 0)
            if listening:
                self._leaving = [self._messages.receive(self._frames[r].view(np.uint8), r, FRAME) for r in self._others]
            self._leaving += [self._messages.send(mine[:_HEAD].view(np.uint8), r, FRAME) for r in self._others]

    def _end(self, limit: float | None = None) -> None:
        """Leave: ranks that wait for this one are told so. Free what is held once all have left.

        Args:
            limit: float. Seconds to wait for that. None as Python ends: under MPI for as long as the others live, as
                they may have work of their own, and asleep, which MPI_Finalize is not. A second at most where a call
                has failed.
        """
        if self._ended or self._messages.over():
            return
        self._leave(not self._broken and bool(self._messages.patience))
        begin = time.perf_counter()
        longest = 1.0 if self._broken else (self._messages.patience or 1.0) if limit is None else limit
        while not self._gone():
            waited = time.perf_counter() - begin
            if waited >= longest or not all(map(alive, self._beside.values())):
                return
            self._messages.rest(min(max(waited / 8, 2e-5), 0.05))
        self._ended = True
        atexit.unregister(self._end)
        self._messages.free(bool(self._broken))

    def _gone(self) -> bool:
        """Return whether all messages of leaving have gone; a rank that broke off is not awaited any longer."""
        for _ in self._others:
            try:
                return self._messages.done(self._leaving)
            except self._messages.errors:
                continue
        return True
