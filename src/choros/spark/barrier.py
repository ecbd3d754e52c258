"""Barrier stages: a function runs in all tasks at once, each with its partition and a connection to the others.

Only ``mapInArrow(barrier=True).collect()`` is used, so classic Spark and Spark Connect share the code. Tasks connect
by sockets. Spark provides the host of rank 0, and its port (one of eight) is derived from the secret of the run.
Spark's ``allGather`` is not used: it takes a second, and an executor may die if its task is killed during the call.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import choros
from choros.cluster.hardware.network_address import addresses, own_address
from choros.comm.bootstrap.rendezvous import Rendezvous, RendezvousGreeting, join_rendezvous, ports
from choros.comm.messages import decode, header_of
from choros.comm.tcp.auth_socket import AuthListener
from choros.errors import InvalidDataError, InvalidInputError, PeerLostError, counted
from choros.spark.feature_columns import Columns
from choros.spark.row_store import Data, Form, RowStore, agree, local_folder
from choros.spark.task_errors import report, translate
from choros.spark.task_process import hold_back, same_version
from choros.spark.task_slots import choose_workers, is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS = "rank int, part int, payload binary"
_PART = 32 << 20  # most bytes of one row of the result
Work = Callable[["Task"], bytes]


@dataclass(frozen=True)
class RowsReport:
    """Report of a task about its rows, which all tasks get.

    Attributes:
        forms: dict. The dtype and the shape of a row of each array.
        rows: int. The number of rows to train with.
        validation_rows: int. The number of rows of validation.
        failed: bool. Whether the task could not take its rows.
    """

    forms: dict[str, tuple[str, list[int]]]
    rows: int = 0
    validation_rows: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Task:
    """The facts about one task of a barrier stage.

    Attributes:
        rank, size: int. Rank of the task and number of tasks.
        data, validation: Data. The rows of this task. ``validation`` is None without validation.
        rows, validation_rows: list of int. Number of rows of each task, by rank.
        swap: callable. An all-gather of bytes: returns the bytes of all tasks by rank. All tasks must call it; it can
            be called repeatedly.
        secret: bytes. A key that only the tasks of this run know.
        address: str. The address of this task's host for the other tasks.
        hosts: list of str. The hosts by rank, with the names that Spark uses.
        cores: int. Number of cores of this task (``spark.task.cpus``).
        gpus: list of str. Addresses of the GPUs that Spark assigned to this task.
        timeout: float. Seconds that the tasks wait for each other. Defaults to 1800.
    """

    rank: int
    size: int
    data: Data
    validation: Data | None
    rows: list[int]
    validation_rows: list[int]
    swap: Callable[[bytes], list[bytes]]
    secret: bytes
    address: str
    hosts: list[str]
    cores: int = 1
    gpus: list[str] = field(default_factory=list)
    timeout: float = 1800.0


@dataclass(frozen=True)
class _Plan:
    """The message that the driver sends to the tasks."""

    work: Work
    columns: Columns
    size: int
    secret: bytes
    timeout: float
    version: str


def run(
    frame: DataFrame,
    work: Work,
    workers: int | str = "auto",
    *,
    columns: Columns,
    partitioned: bool = False,
    profile: object = None,
    timeout: float = 1800.0,
) -> list[bytes]:
    """Run a function in a barrier stage with one task for each worker, each with a share of the rows.

    Args:
        frame: DataFrame, a result of ``choros.spark.feature_columns.normalise``.
        work: function of a ``Task`` that returns bytes. It is sent by cloudpickle.
        workers: int, or "auto" for all free task slots. Defaults to "auto".
        columns: the meaning of the frame's columns.
        partitioned: bool. True if the frame has as many partitions as workers, without a union or coalesce before. Then
            the partitions are kept; otherwise rows are distributed evenly. Defaults to False.
        profile: pyspark ResourceProfile of the tasks (cores and GPUs), or None.
        timeout: float. Seconds that the tasks wait for each other. Defaults to 1800.

    Returns:
        The bytes that each task returned, by rank.

    Raises:
        InvalidInputError: there are too few slots, dynamic allocation is on, or an executor lacks a package.
        InvalidDataError: rows are invalid.
        WorkerFailedError: a task failed. The error contains its traceback.
    """
    spark = frame.sparkSession
    size = int(workers) if profile is not None and workers != "auto" else choose_workers(spark, workers)
    plan = _Plan(work, columns, size, secrets.token_bytes(32), timeout, choros.__version__)
    if not (partitioned or _fits(frame, size)):
        frame = frame.repartition(size)
    how = {} if profile is None else {"profile": profile}
    try:
        rows = frame.mapInArrow(partial(_task, plan), _ROWS, barrier=True, **how).collect()
    except Exception as error:
        failed = translate(error, size)
        raise failed from None
    parts: dict[int, dict[int, bytes]] = {rank: {} for rank in range(size)}
    for row in rows:
        parts[row.rank][row.part] = bytes(row.payload)
    return [b"".join(parts[rank][number] for number in sorted(parts[rank])) for rank in range(size)]


def _fits(frame: DataFrame, size: int) -> bool:
    """Return whether a plain scan has as many partitions as workers, so that no shuffle is needed."""
    if is_connect(frame) or size == 1:
        return False
    try:
        plan = frame._jdf.queryExecution().executedPlan()
        kinds = {line.strip(" :+-*()0123456789").split(" ")[0] for line in plan.toString().splitlines() if line.strip()}
        plain = all(kind in ("Project", "Filter", "ColumnarToRow", "FileScan", "Scan") for kind in kinds)
        return bool(plain and frame._jdf.queryExecution().toRdd().getNumPartitions() == size)
    except Exception:  # these are internals of Spark: if they have changed, rows are repartitioned
        return False


def _task(plan: _Plan, batches: Iterable[Any]) -> Iterator[Any]:
    """Run the work in one task, and yield its result as rows."""
    from pyspark import BarrierTaskContext

    from choros.spark.pyarrow import payload

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    try:
        yield from payload(rank, _work(plan, context, rank, batches), _PART)
    except Exception as error:
        raise report(error, rank, plan.size) from None


def _work(plan: _Plan, context: Any, rank: int, batches: Iterable[Any]) -> bytes:
    cores, gpus = hold_back(context)
    hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
    if len(hosts) != plan.size:
        raise InvalidInputError(
            f"The frame has {counted(len(hosts), 'partition')}, but there are {counted(plan.size, 'worker')}: they "
            "must agree."
        )
    address = _address(hosts, rank)
    spill = RowStore(plan.columns, local_folder(rank))
    wrong: BaseException | None = None
    with ExitStack() as stack:
        stack.callback(spill.close)
        listener = (
            None if rank else stack.enter_context(AuthListener("", plan.secret, RendezvousGreeting, ports(plan.secret)))
        )
        place = f"{address if listener else hosts[0]}:{','.join(map(str, ports(plan.secret)))}"

        def swap(payload: bytes) -> list[bytes]:
            if listener:
                Rendezvous(listener, plan.size, from_variable=False)
            return join_rendezvous(place, plan.secret, rank, plan.timeout, from_variable=False)(payload)

        try:
            same_version(plan.version)
            spill.fill(batches)
        except Exception as error:
            # Raised only after the all-gather. The other tasks would wait in it until their timeout.
            wrong = error
        counts = (0, 0) if wrong else (spill.data({}).rows, _validating(plan, spill))
        forms = {name: (dtype, list(shape)) for name, (dtype, shape) in spill.forms().items()}
        local_report = RowsReport(forms, *counts, wrong is not None)
        texts = swap(json.dumps(header_of(local_report)).encode())
        reports = [decode(RowsReport, json.loads(text)) for text in texts]
        agreed = _agreed(plan, reports, wrong)
        task = Task(
            rank,
            plan.size,
            spill.data(agreed),
            spill.data(agreed, True) if plan.columns.marked else None,
            [report.rows for report in reports],
            [report.validation_rows for report in reports],
            swap,
            plan.secret,
            address,
            hosts,
            cores,
            gpus,
            plan.timeout,
        )
        return plan.work(task) or b""


def _validating(plan: _Plan, spill: RowStore) -> int:
    return spill.data({}, True).rows if plan.columns.marked else 0


def _agreed(plan: _Plan, reports: list[RowsReport], wrong: BaseException | None) -> dict[str, Form]:
    """Return the forms of the arrays over all tasks. Raise an error if a task failed or there are no rows."""
    if wrong is not None:
        raise wrong
    failed = [rank for rank, report in enumerate(reports) if report.failed]
    if failed:
        raise PeerLostError(f"Worker {failed[0]} could not take its rows.")
    if not sum(report.rows for report in reports):
        raise InvalidDataError("The frame has no rows to train with.")
    forms = [{name: (dtype, tuple(shape)) for name, (dtype, shape) in report.forms.items()} for report in reports]
    return agree(plan.columns, forms)


def _address(hosts: list[str], rank: int) -> str:
    """Return the address of this host for the other tasks: Spark's host name, unless CHOROS_NETWORK is set."""
    network = os.environ.get("CHOROS_NETWORK", "")
    if not network:
        try:
            address = socket.gethostbyname(hosts[rank])
        except OSError:
            address = ""
        single_host = address.startswith("127.") and len(set(hosts)) == 1  # the loopback is valid only on a single host
        if single_host or address in addresses().values():
            return address
    return own_address(network)
