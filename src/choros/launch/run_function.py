"""``choros.run``: call a function on every rank of a job and return the results of all ranks."""

from __future__ import annotations

import inspect
import logging
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from choros.argument_checks import check_flag, check_path, check_whole
from choros.backend_choice import announce
from choros.cluster.hardware import physical_cores
from choros.console import LAUNCHER
from choros.errors import InvalidInputError, WorkerFailedError, warn
from choros.launch.call_io import Returned, check_call, create, read_answer, read_value, write_call
from choros.launch.horovod_options import answers
from choros.launch.local_job import LaunchOptions, check_outside, horovod_variables, size_of, start
from choros.launch.process.child_process import python_variables
from choros.launch.process.failure_report import RankFailure, failure, first_cause
from choros.launch.process.rank_limit import check_ranks, crowding
from choros.launch.process.rank_supervisor import JobResult

logger = logging.getLogger(LAUNCHER)


def run(
    func: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    threads: int | None = None,
    bind: bool = True,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    output_filename: str | None = None,
    prefix_output_with_timestamp: bool = False,
    verbose: bool = False,
    **horovod: Any,
) -> list[Any]:
    """Call a function on every rank of a job on this host, and return the results of all ranks.

    The ranks are processes as ``choros run`` starts them, with rank, cores, threads and shared memory set. In the
    function ``choros.hvd.init()`` therefore connects to the other ranks, and a ``choros.Trainer`` uses them. The
    calling script is not run again, so it needs no ``__main__`` guard. Notebook functions, lambdas and closures are
    pickled by value. The output of the ranks is shown, marked with their rank. Interrupting the call ends the ranks.

    Args:
        func: the function to call.
        args: list or tuple of its arguments.
        kwargs: dict of its keyword arguments.
        num_proc: int. The number of ranks. Defaults to the slots of the hosts given, else to min(4, physical cores).
        np: int. The older name of ``num_proc``.
        threads: int. Threads of each rank. Defaults to the number of its cores.
        bind: bool. Whether to bind each rank to separate cores. Defaults to True.
        hosts: str, as "localhost:4". Hosts with slots; only this host is supported.
        hostfile: str. A file of lines "host slots=n", instead of ``hosts``.
        start_timeout: float. Seconds that ``hvd.init`` may wait for all ranks. Defaults to 30.
        output_filename: str. A folder that also gets the output of each rank, in rank.N/stdout and rank.N/stderr.
        prefix_output_with_timestamp: bool. Put the time before each line. Defaults to False.
        verbose: bool. Print the cores and threads of each rank. Defaults to False.
        **horovod: other keywords of ``horovod.run``: ignored or refused, with the reason.

    Returns:
        List of the returned values, in rank order.

    Raises:
        WorkerFailedError: a rank raised (with its rank, host and traceback), was killed (with its signal), or ended
            without a result; the other ranks were ended.
        NotSerializableError: the function or an argument cannot be pickled, and nothing was started; or a returned
            value cannot be unpickled here.
        InvalidInputError: an argument is not valid, or this process is a rank itself.

    Example:
        >>> import choros
        >>> choros.run(lambda a, b: a * b, (6, 7), num_proc=2)
        [42, 42]
    """
    check_outside("call the function itself there")
    bind = check_flag("bind", bind)
    if threads is not None:
        threads = check_whole("threads", threads, 1)
    if output_filename is not None:
        output_filename = check_path("output_filename", output_filename)
    size = _size(_requested_ranks(num_proc, np), hosts, hostfile)
    check_ranks(size, "give a smaller num_proc")
    check_call("choros.run", func, args, kwargs)
    if start_timeout is not None and not 0 < start_timeout < 1e6:
        raise InvalidInputError(f"start_timeout={start_timeout!r}: give a number of seconds above 0")
    if not sys.executable:
        raise InvalidInputError("this interpreter has no path (sys.executable is empty), so it starts no rank")
    for line in answers(horovod, inspect.signature(run).parameters):
        logger.info(f"{line}")
    options = LaunchOptions(
        size,
        threads,
        bind,
        folder=output_filename,
        timestamps=prefix_output_with_timestamp,
        variables=python_variables() | horovod_variables(start_timeout=start_timeout),
    )
    if warning := crowding(size, "ranks", "num_proc="):
        warn(f"{warning}.")
    announce()
    memories: list[int] = []
    try:
        memories += [create("choros-call")]
        write_call(memories[0], func, args, kwargs or {})
        memories += [create("choros-answer") for _ in range(size)]
        pairs = [(memories[0], answer) for answer in memories[1:]]
        outcome = start(
            [sys.executable, "-P", "-m", "choros.launch.call_entry"],
            options,
            own=[{"CHOROS_CALL": f"{call},{answer}"} for call, answer in pairs],
            own_fds=pairs,
            announce=False,
            verbose=verbose,
        )
        return _results(outcome, memories[1:])
    finally:
        for fd in memories:
            os.close(fd)


def _requested_ranks(num_proc: int | None, np: int | None) -> int | None:
    """Return the number of ranks, given under either name; None if it is not given."""
    for name, value in {"num_proc": num_proc, "np": np}.items():
        if value is not None:
            check_whole(name, value, 1, "ranks")
    if None not in (num_proc, np) and num_proc != np:
        raise InvalidInputError(f"num_proc={num_proc} and np={np} mean the same thing: give one of them")
    return np if num_proc is None else num_proc


def _size(requested: int | None, hosts: str | None, hostfile: str | None) -> int:
    return size_of(requested, hosts, hostfile) or min(4, len(physical_cores()))


def _results(outcome: JobResult, memories: Sequence[int]) -> list[Any]:
    """Return the values of all ranks, or raise the error that ended the job."""
    if outcome.signal:
        signal.raise_signal(outcome.signal)  # the ranks have ended; now let the signal act on this process
        raise KeyboardInterrupt
    answers = [read_answer(fd) for fd in memories]
    returned = [(answer, begin) for answer, begin in answers if isinstance(answer, Returned)]
    if outcome.code == 0 and len(returned) == len(answers):
        return [read_value(fd, rank, *returned[rank]) for rank, fd in enumerate(memories)]
    if outcome.code != 0 and not outcome.failed:
        raise BrokenPipeError("the output of the ranks is not read any more, so the ranks were ended")
    raise _failure(outcome, [answer for answer, _ in answers])


def _failure(outcome: JobResult, answers: Sequence[Returned | RankFailure | None]) -> WorkerFailedError:
    """Return the error of the rank that failed first, rather than of one that only lost its peer."""
    reports = {}
    for rank, ended, output in outcome.failed:
        answer = answers[rank]
        report = answer if isinstance(answer, RankFailure) else None
        reports[rank] = replace(RankFailure.of_process(ended, report), output=output)
    for rank, answer in enumerate(answers):
        if isinstance(answer, RankFailure) and rank not in reports:
            reports[rank] = answer
    if not outcome.failed:  # all ranks exited with 0, but some without a result
        silent = next(rank for rank, answer in enumerate(answers) if not isinstance(answer, Returned))
        reports = {silent: RankFailure(exit=0, host=platform.node())}
    # The supervisor's list comes first. Ranks that it ended afterwards may also have reported an error.
    rank = first_cause(reports)
    return failure(rank, len(answers), reports[rank], what="rank")
