"""The network as this host has it: interfaces and their addresses, and which names it can look up. Contacts nobody."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAMED = re.compile(r"^(CHOROS_NETWORK|(NCCL|GLOO|UCX|FI|CCL|OMPI_MCA_btl|RCCL|MASTER)_.*)$")
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


def fabrics(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """The devices of InfiniBand and what speaks as it, such as ``mlx5_0``.

    Args:
        folder: where the kernel lists them.

    Example:
        >>> fabrics(Path("/no/such/folder"))
        []
    """
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def variables() -> dict[str, str]:
    """What the environment says of networks: the collectives' libraries' variables, and ``CHOROS_NETWORK``.

    Example:
        >>> all(NAMED.match(name) for name in variables())
        True
    """
    return {name: value for name, value in sorted(os.environ.items()) if NAMED.match(name)}


def look_up(names: Iterable[str], seconds: float = 5.0) -> dict[str, list[str]]:
    """The addresses of hosts, as this host finds them.

    Args:
        names: of hosts.
        seconds: to wait for all of them.

    Returns:
        For each its addresses; none where it is not found, or not in time.

    Example:
        >>> look_up(["localhost"])["localhost"] != []
        True
    """
    found: dict[str, list[str]] = {name: [] for name in names}

    def find(name: str) -> None:
        try:
            found[name] = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
        except (OSError, UnicodeError):
            return

    threads = [threading.Thread(target=find, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(limit - time.monotonic(), 0.0))
    return dict(found)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
