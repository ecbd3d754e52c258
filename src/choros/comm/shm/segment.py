"""Memory that several processes of one machine map: an anonymous file, kept alive by its descriptors alone.

A memfd has no name in any file system. It lives while some process holds a descriptor or a mapping of it, so
a SIGKILL of everyone leaves nothing behind (memfd_create(2), Linux 3.17 and later). The mapping is made by
``mmap(2)`` itself and not by Python's ``mmap``, for two reasons: that module keeps a second descriptor, whose
closing would drop the record locks by which a rank shows that it lives, and it refuses to close while arrays
still point into it. Here the memory is unmapped when the last array on it has gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np

from choros.errors import InvalidInputError, PeerLostError
from choros.types import Array

LINE = 64
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_WORTH = 1 << 22


def align(nbytes: int, to: int = LINE) -> int:
    """Round a number of bytes up to a multiple of ``to``.

    Args:
        nbytes: int. An offset or a length.
        to: int. A power of two; a cache line by default.

    Returns:
        int. The smallest multiple of ``to`` that is not below ``nbytes``.

    Example:
        >>> align(1), align(64), align(65)
        (64, 64, 128)
    """
    return (nbytes + to - 1) // to * to


@dataclass
class _Inode:
    """The locks that this process holds of one anonymous file: closing any descriptor of it drops every record lock."""

    users: int = 0
    fds: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)


_inodes: dict[tuple[int, int], _Inode] = {}
_guard = threading.Lock()


class Segment:
    """One piece of shared memory: a descriptor and a mapping of the whole of it.

    Args:
        fd: int. A descriptor that this object owns from now on and closes.
        private: whether this process sees its own writes alone, and others do not see them; a page that is written is
            copied first. Pages that are not show what others write.

    Attributes:
        fd: int. Hand it to a child through ``pass_fds``, or to a peer as ``(os.getpid(), fd)``.
        nbytes: int. The length of the mapping.
        lock: re-entrant lock of this process, for what the kernel's record locks cannot keep apart: threads.

    Raises:
        InvalidInputError: where ``fd`` is not a descriptor of a segment.

    Example:
        >>> with Segment.create(4096, "doctest") as segment:
        ...     values = segment.array("float32", 3)
        ...     values[:] = [1, 2, 3]
        >>> float(values.sum())
        6.0
    """

    def __init__(self, fd: int, private: bool = False) -> None:
        try:
            facts = os.fstat(fd)
        except OSError as error:
            raise InvalidInputError(
                f"Descriptor {fd} is not open in process {os.getpid()} ({error.strerror}): "
                "start the worker with pass_fds=[segment.fd]."
            ) from None
        if facts.st_size <= 0:
            raise InvalidInputError(f"Descriptor {fd} is not a segment: its length is {facts.st_size} bytes.")
        os.set_inheritable(fd, False)
        self.fd = fd
        self.nbytes = facts.st_size
        self._memory: Any = _map(fd, self.nbytes, private)
        self._key = (facts.st_dev, facts.st_ino)
        with _guard:
            inode = _inodes.setdefault(self._key, _Inode())
            inode.users += 1
            inode.fds.add(fd)
        self.lock = inode.lock

    @classmethod
    def create(cls, nbytes: int, name: str = "choros") -> Self:
        """Make a new segment of zeros.

        Args:
            nbytes: int. Its length, rounded up to whole pages.
            name: str. What ``/proc/<pid>/fd`` shows; need not be unique.

        Returns:
            Segment. Its descriptor is not inherited unless it is passed.

        Raises:
            InvalidInputError: for a length below 1.
            OSError: if the system has no memory or no descriptor left.

        Example:
            >>> with Segment.create(100) as segment:
            ...     segment.nbytes % 4096
            0
        """
        if nbytes < 1:
            raise InvalidInputError(f"A segment of {nbytes} bytes was asked for: give 1 or more.")
        nbytes = align(nbytes, mmap.PAGESIZE)
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
        else:  # macOS: a temporary file that has lost its name
            fd, path = tempfile.mkstemp(prefix=f"{name}-")
            os.unlink(path)
        try:
            os.ftruncate(fd, nbytes)
            if hasattr(fcntl, "F_ADD_SEALS"):  # nobody can shrink it under a peer, which would be a SIGBUS
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, private: bool = False) -> Self:
        """Map a segment whose descriptor this process inherited; the descriptor is owned from now on."""
        return cls(fd, private)

    @classmethod
    def open_peer(cls, pid: int, fd: int) -> Self:
        """Map a segment that another process of the same user holds, by its number there.

        Args:
            pid: int. The process.
            fd: int. The descriptor's number in that process.

        Returns:
            Segment. It has a descriptor of its own.

        Raises:
            PeerLostError: if the process has gone, is not visible or may not be looked at.

        Example:
            >>> import os
            >>> with Segment.create(64) as mine, Segment.open_peer(os.getpid(), mine.fd) as same:
            ...     mine.array("int64", 1)[0] = 7
            ...     int(same.array("int64", 1)[0])
            7
        """
        path = f"/proc/{pid}/fd/{fd}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLostError(
                f"Process {os.getpid()} cannot map the segment {path}: {error.strerror}. Both processes must be alive, "
                "of one user, and in one container (one PID namespace) of a Linux machine."
            ) from None
        try:
            return cls(own)
        except BaseException:
            os.close(own)
            raise

    def array(self, dtype: Any, count: int, offset: int = 0) -> Array:
        """Return ``count`` values at ``offset`` bytes, without a copy.

        Args:
            dtype: a numpy dtype or its name.
            count: int. How many values.
            offset: int. Where they begin, a multiple of 64.

        Returns:
            A one-dimensional array; the memory stays mapped while it lives, also after ``close``.

        Raises:
            InvalidInputError: if the offset is not aligned or the values do not fit.
        """
        dtype = np.dtype(dtype)
        if offset % LINE or offset < 0 or count < 0 or offset + count * dtype.itemsize > self.nbytes:
            raise InvalidInputError(
                f"{count} values of {dtype} at byte {offset} do not fit a segment of {self.nbytes} bytes "
                f"(offsets are multiples of {LINE})."
            )
        if self.closed:
            raise InvalidInputError("This segment is closed.")
        return np.frombuffer(self._memory, dtype, count, offset)

    @property
    def closed(self) -> bool:
        """True if ``close`` was called."""
        return self._memory is None

    @property
    def words(self) -> memoryview:
        """The segment as aligned 64-bit integers; a read or a write of one is a single load or store."""
        return np.frombuffer(self._memory, np.uint8).data.cast("q")

    @property
    def address(self) -> int:
        """The address of the mapping in this process."""
        return ctypes.addressof(self._memory)

    def touch(self, offset: int, nbytes: int) -> None:
        """Bring pages in now, on this process' memory node, and not one by one when they are first written."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(align(offset + nbytes, mmap.PAGESIZE), self.nbytes)
        if sys.platform == "linux" and end > begin:
            _libc().madvise(self.address + begin, end - begin, _POPULATE_WRITE)

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array into the file: quicker than through a mapping with new pages, which are cleared first."""
        if not array.flags.c_contiguous:  # without a second copy
            np.copyto(np.ndarray(array.shape, array.dtype, self._memory, offset), array)
            return
        rest = array.reshape(-1).view(np.uint8)
        while rest.size:
            count = os.pwrite(self.fd, rest.data, offset)
            rest, offset = rest[count:], offset + count

    def written(self, offset: int, nbytes: int) -> bool:
        """Tell whether this process has written to these bytes of a private mapping; True where that is not known.

        The system has given it a page of its own for each one written: no page of a file (bit 61 of its entry in
        /proc/self/pagemap), in memory (bit 63) or swapped out (bit 62).
        """
        begin, end = (self.address + offset) // mmap.PAGESIZE, (self.address + offset + nbytes - 1) // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                pages = np.frombuffer(os.pread(file.fileno(), 8 * (end + 1 - begin), 8 * begin), np.uint64)
        except OSError:
            return True
        states = pages >> np.uint64(61)  # 1: not in memory
        return pages.size != end + 1 - begin or bool(np.any((states > 1) & (states % 2 == 0)))

    def close(self) -> None:
        """Give up this object's descriptor and mapping; arrays that still live keep the memory, not the file."""
        if self._memory is None:
            return
        self._memory = None
        with _guard:
            inode = _inodes[self._key]
            inode.users -= 1
            if inode.users:
                return
            del _inodes[self._key]
            for fd in inode.fds:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _map(fd: int, nbytes: int, private: bool = False) -> Any:
    libc = _libc()
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping a segment of {nbytes} bytes failed: {os.strerror(number)}")
    if sys.platform == "linux" and nbytes >= _WORTH:
        libc.madvise(address, nbytes, _HUGE)
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return memory
