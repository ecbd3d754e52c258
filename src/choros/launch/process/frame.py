"""The format of one message: JSON, then raw bytes. No pickle.

A frame is a prefix of four fields (``magic``, bytes of the head, number of blobs, number of descriptors; 4 bytes each),
the head (the blobs' lengths, 8 bytes each, then the message as JSON), and the blobs.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any

from choros.errors import InvalidInputError

Message = dict[str, Any]
Frame = tuple[Message, list[bytearray], list[int]]

MOST_FDS = 250  # the kernel's SCM_MAX_FD is 253
MOST_BLOBS = 1 << 16
MOST_HEAD = 1 << 26
MOST_BYTES = 1 << 36

MAGIC = b"ChW1"
PREFIX = struct.Struct("<4sIII")
_LENGTH = struct.Struct("<Q")


def pack(message: Message, blobs: Sequence[Any] = (), fds: Sequence[int] = ()) -> tuple[bytes, list[memoryview]]:
    """Return the bytes before the blobs, and the blobs as views of bytes.

    Args:
        message: dict of JSON types.
        blobs: contiguous buffers.
        fds: open file descriptors.

    Returns:
        Prefix and head as bytes; the list of views.

    Raises:
        InvalidInputError: a part has a wrong type or is over a limit.

    Example:
        >>> head, views = pack({"a": 1}, [b"xyz"])
        >>> unpack_prefix(memoryview(head)[:16])
        (16, 1, 0)
    """
    if not isinstance(message, dict):
        raise InvalidInputError(f"a message must be a dict, got {type(message).__name__}")
    try:
        text = json.dumps(message).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a message may hold only what JSON has: {error}") from None
    try:
        views = [memoryview(blob) for blob in blobs]
        views = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
    except TypeError as error:
        raise InvalidInputError(f"a blob must be a contiguous buffer of bytes or numbers: {error}") from None
    for fd in fds:
        try:
            os.fstat(fd)
        except OSError as error:
            raise InvalidInputError(f"{fd} is not an open descriptor of this process: {error.strerror}") from None
    size = sum(view.nbytes for view in views)
    for kind, have, most in (
        ("bytes of JSON", len(text), MOST_HEAD),
        ("blobs", len(views), MOST_BLOBS),
        ("bytes in blobs", size, MOST_BYTES),
        ("descriptors", len(fds), MOST_FDS),
    ):
        if have > most:
            raise InvalidInputError(f"a message may have {most} {kind}, this one has {have}: send it in several")
    head = b"".join(_LENGTH.pack(view.nbytes) for view in views) + text
    return PREFIX.pack(MAGIC, len(head), len(views), len(fds)) + head, views


def unpack_prefix(prefix: memoryview) -> tuple[int, int, int]:
    """Read a frame's first 16 bytes.

    Args:
        prefix: the 16 bytes.

    Returns:
        Bytes of the head, number of blobs, number of descriptors.

    Raises:
        ValueError: the bytes do not begin a frame, or the frame is over a limit.
    """
    magic, head, blobs, fds = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ValueError("it does not begin as one")
    if blobs > MOST_BLOBS or head > MOST_HEAD + blobs * _LENGTH.size or head < blobs * _LENGTH.size or fds > MOST_FDS:
        raise ValueError("it announces more than a message may have")
    return head, blobs, fds


def lengths_and_message(head: memoryview, blobs: int) -> tuple[list[int], Message]:
    """Read a frame's head.

    Args:
        head: the bytes of the head.
        blobs: the number of blobs.

    Returns:
        The lengths of the blobs in bytes, and the message.

    Raises:
        ValueError: the blobs are over the limit, or the message is not a JSON object.
    """
    split = blobs * _LENGTH.size
    lengths = [length for (length,) in _LENGTH.iter_unpack(head[:split])]
    if sum(lengths) > MOST_BYTES:
        raise ValueError("it announces more bytes than a message may have")
    message = json.loads(bytes(head[split:]))
    if not isinstance(message, dict):
        raise ValueError("it is not a JSON object")
    return lengths, message
