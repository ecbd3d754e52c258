"""Errors of tasks for the user: with the worker's Python traceback, without the traceback of the JVM."""

from __future__ import annotations

import base64
import json
import re
import textwrap
import time
import zlib
from dataclasses import dataclass, replace

import choros.errors
from choros.comm.messages import decode, header_of
from choros.errors import ChorosError, InvalidInputError, WorkerFailedError, counted
from choros.launch.process.failure_report import RankFailure, failure, raised

_SAID = re.compile(r"<choros:([A-Za-z0-9+/=]+)>")
_CANCELLED = re.compile(r"\bJob \d+ cancelled\b|\[OPERATION_CANCELED\b")
_MOST = 16_000  # most characters of a traceback
_WAIT = 2.0  # seconds that other tasks wait, so that the task that failed first is reported first
_ELSEWHERE = (
    "The executors' Python needs what this one has: install it there (pip install 'choros[spark,jax]', or with "
    "this one's backend), or ship an environment with spark.archives and PYSPARK_PYTHON."
)


class Cancelled(WorkerFailedError):
    """The job was cancelled in Spark, so it must not be restarted."""


@dataclass(frozen=True)
class TaskReport:
    """Report of a failed task."""

    rank: int
    size: int
    failure: RankFailure


class TaskFailedError(RuntimeError):
    """The error of a task. Its text contains all facts for the driver."""


def report(error: BaseException, rank: int, size: int) -> TaskFailedError:
    """Return the exception that a failed task raises. If it failed only because another task did, wait 2 s first.

    Args:
        error: the exception.
        rank: int. The rank of the task.
        size: int. Number of tasks.

    Example:
        >>> failed = report(ValueError("wrong"), 1, 2)
        >>> str(translate(failed, 2)).partition(" on host")[0]
        'worker 1 of 2 (counted from 0)'
    """
    failed = raised(error)
    failed = replace(failed, traceback=failed.traceback[-_MOST:])
    if failed.is_echo:
        time.sleep(_WAIT)  # meanwhile Spark ends this process because of the other failure
    text = json.dumps(header_of(TaskReport(rank, size, failed)))
    summary = _short(f"worker {rank} of {size}: {failed.type}: {failed.message}")  # readable text for Spark's logs
    return TaskFailedError(f"{summary} <choros:{base64.b64encode(zlib.compress(text.encode())).decode()}>")


def translate(error: BaseException, size: int) -> BaseException:
    """Return the exception to raise in the driver for the exception of a job.

    Args:
        error: the exception of pyspark.
        size: int. Number of workers.
    """
    if isinstance(error, ChorosError) or type(error).__name__ in ("AnalysisException", "ParseException"):
        return error
    text = str(error)
    texts = [zlib.decompress(base64.b64decode(text)) for text in dict.fromkeys(_SAID.findall(text))]
    reports = [decode(TaskReport, json.loads(text)) for text in texts]
    for report in sorted(reports, key=lambda each: each.failure.is_echo):
        return _reported(report)
    if _CANCELLED.search(text):
        return Cancelled(
            "The training was cancelled in Spark (on its page, by cancelAllJobs, cancelJobGroup or interruptAll), "
            "and is not restarted.",
            rank=0,
            traceback=text,
        )
    if "SPARK-24819" in text or "requires more slots" in text:
        return InvalidInputError(
            f"This cluster cannot run {counted(size, 'worker')} at once, which Spark found when it had waited for "
            "them: give fewer workers, or more executors or cores."
        )
    if "SPARK-24942" in text:
        return InvalidInputError(
            "Spark starts no workers that must run all at once with dynamic allocation: start the session with "
            "spark.dynamicAllocation.enabled=false."
        )
    if "maxResultSize" in text:
        return InvalidInputError(
            "The trained model is larger than what Spark lets tasks send to the driver: start the session with a "
            "larger spark.driver.maxResultSize."
        )
    if missing := re.search(r"ModuleNotFoundError: No module named '([^']+)'", text):
        return InvalidInputError(f"An executor has no module {missing[1]!r}. {_ELSEWHERE}")
    if "PYTHON_VERSION_MISMATCH" in text:
        return InvalidInputError(f"The executors' Python is of another version than this one. {_ELSEWHERE}")
    return _lost(text, size)


def _reported(report: TaskReport) -> BaseException:
    kind = getattr(choros.errors, report.failure.type.removeprefix("choros.errors."), None)
    if isinstance(kind, type) and issubclass(kind, InvalidInputError):
        return kind(report.failure.message)
    return failure(report.rank, report.size, report.failure)


def _lost(text: str, size: int) -> WorkerFailedError:
    """Return the error for a task that sent no report, from the text of Spark."""
    rank = re.search(r"ResultTask\(\d+, (\d+)\)|[Tt]ask (\d+)(?:\.\d+)? in stage", text)
    host = re.search(r"\(TID \d+\) \(([^ )]+) executor", text)
    number = int(next(filter(None, rank.groups()), 0)) if rank else 0
    python = re.findall(r"^\w[\w.]*(?:Error|Exception): .*$", text, re.MULTILINE)
    ended = "Python worker exited unexpectedly" in text or "worker crashed" in text
    lost = re.search(r"ExecutorLostFailure[^\n]*|[Ee]xecutor \S+ exited[^\n]*|Command exited with code \d+", text)
    if ended or lost:
        cause = "its Python process was ended" if ended else "its executor was lost"
        detail = f" ({_short(lost[0])})" if lost else ""
        why = (
            "If memory ran out, give Spark more (spark.executor.memoryOverhead, spark.executor.pyspark.memory), or use "
            "fewer workers or a smaller batch; see the executor's stderr."
        )
    else:
        cause, detail = "Spark ended it", f": {_short(python[0] if python else text)}"
        why = "Look at what makes the frame first: frame.count() runs it alone."
    where = f" on {host[1]}" if host else ""
    return WorkerFailedError(
        f"worker {number} of {size} (counted from 0){where} failed; {cause}{detail}.\n\n{why}",
        rank=number,
        host=host[1] if host else "",
        traceback=text,
    )


def _short(text: str) -> str:
    return textwrap.shorten(text, 300, placeholder=" ...")
