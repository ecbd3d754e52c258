"""The number of tasks that a cluster can run at once. A barrier stage needs all its slots at the same time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from choros.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_YOUNG = 30.0  # seconds after the start of an application in which executors may still register
_SETTLED = 3.0  # seconds without a change after which the number of slots is final
_LATE = 2.0  # seconds in which Spark may still report the tasks of a job that has ended
_AGAIN = 60.0  # seconds to wait for replacements of lost executors
_seen: dict[str, int] = {}  # the largest number of slots of each application


def is_connect(session: object) -> bool:
    """Return whether a session or a frame belongs to Spark Connect.

    Example:
        >>> is_connect(object())
        False
    """
    return ".connect." in f"{type(session).__module__}."


def choose_workers(spark: SparkSession, workers: int | str | None) -> int:
    """Return the number of workers; refuse more workers than slots, before any job starts.

    Args:
        spark: SparkSession.
        workers: int; or "auto" or None for all free task slots, at least 1.

    Raises:
        InvalidInputError: there are too few slots, dynamic allocation is on, or ``workers`` is invalid.
    """
    auto = workers in (None, "auto")
    if not auto and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise InvalidInputError(
            f"workers={workers!r}: give a whole number, 1 or more, or 'auto' for all free task slots."
        )
    refuse_dynamic(spark)
    requested = 1 if auto else int(workers or 1)
    available, free = wait_for_slots(spark, None if auto else requested)
    if available < requested:
        raise InvalidInputError(
            f"workers={requested}, but this cluster has {available} task slot{'s' * (available != 1)} "
            f"({_master_text(spark)}), and all workers run at once: give workers={max(available, 1)} or 'auto', more "
            "executors or cores, or a smaller spark.task.cpus."
        )
    return max(free, 1) if auto else requested


def refuse_dynamic(spark: SparkSession) -> None:
    """Refuse a session with dynamic allocation, in which Spark runs no barrier stage.

    Raises:
        InvalidInputError: dynamic allocation is on, and the master is not local.
    """
    if setting(spark, "spark.dynamicAllocation.enabled", "false").lower() == "true" and not _local(spark):
        raise InvalidInputError(
            "spark.dynamicAllocation.enabled is true: Spark starts no workers that must run all at once then. Start "
            "the session with spark.dynamicAllocation.enabled=false and spark.executor.instances=N."
        )


def setting(spark: SparkSession, name: str, default: str) -> str:
    """Return a setting of the session.

    Args:
        spark: SparkSession.
        name: str.
        default: str. The result if the setting is not set or cannot be read.
    """
    try:
        return str(spark.conf.get(name, default))
    except Exception:  # a server may refuse to show a setting
        return default


def wait_for_slots(spark: SparkSession, requested: int | None) -> tuple[int, int]:
    """Return the numbers of slots and of free slots.

    If the application has just started, wait for its executors. If slots are not free, wait for the report of tasks
    that have just ended: Spark returns the result of a job before its status lists the job as ended.

    Args:
        spark: SparkSession.
        requested: number of slots to wait for, or None: those that there are.
    """
    available, free = slots(spark)
    if not (is_connect(spark) or _local(spark)):
        available, free = _executors(spark, requested, available, free)
    end = time.monotonic() + _LATE
    while requested is None and free < available and time.monotonic() < end:
        time.sleep(0.05)
        available, free = slots(spark)
    return available, free


def _executors(spark: SparkSession, requested: int | None, available: int, free: int) -> tuple[int, int]:
    """Wait for the executors of a young application, or for replacements of lost ones; see ``wait_for_slots``."""
    context, now = spark.sparkContext, time.monotonic()
    most = _seen.get(context.applicationId, 0)
    end = now + _YOUNG - (time.time() - context.startTime / 1000)
    if available < (requested or most) <= most:  # executors were lost, and may be replaced
        end = now + _AGAIN
    changed = now
    while time.monotonic() < end and (
        available < requested if requested else time.monotonic() - changed < _SETTLED or not available
    ):
        time.sleep(0.2)
        before = available
        available, free = slots(spark)
        changed = time.monotonic() if available != before else changed
    _seen[context.applicationId] = max(available, most)
    return available, free


def slots(spark: SparkSession) -> tuple[int, int]:
    """Return the number of tasks that can run at once, and the number that can start now.

    Args:
        spark: SparkSession. Spark Connect reports neither number, so both are derived from the default parallelism.
    """
    if is_connect(spark):
        from pyspark.sql import functions as F

        master = setting(spark, "spark.master", "")
        inside = master.removeprefix("local[").partition("]")[0].partition(",")[0]
        available = (
            int(inside)
            if master.startswith("local[") and inside.isdecimal()
            else int(spark.range(1 << 16).select(F.spark_partition_id()).distinct().count())
        )
        cpus = int(setting(spark, "spark.task.cpus", "1"))
        return available // cpus, available // cpus
    context = spark.sparkContext
    scala = context._jsc.sc()
    try:
        available = int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # an internal method, which some versions of Spark lack
        available = int(context.defaultParallelism)
    tracker = context.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return available, max(available - sum(stage.numActiveTasks for stage in stages if stage), 0)


def _local(spark: SparkSession) -> bool:
    master = setting(spark, "spark.master", "")
    return master.startswith("local") and not master.startswith("local-cluster")


def _master_text(spark: SparkSession) -> str:
    return f"spark.master={setting(spark, 'spark.master', 'unknown')}"
