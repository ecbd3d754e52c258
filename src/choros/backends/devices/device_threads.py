"""One thread for each device of a worker. For a CPU device, the thread has separate cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from choros.backends.devices import limit_threads, scope
from choros.cluster.hardware import plan
from choros.cluster.hardware.cpu_affinity import physical_cores


class DeviceThreads:
    """Threads that call the same function, each in the scope of one device.

    Args:
        devices: names in Keras' form (``"cpu:0"``).

    Example:
        >>> with DeviceThreads(["cpu:0"]) as threads:
        ...     threads.each(lambda number: number + 10)
        [10]
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = list(devices)
        cores = physical_cores()
        bindings = plan(len(devices), cores=cores)
        self._threads = [
            ThreadPoolExecutor(1, f"choros-{name}", _settle, (name, binding.cores, binding.threads))
            for name, binding in zip(devices, bindings, strict=True)
        ]

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function(index of the device)`` in every thread; return its values, or raise the first error."""
        return self._done([self._submit(number, function, number) for number in range(len(self.devices))])

    def first(self, function: Callable[[], Any]) -> Any:
        """Call a function in the first device's thread."""
        return self._done([self._submit(0, function)])[0]

    def _submit(self, number: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._threads[number].submit(_in_scope, self.devices[number], function, args)

    def _done(self, futures: list[Future[Any]]) -> list[Any]:
        for future in futures:
            future.exception()  # wait for all threads before an error is raised
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads after their pending calls."""
        for thread in self._threads:
            thread.shutdown()

    def __enter__(self) -> DeviceThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settle(name: str, cores: tuple[int, ...], threads: int) -> None:
    if name.startswith("cpu"):
        if cores:
            os.sched_setaffinity(0, cores)  # applies to this thread and to the threads that it starts
        limit_threads(threads)


def _in_scope(device: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        with scope(device):
            return function(*args)
    except Exception as error:
        error.add_note(f"(on {device})")
        raise
