"""The plan of a comparison, and settings that are required before Keras is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from choros import algorithms
from choros.backend_choice import BACKENDS, is_installed
from choros.cluster.hardware import usable_cores, variables
from choros.errors import InvalidInputError, MissingPackageError

DEFAULT = "allreduce,localsgd,aeasgd"
BATCHES = {True: 64, False: 128}  # rows of a global batch, for images and for tables
# Accuracies to which the seconds are measured. On the 517 digits held back an accuracy is uncertain by 2 points, so the
# time to an accuracy near the final 0.97 is a matter of chance.
TARGETS = {"digits": 0.9, "mnist": 0.97, "higgs": 0.8}
EPOCHS = {"digits": 5, "mnist": 10, "higgs": 10}
PLAIN_VARIABLES = ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS")  # for plain fit, as for workers
_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison.

    Attributes:
        algorithms: tuple of ``Algorithm``, in the order in which they run.
        backend: str. Keras' backend.
        workers, epochs, batch_size: int. ``batch_size`` is the global batch.
        seeds: tuple of int. Each algorithm trains once from each seed.
        threads: int. Threads of each worker; None for the number from the environment.
        target: float. The accuracy to which the seconds are measured.
    """

    algorithms: tuple[algorithms.Algorithm, ...]
    backend: str
    workers: int = 2
    epochs: int = 5
    batch_size: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    threads: int | None = None
    target: float = 0.9


def choose(names: str | None) -> tuple[algorithms.Algorithm, ...]:
    """Return the algorithms of a comma-separated list; ``DEFAULT`` for None, and all for "all".

    Args:
        names: such as "aeasgd,all-reduce". Case and hyphens do not matter. Repeated names count once.

    Returns:
        Algorithms with their default settings.

    Raises:
        UnknownAlgorithmError: no algorithm has this name. The message contains the nearest name.
        InvalidInputError: the list is empty.

    Example:
        >>> choose("Single, local-sgd,single")
        (Single(window=1), LocalSGD(window=8))
    """
    if names is not None and names.strip().lower() == "all":
        return tuple(kind() for kind in algorithms.ALL)
    requested = [name.strip() for name in (DEFAULT if names is None else names).split(",") if name.strip()]
    if not requested:
        raise InvalidInputError(f"--algorithms {names!r} names none: give a list such as 'single,allreduce,aeasgd'.")
    return tuple(dict.fromkeys(algorithms.by_name(name) for name in requested))


def choose_backend(requested: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the requested backend, else that of ``KERAS_BACKEND``, else the first installed one.

    Raises:
        InvalidInputError: the backend is unknown.
        MissingPackageError: the backend is not installed. The message names the extra that installs it.

    Example:
        >>> choose_backend(None, {"KERAS_BACKEND": "jax"})
        'jax'
    """
    backend = requested or environment.get("KERAS_BACKEND") or next(filter(is_installed, BACKENDS), "jax")
    if backend not in BACKENDS:
        raise InvalidInputError(
            f"KERAS_BACKEND is {backend!r}: the demo runs on {', '.join(BACKENDS)}; give --backend."
        )
    if not is_installed(backend):
        raise MissingPackageError(f'The backend {backend} is not installed: pip install "choros[{backend},demo]".')
    return backend


def check_installed() -> None:
    """Refuse to start without the packages that scores and figures need.

    Raises:
        MissingPackageError: scikit-learn or matplotlib is missing. The message names the extra that installs them.
    """
    missing = [package for module, package in _NEEDED.items() if not is_installed(module)]
    if missing:
        raise MissingPackageError(
            f'The demo needs {" and ".join(missing)}, not installed here: pip install "choros[demo]".'
        )


def prepare(backend: str, workers: int) -> int | None:
    """Set Keras' backend, and limit this process to one thread, so that the workers can use all cores.

    Call this before Keras is imported. Thread variables that the user has set are kept, also for workers.

    Args:
        backend: str. Keras' backend.
        workers: int. Number of workers that share the cores.

    Returns:
        The number of threads of each worker; None if the user has set thread variables.

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
    if backend != "tensorflow":  # if installed, Keras imports TensorFlow, whose messages would disturb the progress
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    chosen = any(name in os.environ for name in variables(1))
    os.environ.update(variables(1, keep=os.environ))
    return None if chosen else max(1, len(usable_cores()) // max(1, workers))
