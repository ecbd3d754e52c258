"""Files of one user that processes on several hosts exchange through a shared folder.

The files may hold pickles, which run code when they are read. So a reader uses a file only if it belongs to the reading
user and no other user may read or write it. Code that is run has a digest too, which comes by another way.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from choros.errors import InvalidInputError


def create_private(path: str | os.PathLike[str]) -> int:
    """Create a file that only this user can read and write, and return its descriptor.

    Raises:
        OSError: the file exists, or cannot be created.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def open_private(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a private file for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        InvalidInputError: it belongs to another user, or other users have access to it.
    """
    file = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
    status = os.fstat(file.fileno())
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        file.close()
        raise InvalidInputError(
            f"On {os.uname().nodename} {Path(path)} belongs to another user, or other users may read or write it: it "
            "is not used. If it is yours and unchanged, chmod 600 it."
        )
    return file


def read_private(path: str | os.PathLike[str], writer: str, digest: str) -> bytes:
    """Return the content of a private file whose digest came by another way.

    Args:
        path: the file.
        writer: the process that wrote it, for messages.
        digest: the result of ``digest_of`` for the content.

    Raises:
        FileNotFoundError: the file does not exist.
        InvalidInputError: it is not private, or has another digest.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     read_private(file.name, "this process", digest_of(b""))
        b''
    """
    with open_private(path) as file:
        content = file.read()
    if digest_of(content) != digest:
        raise InvalidInputError(
            f"On {os.uname().nodename} {Path(path)} is not what {writer} wrote there: it is not used."
        )
    return content
