"""Checkpoint files in a directory, written atomically and read with a checksum.

A file has a magic line, the length of a JSON header, and the header. Then come the arrays, at offsets that are
multiples of 64 bytes, and a digest of everything before it. It holds no code, and reading it runs none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from choros.data.validation import is_whole
from choros.errors import CheckpointError, InvalidInputError
from choros.types import Array, dtype_of

logger = logging.getLogger(__name__)

_FORMAT = b"choros checkpoint "
_MAGIC = _FORMAT + b"3\n"  # raise the number when files of the version before cannot be resumed any more
_ALIGN, _DIGEST, _LENGTH = 64, 32, 8  # bytes
_NAME = re.compile(r"checkpoint-(\d{8,18})\.choros")
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SYNC_ERRORS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # some FUSE and SMB mounts cannot fsync a directory
_TEMPORARY = re.compile(r"\.checkpoint-\d+(?:\.(?P<host>.+))?\.(?P<pid>\d{1,9})\.new")
_STALE_SECONDS = 86_400.0  # after which another host's temporary file counts as abandoned
_BLOCK_BYTES = 4096


class _OtherVersionError(CheckpointError):
    """A checkpoint file has the format of another version of Choros."""


class StoredCheckpoint(NamedTuple):
    """The content of one checkpoint file.

    Attributes:
        path: Path. The file.
        facts: dict. Values that JSON can hold.
        arrays: list of arrays, read-only.
    """

    path: Path
    facts: dict[str, Any]
    arrays: list[Array]


class CheckpointStore:
    """The checkpoint files of one training.

    A file is written under a temporary name, flushed to disk (fsync) and then given its name. A killed process or a
    full disk therefore leaves the earlier files intact. A name that exists is never replaced. Only the owner may read
    and write the files (0600).

    Args:
        directory: str or path. Used by this training only. The first write creates it.
        keep: int. The number of files to keep. Defaults to 3.

    Raises:
        InvalidInputError: ``keep`` is not a positive integer.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     store = CheckpointStore(directory, keep=2)
        ...     for epoch in range(3):
        ...         written = store.save({"epoch": epoch}, [np.full(2, epoch)])
        ...     latest = store.latest()
        ...     written.name, latest.facts, latest.arrays[0].tolist(), len(store.paths())
        ('checkpoint-00000003.choros', {'epoch': 2}, [2, 2], 2)
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if not is_whole(keep, 1):
            raise InvalidInputError(f"keep={keep!r}: give the number of checkpoints to keep, 1 or more.")
        self.directory, self.keep = Path(directory), keep

    def paths(self) -> list[Path]:
        """Return the checkpoint files, oldest first. Some may be damaged."""
        if not self.directory.is_dir():
            return []
        numbered = [(int(match[1]), path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(numbered)]

    def save(self, facts: dict[str, Any], arrays: list[Array]) -> Path:
        """Write a new file, and remove the oldest if there are more than ``keep``.

        Args:
            facts: values that JSON can hold.
            arrays: arrays of numbers.

        Returns:
            Path. The new file.

        Raises:
            CheckpointError: the disk is full, or the directory cannot be read or written. Earlier files are intact.
        """
        existing: list[Path] = []
        temporary = self._temporary(0)
        try:
            existing = self.paths()
            number = int(_NAME.fullmatch(existing[-1].name)[1]) + 1 if existing else 1  # type: ignore[index]
            temporary = self._temporary(number)
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            _write(temporary, facts, arrays)
            path = self._publish(temporary, number)
            sync(self.directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            last = f"the last good one is {existing[-1]}" if existing else "there is none yet"
            raise self._failed(error, last) from error
        # Only now: the new file and its name are on disk.
        for outdated in existing[: max(0, len(existing) + 1 - self.keep)]:
            with contextlib.suppress(OSError):  # a directory with such a name is not a checkpoint
                outdated.unlink(missing_ok=True)
        return path

    def try_out(self) -> None:
        """Write one block to a temporary file, and remove the file.

        Raises:
            CheckpointError: the directory cannot be written, or the disk is full.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = self._temporary(0)
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
                    _write_all(file, os.urandom(_BLOCK_BYTES))  # a file system that compresses would store no zeros
                    os.fsync(file.fileno())  # some report a full disk only here
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error, "nothing was trained") from error

    def check_unused(self) -> None:
        """Refuse a directory with checkpoints: those of two trainings would mix, and the older ones be removed.

        Raises:
            InvalidInputError: the directory has a checkpoint.
            CheckpointError: the directory cannot be read.
        """
        try:
            paths = self.paths()
        except OSError as error:
            raise self._unreadable(self.directory, error) from error
        if paths:
            raise InvalidInputError(
                f"checkpoint={str(self.directory)!r}: the directory has a checkpoint of an earlier training, "
                f"{paths[-1].name}. Give resume=True to continue that training, or another directory."
            )

    def latest(self) -> StoredCheckpoint | None:
        """Return the content of the newest undamaged file; None if there is no file. Log a warning of damaged files.

        Raises:
            CheckpointError: the directory or a file cannot be read, or a file was written by another version of Choros.
                Its content may be good, so no older file is used. Or all files are damaged.
        """
        path = self.directory
        try:
            paths = self.paths()
            for path in reversed(paths):
                try:
                    return read(path)
                except _OtherVersionError as error:
                    # An older file would silently undo the training since then.
                    raise CheckpointError(
                        f"{path}: {error}. Resume with that version, or give another directory."
                    ) from None
                except (CheckpointError, FileNotFoundError) as error:
                    logger.warning(f"{path} is left out: {error}")
        except (OSError, MemoryError) as error:
            raise self._unreadable(path, error) from error
        if paths:  # to start from the beginning would silently undo the training
            raise CheckpointError(
                f"{self.directory} has no usable checkpoint ({len(paths)} damaged): see the warnings above. Restore a "
                "checkpoint from a copy, or give another directory to start from the beginning."
            )
        return None

    def _unreadable(self, path: Path, error: OSError | MemoryError) -> CheckpointError:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        remedy = "" if path == self.directory else ", or move it away to resume from an older checkpoint"
        return CheckpointError(
            f"{path} could not be read on {os.uname().nodename} ({reason}). Make it readable{remedy}."
        )

    def _temporary(self, number: int) -> Path:
        return self.directory / f".checkpoint-{number:08}.{os.uname().nodename}.{os.getpid()}.new"

    def _remove_stale(self) -> None:
        """Remove temporary files of killed processes, but none of another live process."""
        for path in self.directory.iterdir():
            if match := _TEMPORARY.fullmatch(path.name):
                with contextlib.suppress(OSError):  # another process has removed it, or it is another user's
                    is_local = match["host"] == os.uname().nodename
                    has_ended = is_local and not _is_other_process(int(match["pid"]))
                    if has_ended or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                        path.unlink()

    def _publish(self, temporary: Path, number: int) -> Path:
        """Give a temporary file the first free number, from this one on, and return its path."""
        while True:
            path = self.directory / f"checkpoint-{number:08}.choros"
            try:
                os.link(temporary, path)  # unlike rename, it fails if another process has taken the number
            except FileExistsError:
                number += 1
                continue
            except OSError:  # a file system without hard links
                if path.exists():
                    number += 1
                    continue
                temporary.rename(path)
                return path
            with contextlib.suppress(OSError):  # the checkpoint is there; the next save removes this name
                temporary.unlink()
            return path

    def _failed(self, error: OSError, last: str) -> CheckpointError:
        remedy = "Free space there, or give" if error.errno in _FULL_ERRORS else "Give"
        return CheckpointError(
            f"A checkpoint could not be written to {self.directory} on {os.uname().nodename} "
            f"({error.strerror or error}); {last}. {remedy} another directory."
        )


def read(path: Path) -> StoredCheckpoint:
    """Read a checkpoint file.

    Args:
        path: Path.

    Raises:
        CheckpointError: the file is damaged, or is not a checkpoint.
        OSError: the file cannot be read.
        MemoryError: its content does not fit into memory.
    """
    if not path.is_file():  # opening a pipe would block
        raise CheckpointError("it is not a regular file")
    start = len(_MAGIC) + _LENGTH
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        # The magic line comes first: a file of another kind may be larger than memory.
        magic = file.read(len(_MAGIC))
        if magic != _MAGIC and magic.startswith(_FORMAT):
            raise _OtherVersionError("it was written by another version of Choros")
        if size < start + _DIGEST or magic != _MAGIC:
            raise CheckpointError("it is not a whole checkpoint of Choros")
        file.seek(0)
        data = np.empty(size, np.uint8)  # np.fromfile would treat a disk error as the end of the file
        unread = data.data
        while len(unread) and (count := file.readinto(unread)):
            unread = unread[count:]
    content = data[:-_DIGEST]
    if len(unread) or hashlib.blake2b(content.data, digest_size=_DIGEST).digest() != data[-_DIGEST:].tobytes():
        raise CheckpointError("it is truncated or altered: the checksum differs")
    try:
        length = int.from_bytes(content[len(_MAGIC) : start].tobytes(), "little")
        header = json.loads(content[start : start + length].tobytes())
        arrays = []
        for kind, shape, offset in header["arrays"]:
            if dtype_of(kind).hasobject:
                raise TypeError(f"{kind} is not a type of numbers")  # its bytes would be read as memory addresses
            if offset < 0:
                raise ValueError(f"an array begins at {offset}")  # numpy would read memory before the buffer
            array = np.ndarray(tuple(shape), dtype_of(kind), content, offset)
            array.flags.writeable = False
            arrays.append(array)
        return StoredCheckpoint(path, dict(header["facts"]), arrays)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"its header cannot be read ({type(error).__name__}: {error})") from error


def _is_other_process(pid: int) -> bool:
    """Return whether a process of this host lives and is not this one."""
    if pid == os.getpid():  # this process writes one file at a time: an earlier process had this number
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _write(path: Path, facts: dict[str, Any], arrays: list[Array]) -> None:
    """Write a file and flush it to disk."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for piece in _pieces(facts, arrays):
            digest.update(piece)
            _write_all(file, piece)
        _write_all(file, digest.digest())
        os.fsync(file.fileno())


def _pieces(facts: dict[str, Any], arrays: list[Array]) -> Iterator[Any]:
    """Yield the content of a file in pieces, without the digest."""
    # A dtype's name has no byte order.
    arrays = [array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays]
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    start = 0
    while True:  # the header holds the offsets of the arrays, which depend on the header's length
        entries = [
            [array.dtype.name, list(array.shape), start + offset] for array, offset in zip(arrays, offsets, strict=True)
        ]
        header = json.dumps({"facts": facts, "arrays": entries}).encode()
        data_start = -(-(len(_MAGIC) + _LENGTH + len(header)) // _ALIGN) * _ALIGN
        if data_start <= start:
            break
        start = data_start
    head = _MAGIC + len(header).to_bytes(_LENGTH, "little") + header
    yield head.ljust(start, b"\0")
    for array in arrays:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        yield bytes(-array.nbytes % _ALIGN)


def _write_all(file: Any, piece: Any) -> None:
    """Write all bytes of a piece. One system call may write fewer."""
    unwritten = memoryview(piece)
    while len(unwritten):
        unwritten = unwritten[file.write(unwritten) :]


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk. A file system may refuse that for directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_ERRORS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
