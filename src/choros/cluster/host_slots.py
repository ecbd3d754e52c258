"""Hosts with their slots, as ``horovodrun`` is given them: ``-H host:slots,...`` and host files."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Iterable

from choros.errors import InvalidInputError

Slots = tuple[tuple[str, int], ...]

_PAIR = re.compile(r"([\w.-]+):([1-9]\d{0,5})", re.ASCII)
_LINE = re.compile(r"([\w.-]+)\s+slots\s*=\s*([1-9]\d{0,5})", re.ASCII)


def parse_slots(text: str) -> Slots:
    """The hosts of ``-H``.

    Args:
        text: such as ``"n1:4,n2:4"``.

    Returns:
        Each host and its slots, in the order given; those of a host that is there twice are added up.

    Raises:
        InvalidInputError: the text is not of that form.

    Example:
        >>> parse_slots("localhost:2,n1:4")
        (('localhost', 2), ('n1', 4))
        >>> parse_slots("n1:1,n1:1")
        (('n1', 2),)
    """
    pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise InvalidInputError(
            f"the hosts {text!r} are not of the form host:slots[,host:slots], each with 1 slot or more"
        )
    return _added((pair[1], int(pair[2])) for pair in pairs if pair)


def read_hostfile(path: str) -> Slots:
    """The hosts of a host file: a line ``host slots=n`` each; ``#`` begins a comment, empty lines do not count.

    Args:
        path: the file.

    Returns:
        Each host and its slots, in the order of the file, added up as ``parse_slots`` does.

    Raises:
        InvalidInputError: it cannot be read, has a line of another form, or no host.
    """
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
    return _added(entries)


def _added(entries: Iterable[tuple[str, int]]) -> Slots:
    """Each host once: two entries of one would be two nodes to the ranks, each with cores that the other has too."""
    slots: dict[str, int] = {}
    for host, count in entries:
        slots[host] = slots.get(host, 0) + count
    return tuple(slots.items())


def is_this_machine(host: str) -> bool:
    """Return whether a name is this machine's: localhost, 127.0.0.1, its host name, with or without the domain.

    Args:
        host: the name.

    Example:
        >>> is_this_machine("localhost"), is_this_machine(platform.node()), is_this_machine("no.such.host")
        (True, True, False)
    """
    host, local_host = host.lower(), platform.node().lower()
    if host in ("localhost", "127.0.0.1", local_host, local_host.partition(".")[0]):
        return True
    return host.startswith(local_host + ".") and host == socket.getfqdn().lower()  # which may ask a name server
