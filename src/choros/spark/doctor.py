"""A report of each executor and of its differences from the driver: ``choros spark doctor``.

>>> from choros.spark import doctor
>>> facts = doctor.examine(spark)
>>> doctor.findings(facts), doctor.report(facts).splitlines()[-1]
([], 'Nothing is wrong.')
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from choros.backend_choice import named_backend
from choros.console import write_line
from choros.errors import ChorosError, SchedulerError, brief
from choros.launch.process.failure_report import amount
from choros.spark.java import session
from choros.spark.master_url import unreachable
from choros.spark.task_errors import translate
from choros.spark.task_slots import setting, wait_for_slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = ("choros", "keras", "numpy", "pyarrow", "pandas", "cloudpickle", "jax", "torch", "tensorflow", "pyspark")
_NEEDED = ("choros", "keras", "numpy", "cloudpickle")
_ROOM = 1 << 28  # bytes of /dev/shm that ranks of one host may need to communicate


def examine(spark: SparkSession) -> list[dict[str, Any]]:
    """Collect facts about the driver and every executor. Executors do not need choros for this.

    Args:
        spark: SparkSession.

    Returns:
        Facts of the driver, then of one task for each slot: ``host``, ``executor``, ``python``, ``packages`` (versions,
        None if not installed), ``cores``, ``task_cores``, ``shm`` (free bytes), ``backend`` (``KERAS_BACKEND``; for the
        driver the backend that Keras loads), ``gpus``, ``local`` (directory of its files), ``slots`` (driver only).

    Raises:
        InvalidInputError: no task could start. The message contains the reason.
    """
    count, look = max(wait_for_slots(spark, None)[0], 1), _looker(PACKAGES)
    barrier = setting(spark, "spark.dynamicAllocation.enabled", "false").lower() != "true"
    frame = spark.range(count).repartition(count).select("id")
    try:
        rows = frame.mapInArrow(_asker(look), "facts string", barrier=barrier).collect()
    except Exception as error:
        failed = translate(error, count)
        raise failed from None
    driver_facts = look() | {"executor": "driver", "slots": count, "backend": named_backend()[0]}
    return [
        driver_facts,
        *sorted((json.loads(row.facts) for row in rows), key=lambda one: (one["host"], one["executor"])),
    ]


def _asker(look: Callable[[], dict[str, Any]]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return the function of a task. As a closure it is pickled by value, so executors do not need choros."""

    def ask(batches: Iterable[Any]) -> Iterator[Any]:
        import importlib
        import json
        import os

        from pyspark import TaskContext

        for _ in batches:
            pass
        arrow, context = importlib.import_module("pyarrow"), TaskContext.get()
        facts = look()
        if context is not None:
            gpus = context.resources().get("gpu")
            facts["task_cores"] = context.cpus()
            facts["gpus"] = list(gpus.addresses) if gpus is not None else []
        facts["executor"] = os.environ.get("SPARK_EXECUTOR_DIRS", "") or str(os.getppid())
        yield arrow.RecordBatch.from_arrays([arrow.array([json.dumps(facts)])], names=["facts"])

    return ask


def _looker(packages: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Return a function that collects facts about its process with the standard library."""
    names = {name: ("tensorflow", "tensorflow-cpu") if name == "tensorflow" else (name,) for name in packages}

    def look() -> dict[str, Any]:
        import os
        import platform
        import shutil
        import sys
        from importlib import metadata

        versions: dict[str, str | None] = {}
        for name, several in names.items():
            versions[name] = None
            for process in several:
                try:
                    versions[name] = versions[name] or metadata.version(process)
                except metadata.PackageNotFoundError:
                    continue
        if versions.get("choros") is None and "choros" in names:
            try:
                import choros as there
            except ImportError:
                pass
            else:
                versions["choros"] = there.__version__
        shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return {
            "host": platform.node(),
            "python": platform.python_version(),
            "program": sys.executable,
            "packages": versions,
            "cores": cores,
            "shm": shm,
            "backend": os.environ.get("KERAS_BACKEND", ""),
            "local": os.environ.get("SPARK_LOCAL_DIRS", ""),
        }

    return look


def findings(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems as sentences; an empty list if there are none.

    Args:
        facts: a result of ``examine``.

    Example:
        >>> mine = {"host": "d", "python": "3.11.7", "packages": {"keras": "3.15"}, "shm": 1 << 30, "backend": "jax"}
        >>> findings([mine, {**mine, "host": "a", "packages": {"keras": None}}])
        ['The executors on a have no keras (the driver has 3.15): pip install keras==3.15 there, or ship it.']
    """
    driver, others = facts[0], facts[1:]
    problems: list[str] = []

    def add_problem(wrong: Sequence[dict[str, Any]], problem: str) -> None:
        hosts = ", ".join(dict.fromkeys(facts_of_task["host"] for facts_of_task in wrong))
        if wrong:
            problems.append(f"The executors on {hosts} {problem}")

    backend = driver["backend"]
    if backend and driver["packages"].get(backend, "unknown") is None:
        problems.append(
            f"The driver has no {backend}, which Keras would load: pip install 'choros[spark,{backend}]', or set "
            "KERAS_BACKEND to a backend that is installed."
        )
    minor = driver["python"].rpartition(".")[0]
    add_problem(
        [task for task in others if task["python"].rpartition(".")[0] != minor],
        f"run another Python than the driver's {minor}: set spark.pyspark.python, or ship an environment.",
    )
    for name, version in driver["packages"].items():
        if version is None:
            continue
        needed = name in _NEEDED or name == driver["backend"]
        missing = [task for task in others if task["packages"].get(name) is None]
        if needed:
            add_problem(
                missing, f"have no {name} (the driver has {version}): pip install {name}=={version} there, or ship it."
            )
        other = [task for task in others if task["packages"].get(name) not in (None, version)]
        if needed and other:
            versions = ", ".join(sorted({task["packages"][name] for task in other}))
            add_problem(other, f"have {name} {versions}, the driver {version}: install the same.")
    small = [task for task in others if task["shm"] < _ROOM]
    add_problem(small, "have less than 256 MB free in /dev/shm, which the workers of one host share: give them more.")
    backends = [task for task in others if task["backend"] not in ("", driver["backend"])]
    if driver["backend"]:
        add_problem(backends, f"have another KERAS_BACKEND: set spark.executorEnv.KERAS_BACKEND={driver['backend']}.")
    return problems


def report(facts: Sequence[dict[str, Any]]) -> str:
    """Return facts and findings as text, with one line for each task.

    Args:
        facts: a result of ``examine``.
    """
    lines = []
    for number, task in enumerate(facts):
        have = ", ".join(f"{name} {version}" for name, version in task["packages"].items() if version)
        place = "driver" if number == 0 else f"task {number - 1}"
        cores = f"{task.get('task_cores', task['cores'])} of {task['cores']} cores"
        gpus = f", GPUs {','.join(task['gpus'])}" if task.get("gpus") else ""
        lines.append(
            f"{place:8} {task['host']}: Python {task['python']}, {cores}{gpus}, {amount(task['shm'])} in /dev/shm; "
            f"{have}"
        )
    wrong = findings(facts)
    return "\n".join([*lines, "", *(wrong or ["Nothing is wrong."])])


def check(master: str = "") -> int:
    """Examine a cluster and print the report.

    Args:
        master: the URL of the cluster. Defaults to that of spark-submit or of the environment.

    Returns:
        The exit code: 1 if there is a problem, else 0.

    Raises:
        MissingPackageError: pyspark, Java or the backend is missing.
        InvalidInputError: no task could start.
        SchedulerError: no server answers at the URL, or Spark could not start there.
    """
    url = master or os.environ.get("SPARK_REMOTE", "")
    if reason := unreachable(url):
        raise SchedulerError(reason)
    try:
        spark = session(master, "choros doctor")
    except (ChorosError, OSError):
        raise
    except Exception as error:  # of pyspark, with the traceback of the JVM
        raise SchedulerError(
            f"Spark could not start at {url or 'the master of its own settings'} ({_cause(error)}): correct the URL, "
            "or see whether the cluster runs and can be reached from here"
        ) from None
    try:
        facts = examine(spark)
    finally:
        spark.stop()
    write_line(report(facts))
    return 1 if findings(facts) else 0


def _cause(error: Exception) -> str:
    """Return the cause of an error of pyspark: the message of the last Java exception, else the error in brief."""
    messages = re.findall(r"\b(?:java|org|io)\.[\w.$]+(?:Exception|Error): ([^\n]+)", str(error))
    return textwrap.shorten(messages[-1].rstrip("."), 200, placeholder=" ...") if messages else brief(error)
