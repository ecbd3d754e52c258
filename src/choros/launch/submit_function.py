"""``choros.submit``: call a function on every rank of a cluster's job. ``SubmittedJob`` has the results."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from choros import backend_choice
from choros.argument_checks import check_number, check_path, check_text, check_texts, check_variables, check_whole
from choros.errors import CommTimeoutError, InvalidInputError, SchedulerError, counted, warn
from choros.launch.call_io import Returned, check_call, read_answer, read_value, write_call
from choros.launch.job_entry import CALL, answer_file
from choros.launch.local_job import check_outside
from choros.launch.private_file import create_private, digest_of, open_private
from choros.launch.process.child_process import python_variables
from choros.launch.process.failure_report import RankFailure, failure, first_cause
from choros.launch.schedulers import (
    JobOptions,
    Scheduler,
    cancel_job,
    check_name,
    complete,
    find_scheduler,
    follow_log,
    has_ended,
    job_of,
    job_status,
    name_of,
    require_program,
    submit_job,
    write_script,
)
from choros.launch.schedulers.commands import NoJobIdError
from choros.launch.schedulers.option_names import keyword_names
from choros.launch.schedulers.slurm import srun_mpi_warning

logger = logging.getLogger(__name__)

_RECORD = "job.json"
_TEXT_ARGUMENTS = {  # what each argument takes, for messages
    "on": "the name of a scheduler, such as 'slurm'",
    "site": "the name of a site, such as 'polaris'",
    "account": "the name of an account",
    "queue": "the name of a queue, such as 'debug'",
    "filesystems": "the names of file systems, such as 'home:eagle'",
    "mpi": "the name of an MPI, such as 'mpich'",
    "python": "the path of a Python program",
    "name": "a name, such as 'train'",
    "time": "a time limit, such as '1:30:00' or '90m'",
}
_OPTIONAL_TEXTS = ("time", "filesystems")  # texts that may be None
_MINIMA = {"nodes": 1, "ranks_per_node": 1, "cores": 1, "gpus": 0, "signal": 0}
_FILE_POLL_SECONDS = 0.5  # between two looks for the ranks' answers
_QUERY_SECONDS = (1.0, 15.0)  # between two queries of the scheduler: at first, and at most
_FILE_DELAY_SECONDS = 10.0  # after a job's end, in which a shared folder may still lack the newest files


@dataclass(frozen=True)
class SubmittedJob:
    """A job of ``choros.submit``. It stays valid when the process that submitted it has ended: see ``load``.

    Example:
        >>> job = SubmittedJob("17", "slurm", 8, ".choros-train-x1", "/home/me")
        >>> job.id, job.size
        ('17', 8)

    Attributes:
        id: str. The scheduler's id of the job.
        on: str. The scheduler's name.
        size: int. The number of ranks.
        folder: str. The private folder with the call, the script and the answers.
        directory: str. The directory from which the job was submitted, with its log.
    """

    id: str
    on: str
    size: int
    folder: str
    directory: str

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> SubmittedJob:
        """Return the job of a folder, also in another process than the one that submitted it.

        Args:
            folder: ``SubmittedJob.folder``.

        Raises:
            InvalidInputError: the folder has no job, or other users may read or write the file that describes it.
        """
        file = Path(check_path("folder", folder), _RECORD)
        try:
            with open_private(file) as stream:
                record = json.load(stream)
            return SubmittedJob(**{**record, "folder": os.path.abspath(folder)})
        except InvalidInputError as error:  # it is not private, or holds a value that no job has
            raise InvalidInputError(f"{file}: {error}") from None
        except (OSError, ValueError, TypeError):
            raise InvalidInputError(
                f"{os.fspath(folder)} is not the folder of a job: give the folder of a SubmittedJob"
            ) from None

    def __post_init__(self) -> None:
        for name in ("id", "on", "folder", "directory"):
            check_text(name, getattr(self, name), "the text that choros.submit gave it")
        check_whole("size", self.size, 1, "ranks")
        with keyword_names():
            find_scheduler(self.on)

    @property
    def _scheduler(self) -> Scheduler:
        return find_scheduler(self.on)

    def status(self) -> str:
        """Return the scheduler's status of the job, as ``choros status`` prints it.

        Raises:
            SchedulerError: the scheduler does not know the job any more, or does not answer.
        """
        return job_status(self._scheduler, self.id)

    def log(self, follow: bool = False) -> None:
        """Print the job's log; with ``follow``, until the job ends.

        Raises:
            SchedulerError: there is no log yet.
        """
        follow_log(self._scheduler, self.id, follow, folder=self.directory)

    def cancel(self) -> bool:
        """Cancel the job, and return False if it had ended already.

        Raises:
            SchedulerError: the scheduler refuses.
        """
        return not has_ended(self._scheduler, self.id) and cancel_job(self._scheduler, self.id)

    def done(self) -> bool:
        """Return whether all ranks have returned, or the job has ended.

        Raises:
            SchedulerError: the scheduler does not answer.
        """
        return self._answered() == self.size or has_ended(self._scheduler, self.id)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for the end of the job, and return what the function returned, in rank order.

        Interrupting the wait does not end the job.

        Args:
            timeout: float. Seconds to wait; 0 does not wait. Defaults to None, which has no limit.

        Raises:
            WorkerFailedError: a rank raised; with its rank, host and traceback.
            SchedulerError: the job ended without the results of all ranks: it was cancelled, or reached its limit.
            CommTimeoutError: the job has not ended in time. It continues; call ``results`` again.
            InvalidInputError: ``timeout`` is not a number, the folder was deleted, or other users have access to a
                result.
            NotSerializableError: a result cannot be unpickled in this process.
        """
        self._wait(timeout)
        return self._answers(range(self.size))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end of the job, and return what the function returned on rank 0. Raises as ``results``."""
        self._wait(timeout)
        return self._answers([0])[0]

    def _wait(self, timeout: float | None) -> None:
        """Wait until all ranks have answered or the job has ended."""
        if timeout is not None:
            timeout = check_number("timeout", timeout, "a number of seconds, or None for no limit")
        begun = queried = monotonic()
        pause = _QUERY_SECONDS[0]
        while self._answered() < self.size:
            if monotonic() - queried >= pause:
                if self._has_ended():
                    self._wait_for_files()
                    break
                pause, queried = min(1.5 * pause, _QUERY_SECONDS[1]), monotonic()
            remaining = float("inf") if timeout is None else begun + timeout - monotonic()
            if remaining <= 0:
                raise CommTimeoutError(
                    f"job {self.id} has not ended after {timeout:g} s ({self._status_text()}): it continues, so call "
                    "results again, or cancel it"
                )
            sleep(min(_FILE_POLL_SECONDS, remaining))

    def delete(self) -> None:
        """Remove the folder with the call and the results. The log stays.

        Raises:
            InvalidInputError: the job has not ended.
        """
        if os.path.isdir(self.folder) and not self.done():
            raise InvalidInputError(f"job {self.id} has not ended: cancel it first")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _has_ended(self) -> bool:
        """Return whether the job has ended. A scheduler that does not answer may do so later: the wait continues."""
        try:
            return has_ended(self._scheduler, self.id)
        except SchedulerError as error:
            logger.warning(f"waiting for job {self.id}: {error}")
            return False

    def _answered(self) -> int:
        """Return the number of ranks that have an answer."""
        if not os.path.isdir(self.folder):
            raise InvalidInputError(f"the folder of job {self.id} is gone: {self.folder}")
        return sum(answer_file(self.folder, rank).exists() for rank in range(self.size))

    def _wait_for_files(self) -> None:
        """Wait for answers that a network's file system shows late."""
        end = monotonic() + _FILE_DELAY_SECONDS
        while self._answered() < self.size and monotonic() < end:
            os.listdir(self.folder)  # makes NFS look at the folder again
            if self._failures():
                return
            sleep(_FILE_POLL_SECONDS)

    def _failures(self) -> dict[int, RankFailure]:
        answers = {rank: self._read(rank)[0] for rank in range(self.size)}
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, RankFailure)}

    def _read(self, rank: int, value: bool = False) -> tuple[Returned | RankFailure | None, Any]:
        """Return the answer of a rank, if there is one; with ``value``, also what it returned."""
        try:
            with open_private(answer_file(self.folder, rank)) as file:
                answer, begin = read_answer(file.fileno())
                if value and isinstance(answer, Returned):
                    return answer, read_value(file.fileno(), rank, answer, begin)
                return answer, None
        except FileNotFoundError:
            return None, None

    def _answers(self, ranks: Sequence[int]) -> list[Any]:
        """Return the values of these ranks, or raise the error that ended the job."""
        if failures := self._failures():
            rank = first_cause(failures)
            raise failure(rank, self.size, failures[rank], what="rank", alone="choros.run(function, num_proc=1)")
        if missing := [rank for rank in range(self.size) if self._read(rank)[0] is None]:
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise SchedulerError(
                f"job {self.id} ended without a result of rank{'s' * (len(missing) > 1)} {names} of {self.size} "
                f"({self._status_text()}): the function ended the process, the ranks did not start, or the job was "
                f"cancelled or reached its time limit. The log says more: choros log --on {self.on} {self.id}, in "
                f"{self.directory}"
            )
        return [self._read(rank, value=True)[1] for rank in ranks]

    def _status_text(self) -> str:
        try:
            return self.status().splitlines()[0]
        except (SchedulerError, IndexError):
            return f"{self.on} does not know it any more"


def submit(
    func: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    on: str = "",
    site: str = "",
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    cores: int | None = None,
    gpus: int | None = None,
    time: str | None = None,
    account: str = "",
    queue: str = "",
    filesystems: str | None = None,
    directives: Sequence[str] = (),
    setup: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    mpi: str = "",
    python: str = "",
    signal: int | None = None,
    name: str = "",
) -> SubmittedJob:
    """Submit a job to the scheduler of a cluster; each of its ranks calls a function. Return at once.

    The job is that of ``choros submit``: each rank has its cores and threads set, and in the function a
    ``choros.Trainer`` or ``choros.hvd.init()`` connects to the other ranks. The defaults of
    ``~/.config/choros/config.toml`` apply. Functions of ``__main__`` and of notebooks are pickled by value. Call it
    in a directory that all nodes share: a folder there, which only you can read, holds the call and the results.

    Args:
        func: the function to call.
        args: list or tuple of its arguments.
        kwargs: dict of its keyword arguments.
        on: str. The scheduler: "slurm", "pbs", "flux", "lsf" or "sge". Defaults to the site's, else the one whose
            command is on ``PATH``.
        site: str. The cluster: a name of ``choros site list``, or a file of ``choros site init``.
        nodes: int. The number of nodes. Defaults to 1.
        ranks_per_node: int. The number of ranks on each node. Defaults to the site's, else 1.
        cores: int. The number of cores of each rank. Defaults to the site's, else 1.
        gpus: int. The number of GPUs of each rank. Defaults to the site's, else 0.
        time: str. The time limit, such as "1:30:00" or "90m". Defaults to the queue's.
        account: str. The project that is charged.
        queue: str. The queue or partition.
        filesystems: str. For PBS: the file systems that the job uses, such as "home:eagle". Defaults to None, which
            names none.
        directives: list of str. Options passed on to the scheduler, such as ["--constraint=cpu"].
        setup: list of str. Lines of shell before the ranks start, such as ["module load python"].
        env: dict of str. Environment variables of the ranks.
        mpi: str. The MPI of the ranks; see ``choros submit --help``. Defaults to the one that mpi4py loads here.
        python: str. The Python program of the ranks. Defaults to this one; with ``setup``, to "python".
        signal: int. Seconds before the time limit at which the ranks get a signal. Defaults to 90.
        name: str. The name of the job and of its log. Defaults to the function's.

    Returns:
        SubmittedJob. ``results()`` waits for the results of all ranks.

    Raises:
        InvalidInputError: an argument is not valid, or this process is a rank itself; nothing was submitted.
        NotSerializableError: the function or an argument cannot be pickled; nothing was submitted.
        SchedulerError: the scheduler refuses the job, or does not answer.

    Example:
        >>> import choros
        >>> choros.submit(print, ("hello",), on="slurm", nodes=0)
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: nodes=0: give a whole number, 1 or more.
    """
    check_outside("call the function itself there")
    check_call("choros.submit", func, args, kwargs)
    options = JobOptions(
        on=on,
        site=site,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cores=cores,
        gpus=gpus,
        time=time,
        account=account,
        queue=queue,
        filesystems=filesystems,
        directive=check_texts("directives", directives),
        setup=check_texts("setup", setup),
        mpi=mpi,
        python=python,
        signal=signal,
        name=name_of(getattr(func, "__name__", type(func).__name__)) if name == "" else name,
    )
    _check_values(options)
    variables = {} if env is None else check_variables("env", env)
    with keyword_names():
        return _submit_call(options, variables, (func, args, kwargs or {}))


def _check_values(options: JobOptions) -> None:
    """Refuse numbers and texts of another type, numbers that are too small, and blank texts."""
    for argument, least in _MINIMA.items():
        if (number := getattr(options, argument)) is not None:
            check_whole(argument, number, least)
    for argument, remedy in _TEXT_ARGUMENTS.items():
        text = getattr(options, argument)
        if text != "" and not (argument in _OPTIONAL_TEXTS and text is None):
            check_text(argument, text, remedy)


def _submit_call(
    options: JobOptions, env: Mapping[str, str], call: tuple[object, Sequence[Any], Mapping[str, Any]]
) -> SubmittedJob:
    """Write the call and the script into a folder, and submit the script. A failure leaves no folder."""
    check_name(options.name)
    scheduler, preset, _ = complete(options, find_scheduler)
    if scheduler.attached or scheduler.named_only:
        instead = 'Trainer(..., launcher="spark") trains on Spark' if scheduler.attached else "use choros submit"
        raise InvalidInputError(f"choros.submit is for batch schedulers, and {scheduler.name} is none: {instead}")
    options.env = [f"{key}={value}" for key, value in _variables(options, scheduler.name, env).items()]
    folder = _private_folder(options.name)
    try:
        digest = _write_call(folder, *call)
        flags = ["-P"] if options.same_environment(scheduler.name) else []
        entry = [options.interpreter(scheduler.name), *flags, "-m", "choros.launch.job_entry", folder, digest]
        options.script = os.path.join(folder, f"job{scheduler.ending}")
        job = job_of(options, preset, scheduler.name, entry, f"choros.submit({options.name})")
        # Before any rank of a requeued job starts: one may answer while another still has its earlier answer.
        job = replace(job, setup=(f"rm -f {shlex.quote(folder)}/answer.*", *job.setup))
        text = scheduler.script(job)
        if scheduler.name == "slurm" and (warning := srun_mpi_warning(job.mpi)):
            warn(f"{warning}.")
        require_program(scheduler)
        backend_choice.announce()
        write_script(job.script, text)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    submitted = SubmittedJob(_submit(scheduler, job.script, folder), scheduler.name, job.size, folder, os.getcwd())
    with open(create_private(Path(folder, _RECORD)), "w", encoding="utf-8") as file:
        json.dump({name: value for name, value in asdict(submitted).items() if name != "folder"}, file)
    logger.info(
        f"submitted job {submitted.id} to {scheduler.name}: {counted(job.size, 'rank')}, {os.path.relpath(folder)}"
    )
    return submitted


def _private_folder(name: str) -> str:
    """Create a folder in the current directory that only this user can read."""
    try:
        return tempfile.mkdtemp(prefix=f".choros-{name}-", dir=os.getcwd())
    except OSError as error:
        raise InvalidInputError(
            f"{os.getcwd()} cannot be written to ({error.strerror}): call choros.submit in a directory that all nodes "
            "share"
        ) from None


def _write_call(folder: str, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Write the call into its file, and return the digest."""
    file = create_private(Path(folder, CALL))
    try:
        write_call(file, func, args, kwargs)
    finally:
        os.close(file)
    return digest_of(Path(folder, CALL).read_bytes())


def _submit(scheduler: Scheduler, script: str, folder: str) -> str:
    """Submit the script, and return the job's id. The folder stays if the job may have been submitted."""
    try:
        return submit_job(scheduler, script)
    except NoJobIdError:  # the job's ranks may need the folder
        raise
    except SchedulerError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _variables(options: JobOptions, on: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the ranks: the module path of this process, its backend, the user's."""
    backend = os.environ.get("KERAS_BACKEND", "")
    variables = {"KERAS_BACKEND": backend} if backend and not backend_choice.chosen else {}
    if options.same_environment(on):
        variables |= python_variables()
    return {**variables, **env}
