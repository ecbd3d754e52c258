"""The transport of a call to the ranks and of their results: cloudpickle in anonymous memory, or in private files.

The memory is an anonymous file (memfd_create(2)), which exists as long as a descriptor of it is open. Processes of
other users cannot open it, and nothing is left when the last process has ended. The files are those of
``launch/private_file.py``, for ranks on other hosts. A rank's reply is a line of JSON:
the rank returned, or raised. If it returned, the value follows.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.comm.messages import Messages, header_of
from choros.errors import InvalidInputError, NotSerializableError, brief
from choros.launch.process.failure_report import RankFailure


@dataclass(frozen=True)
class Returned:
    """Answer of a rank that returned a value. ``type``: the name of the value's type."""

    type: str


_ANSWERS = Messages(Returned, RankFailure)


def check_call(caller: str, func: object, args: object, kwargs: object) -> None:
    """Check the types of a function and its arguments.

    Args:
        caller: the public function that was given them, for messages.
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments, or None.

    Raises:
        InvalidInputError: one of them has another type.
    """
    if not callable(func):
        command = "; a script is started by the command " + caller.replace(".", " ") if isinstance(func, str) else ""
        raise InvalidInputError(f"{caller} was given {func!r} to call: give a function{command}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidInputError(
            f"args is of type {type(args).__name__}: give a tuple or a list, such as args=({args!r:.40},)"
        )
    if not (kwargs is None or (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs))):
        raise InvalidInputError(f"kwargs={kwargs!r:.40}: give a dict of keyword arguments by name")


def create(name: str) -> int:
    """Return the descriptor of new, empty memory.

    Args:
        name: the name that ``/proc/<pid>/fd`` shows.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        return fd
    fd, path = tempfile.mkstemp(prefix=f"{name}-")  # macOS: a temporary file, unlinked at once
    os.unlink(path)
    return fd


def write_call(fd: int, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write the call for the ranks: functions and classes of ``__main__`` by value, those of modules by name.

    Args:
        fd: descriptor of empty memory.
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        NotSerializableError: a part cannot be pickled; names the part and its type.
    """
    from choros.pickling import dump, dumps

    try:
        with open(fd, "wb", closefd=False) as file:
            dump((func, tuple(args), dict(kwargs)), file)
    except Exception as error:
        parts = {f"the function {_function_name(func)}": func}
        parts |= {f"argument {number}, a {_type_name(value)},": value for number, value in enumerate(args)}
        parts |= {f"argument {name}, a {_type_name(value)},": value for name, value in kwargs.items()}
        for label, part in parts.items():
            try:
                dumps(part)
            except Exception as cause:
                raise NotSerializableError(f"{label} cannot be sent to the ranks: {brief(cause)}") from cause
        raise NotSerializableError(f"this call cannot be sent to the ranks: {brief(error)}") from error


def read_call(fd: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what ``write_call`` wrote: the function and its arguments."""
    from choros.pickling import loads

    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:  # mmap, as the ranks share the descriptor's offset
        call: tuple[Any, tuple[Any, ...], dict[str, Any]] = loads(memory)
        return call


def write_value(fd: int, rank: int, value: object) -> None:
    """Write the value that a rank returned.

    Args:
        fd: descriptor of empty memory.
        rank: the rank.
        value: a value that cloudpickle can pickle.

    Raises:
        NotSerializableError: the value cannot be pickled; names the rank and the type. The memory is empty then.
    """
    from choros.pickling import dump

    with open(fd, "r+b", closefd=False) as file:
        file.write(json.dumps(header_of(Returned(_type_name(value)))).encode() + b"\n")
        try:
            dump(value, file)
        except Exception as error:
            # A part of the value may be written already. The report of the error must be the only content.
            file.seek(0)
            file.truncate()
            raise NotSerializableError(
                f"what rank {rank} returned, a {_type_name(value)}, cannot be sent to the caller: {brief(error)}"
            ) from None


def write_failure(fd: int, report: RankFailure) -> None:
    """Write the report of a rank that raised."""
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(header_of(report)).encode() + b"\n")


def read_answer(fd: int) -> tuple[Returned | RankFailure | None, int]:
    """Return a rank's answer and the offset of its value; None and 0 if the rank wrote nothing."""
    size = os.fstat(fd).st_size
    if not size:
        return None, 0
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
        end = memory.find(b"\n") + 1
        return (_ANSWERS.decode(json.loads(memory[:end])) if end else None), end


def read_value(fd: int, rank: int, answer: Returned, begin: int) -> Any:
    """Return the value that a rank returned.

    Args:
        fd: descriptor of the rank's memory.
        rank: the rank.
        answer: the answer from ``read_answer``.
        begin: the offset of the value from ``read_answer``.

    Raises:
        NotSerializableError: the value cannot be unpickled in this process; names the rank and the type.
    """
    from choros.pickling import loads

    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
            memory.seek(begin)
            return loads(memory)
    except Exception as error:
        raise NotSerializableError(
            f"what rank {rank} returned, a {answer.type}, cannot be built in this process: {brief(error)}"
        ) from error


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _function_name(func: object) -> str:
    return str(getattr(func, "__qualname__", None) or _type_name(func))
