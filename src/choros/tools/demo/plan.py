"""The plan of a demo's comparison, and what must be set before Keras is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from choros import algorithms
from choros.cluster.hardware import usable_cores, variables
from choros.errors import InvalidInputError

BACKENDS = ("jax", "torch", "tensorflow")
_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison.

    Attributes:
        algorithms: tuple of ``Algorithm``, in the order in which they run.
        backend: str. Keras' backend.
        workers, epochs, batch_size: int. ``batch_size`` is the global batch.
        seeds: tuple of int. Each algorithm is trained once from each.
        threads: int. Of each worker; None leaves it to the environment.
    """

    algorithms: tuple[algorithms.Algorithm, ...]
    backend: str
    workers: int = 2
    epochs: int = 10
    batch_size: int = 128
    seeds: tuple[int, ...] = (0,)
    threads: int | None = None


def choose(names: str | None) -> tuple[algorithms.Algorithm, ...]:
    """Return the algorithms of a comma-separated list, all of them when there is none.

    Args:
        names: "aeasgd,all-reduce"; case and hyphens do not matter, a name that comes twice counts once.

    Returns:
        Objects with the settings that Choros ships.

    Raises:
        UnknownAlgorithmError: no algorithm has that name; the message gives the nearest one.
        InvalidInputError: the list is empty.

    Example:
        >>> choose("Single, local-sgd,single")
        (Single(window=1), LocalSGD(window=8))
    """
    if names is None:
        return tuple(kind() for kind in algorithms.ALL)
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise InvalidInputError(f"--algorithms {names!r} names none: give a list such as 'single,allreduce,aeasgd'.")
    return tuple(dict.fromkeys(algorithms.by_name(name) for name in asked))


def choose_backend(asked: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the backend that was asked for, else that of ``KERAS_BACKEND``, else the first that is installed.

    Raises:
        InvalidInputError: it is not installed; the message names the extra that brings it.

    Example:
        >>> choose_backend(None, {"KERAS_BACKEND": "jax"})
        'jax'
    """
    backend = asked or environment.get("KERAS_BACKEND") or next(filter(_installed, BACKENDS), "jax")
    if backend not in BACKENDS:
        raise InvalidInputError(
            f"KERAS_BACKEND is {backend!r}: the demo runs on {', '.join(BACKENDS)}; give --backend."
        )
    if not _installed(backend):
        raise InvalidInputError(f'The backend {backend} is not installed: pip install "choros[{backend},demo]".')
    return backend


def check_installed(modules: Iterable[str] = _NEEDED) -> None:
    """Refuse to begin what could not be finished.

    Raises:
        InvalidInputError: scikit-learn or matplotlib is missing; the message names the extra that brings them.
    """
    missing = [_NEEDED.get(module, module) for module in modules if not _installed(module)]
    if missing:
        raise InvalidInputError(
            f'The demo needs {" and ".join(missing)}, not installed here: pip install "choros[demo]".'
        )


def prepare(backend: str, workers: int) -> int | None:
    """Set Keras' backend, and hold this process to one thread, so that the workers have the cores to themselves.

    To be called before Keras is imported. Thread variables that the user has set stay as they are, also for workers.

    Args:
        backend: str. Keras' backend.
        workers: int. How many share the cores.

    Returns:
        The threads of each worker, None where the user's own variables say it.

    Raises:
        InvalidInputError: Keras was already imported in this process with another backend.
    """
    running = sys.modules.get("keras")
    if running is not None and running.backend.backend() != backend:
        raise InvalidInputError(
            f"Keras already runs on {running.backend.backend()} in this process: start the demo in a new one."
        )
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if backend != "tensorflow":  # Keras imports it where it is installed, and it would print into the progress
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    chosen = any(name in os.environ for name in variables(1))
    os.environ.update(variables(1, keep=os.environ))
    return None if chosen else max(1, len(usable_cores()) // max(1, workers))


def _installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None
