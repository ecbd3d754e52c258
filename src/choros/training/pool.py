"""The workers: processes on this machine with their cores, threads and backend set before any import."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from choros.errors import BadInput
from choros.launch.local import Pool
from choros.machine import physical_cores, plan, variables


class WorkerPool:
    """Worker processes that several Trainers may use one after the other.

    Args:
        workers: int. How many. Defaults to min(4, physical cores).
        backend: str. "jax", "torch" or "tensorflow". Defaults to the caller's Keras backend.
        threads: int. Threads of each worker. Defaults to its number of cores.
        bind: bool. Whether each worker is bound to cores of its own. Defaults to True.
        devices: str. "cpu", or "auto": GPUs where there are as many as workers take, else the CPU; one GPU for several
            workers is refused. Defaults to "auto".
        devices_per_worker: int, or one for each worker. Devices that each has: GPUs, or logical ones of its CPU.
            Defaults to 1.
        echo: bool. Whether what workers print is shown, marked with their rank. Defaults to True.

    Raises:
        BadInput: settings that cannot work.

    Example:
        >>> import choros
        >>> with choros.WorkerPool(2, backend="jax") as pool:  # starts nothing until the first fit
        ...     pool.size
        2
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        backend: str | None = None,
        threads: int | None = None,
        bind: bool = True,
        devices: str = "auto",
        devices_per_worker: int | Sequence[int] = 1,
        echo: bool = True,
    ) -> None:
        self.size = default_workers() if workers is None else check_workers(workers)
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise BadInput(f"threads={threads!r}: give a whole number, 1 or more.")
        if devices not in ("auto", "cpu", "gpu"):
            raise BadInput(f"devices={devices!r}: give 'auto', 'cpu' or 'gpu'.")
        self.per_worker = each_devices(devices_per_worker, self.size)
        self._backend, self._threads, self._bind, self._devices, self._echo = backend, threads, bind, devices, echo
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the pool without its processes: a model may hold the Trainer that trains it."""
        return vars(self) | {"_pool": None}

    @property
    def backend(self) -> str:
        """The Keras backend of the workers."""
        from choros.backend import backend_name

        return self._backend or backend_name()

    @property
    def started(self) -> bool:
        """True if the processes run."""
        return self._pool is not None

    def start(self, unfit: Collection[int] = ()) -> Pool:
        """Start the processes, if they do not all run, and return the engine that holds them.

        Args:
            unfit: ranks that get a new process in any case.

        Raises:
            WorkerFailed: a worker ended while it started.
        """
        if self._pool is not None and not all(map(self._pool.alive, set(range(self.size)) - set(unfit))):
            self.kill()
        elif self._pool is not None:
            for rank in sorted(unfit):
                self._pool.replace(rank)
        if self._pool is None:
            bindings = plan(self.size, threads=self._threads, bind=self._bind)
            gpus = self.gpus()
            keep = os.environ if self._threads is None else None
            shared = not all(binding.cores for binding in bindings)
            environment = [
                {
                    **variables(b.threads, keep=keep, shared=shared),
                    **device_variables(self.backend, mine if gpus else ()),
                }
                for b, mine in zip(bindings, self.numbers(), strict=True)
            ]
            self._pool = Pool(
                self.size,
                environment=environment,
                cores=[binding.cores for binding in bindings],
                echo=show if self._echo else None,
            )
        return self._pool

    @contextmanager
    def lent(self) -> Iterator[None]:
        """For a while, be one ``fit``'s alone.

        Raises:
            BadInput: another one has it.
        """
        if not self._lock.acquire(blocking=False):
            raise BadInput(
                "These workers are training already, for a fit of another thread or around this callback: wait for it, "
                "or give each Trainer a WorkerPool of its own."
            )
        try:
            yield
        finally:
            self._lock.release()

    def gpus(self) -> int:
        """Return how many GPUs the workers get, 0 for the CPU.

        Raises:
            BadInput: fewer GPUs than workers take.
        """
        if self._devices == "cpu":
            return 0
        found, wanted = count_gpus(self.backend), sum(self.per_worker)
        if found >= wanted:
            return wanted
        if found or self._devices == "gpu":
            each = f" with {wanted} devices" if wanted > self.size else ""
            raise BadInput(
                f"{self.size} workers{each}, but {found} GPU{'s' if found != 1 else ''}: several workers on one GPU "
                f"would only wait for each other. Give workers={max(found, 1)}, or devices='cpu' to train on the CPU."
            )
        return 0

    def numbers(self) -> list[list[int]]:
        """Return each worker's devices, counted through all workers."""
        ends = list(itertools.accumulate(self.per_worker, initial=0))
        return [list(range(start, end)) for start, end in itertools.pairwise(ends)]

    def kill(self) -> None:
        """End the processes at once; the next fit starts new ones."""
        if self._pool is not None:
            self._pool.kill()
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_workers() -> int:
    """Return min(4, physical cores)."""
    return min(4, len(physical_cores()))


def check_workers(workers: Any) -> int:
    """Return ``workers``, or say why it cannot be."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise BadInput(f"workers={workers!r}: give a whole number of workers, 1 or more.")
    return workers


def each_devices(given: int | Sequence[int], workers: int) -> list[int]:
    """Return how many devices each worker has, or say why it cannot be."""
    several = list(given) if isinstance(given, Sequence) else [given] * workers
    if len(several) != workers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in several):
        raise BadInput(f"devices_per_worker={given!r}: give a whole number, 1 or more, or one for each of {workers}.")
    return several


def device_variables(backend: str, gpus: Sequence[int]) -> Mapping[str, str]:
    """Return the environment that gives a worker its GPUs, by their numbers, or keeps it on the CPU."""
    if gpus:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        mine = ",".join(visible[number] if visible else str(number) for number in gpus)
        return {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": mine}
    return {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def count_gpus(backend: str) -> int:
    """Return how many GPUs the backend sees in this process."""
    import keras

    if str(keras.backend.backend()) != backend:
        return 0
    if backend == "torch":  # Keras 3.15 lists no devices there
        module = sys.modules.get("torch")
        return int(module.cuda.device_count()) if module is not None else 0
    return sum(not name.startswith("cpu") for name in keras.distribution.list_devices())


def show(rank: int, line: str) -> None:
    """Show a line that a worker printed."""
    print(f"[{rank}] {line}", file=sys.stdout, flush=True)
