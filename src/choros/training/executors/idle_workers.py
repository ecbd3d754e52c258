"""Workers that stay after a fit, for the next fit of this process with the same settings.

They are used again only if nothing has changed that a new worker would see: the environment, the working directory,
``sys.path``, and the files of the modules that the workers have loaded. At most one set of workers stays, for
``CHOROS_IDLE_SECONDS`` (600 by default; 0: none stays). Workers with GPUs end with their fit, as they hold memory of
the GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from choros.training.executors.worker_pool import WorkerPool

VARIABLE = "CHOROS_IDLE_SECONDS"
_SECONDS = 600.0

FileMarks = dict[str, list[int]]  # by path: the time of the last change in nanoseconds, and the size in bytes


@dataclass
class _Idle:
    """Workers without a fit: the pool that holds them, the files that they have loaded, the timer that ends them."""

    pool: WorkerPool
    files: FileMarks
    timer: threading.Timer


_lock = threading.Lock()
_idle: list[_Idle] = []  # at most one


def keep(pool: WorkerPool, files: FileMarks) -> None:
    """Keep the workers of a pool for a later fit, and leave the pool without processes.

    Args:
        pool: the pool, whose fit has ended well.
        files: marks of the files of modules that its workers have loaded.
    """
    seconds = idle_seconds()
    if not seconds or not pool.started or any(pool.gpus()):
        pool.close()
        return
    idle = _Idle(pool.split_off(), files, threading.Timer(seconds, close))
    idle.timer.daemon = True
    with _lock:
        earlier, _idle[:] = list(_idle), [idle]
    idle.timer.start()
    _end(earlier)


def take(pool: WorkerPool) -> None:
    """Give a pool without processes the idle workers, if they are what it would start. Else end them."""
    if pool.started:
        return
    with _lock:
        idle, _idle[:] = list(_idle), []
    if idle and fits(idle[0], pool):
        idle[0].timer.cancel()
        pool.adopt(idle[0].pool)
        return
    _end(idle)


def ready(pool: WorkerPool) -> bool:
    """Return whether a pool has processes, or ``take`` would give it some."""
    with _lock:
        return pool.started or bool(_idle and fits(_idle[0], pool))


def close() -> None:
    """End the workers that have stayed after a fit, and free their memory. The next fit starts new ones.

    Without this call they end after ``CHOROS_IDLE_SECONDS`` (600) without a fit, or with this process.

    Example:
        >>> import choros
        >>> choros.close()
    """
    with _lock:
        idle, _idle[:] = list(_idle), []
    _end(idle)


def fits(idle: _Idle, pool: WorkerPool) -> bool:
    """Return whether idle workers are what a pool would start now."""
    return idle.pool.same_workers(pool) and all(mark(path) == marked for path, marked in idle.files.items())


def idle_seconds() -> float:
    """Return the seconds for which workers stay without a fit.

    Raises:
        InvalidInputError: the environment variable is not a number of 0 or more.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise InvalidInputError(f"{VARIABLE}={text}: give a number of seconds, 0 or more.")
    return seconds


def mark(path: str) -> list[int]:
    """Return the time of a file's last change and its size; [] if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_mtime_ns, status.st_size]


def loaded_files(since: float) -> FileMarks:
    """Return marks of the files of all modules of this process, except those of installed packages.

    Args:
        since: the time at which this process began, in seconds. A file that was changed later gets the mark [-1]: it is
            unknown whether the module was loaded before or after the change.
    """
    installed = tuple({os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix)})
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # PyTorch has modules without a file, whose names are relative.
    others = [path for path in paths if path and os.path.isabs(path) and not path.startswith(installed)]
    marks = {path: mark(path) for path in others}
    return {path: marked if marked and marked[0] < 1e9 * since else [-1] for path, marked in marks.items()}


def _end(idle: list[_Idle]) -> None:
    for each in idle:
        each.timer.cancel()
        each.pool.close()
        if each.timer is not threading.current_thread():
            each.timer.join()


def _forget_in_child() -> None:
    """Drop the idle workers in a forked process, which may not end them. Another thread may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_in_child)
