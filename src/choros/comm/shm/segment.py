"""Shared memory between processes of one machine: an anonymous file (memfd).

A memfd has no name in any file system. It exists as long as a process holds a descriptor or a mapping of it. So a
SIGKILL of all processes leaves nothing behind (memfd_create(2), Linux 3.17 and later).

This module calls ``mmap(2)`` and does not use Python's ``mmap``, for two reasons. Python's module keeps a second
descriptor, and closing that one would drop the record locks that show a rank's life. And it refuses to close while
arrays point into the memory. Here the memory is unmapped when the last array on it has been freed.
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

CACHE_LINE = 64
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_HUGE_PAGE_BYTES = 1 << 22  # a mapping from this size on gets huge pages, if the kernel allows them


def align(nbytes: int, to: int = CACHE_LINE) -> int:
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
    """Descriptors and users of one anonymous file in this process.

    POSIX drops all record locks of a process on a file when the process closes any descriptor of that file. So the
    descriptors stay open until the last ``Segment`` of the file is closed.
    """

    users: int = 0
    fds: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)


# Keyed by inode, not by descriptor: record locks belong to (process, inode), however many descriptors lead to it.
_inodes: dict[tuple[int, int], _Inode] = {}
_inodes_lock = threading.Lock()


class Segment:
    """A shared memory segment: a descriptor and a mapping of the whole file.

    Args:
        fd: int. A descriptor; this object owns it and closes it.
        private: bool. Keep this process's writes private: the first write to a page copies it. Pages without a write
            show the writes of other processes. Defaults to False.

    Attributes:
        fd: int. Pass it to a child process by ``pass_fds``, or to a peer as ``(os.getpid(), fd)``.
        nbytes: int. Length of the mapping in bytes.
        lock: RLock. Keeps threads of this process apart, which record locks cannot do.

    Raises:
        InvalidInputError: ``fd`` is not a descriptor of a segment.

    Example:
        >>> with Segment.create(4096, "doctest") as segment:
        ...     values = segment.array("float32", 3)
        ...     values[:] = [1, 2, 3]
        >>> float(values.sum())
        6.0
    """

    def __init__(self, fd: int, private: bool = False) -> None:
        try:
            status = os.fstat(fd)
        except OSError as error:
            raise InvalidInputError(
                f"Descriptor {fd} is not open in process {os.getpid()} ({error.strerror}): "
                "start the worker with pass_fds=[segment.fd]."
            ) from None
        # A pipe or a socket has length 0: a wrong number in ``pass_fds`` ends here and not in a failed ``mmap``.
        if status.st_size <= 0:
            raise InvalidInputError(f"Descriptor {fd} is not a segment: its length is {status.st_size} bytes.")
        # ``pass_fds`` cleared CLOEXEC for this process. A program that it starts must not keep the memory alive after
        # its end.
        os.set_inheritable(fd, False)
        self.fd = fd
        self.nbytes = status.st_size
        self._memory: Any = _map(fd, self.nbytes, private)
        self._key = (status.st_dev, status.st_ino)
        with _inodes_lock:
            inode = _inodes.setdefault(self._key, _Inode())
            inode.users += 1
            inode.fds.add(fd)
        self.lock = inode.lock

    @classmethod
    def create(cls, nbytes: int, name: str = "choros") -> Self:
        """Make a new segment of zeros.

        Args:
            nbytes: int. Length in bytes, rounded up to whole pages.
            name: str. Name in ``/proc/<pid>/fd``; need not be unique.

        Returns:
            Segment. A child process does not inherit the descriptor unless it is passed.

        Raises:
            InvalidInputError: the length is below 1.
            OSError: the system has no memory or no descriptor left.

        Example:
            >>> with Segment.create(100) as segment:
            ...     segment.nbytes % 4096
            0
        """
        if nbytes < 1:
            raise InvalidInputError(f"A segment of {nbytes} bytes was requested: give 1 or more.")
        nbytes = align(nbytes, mmap.PAGESIZE)
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # memfd_create makes the file with mode 0777, and an open through /proc/<pid>/fd is checked against that
            # mode too.
            os.fchmod(fd, 0o600)
        else:  # macOS: a temporary file that has lost its name
            fd, path = tempfile.mkstemp(prefix=f"{name}-")
            os.unlink(path)
        try:
            # New pages of a file are zero and are allocated at the first write. The header relies on the zeros, lazy
            # slots on the late allocation.
            os.ftruncate(fd, nbytes)
            if hasattr(fcntl, "F_ADD_SEALS"):  # access beyond the end of a file that a peer shrank is a SIGBUS
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, private: bool = False) -> Self:
        """Map a segment whose descriptor this process inherited; the result owns the descriptor."""
        return cls(fd, private)

    @classmethod
    def open_peer(cls, pid: int, fd: int) -> Self:
        """Map a segment that another process of the same user holds.

        Args:
            pid: int. The other process.
            fd: int. The descriptor's number in that process.

        Returns:
            Segment. It has a new descriptor.

        Raises:
            PeerLostError: the process has ended, is not visible, or belongs to another user.

        Example:
            >>> import os
            >>> with Segment.create(64) as created, Segment.open_peer(os.getpid(), created.fd) as opened:
            ...     created.array("int64", 1)[0] = 7
            ...     int(opened.array("int64", 1)[0])
            7
        """
        path = f"/proc/{pid}/fd/{fd}"
        try:
            # This opens the inode again instead of receiving the descriptor: no socket between the processes is needed,
            # and record locks work as they belong to the inode.
            own_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLostError(
                f"Process {os.getpid()} cannot map the segment {path}: {error.strerror}. Both processes must be alive, "
                "of one user, and in one container (one PID namespace) of a Linux machine."
            ) from None
        try:
            return cls(own_fd)
        except BaseException:
            os.close(own_fd)
            raise

    def array(self, dtype: np.typing.DTypeLike, count: int, offset: int = 0) -> Array:
        """Return ``count`` values at ``offset`` bytes, without a copy.

        Args:
            dtype: numpy dtype or its name.
            count: int. Number of values.
            offset: int. Offset of the first value in bytes, a multiple of 64. Defaults to 0.

        Returns:
            A one-dimensional array. The memory stays mapped as long as the array lives, even after ``close``.

        Raises:
            InvalidInputError: the offset is not aligned, the values do not fit, or the segment is closed.
        """
        dtype = np.dtype(dtype)
        if offset % CACHE_LINE or offset < 0 or count < 0 or offset + count * dtype.itemsize > self.nbytes:
            raise InvalidInputError(
                f"{count} values of {dtype} at byte {offset} do not fit a segment of {self.nbytes} bytes "
                f"(offsets are multiples of {CACHE_LINE})."
            )
        if self.closed:
            raise InvalidInputError("This segment is closed.")
        return np.frombuffer(self._memory, dtype, count, offset)

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._memory is None

    @property
    def words(self) -> memoryview:
        """The segment as aligned signed 64-bit integers; reading or writing one is a single load or store."""
        # A memoryview item is copied by one 8-byte load or store, which the CPU makes atomic at an aligned address. It
        # is also faster than an index of a numpy array, which makes a scalar object.
        return np.frombuffer(self._memory, np.uint8).data.cast("q")

    @property
    def address(self) -> int:
        """The address of the mapping in this process."""
        return ctypes.addressof(self._memory)

    def touch(self, offset: int, nbytes: int) -> None:
        """Allocate pages now and on this process's memory node, instead of one page fault at each first write."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(align(offset + nbytes, mmap.PAGESIZE), self.nbytes)
        if sys.platform == "linux" and end > begin:
            # The result is ignored: an older kernel returns EINVAL, and then the first write allocates the page as
            # before.
            _libc().madvise(self.address + begin, end - begin, _MADV_POPULATE_WRITE)

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array into the file. This is faster than a copy into new pages, which the kernel clears first."""
        if not array.flags.c_contiguous:  # pwrite would need a contiguous copy first
            np.copyto(np.ndarray(array.shape, array.dtype, self._memory, offset), array)
            return
        remaining = array.reshape(-1).view(np.uint8)
        while remaining.size:
            # A write may be partial: Linux transfers at most 2 GiB minus one page in one call.
            count = os.pwrite(self.fd, remaining.data, offset)
            remaining, offset = remaining[count:], offset + count

    def written(self, offset: int, nbytes: int) -> bool:
        """Return whether this process has written to these bytes of a private mapping; True if that is unknown.

        The first write to a page gives this process a copy of the page. A copied page does not belong to a file (bit
        61 of its entry in /proc/self/pagemap), and is in memory (bit 63) or in swap (bit 62).
        """
        begin, end = (self.address + offset) // mmap.PAGESIZE, (self.address + offset + nbytes - 1) // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                pages = np.frombuffer(os.pread(file.fileno(), 8 * (end + 1 - begin), 8 * begin), np.uint64)
        except OSError:
            return True
        # Bit 0: a page of a file. Bit 1: in swap. Bit 2: in memory. A private copy has bit 1 or 2, and not bit 0.
        states = pages >> np.uint64(61)
        return pages.size != end + 1 - begin or bool(np.any((states > 1) & (states % 2 == 0)))

    def close(self) -> None:
        """Release the descriptor and the mapping; arrays that still live keep the memory mapped."""
        if self._memory is None:
            return
        self._memory = None  # munmap runs when the last array on the memory has been freed (see ``_map``)
        with _inodes_lock:
            inode = _inodes[self._key]
            inode.users -= 1
            if inode.users:  # closing the descriptor now would drop the record locks of the other users
                return
            # Under the lock until the descriptors are closed: a new Segment of this file in another thread could take a
            # record lock that the close below would drop.
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
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"mapping a segment of {nbytes} bytes failed: {os.strerror(error_number)}")
    if sys.platform == "linux" and nbytes >= _HUGE_PAGE_BYTES:
        libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    # ``from_address`` owns nothing, so the finalizer below is the only owner of the mapping. numpy arrays keep
    # ``memory`` alive, so it runs after the last of them.
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: other threads may still use the memory then, and the kernel unmaps it anyway.
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return memory
