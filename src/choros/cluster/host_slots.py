"""Hosts and slots in the forms of ``horovodrun``: ``-H host:slots,...`` and host files."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterable

from choros.argument_checks import check_path
from choros.errors import InvalidInputError

Slots = tuple[tuple[str, int], ...]

_PAIR = re.compile(r"([\w.-]+):([1-9]\d{0,5})", re.ASCII)
_LINE = re.compile(r"([\w.-]+)\s+slots\s*=\s*([1-9]\d{0,5})", re.ASCII)


def parse_slots(text: str) -> Slots:
    """Return the hosts of the option ``-H``.

    Args:
        text: such as ``"n1:4,n2:4"``.

    Returns:
        Pairs of host and slots in the order of the text. The slots of a repeated host are added.

    Raises:
        InvalidInputError: the text does not have this form.

    Example:
        >>> parse_slots("localhost:2,n1:4")
        (('localhost', 2), ('n1', 4))
        >>> parse_slots("n1:1,n1:1")
        (('n1', 2),)
    """
    if not isinstance(text, str):
        raise InvalidInputError(
            f"hosts={text!r}: give one text of the form host:slots[,host:slots], such as 'n1:4,n2:4'"
        )
    pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise InvalidInputError(
            f"the hosts {text!r} are not of the form host:slots[,host:slots], each with 1 slot or more"
        )
    return _merged((pair[1], int(pair[2])) for pair in pairs if pair)


def read_hostfile(path: str) -> Slots:
    """Return the hosts of a host file with lines ``host slots=n``. ``#`` starts a comment; empty lines are ignored.

    Args:
        path: the file.

    Returns:
        Pairs of host and slots in the order of the file. The slots of a repeated host are added.

    Raises:
        InvalidInputError: the file cannot be read, has a line of another form, or has no host.
    """
    path = check_path("hostfile", path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"the host file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    entries = []
    for number, line in enumerate(lines, 1):
        pair = _LINE.fullmatch(line)
        if pair:
            entries.append((pair[1], int(pair[2])))
        elif line:
            raise InvalidInputError(f"line {number} of the host file {path} is {line!r}, not of the form: host slots=n")
    if not entries:
        raise InvalidInputError(f"the host file {path} names no host: give lines of the form: host slots=n")
    return _merged(entries)


def _merged(entries: Iterable[tuple[str, int]]) -> Slots:
    """Merge entries of one host. Two entries would count as two nodes, and ranks would use the same cores twice."""
    slots: dict[str, int] = {}
    for host, count in entries:
        slots[host] = slots.get(host, 0) + count
    return tuple(slots.items())


def is_this_machine(host: str) -> bool:
    """Return whether a name is localhost, 127.0.0.1, or this machine's host name with or without the domain.

    Args:
        host: the name.

    Example:
        >>> is_this_machine("localhost"), is_this_machine(platform.node()), is_this_machine("no.such.host")
        (True, True, False)
    """
    host, local_host = host.lower(), platform.node().lower()
    if host in ("localhost", "127.0.0.1", local_host, local_host.partition(".")[0]):
        return True
    return host.startswith(local_host + ".") and host == socket.getfqdn().lower()  # last, as it may query a name server
