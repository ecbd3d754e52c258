"""Operations on large arrays, on the threads of a rank.

numpy uses one thread, and one core reads a fraction of what the memory of a socket delivers. Within an operation on an
array, numpy releases the interpreter's lock, so threads of Python suffice.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from choros.cluster.hardware.cpu_affinity import usable_cores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MIN_BYTES = 1 << 21  # of a thread: with fewer, to wake it takes about as long as it saves
_MAX_THREADS = 8  # some cores together use all of a socket's bandwidth


@functools.cache
def array_threads() -> int:
    """Return the number of threads for operations on large arrays.

    It is that of the frameworks (``OMP_NUM_THREADS``), which Choros sets for each rank by its share of the cores; at
    most 8, and at most one for each usable core. Without the variable it is 1.

    Example:
        >>> array_threads() >= 1
        True
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(int(text) if text.isdecimal() else 1, len(usable_cores()), _MAX_THREADS))


def part_length(count: int, itemsize: int) -> int:
    """Return the length of parts into which an array is divided, so that each thread gets one.

    Args:
        count: int. Number of values.
        itemsize: int. Bytes of a value.

    Returns:
        int. A multiple of 64 values; ``count`` or more if one thread suffices.

    Example:
        >>> part_length(1000, 4)
        1024
    """
    threads = max(1, min(array_threads(), count * itemsize // _MIN_BYTES))
    return -(-count // (threads * 64)) * 64


def for_each(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], nbytes: int) -> None:
    """Call a function with each tuple of arguments, on several threads if the arrays are large.

    Args:
        function: called as ``function(*arguments)``. It releases the interpreter's lock.
        calls: the arguments of each call. No two calls write to the same memory.
        nbytes: int. Bytes of the results of all calls.

    Raises:
        Exception: what a call raises. All calls have ended then.

    Example:
        >>> import numpy as np
        >>> out = np.zeros(4)
        >>> for_each(np.add, [(out[:2], 1.0, out[:2]), (out[2:], 2.0, out[2:])], out.nbytes)
        >>> out.tolist()
        [1.0, 1.0, 2.0, 2.0]
    """
    threads = min(array_threads(), nbytes // _MIN_BYTES, len(calls))
    if threads < 2:
        _call_all(function, calls)
        return
    futures = [_pool().submit(_call_all, function, calls[first::threads]) for first in range(1, threads)]
    try:
        _call_all(function, calls[::threads])
    finally:
        errors = [future.exception() for future in futures]  # waits for all
    for error in errors:
        if error is not None:
            raise error


def with_number(operation: np.ufunc, array: NDArray[Any], number: float, out: NDArray[Any]) -> None:
    """Write ``operation(array, number)`` to ``out``, on several threads if the arrays are large.

    Args:
        operation: of two operands, such as ``np.multiply``. It calculates in the dtype of ``out``.
        array: flat array.
        number: float.
        out: flat array of the same length. It may be ``array``.

    Example:
        >>> import numpy as np
        >>> with_number(np.divide, np.ones(2), 4.0, out := np.zeros(2))
        >>> out.tolist()
        [0.25, 0.25]
    """

    def run(part: slice) -> None:
        operation(array[part], number, out=out[part], dtype=out.dtype, casting="same_kind")

    step = part_length(out.size, out.itemsize) or 1
    for_each(run, [(slice(begin, begin + step),) for begin in range(0, out.size, step)], out.nbytes)


def _call_all(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> None:
    for arguments in calls:
        function(*arguments)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(array_threads() - 1, "choros-arrays")
