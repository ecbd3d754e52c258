"""Worker processes on this machine. Cores, threads and backend of each are set before any import."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from choros.argument_checks import check_flag
from choros.backend_choice import BACKENDS
from choros.cluster.hardware import kept_variables, physical_cores, plan, variables
from choros.cluster.hardware.gpu_builds import AMD, INTEL, JAX_PLATFORM_NAMES, gpu_vendor
from choros.cluster.hardware.gpus import GIVEN, Gpu, showing, usable_gpus
from choros.console import write_line
from choros.data.validation import is_whole
from choros.errors import InvalidInputError, counted, warn
from choros.launch.process.rank_limit import check_ranks, crowding
from choros.launch.process.worker_pool import Pool

_MAX_WORKERS = 1_000_000


class Processes(NamedTuple):
    """The processes of a pool, what they took from this process when they were started, and whether they have GPUs."""

    pool: Pool
    surroundings: list[object]
    gpus: bool


class WorkerPool:
    """Worker processes that several Trainers may use one after the other.

    Args:
        workers: int. Number of workers. Defaults to one for each GPU that the installed build of the backend can use
            (or for each ``devices_per_worker`` of them), else min(4, physical cores).
        backend: str. "jax", "torch" or "tensorflow". Defaults to the caller's Keras backend.
        threads: int. Threads of each worker. Defaults to its number of cores.
        bind: bool. Whether each worker is bound to separate cores. Defaults to True.
        devices: str. "auto": GPUs if the backend can use one, else the CPU. "gpu": GPUs, even if ``JAX_PLATFORMS`` or
            ``KERAS_TORCH_DEVICE`` keeps this process on the CPU. "cpu": the CPU. "shared": GPUs; if there are fewer
            GPUs than workers, several workers share one, which "auto" and "gpu" refuse. Defaults to "auto".
        devices_per_worker: int, or one for each worker. Number of devices of each worker: GPUs, or logical devices of
            its CPU. Defaults to 1.
        echo: bool. Whether the workers' output is shown, marked with their rank. Defaults to True.

    Raises:
        InvalidInputError: an argument that cannot work.

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
        devices: Literal["auto", "cpu", "gpu", "shared"] = "auto",
        devices_per_worker: int | Sequence[int] = 1,
        echo: bool = True,
    ) -> None:
        if backend is not None and backend not in BACKENDS:
            raise InvalidInputError(f"backend={backend!r}: give 'jax', 'torch' or 'tensorflow'.")
        self._backend = backend
        if workers is None:
            workers = default_workers(self.backend, devices, devices_per_worker)
        self.size = check_workers(workers)
        if threads is not None and not is_whole(threads, 1):
            raise InvalidInputError(f"threads={threads!r}: give a whole number, 1 or more.")
        if devices not in ("auto", "cpu", "gpu", "shared"):
            raise InvalidInputError(f"devices={devices!r}: give 'auto', 'cpu', 'gpu' or 'shared'.")
        self.per_worker = each_devices(devices_per_worker, self.size)
        threads = None if threads is None else int(threads)
        self._threads, self._devices = threads, devices
        self._bind, self._echo = check_flag("bind", bind), check_flag("echo", echo)
        self._pool: Pool | None = None
        self._surroundings: list[object] = []  # of the processes, when they were started
        self._with_gpus = self._has_warned = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        options = {"backend": self._backend, "threads": self._threads, "devices_per_worker": self._devices_shown()}
        return (
            f"WorkerPool({', '.join([str(self.size), *(f'{k}={v!r}' for k, v in options.items() if v is not None)])})"
        )

    def _devices_shown(self) -> list[int] | None:
        return list(self.per_worker) if max(self.per_worker) > 1 else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the pool without its processes. A pool is pickled if a model holds the Trainer that trains it."""
        # Processes and locks exist only here. An unpickled pool starts its own.
        return {name: value for name, value in vars(self).items() if name not in ("_pool", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pool, self._lock = None, threading.Lock()

    @property
    def backend(self) -> str:
        """The Keras backend of the workers."""
        from choros.backends import backend_name

        return self._backend or backend_name()

    @property
    def started(self) -> bool:
        """True if the processes were started."""
        return self._pool is not None

    def start(self, unfit: Collection[int] = ()) -> Pool:
        """Start the processes unless all of them run, and return the ``Pool`` that holds them.

        Args:
            unfit: ranks that get a new process in any case.

        Raises:
            WorkerFailedError: a worker ended during start-up.
            InvalidInputError: there are fewer GPUs than the workers need.
        """
        if self._pool is not None and not all(map(self._pool.responds, set(range(self.size)) - set(unfit))):
            self.kill()
        elif self._pool is not None:
            for rank in sorted(unfit):
                self._pool.replace(rank)
        if self._pool is None:
            check_ranks(self.size, "give fewer workers")
            bindings = plan(self.size, threads=self._threads, bind=self._bind)
            gpus = self.gpus()
            if not any(gpus) and not self._has_warned and (warning := crowding(self.size, "workers", "workers=")):
                self._has_warned = True
                warn(f"{warning}.")
            inherited = kept_variables(os.environ, self._threads)
            shared = not all(binding.cores for binding in bindings)
            environment = [
                {
                    **variables(b.threads, keep=inherited, shared=shared, bound=bool(b.cores)),
                    **device_variables(self.backend, gpu_list),
                }
                for b, gpu_list in zip(bindings, gpus, strict=True)
            ]
            self._surroundings, self._with_gpus = surroundings(), any(gpus)
            self._pool = Pool(
                self.size,
                environment=environment,
                cores=[binding.cores for binding in bindings],
                echo=show if self._echo else None,
            )
        return self._pool

    @property
    def settings(self) -> tuple[object, ...]:
        """The arguments of this pool on which its processes depend."""
        return (self.size, self.backend, self.per_worker, self._threads, self._bind, self._devices, self._echo)

    def release(self) -> Processes | None:
        """Leave this pool without processes, and return them if there were any."""
        processes = None if self._pool is None else Processes(self._pool, self._surroundings, self._with_gpus)
        self._pool = None
        return processes

    def adopt(self, processes: Processes) -> None:
        """Take the processes of a pool with the same settings."""
        self._pool, self._surroundings, self._with_gpus = processes

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Reserve the pool for one ``fit`` within this context.

        Raises:
            InvalidInputError: another ``fit`` uses the pool.
        """
        if not self._lock.acquire(blocking=False):
            raise InvalidInputError(
                "These workers are training already, for a fit of another thread or around this callback: wait for it, "
                "or give each Trainer a WorkerPool of its own."
            )
        try:
            yield
        finally:
            self._lock.release()

    def gpus(self) -> list[list[Gpu]]:
        """Return each worker's GPUs; an empty list means the CPU.

        Raises:
            InvalidInputError: there are fewer GPUs than the workers need.
        """
        ends = list(itertools.accumulate(self.per_worker, initial=0))
        spans = list(itertools.pairwise(ends))
        usable, needed = gpus_for(self.backend, self._devices), ends[-1]
        if len(usable) >= needed:
            return [list(usable[start:end]) for start, end in spans]
        if usable and self._devices == "shared" and max(self.per_worker) <= len(usable):
            return [[usable[number % len(usable)] for number in range(start, end)] for start, end in spans]
        if usable or self._devices in ("gpu", "shared"):
            raise InvalidInputError(self._too_few_gpus(len(usable), needed))
        return [[] for _ in spans]

    def _too_few_gpus(self, usable: int, needed: int) -> str:
        """Return the error message for too few GPUs, with the remedy."""
        device_text = f" with {needed} devices" if needed > self.size else ""
        if not usable:
            return (
                f"{self.size} workers{device_text}, but no GPU that the installed {self.backend} can use: install its "
                "build for GPUs (README, Install), show a GPU to this process (CUDA_VISIBLE_DEVICES), or give "
                "devices='cpu'."
            )
        return (
            f"{counted(self.size, 'worker')}{device_text}, but {counted(usable, 'GPU')}: several workers on one "
            f"GPU wait for each other. Give workers={max(usable // max(self.per_worker), 1)}, devices='shared' to "
            "share GPUs all the same, or devices='cpu' to train on the CPU."
        )

    def kill(self) -> None:
        """Kill the processes. The next fit starts new ones."""
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


def surroundings() -> list[object]:
    """Return what a new process takes from this one: environment, directory, module path.

    Raises:
        InvalidInputError: the working directory was deleted.
    """
    try:
        path = os.getcwd()
    except FileNotFoundError:
        raise InvalidInputError(
            "The working directory was deleted, and workers start in it: change to another one with os.chdir."
        ) from None
    directory = os.stat(".")  # the path can name another directory now
    return [dict(os.environ), path, directory.st_dev, directory.st_ino, list(sys.path)]


def default_workers(backend: str, devices: str = "auto", per_worker: int | Sequence[int] = 1) -> int:
    """Return one worker for each GPU (or ``per_worker`` of them) that the backend can use, else min(4, cores)."""
    if isinstance(per_worker, Sequence):
        return len(per_worker)
    usable = len(gpus_for(backend, devices))
    return max(usable // max(per_worker, 1), 1) if usable else min(4, len(physical_cores()))


def gpus_for(backend: str, devices: str) -> tuple[Gpu, ...]:
    """Return the GPUs that workers may use with this ``devices`` argument."""
    if devices == "cpu":
        return ()
    hidden = JAX_PLATFORM_NAMES if devices == "gpu" else ()  # they may keep only the caller on the CPU
    return usable_gpus(backend, {name: value for name, value in os.environ.items() if name not in hidden})


def check_workers(workers: object) -> int:
    """Return ``workers``; refuse values that are not whole numbers of 1 to a million."""
    if not is_whole(workers, 1):
        raise InvalidInputError(f"workers={workers!r}: give a whole number of workers, 1 or more.")
    if workers > _MAX_WORKERS:  # lists with an element for each worker follow, before the limit of a host is checked
        raise InvalidInputError(f"workers={workers!r}: give at most {_MAX_WORKERS:,} workers.")
    return int(workers)


def each_devices(devices: int | Sequence[int], workers: int) -> list[int]:
    """Return the number of devices of each worker; refuse invalid ``devices_per_worker``."""
    counts = list(devices) if isinstance(devices, Sequence) else [devices] * workers
    if len(counts) != workers or not all(is_whole(count, 1) for count in counts):
        raise InvalidInputError(
            f"devices_per_worker={devices!r}: give a whole number, 1 or more, or one for each of {workers}."
        )
    return [int(count) for count in counts]


def device_variables(backend: str, gpus: Sequence[Gpu]) -> Mapping[str, str]:
    """Return the environment variables that give a worker its GPUs, or keep it on the CPU."""
    if not gpus:
        # HIP treats an empty variable as one that is not set. Keras on PyTorch computes on a GPU of Intel or Apple if
        # there is one, and no variable hides it.
        hidden = {"HIP_VISIBLE_DEVICES": "-1"} if gpu_vendor(backend) == AMD else {}
        hidden |= {"KERAS_TORCH_DEVICE": "cpu"} if backend == "torch" else {}
        return {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", **hidden}
    vendor = gpu_vendor(backend, {})
    # Settings that keep the caller on the CPU must not apply to its workers.
    variables = {name: "" for name in JAX_PLATFORM_NAMES if "cpu" in os.environ.get(name, "").lower()}
    torch = {"KERAS_TORCH_DEVICE": "xpu" if vendor == INTEL else "cuda"} if "KERAS_TORCH_DEVICE" in os.environ else {}
    # A worker with GIVEN checks that its backend lists a GPU. Intel's GPUs are not listed, so they are not checked.
    gpu_count = {} if vendor == INTEL else {GIVEN: str(len(gpus))}
    return {"KERAS_BACKEND": backend, **showing(vendor, gpus), **gpu_count, **variables, **torch}


def show(rank: int, line: str) -> None:
    """Print a line of a worker's output, with its rank."""
    write_line(f"[{rank}] {line}", sys.stdout)
