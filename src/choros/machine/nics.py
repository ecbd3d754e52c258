"""The network interfaces of this host and their addresses, as the kernel tells them: no socket is opened."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

_UP, _LOOPBACK = 0x1, 0x8  # net/if.h


def interfaces(net: Path = Path("/sys/class/net"), proc: Path = Path("/proc/net")) -> list[dict[str, Any]]:
    """The network interfaces of this host.

    Args:
        net: where the kernel lists them.
        proc: where it tells addresses and routes.

    Returns:
        For each, by name: ``name``, ``up``, ``loopback``, ``speed`` (Mbit/s, 0 where unknown) and ``addresses``.

    Example:
        >>> all(each["name"] for each in interfaces())
        True
    """
    found: list[dict[str, Any]] = []
    for folder in sorted(net.iterdir()) if net.is_dir() else []:
        flags = int(_text(folder / "flags") or "0", 16)
        speed = _text(folder / "speed")
        found.append(
            {
                "name": folder.name,
                "up": bool(flags & _UP),
                "loopback": bool(flags & _LOOPBACK),
                "speed": int(speed) if speed.isdecimal() else 0,
                "addresses": [],
            }
        )
    by_name: dict[str, dict[str, Any]] = {each["name"]: each for each in found}
    for name, address in [*_version_4(proc, by_name), *_version_6(proc)]:
        if name in by_name:
            by_name[name]["addresses"].append(address)
    return found


def default_route(proc: Path = Path("/proc/net")) -> str:
    """The interface by which this host reaches what is not near, ``""`` where there is none.

    Args:
        proc: where the kernel tells routes.

    Example:
        >>> default_route(Path("/no/such/folder"))
        ''
    """
    rows = [line.split() for line in _text(proc / "route").splitlines()[1:]]
    return next((row[0] for row in rows if row[1] == row[7] == "00000000"), "")


def _version_4(proc: Path, by_name: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """The addresses of this host, each with the interface whose network it is in."""
    routes = []
    for line in _text(proc / "route").splitlines()[1:]:
        words = line.split()
        target, mask = (int.from_bytes(bytes.fromhex(words[at])[::-1], "big") for at in (1, 7))
        if mask:
            routes.append((mask, target, words[0]))
    loopback = next((name for name, each in by_name.items() if each["loopback"]), "")
    local = re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", _text(proc / "fib_trie"))
    found = []
    for address in dict.fromkeys(local):
        number = int(ipaddress.IPv4Address(address))
        near = [(mask, name) for mask, target, name in routes if number & mask == target]
        name = loopback if address.startswith("127.") else max(near, default=(0, ""))[1]
        found.append((name, address))
    return found


def _version_6(proc: Path) -> list[tuple[str, str]]:
    rows = (line.split() for line in _text(proc / "if_inet6").splitlines())
    return [(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows if len(row) == 6]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
