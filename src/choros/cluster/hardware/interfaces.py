"""The network interfaces of this host and their addresses, as the kernel reports them. Nothing is sent."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NET, _PROC = Path("/sys/class/net"), Path("/proc/net")
_UP, _LOOPBACK = 0x1, 0x8  # net/if.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interfaces(
    net: Path = _NET, proc: Path = _PROC, primary: Callable[[str], str | None] | None = None
) -> list[dict[str, Any]]:
    """Return the network interfaces of this host.

    Args:
        net: the directory in which the kernel lists interfaces.
        proc: the directory in which the kernel lists addresses and routes.
        primary: returns the first IPv4 address of an interface. Defaults to ``primary_address``; with another ``proc``,
            addresses are matched only with routes.

    Returns:
        A dict for each interface, sorted by name: ``name``, ``up``, ``loopback``, ``speed`` (Mbit/s, 0 if unknown) and
        ``addresses``.

    Example:
        >>> all(interface["name"] for interface in interfaces())
        True
    """
    listed: list[dict[str, Any]] = []
    for folder in sorted(net.iterdir()) if net.is_dir() else []:
        flags = int(_text(folder / "flags") or "0", 16)
        speed = _text(folder / "speed")
        listed.append(
            {
                "name": folder.name,
                "up": bool(flags & _UP),
                "loopback": bool(flags & _LOOPBACK),
                "speed": int(speed) if speed.isdecimal() else 0,
                "addresses": [],
            }
        )
    by_name: dict[str, dict[str, Any]] = {interface["name"]: interface for interface in listed}
    if primary is None:
        primary = primary_address if proc == _PROC else lambda name: None
    first = [(name, address) for name in by_name if by_name[name]["up"] and (address := primary(name))]
    for name, address in [*first, *_version_4(proc, by_name, {address for _, address in first}), *_version_6(proc)]:
        if name in by_name:
            by_name[name]["addresses"].append(address)
    return listed


def primary_address(name: str) -> str | None:
    """Return the first IPv4 address of an interface, or None.

    Routes do not show it if several interfaces are on one network, or if the network has only this address (/32).

    Args:
        name: str. The interface.

    Example:
        >>> primary_address("no_such_interface") is None
        True
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # only a descriptor for the ioctl
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def default_route(proc: Path = _PROC) -> str:
    """Return the interface of the default route, or "".

    Args:
        proc: the directory in which the kernel lists routes.

    Example:
        >>> default_route(Path("/no/such/folder"))
        ''
    """
    rows = [line.split() for line in _text(proc / "route").splitlines()[1:]]
    return next((row[0] for row in rows if row[1] == row[7] == "00000000"), "")


def _version_4(proc: Path, by_name: dict[str, dict[str, Any]], known: set[str]) -> list[tuple[str, str]]:
    """Return the other IPv4 addresses of this host, each with the interface of the narrowest route to its network.

    An address without such a route (/32) is assigned to the interface of the default route.
    """
    routes = []
    for line in _text(proc / "route").splitlines()[1:]:
        columns = line.split()
        target, mask = (int.from_bytes(bytes.fromhex(columns[at])[::-1], "big") for at in (1, 7))
        if mask:
            routes.append((mask, target, columns[0]))
    loopback = next((name for name, interface in by_name.items() if interface["loopback"]), "")
    local = re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", _text(proc / "fib_trie"))
    outward_interface = default_route(proc)
    placed = []
    for address in dict.fromkeys(local):
        if address not in known:
            number = int(ipaddress.IPv4Address(address))
            matching_routes = [(mask, name) for mask, target, name in routes if number & mask == target]
            name = loopback if address.startswith("127.") else max(matching_routes, default=(0, outward_interface))[1]
            placed.append((name, address))
    return placed


def _version_6(proc: Path) -> list[tuple[str, str]]:
    rows = (line.split() for line in _text(proc / "if_inet6").splitlines())
    return [(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows if len(row) == 6]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
