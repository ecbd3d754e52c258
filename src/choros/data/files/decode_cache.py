"""Rows decoded once, into a file without a name that all workers map and fill together.

What a reader decodes is written where it stays: the file is as long as all rows, its pages belong to the system's
cache and not to any worker, and a second epoch decodes nothing. Whoever needs a block first decodes it under a lock of
the kernel on that block's byte, which the death of its holder opens.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO

import numpy as np

from choros.errors import CommTimeoutError, InvalidDataError
from choros.types import Array

_PAGE = 4096
_PATIENCE = 600.0  # seconds that a process waits for another one to decode a block
_NAP = 0.05  # seconds between two tries to take a lock, at most
Form = tuple[str, tuple[int, ...]]  # dtype, shape of a row


class DecodeCache:
    """The file and the arrays in it.

    Args:
        path: str. Of a file that ``DecodeCache.create`` made, in whichever process.
        blocks: int. How many blocks there are.
        rows: int. How many rows.
        forms: of each array, its dtype and the shape of a row.

    Attributes:
        arrays: list. As long as all rows; those of a block are there once ``fill`` has returned.
    """

    def __init__(self, path: str, blocks: int, rows: int, forms: Sequence[Form]) -> None:
        self.path = path
        self._blocks = blocks
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        places, end = _layout(blocks, rows, forms)
        mapped = np.memmap(path, np.uint8, "r+", 0, (end,)).view(np.ndarray)
        self._state: Array = mapped[:blocks]
        self.arrays = [
            mapped[at : at + size].view(dtype).reshape(rows, *shape)
            for (at, size), (dtype, shape) in zip(places, forms, strict=True)
        ]
        self._places = [at for (at, _) in places]
        self._known: set[int] = set()
        self._thread = threading.Lock()  # the kernel's lock does not keep the threads of one process apart
        self._owned: IO[bytes] | None = None

    @classmethod
    def create(cls, blocks: int, rows: int, forms: Sequence[Form], folder: str | None = None) -> DecodeCache:
        """Make the file, in ``folder`` or where ``TMPDIR`` says.

        Raises:
            InvalidDataError: the disk has too little room; the message says how much is needed.
        """
        folder = folder or tempfile.gettempdir()
        _, nbytes = _layout(blocks, rows, forms)
        try:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the spill closes it
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error here, not a fault at some write
        except OSError as error:
            raise InvalidDataError(
                f"The rows take {nbytes / 1e9:.2f} GB once they are decoded, and {folder} cannot hold them "
                f"({error.strerror}): give spill_dir, or set TMPDIR, to a directory with that much room."
            ) from error
        spill = cls(f"/proc/{os.getpid()}/fd/{file.fileno()}", blocks, rows, forms)
        spill._owned = file
        return spill

    def put(self, number: int, row: int, rows: Array) -> None:
        """Write rows of ``arrays[number]``, from ``row`` on: in half the time of writing where they are mapped.

        Args:
            number: int. Which array.
            row: int. Where.
            rows: one after the other in memory, of that array's dtype.
        """
        remaining = rows.reshape(-1).view(np.uint8).data
        at = self._places[number] + row * (rows.nbytes // max(len(rows), 1))
        while remaining:
            count = os.pwrite(self._file, remaining, at)
            remaining, at = remaining[count:], at + count

    def close(self) -> None:
        """Let the file go; arrays that are in use stay as they are."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._owned is not None:
            self._owned.close()

    def __del__(self) -> None:
        if os is not None:  # the interpreter ends: the kernel closes what is open
            self.close()

    def fill(self, blocks: Iterable[int], decode: Callable[[int], None]) -> None:
        """Return when these blocks are there, decoded by as many threads as this process has cores.

        Args:
            blocks: which; those that another process is at are left to it.
            decode: writes one block's rows into ``arrays``.

        Raises:
            CommTimeoutError: another process decodes a block for too long, as it or its disk hangs.
        """
        cores = len(os.sched_getaffinity(0))
        with self._thread, ThreadPoolExecutor(cores, thread_name_prefix="choros-decode") as threads:
            missing = [block for block in blocks if block not in self._known]
            for wait in (False, True):
                done = threads.map(lambda block, wait=wait: self._fill(block, decode, wait), missing)
                missing = [block for block, is_decoded in zip(missing, done, strict=True) if not is_decoded]

    def _fill(self, block: int, decode: Callable[[int], None], wait: bool) -> bool:
        with self._locked(block, wait) as held:
            if not held:
                return False
            if not self._state[block]:
                decode(block)
                self._state[block] = 1
        self._known.add(block)
        return True

    @contextmanager
    def _locked(self, block: int, wait: bool) -> Iterator[bool]:
        """Hold a block's lock, which also orders the writes before it.

        The lock is polled, since a wait inside of the kernel has no limit.
        """
        limit, pause = time.monotonic() + _PATIENCE, 0.001
        while not (held := self._lock(block, fcntl.F_WRLCK)) and wait:
            if time.monotonic() > limit:
                raise CommTimeoutError(
                    f"{os.uname().nodename}: another process of this run has been decoding block {block} for "
                    f"{_PATIENCE:g} s, so process {os.getpid()} waits no longer. See whether a worker is stopped, or "
                    "the disk that it reads."
                )
            time.sleep(pause)
            pause = min(2 * pause, _NAP)
        try:
            yield held
        finally:
            if held:
                self._lock(block, fcntl.F_UNLCK)

    def _lock(self, block: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, block, 1, 0))
        except BlockingIOError:
            return False
        return True


def _layout(blocks: int, rows: int, forms: Sequence[Form]) -> tuple[list[tuple[int, int]], int]:
    """Return each array's (offset, bytes), and the file's length; the blocks' states come first."""
    places: list[tuple[int, int]] = []
    end = blocks
    for dtype, shape in forms:
        at = -(-end // _PAGE) * _PAGE
        size = rows * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        places.append((at, size))
        end = at + size
    return places, max(end, 1)


def form(array: Array) -> Form:
    """Return dtype and shape of a row.

    Example:
        >>> form(np.zeros((3, 2), "float32"))
        ('float32', (2,))
    """
    return array.dtype.name, tuple(array.shape[1:])
