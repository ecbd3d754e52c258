"""Facts about the network of this host: fabrics, variables, and names that it can resolve. No host is contacted."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

NAMED = re.compile(r"^(CHOROS_NETWORK|(NCCL|GLOO|UCX|FI|CCL|OMPI_MCA_btl|RCCL|MASTER)_.*)$")


def fabrics(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the InfiniBand devices and compatible devices, such as ``mlx5_0``.

    Args:
        folder: the directory in which the kernel lists them.

    Example:
        >>> fabrics(Path("/no/such/folder"))
        []
    """
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def variables() -> dict[str, str]:
    """Return the environment variables that configure networks: those of libraries, and ``CHOROS_NETWORK``.

    Example:
        >>> all(NAMED.match(name) for name in variables())
        True
    """
    return {name: value for name, value in sorted(os.environ.items()) if NAMED.match(name)}


def look_up(names: Iterable[str], seconds: float = 5.0) -> dict[str, list[str]]:
    """Resolve the names of hosts on this host.

    Args:
        names: names of hosts.
        seconds: time limit for all names. Defaults to 5.

    Returns:
        The addresses of each name; empty if the name cannot be resolved in time.

    Example:
        >>> look_up(["localhost"])["localhost"] != []
        True
    """
    resolved: dict[str, list[str]] = {name: [] for name in names}

    def find(name: str) -> None:
        try:
            resolved[name] = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
        except (OSError, UnicodeError):
            return

    threads = [threading.Thread(target=find, args=(name,), daemon=True) for name in resolved]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(limit - time.monotonic(), 0.0))
    return dict(resolved)
