"""Arrays that are a file mapped into memory: they travel by the file's name, and are read where they lie."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from choros.types import Array

_BLOCK = 1 << 22  # bytes of a block


def place_in_file(array: Array) -> dict[str, Any] | None:
    """Return where in which file an array lies, or None for one that is in memory, or only there as it is.

    ``numpy.memmap`` and ``numpy.load(mmap_mode=)`` make such arrays, and slices of their first axis are too. One that
    was opened copy-on-write (mode "c") may differ from its file, and counts as in memory.

    Example:
        >>> place_in_file(np.zeros(3)) is None
        True
    """
    root: Any = array
    while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
        root = root.base
    filename = getattr(root, "filename", None)
    if filename is None or root.mode == "c" or not os.path.isfile(filename):
        return None
    if not array.size or not array.flags.c_contiguous or np.dtype(array.dtype.str) != array.dtype:
        return None
    offset = root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return {"file": str(filename), "dtype": array.dtype.str, "shape": list(array.shape), "offset": int(offset)}


def block_rows(arrays: Iterable[Array], rows: int) -> int:
    """Return how many rows make a block of 4 MB, where mapped files do not fit into half of the memory; else 0.

    Args:
        arrays: all that have so many rows.
        rows: int.

    Example:
        >>> block_rows([np.zeros(3)], 3)
        0
    """
    nbytes = sum(array.nbytes for array in arrays if place_in_file(array) is not None)
    return max(1, _BLOCK * rows // nbytes) if nbytes > _memory() // 2 else 0


def _memory() -> int:
    """Bytes that this machine, or this process's control group, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def memory_left() -> int:
    """Return the bytes that this process may still take, of the machine's or of its control group's memory."""
    available = _memory()
    with suppress(OSError, ValueError):
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = min(available, int(facts["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # no limit is "max"
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, max(limit - used, 0))
    return available


def open_place(place: dict[str, Any]) -> Array:
    """Return the array that ``place_in_file`` described, read-only.

    Raises:
        FileNotFoundError: the file is gone.
    """
    array = np.memmap(place["file"], np.dtype(place["dtype"]), "r", place["offset"], tuple(place["shape"]))
    return array.view(np.ndarray)
