"""Memory-mapped arrays. Workers get the name of the file and map it, instead of a copy of the array."""

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
    """Return the file, dtype, shape and offset of a memory-mapped array; None for other arrays.

    ``numpy.memmap`` and ``numpy.load(mmap_mode=)`` create such arrays; slices of their first axis are also mapped. An
    array in copy-on-write mode ("c") may differ from its file, so None is returned.

    Example:
        >>> place_in_file(np.zeros(3)) is None
        True
    """
    root: Any = array
    while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c":
        return None
    if not os.path.isfile(root.filename):
        return None
    # Only such arrays can be described by an offset and a shape.
    if not array.size or not array.flags.c_contiguous or np.dtype(array.dtype.str) != array.dtype:
        return None
    offset = root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return {"file": str(root.filename), "dtype": array.dtype.str, "shape": list(array.shape), "offset": int(offset)}


def block_rows(arrays: Iterable[Array], rows: int) -> int:
    """Return the number of rows in a block of 4 MB if mapped files are larger than half of the memory, else 0.

    Args:
        arrays: arrays with ``rows`` rows.
        rows: int. Number of rows.

    Example:
        >>> block_rows([np.zeros(3)], 3)
        0
    """
    nbytes = sum(array.nbytes for array in arrays if place_in_file(array) is not None)
    return max(1, _BLOCK * rows // nbytes) if nbytes > _memory() // 2 else 0


def _memory() -> int:
    """Return the memory of this machine or of this process's control group in bytes, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # ValueError: the text is "max" without a limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def memory_left() -> int:
    """Return the available memory of this machine or of this process's control group in bytes, whichever is less."""
    available = _memory()
    with suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = min(available, int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # ValueError: the text is "max" without a limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, max(limit - used, 0))
    return available


def open_place(place: dict[str, Any]) -> Array:
    """Return the array that ``place_in_file`` described, read-only.

    Raises:
        FileNotFoundError: the file does not exist any more.
    """
    array = np.memmap(place["file"], np.dtype(place["dtype"]), "r", place["offset"], tuple(place["shape"]))
    return array.view(np.ndarray)
