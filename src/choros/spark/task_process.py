"""Set-up of a task's Python process: cores and devices, before any framework is imported, and the driver's Keras."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import choros
from choros.backend_choice import BACKENDS, is_installed
from choros.cluster.hardware import variables
from choros.cluster.hardware.gpu_builds import AMD, NVIDIA
from choros.cluster.hardware.gpus import VARIABLE, visible_gpus
from choros.errors import InvalidInputError, NoBackendError
from choros.launch.process.hidden_packages import lean_keras_import
from choros.spark.row_store import local_folder


def hold_back(context: Any) -> tuple[int, list[str]]:
    """Limit this process to the cores and devices of its task.

    Args:
        context: pyspark TaskContext.

    Returns:
        The number of cores, and the addresses of the GPUs that Spark assigned to this task.

    Raises:
        InvalidInputError: Spark reuses this process, and it has already imported a framework with other GPUs.
    """
    cores = max(int(context.cpus()), 1)
    for name, value in variables(cores, keep=os.environ).items():
        os.environ[name] = value
    _keep_compiled()
    assigned = context.resources().get("gpu")
    gpus = list(assigned.addresses) if assigned is not None else []
    if gpus:
        shown, variable = ",".join(gpus), VARIABLE[AMD if visible_gpus(AMD, {}) else NVIDIA]
        loaded = [name for name in BACKENDS if name in sys.modules]
        if loaded and os.environ.get(variable) != shown:
            raise InvalidInputError(
                f"A Python worker that has loaded {loaded[0]} with other GPUs got this task: start the session with "
                "spark.python.worker.reuse=false."
            )
        os.environ[variable] = shown
    return cores, gpus


def _keep_compiled() -> None:
    """Set JAX's compilation cache to a local directory of the application, which Spark deletes at the end.

    Each run traces its step again. With the cache, the step of the same model is not compiled again in another process.
    """
    if os.environ.get("SPARK_LOCAL_DIRS"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(local_folder(0), "choros-jax"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def same_version(version: str) -> None:
    """Refuse a process with another version of choros than the driver.

    Raises:
        InvalidInputError: the versions differ. The message contains both.
    """
    if choros.__version__ != version:
        raise InvalidInputError(
            f"The executor on {os.uname().nodename} has choros {choros.__version__}, the caller {version}: they must "
            "be the same, so install this one there, or ship it with spark.archives."
        )


def keras_here() -> dict[str, Any]:
    """Return the backend and the settings of this process's Keras, for tasks."""
    import keras

    from choros.training.validation import keras_settings

    return {"backend": keras.backend.backend(), "settings": keras_settings()}


def keras_there(settings: dict[str, Any]) -> None:
    """Import Keras with the backend and the settings of the driver.

    Args:
        settings: a result of ``keras_here``.

    Raises:
        InvalidInputError: Spark reuses this process, and it has imported Keras with another backend.
        NoBackendError: the driver's backend is not installed here.
    """
    if "keras" not in sys.modules:
        if not is_installed(settings["backend"]):
            raise NoBackendError(
                f"The executor on {os.uname().nodename} has no {settings['backend']} ({sys.executable}), on which the "
                f"caller's Keras runs: install it there (pip install 'choros[spark,{settings['backend']}]'), or ship "
                "an environment (choros spark pack)."
            )
        os.environ["KERAS_BACKEND"] = settings["backend"]
    with lean_keras_import():
        import keras

    if keras.backend.backend() != settings["backend"]:
        raise InvalidInputError(
            f"A Python worker has loaded Keras with {keras.backend.backend()}, the caller has {settings['backend']}: "
            f"set spark.executorEnv.KERAS_BACKEND={settings['backend']}, or start the session with "
            "spark.python.worker.reuse=false."
        )
    from choros.training.worker.main import configure_keras

    configure_keras(settings["settings"])


def on_cpu_unless_given(resources: Mapping[str, Any]) -> None:
    """Restrict JAX to the CPU in a task without a GPU, unless ``JAX_PLATFORMS`` is set.

    Args:
        resources: the resources of the task by name, as ``TaskContext.resources()`` returns them.
    """
    if "gpu" not in resources:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
