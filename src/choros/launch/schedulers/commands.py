"""Functions that run a scheduler's commands: submit a script, query a job, follow its log, cancel it."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TextIO

from choros.errors import ChorosError, InvalidInputError, SchedulerError, suggestion
from choros.launch.schedulers.option_names import choices, names_keywords, scheduler_option
from choros.launch.schedulers.registry import SCHEDULERS
from choros.launch.schedulers.scheduler import Scheduler

_ID = re.compile(r"[A-Za-z0-9\u0192][\w.\[\]/-]*")
_POLL_SECONDS = 0.5  # seconds between two reads of a growing log
_MAX_FAILURES = 10  # failed queries in a row after which the log of a job is not followed any longer


class _NoAnswer(SchedulerError):
    """Failure to reach the scheduler, although its command exists."""


class NoJobIdError(SchedulerError):
    """Output of the submitting command without a job's id: the job may have been submitted."""


def find_scheduler(name: str = "", attached: bool = True) -> Scheduler:
    """Return the scheduler of the given name, or the first one whose commands are on PATH; Kubernetes must be named.

    Args:
        name: the name. Defaults to "".
        attached: whether the message of the error lists also the schedulers whose jobs have no status. Defaults to
            True.

    Raises:
        InvalidInputError: no scheduler has this name, or no command is on PATH.

    Example:
        >>> find_scheduler("slurm").program
        'sbatch'
    """
    if name:
        if name not in SCHEDULERS:
            raise InvalidInputError(f"there is no scheduler {name!r}: {suggestion(name, choices(SCHEDULERS))}")
        return SCHEDULERS[name]
    schedulers = [scheduler for scheduler in SCHEDULERS.values() if not scheduler.named_only]
    for scheduler in schedulers:
        if shutil.which(scheduler.program) and (not scheduler.beside or shutil.which(scheduler.beside)):
            return scheduler
    programs = ", ".join(dict.fromkeys(scheduler.program for scheduler in schedulers))
    listed = [scheduler.name for scheduler in SCHEDULERS.values() if attached or not scheduler.attached]
    known = scheduler_option(listed) if names_keywords() else f"--on {'|'.join(listed)}"
    asks_for_name = shutil.which("kubectl") and not names_keywords()
    raise InvalidInputError(
        f"no scheduler is here (looked on PATH for {programs}): name it by {known}"
        + (" (kubectl is here: for Kubernetes give --on k8s)" if asks_for_name else "")
    )


def require_program(scheduler: Scheduler) -> None:
    """Check that the command that submits jobs is on PATH.

    Raises:
        InvalidInputError: it is not.
    """
    if shutil.which(scheduler.program) is None:
        otherwise = "" if names_keywords() else ", or print the script with --dry-run"
        raise InvalidInputError(
            f"there is no {scheduler.program} on PATH, so this machine cannot submit to {scheduler.name}: go to a "
            f"login node of the cluster{otherwise}"
        )


def submit_job(scheduler: Scheduler, file: str) -> str:
    """Submit a script, and return the job's id.

    Args:
        scheduler: the scheduler.
        file: the path of the script.

    Raises:
        InvalidInputError: the scheduler's command is not on PATH.
        NoJobIdError: the scheduler printed no id, and may have taken the script.
        SchedulerError: the scheduler refuses the script, or does not answer.
    """
    require_program(scheduler)
    command = scheduler.submit(file)
    consequence = "No job was submitted"
    if not names_keywords():  # choros.submit removes the script
        consequence += f", and the script is kept: run choros submit again, or {shlex.join(command)}"
    output = _call(scheduler, command, f"{scheduler.program} refused {file}", consequence)
    job = scheduler.job_id(output)
    if not _ID.fullmatch(job):
        raise NoJobIdError(
            _with_output(f"{scheduler.program} may have submitted {file}, and printed no job's id", output)
        )
    return job


def job_status(scheduler: Scheduler, job: str) -> str:
    """Return the status of a job as text.

    Raises:
        SchedulerError: the scheduler does not know the job.
    """
    output = _call(scheduler, scheduler.status(_checked(job)), f"{scheduler.name} does not report job {job}")
    return scheduler.describe(output) if scheduler.describe else output.rstrip()


def cancel_job(scheduler: Scheduler, job: str) -> bool:
    """Cancel a job.

    Returns:
        False if the job had ended already.

    Raises:
        SchedulerError: the scheduler does not know the job, or refuses.
    """
    output, _ = _query(scheduler, _checked(job))
    if output.strip() and scheduler.ended(output):
        return False
    _call(scheduler, scheduler.cancel(job), f"{scheduler.name} did not cancel job {job}")
    return True


def has_ended(scheduler: Scheduler, job: str) -> bool:
    """Return whether a job has ended; True if the scheduler does not know it any more.

    Raises:
        InvalidInputError: the scheduler's command is not on PATH.
        SchedulerError: the scheduler does not answer, or its command failed for another reason.
    """
    try:
        return scheduler.ended(_call(scheduler, scheduler.status(_checked(job)), f"{scheduler.name} does not answer"))
    except SchedulerError as error:
        if _is_unknown(scheduler, error):
            return True
        raise SchedulerError(str(error)) from None


def _is_unknown(scheduler: Scheduler, error: ChorosError) -> bool:
    """Return whether ``status`` failed because the scheduler does not know the job any more.

    Other failures are not the end of the job: on a busy cluster a query may time out while the job runs.
    """
    return any(phrase in str(error).lower() for phrase in scheduler.unknown)


def follow_log(scheduler: Scheduler, job: str, on: bool = False, out: TextIO | None = None, folder: str = "") -> None:
    """Print a job's log.

    Args:
        scheduler: the scheduler of the job.
        job: the job's id.
        on: whether to continue until the job ends. Defaults to False.
        out: the stream to write to. Defaults to ``sys.stdout``.
        folder: the folder from which the job was submitted. Defaults to the current one.

    Raises:
        InvalidInputError: there is no log, and the scheduler's command is not on PATH.
        SchedulerError: there is no log; with ``on``, none until the job has ended.
    """
    stream: TextIO = sys.stdout if out is None else out
    job = _checked(job)
    if scheduler.follow is not None:
        _call(scheduler, scheduler.follow(job, on), f"{scheduler.name} has no log of job {job}", out=stream)
        return
    position = failures = 0
    while True:
        output, error = _query(scheduler, job)  # before reading, so that the last read includes all output
        failures = 0 if error is None else failures + 1
        if error is None:
            is_over = scheduler.ended(output)
        else:
            is_over = failures == _MAX_FAILURES or isinstance(error, InvalidInputError) or _is_unknown(scheduler, error)
        path = _log_file(scheduler, job, output, folder)
        if path:
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(position)
                shutil.copyfileobj(file, stream)
                stream.flush()
                position = file.tell()
        if not on or is_over:
            break
        time.sleep(_POLL_SECONDS)
    if not path:
        if isinstance(error, (_NoAnswer, InvalidInputError)):
            raise error
        where = " or ".join(scheduler.logs(job))
        raise SchedulerError(
            f"job {job} has no log yet: {where} is not in {folder or os.getcwd()}, where a job leaves it"
        )


def _log_file(scheduler: Scheduler, job: str, output: str, folder: str) -> str:
    reported_path = scheduler.log_of(output)
    if reported_path and os.path.exists(reported_path):
        return reported_path
    patterns = [os.path.join(glob.escape(folder), pattern) for pattern in scheduler.logs(job)]
    return next((path for pattern in patterns for path in sorted(glob.glob(pattern))), "")


def _checked(job: str) -> str:
    if not _ID.fullmatch(job):
        raise InvalidInputError(f"{job!r} is not a job's id: give what choros submit printed")
    return job


def _query(scheduler: Scheduler, job: str) -> tuple[str, ChorosError | None]:
    """Return the output of ``status``, or "" if the command failed; and its error."""
    try:
        return _call(scheduler, scheduler.status(job), ""), None
    except (InvalidInputError, SchedulerError) as error:
        return "", error


def _with_output(message: str, output: str) -> str:
    r"""Return a message with a command's output, if any: in its line, or indented below it if it has several lines.

    Example:
        >>> _with_output("sbatch printed", "no account"), _with_output("sbatch printed", "no account\nask us")
        ('sbatch printed: no account', 'sbatch printed:\n    no account\n    ask us')
    """
    lines = [line for line in output.splitlines() if line.strip()]
    if len(lines) < 2:
        return ": ".join([message, *map(str.strip, lines)])
    return "\n    ".join([f"{message}:", *lines])


def _call(
    scheduler: Scheduler, command: Sequence[str], failed: str, consequence: str = "", out: TextIO | None = None
) -> str:
    """Run a command, and return its output; with ``out``, also write each line there at once.

    Raises:
        InvalidInputError: the command is not on PATH.
        SchedulerError: the command failed. The message begins with ``failed``, or says that the scheduler does not
            answer; then come ``consequence`` and what the command printed.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        except FileNotFoundError:
            raise InvalidInputError(
                f"there is no {command[0]} on PATH: run this on a login node of the cluster"
            ) from None
        with process:
            for line in process.stdout or ():
                lines.append(line)
                if out is not None:
                    out.write(line)
                    out.flush()
        errors.seek(0)
        text = errors.read().strip() or "".join(lines[-5:]).strip()
    if not process.returncode:
        return "".join(lines)
    kind: type[SchedulerError] = SchedulerError
    if any(phrase in text for phrase in scheduler.silent):
        kind = _NoAnswer
        failed = (
            f"{scheduler.name} does not answer: {command[0]} is on PATH, but reaches no server of {scheduler.name} "
            "from here. Go to a login node of the cluster, or try again later"
        )
    ending = f"{command[0]} printed" if text else f"{command[0]} ended with code {process.returncode}"
    message = ". ".join(part for part in (failed, consequence, ending) if part)
    raise kind(_with_output(message, text))
