"""Files of facts and arrays in a directory, each whole or absent; the newest whole one is what counts.

A file is a line that says what it is, the length of a JSON header, the header, the arrays one after the other on
multiples of 64 bytes, and a digest of all of it. It holds no code, and reading it runs none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from choros.errors import BadInput, CheckpointFailed
from choros.types import Array, dtype_of

_MAGIC = b"choros checkpoint 1\n"
_ALIGN, _DIGEST, _LENGTH = 64, 32, 8  # bytes
_NAME = re.compile(r"checkpoint-(\d{8,18})\.choros")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = re.compile(r"\.checkpoint-\d+\.\d+\.new")


class Saved(NamedTuple):
    """One file's content.

    Attributes:
        path: Path. Where it lies.
        facts: dict. What JSON can hold.
        arrays: list of arrays, read-only.
    """

    path: Path
    facts: dict[str, Any]
    arrays: list[Array]


class Store:
    """The files of one training.

    A file is written beside the others under another name, is brought to the disk, and only then gets its name; so a
    process that is killed at any moment, and a disk that is full, leave the files of before. Only the owner may read
    and write them (0600).

    Args:
        directory: str or path. Of this training alone; made when it is first written to.
        keep: int. How many files are kept. Defaults to 3.

    Raises:
        BadInput: ``keep`` is no number of files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as room:
        ...     store = Store(room, keep=2)
        ...     for epoch in range(3):
        ...         written = store.save({"epoch": epoch}, [np.full(2, epoch)])
        ...     latest = store.latest()
        ...     written.name, latest.facts, latest.arrays[0].tolist(), len(store.paths())
        ('checkpoint-00000003.choros', {'epoch': 2}, [2, 2], 2)
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise BadInput(f"keep={keep!r}: give how many checkpoints are kept, 1 or more.")
        self.directory, self.keep = Path(directory), keep

    def paths(self) -> list[Path]:
        """Return the files, the oldest first; some may not be whole."""
        if not self.directory.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found)]

    def save(self, facts: dict[str, Any], arrays: list[Array]) -> Path:
        """Write a new file, and remove the oldest where there are too many.

        Args:
            facts: what JSON can hold.
            arrays: of numbers.

        Returns:
            Path. The new file.

        Raises:
            CheckpointFailed: the disk is full, or the directory cannot be written to; what was there is untouched.
        """
        before = self.paths()
        number = int(_NAME.fullmatch(before[-1].name)[1]) + 1 if before else 1  # type: ignore[index]
        name = f"checkpoint-{number:08}"
        new, path = self.directory / f".{name}.{os.getpid()}.new", self.directory / f"{name}.choros"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in self.directory.iterdir():  # as a process that was killed leaves it
                if _TEMPORARY.fullmatch(stale.name):
                    stale.unlink(missing_ok=True)
            _write(new, facts, arrays)
            new.rename(path)
            sync(self.directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            last = f"the last good one is {before[-1]}" if before else "there is none yet"
            raise self._failed(error, last) from error
        for old in before[: len(before) + 1 - self.keep]:
            with contextlib.suppress(OSError):  # a directory of that name is nobody's checkpoint
                old.unlink(missing_ok=True)
        return path

    def try_out(self) -> None:
        """Write a file that is empty, and remove it.

        Raises:
            CheckpointFailed: nothing can be written there.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            new = self.directory / f".checkpoint-0.{os.getpid()}.new"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), "wb"):
                new.unlink()
        except OSError as error:
            raise self._failed(error, "nothing was trained") from error

    def _failed(self, error: OSError, last: str) -> CheckpointFailed:
        remedy = "Make room there, or give" if error.errno in _FULL else "Give"
        return CheckpointFailed(
            f"A checkpoint could not be written to {self.directory} on {os.uname().nodename} "
            f"({error.strerror or error}); {last}. {remedy} another directory."
        )

    def latest(self) -> Saved | None:
        """Return the newest whole file's content, None where there is none; says on stderr which were not whole."""
        for path in reversed(self.paths()):
            try:
                return read(path)
            except (CheckpointFailed, OSError, MemoryError) as error:
                print(f"choros: {path} is left out: {error}", file=sys.stderr, flush=True)
        return None


def read(path: Path) -> Saved:
    """Read a file.

    Args:
        path: Path.

    Raises:
        CheckpointFailed: it is not whole, or was altered.
    """
    if not path.is_file():  # a pipe would be waited for
        raise CheckpointFailed("it is no file")
    whole = np.fromfile(path, np.uint8)
    start = len(_MAGIC) + _LENGTH
    if len(whole) < start + _DIGEST or whole[: len(_MAGIC)].tobytes() != _MAGIC:
        raise CheckpointFailed("it is no whole checkpoint of Choros, or one of another version")
    content = whole[:-_DIGEST]
    if hashlib.blake2b(content.data, digest_size=_DIGEST).digest() != whole[-_DIGEST:].tobytes():
        raise CheckpointFailed("it was cut off or altered: its checksum is another")
    try:
        length = int.from_bytes(content[len(_MAGIC) : start].tobytes(), "little")
        header = json.loads(content[start : start + length].tobytes())
        arrays = []
        for kind, shape, offset in header["arrays"]:
            if dtype_of(kind).hasobject:
                raise TypeError(f"{kind} is no type of numbers")  # its bytes would be taken for places in memory
            if offset < 0:
                raise ValueError(f"an array begins at {offset}")  # numpy takes that for memory before the file's
            array = np.ndarray(tuple(shape), dtype_of(kind), content, offset)
            array.flags.writeable = False
            arrays.append(array)
        return Saved(path, dict(header["facts"]), arrays)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointFailed(f"its header cannot be read ({type(error).__name__}: {error})") from error


def _write(path: Path, facts: dict[str, Any], arrays: list[Array]) -> None:
    """Write a file and have it on the disk."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for piece in _pieces(facts, arrays):
            digest.update(piece)
            _put(file, piece)
        _put(file, digest.digest())
        os.fsync(file.fileno())


def _pieces(facts: dict[str, Any], arrays: list[Array]) -> Iterator[Any]:
    """Yield the content of a file, piece by piece, without the digest."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    start = 0
    while True:  # the header says where arrays lie, which depends on its own length
        entries = [[array.dtype.name, list(array.shape), start + at] for array, at in zip(arrays, offsets, strict=True)]
        header = json.dumps({"facts": facts, "arrays": entries}).encode()
        need = -(-(len(_MAGIC) + _LENGTH + len(header)) // _ALIGN) * _ALIGN
        if need <= start:
            break
        start = need
    head = _MAGIC + len(header).to_bytes(_LENGTH, "little") + header
    yield head.ljust(start, b"\0")
    for array in arrays:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        yield bytes(-array.nbytes % _ALIGN)


def _put(file: Any, piece: Any) -> None:
    """Write all of a piece: one call of the kernel may take less."""
    rest = memoryview(piece)
    while len(rest):
        rest = rest[file.write(rest) :]


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
