"""Workers that stay after a fit, for the next fit of this process with the same settings.

They are used again only if nothing has changed that a new worker would see: the environment, the working directory,
``sys.path``, and the files of the modules that the workers have loaded. At most one set of workers stays, for
``CHOROS_IDLE_SECONDS`` (600 by default; 0: none stays). Workers with GPUs end with their fit, as they hold memory of
the GPU.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from choros.errors import InvalidInputError
from choros.training.executors.worker_pool import Processes, WorkerPool, surroundings
from choros.training.worker.loaded_files import FileMarks, mark

VARIABLE = "CHOROS_IDLE_SECONDS"
_DEFAULT_SECONDS = 600.0
_JOIN_SECONDS = 5.0  # to wait for the thread of a cancelled timer


@dataclass
class _Idle:
    """Workers without a fit: the settings of their pool, the files that they have loaded, the timer that ends them."""

    settings: tuple[object, ...]
    processes: Processes
    files: FileMarks
    timer: threading.Timer

    def fits(self, pool: WorkerPool) -> bool:
        """Return whether these workers run, are not stopped, and are what a pool would start now."""
        return (
            self.settings == pool.settings
            and self.processes.surroundings == surroundings()
            and all(map(self.processes.pool.responds, range(pool.size)))
            and all(mark(path) == marked for path, marked in self.files.items())
        )

    def end(self) -> None:
        """End the workers."""
        self.timer.cancel()
        self.processes.pool.close()
        if self.timer is not threading.current_thread():
            self.timer.join(_JOIN_SECONDS)


_lock = threading.Lock()
_idle: list[_Idle] = []  # at most one


def keep(pool: WorkerPool, files: FileMarks) -> None:
    """Keep the workers of a pool for a later fit, and leave the pool without processes.

    Args:
        pool: the pool, whose fit has ended well.
        files: marks of the files of modules that its workers have loaded.
    """
    seconds, processes = idle_seconds(), pool.release()
    if processes is None:
        return
    if not seconds or processes.gpus:
        processes.pool.close()
        return
    idle = _Idle(pool.settings, processes, files, threading.Timer(seconds, close))
    idle.timer.daemon = True
    earlier = _exchange([idle])
    idle.timer.start()
    for workers in earlier:
        workers.end()


def take(pool: WorkerPool) -> None:
    """Give a pool without processes the idle workers, if they are what it would start. Else end them.

    Raises:
        InvalidInputError: as in ``idle_seconds``; before a fit, so that ``keep`` does not raise it after one.
    """
    idle_seconds()
    if pool.started:
        return
    for workers in _exchange([]):
        if workers.fits(pool):
            workers.timer.cancel()
            pool.adopt(workers.processes)
        else:
            workers.end()


def ready(pool: WorkerPool) -> bool:
    """Return whether a pool has processes, or ``take`` would give it some."""
    with _lock:
        return pool.started or any(idle.fits(pool) for idle in _idle)


def close() -> None:
    """End the workers that have stayed after a fit, and free their memory. The next fit starts new ones.

    Without this call they end after ``CHOROS_IDLE_SECONDS`` (600) without a fit, or with this process.

    Example:
        >>> import choros
        >>> choros.close()
    """
    for workers in _exchange([]):
        workers.end()


def idle_seconds() -> float:
    """Return the seconds for which workers stay without a fit.

    Raises:
        InvalidInputError: the environment variable is not a number of 0 or more.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise InvalidInputError(f"{VARIABLE}={text}: give a number of seconds, 0 or more.")
    return seconds


def _exchange(idle: list[_Idle]) -> list[_Idle]:
    """Set the idle workers, and return those before. Another thread may keep, take or close workers meanwhile."""
    with _lock:
        earlier, _idle[:] = list(_idle), idle
    return earlier


def _forget_in_child() -> None:
    """Drop the idle workers in a forked process, which may not end them. Another thread may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_in_child)
