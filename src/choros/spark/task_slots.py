"""The number of tasks that a cluster can run at once: a barrier stage needs as many, all free at the same time."""

from __future__ import annotations

import time
from typing import Any

from choros.errors import InvalidInputError

_YOUNG = 30.0  # seconds after its start in which an application's executors may still be coming
_SETTLED = 3.0  # seconds without a new one after which those that are there count as all
_AGAIN = 60.0  # seconds in which executors that were lost may be replaced
_seen: dict[str, int] = {}  # the most slots that an application had


def is_connect(thing: Any) -> bool:
    """Return whether a session or a frame is Spark Connect's.

    Example:
        >>> is_connect(object())
        False
    """
    return ".connect." in f"{type(thing).__module__}."


def choose_workers(spark: Any, workers: int | str | None) -> int:
    """Return how many workers to train with; refuse more than there are slots, before any job.

    Args:
        spark: SparkSession.
        workers: int, or "auto": all task slots that are free.

    Raises:
        InvalidInputError: too few slots, dynamic allocation, or no number.
    """
    auto = workers in (None, "auto")
    if not auto and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise InvalidInputError(
            f"workers={workers!r}: give a whole number, 1 or more, or 'auto' for all free task slots."
        )
    refuse_dynamic(spark)
    wanted = 1 if auto else int(workers or 1)
    there, free = _waited(spark, None if auto else wanted)
    if there < wanted:
        raise InvalidInputError(
            f"workers={wanted}, but this cluster has {there} task slot{'s' * (there != 1)} "
            f"({_said(spark)}), and all workers run at once: give workers={max(there, 1)} or 'auto', more executors or "
            "cores, or a smaller spark.task.cpus."
        )
    return max(free, 1) if auto else wanted


def refuse_dynamic(spark: Any) -> None:
    """Refuse a session whose executors come and go, in which Spark runs no barrier stage.

    Raises:
        InvalidInputError: dynamic allocation is on.
    """
    if setting(spark, "spark.dynamicAllocation.enabled", "false").lower() == "true" and not _local(spark):
        raise InvalidInputError(
            "spark.dynamicAllocation.enabled is true: Spark starts no workers that must run all at once then. Start "
            "the session with spark.dynamicAllocation.enabled=false and spark.executor.instances=N."
        )


def setting(spark: Any, name: str, default: str) -> str:
    """Return a setting of the session.

    Args:
        spark: SparkSession.
        name: str.
        default: str. Where it is not set, or may not be read.
    """
    try:
        return str(spark.conf.get(name, default))
    except Exception:  # a server may keep its settings to itself
        return default


def _waited(spark: Any, wanted: int | None) -> tuple[int, int]:
    """Slots, and how many of them are free, once an application that has just begun has its executors."""
    there, free = slots(spark)
    if is_connect(spark) or _local(spark):
        return there, free
    context, now = spark.sparkContext, time.monotonic()
    most = _seen.get(context.applicationId, 0)
    end = now + _YOUNG - (time.time() - context.startTime / 1000)
    if there < (wanted or most) <= most:  # executors were lost; others come in their place
        end = now + _AGAIN
    changed = now
    while time.monotonic() < end and (there < wanted if wanted else time.monotonic() - changed < _SETTLED or not there):
        time.sleep(0.2)
        before = there
        there, free = slots(spark)
        changed = time.monotonic() if there != before else changed
    _seen[context.applicationId] = max(there, most)
    return there, free


def slots(spark: Any) -> tuple[int, int]:
    """Return how many tasks can run at once, and how many more can now.

    Args:
        spark: SparkSession. Of Connect, which does not tell, it is what Spark takes for the default parallelism.
    """
    if is_connect(spark):
        from pyspark.sql import functions as F

        master = setting(spark, "spark.master", "")
        inside = master.removeprefix("local[").partition("]")[0].partition(",")[0]
        there = (
            int(inside)
            if master.startswith("local[") and inside.isdecimal()
            else int(spark.range(1 << 16).select(F.spark_partition_id()).distinct().count())
        )
        cpus = int(setting(spark, "spark.task.cpus", "1"))
        return there // cpus, there // cpus
    context = spark.sparkContext
    scala = context._jsc.sc()
    try:
        there = int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # not every Spark has it under this name
        there = int(context.defaultParallelism)
    tracker = context.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return there, max(there - sum(stage.numActiveTasks for stage in stages if stage), 0)


def _local(spark: Any) -> bool:
    master = setting(spark, "spark.master", "")
    return master.startswith("local") and not master.startswith("local-cluster")


def _said(spark: Any) -> str:
    return f"spark.master={setting(spark, 'spark.master', 'unknown')}"
