"""A cache of decoded rows: an anonymous temporary file that all workers of a machine map and fill.

The file has space for all rows. Its pages belong to the page cache of the kernel and not to a worker. A second epoch
decodes nothing. The first process that needs a block decodes it under a file lock on the byte of that block. The kernel
releases the lock if that process dies.
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
_LOCK_SECONDS = 600.0  # that a process waits for another one to decode a block
_MAX_PAUSE = 0.05  # seconds between two attempts to take a lock
Form = tuple[str, tuple[int, ...]]  # dtype, shape of a row


class DecodeCache:
    """The file and the arrays in it.

    Args:
        path: str. Path of a file that ``DecodeCache.create`` created in any process.
        blocks: int. Number of blocks.
        rows: int. Number of rows.
        forms: the dtype and the row shape of each array.

    Attributes:
        arrays: list of arrays with all rows. The rows of a block are valid after ``fill`` has returned.
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
        self._thread = threading.Lock()  # the file lock does not exclude threads that share the open file
        self._owned: IO[bytes] | None = None

    @classmethod
    def create(cls, blocks: int, rows: int, forms: Sequence[Form], folder: str | None = None) -> DecodeCache:
        """Create the file in ``folder``. Defaults to the temporary directory (``TMPDIR``).

        Raises:
            InvalidDataError: the disk has too little space. The message contains the size that is needed.
        """
        folder = folder or tempfile.gettempdir()
        _, nbytes = _layout(blocks, rows, forms)
        try:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the spill closes it
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error here instead of a later SIGBUS
        except OSError as error:
            raise InvalidDataError(
                f"The rows take {nbytes / 1e9:.2f} GB once they are decoded, and {folder} cannot hold them "
                f"({error.strerror}): give spill_dir, or set TMPDIR, to a directory with that much room."
            ) from error
        spill = cls(f"/proc/{os.getpid()}/fd/{file.fileno()}", blocks, rows, forms)
        spill._owned = file
        return spill

    def put(self, number: int, row: int, rows: Array) -> None:
        """Write rows into ``arrays[number]`` from index ``row`` on. This takes half the time of writes to the mapping.

        Args:
            number: int. Index of the array.
            row: int. Index of the first row.
            rows: the rows in C order, with the dtype of the array.
        """
        remaining = rows.reshape(-1).view(np.uint8).data
        at = self._places[number] + row * (rows.nbytes // max(len(rows), 1))
        while remaining:
            count = os.pwrite(self._file, remaining, at)
            remaining, at = remaining[count:], at + count

    def close(self) -> None:
        """Close the file. Arrays that are in use stay valid."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._owned is not None:
            self._owned.close()

    def __del__(self) -> None:
        if os is not None:  # None while the interpreter exits; the kernel then closes the file
            self.close()

    def fill(self, blocks: Iterable[int], decode: Callable[[int], None]) -> None:
        """Decode the missing blocks in one thread for each core; return when all given blocks are valid.

        Args:
            blocks: indices of the blocks. If another process is decoding a block, its result is awaited.
            decode: writes the rows of one block into ``arrays``.

        Raises:
            CommTimeoutError: another process has been decoding a block for more than 600 s.
        """
        cores = len(os.sched_getaffinity(0))
        with self._thread, ThreadPoolExecutor(cores, thread_name_prefix="choros-decode") as threads:
            missing = [block for block in blocks if block not in self._known]
            # First decode the blocks that no other process is decoding: waiting first would leave cores idle.
            for wait in (False, True):
                results = threads.map(lambda block, wait=wait: self._fill(block, decode, wait), missing)
                missing = [block for block, is_decoded in zip(missing, results, strict=True) if not is_decoded]

    def _fill(self, block: int, decode: Callable[[int], None], wait: bool) -> bool:
        with self._locked(block, wait) as acquired:
            if not acquired:
                return False
            if not self._state[block]:
                decode(block)
                # After the rows: if the process is killed while it decodes, the block is still marked as missing.
                self._state[block] = 1
        self._known.add(block)
        return True

    @contextmanager
    def _locked(self, block: int, wait: bool) -> Iterator[bool]:
        """Hold the lock of a block, and yield whether it was taken. It also orders the writes before it.

        The lock is polled, since a wait in the kernel has no timeout.
        """
        limit, pause = time.monotonic() + _LOCK_SECONDS, 0.001
        while not (acquired := self._lock(block, fcntl.F_WRLCK)) and wait:
            if time.monotonic() > limit:
                raise CommTimeoutError(
                    f"{os.uname().nodename}: another process of this run has been decoding block {block} for "
                    f"{_LOCK_SECONDS:g} s, so process {os.getpid()} waits no longer. See whether a worker is stopped, "
                    "or the disk that it reads."
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        try:
            yield acquired
        finally:
            if acquired:
                self._lock(block, fcntl.F_UNLCK)

    def _lock(self, block: int, kind: int) -> bool:
        try:
            # A lock of the open file: unlike a lock of the process, it stays when another descriptor of the file is
            # closed.
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, block, 1, 0))
        except BlockingIOError:
            return False
        return True


def _layout(blocks: int, rows: int, forms: Sequence[Form]) -> tuple[list[tuple[int, int]], int]:
    """Return (offset, size) of each array in bytes, and the length of the file. The states of the blocks come first."""
    places: list[tuple[int, int]] = []
    end = blocks
    for dtype, shape in forms:
        at = -(-end // _PAGE) * _PAGE
        size = rows * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        places.append((at, size))
        end = at + size
    return places, max(end, 1)


def form(array: Array) -> Form:
    """Return the dtype of an array and the shape of a row.

    Example:
        >>> form(np.zeros((3, 2), "float32"))
        ('float32', (2,))
    """
    return array.dtype.name, tuple(array.shape[1:])
