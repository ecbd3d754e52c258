"""The commands of a scheduler, run: submit a script, ask for a job, follow its log, cancel it."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TextIO

from choros.errors import InvalidInputError
from choros.launch.schedulers.registry import SCHEDULERS
from choros.launch.schedulers.scheduler import Scheduler

_ID = re.compile(r"[A-Za-z0-9\u0192][\w.\[\]/-]*")
_TICK = 0.5  # seconds between looks at a log that grows


class _NoAnswer(InvalidInputError):
    """The scheduler's command is here, and the scheduler is not."""


def find_scheduler(name: str = "") -> Scheduler:
    """The scheduler of that name, or the one whose commands are here.

    Raises:
        InvalidInputError: none is here, or there is none of that name.

    Example:
        >>> find_scheduler("slurm").program
        'sbatch'
    """
    if name:
        if name not in SCHEDULERS:
            raise InvalidInputError(f"--on {name} is none of {', '.join(SCHEDULERS)}")
        return SCHEDULERS[name]
    found = [one for one in SCHEDULERS.values() if not one.attached]
    for one in found:
        if shutil.which(one.program) and (not one.beside or shutil.which(one.beside)):
            return one
    programs = ", ".join(dict.fromkeys(one.program for one in found))
    raise InvalidInputError(
        f"no scheduler is here (looked on PATH for {programs}): name it by --on {'|'.join(SCHEDULERS)}"
    )


def submit_job(scheduler: Scheduler, file: str) -> str:
    """Submit a script, and return the job's id.

    Args:
        scheduler: whose it is.
        file: the script.

    Raises:
        InvalidInputError: the scheduler's command is not here, or refuses the script.
    """
    if shutil.which(scheduler.program) is None:
        raise InvalidInputError(
            f"there is no {scheduler.program} on PATH, so this machine cannot submit to {scheduler.name}: go to a "
            "login node of the cluster, or print the script with --dry-run"
        )
    return scheduler.job_id(_call(scheduler, scheduler.submit(file), f"{scheduler.program} refused {file}"))


def job_status(scheduler: Scheduler, job: str) -> str:
    """Return the scheduler's status of a job.

    Raises:
        InvalidInputError: it does not know the job.
    """
    said = _call(scheduler, scheduler.status(_checked(job)), f"{scheduler.name} tells nothing of job {job}")
    return scheduler.tell(said) if scheduler.tell else said.rstrip()


def cancel_job(scheduler: Scheduler, job: str) -> bool:
    """Cancel a job.

    Returns:
        False where it was over already, and there was nothing to cancel.

    Raises:
        InvalidInputError: the scheduler does not know it, or refuses.
    """
    said, _ = _ask(scheduler, _checked(job))
    if said.strip() and scheduler.ended(said):
        return False
    _call(scheduler, scheduler.cancel(job), f"{scheduler.name} did not cancel job {job}")
    return True


def follow_log(scheduler: Scheduler, job: str, on: bool = False, out: TextIO | None = None) -> None:
    """Print a job's log.

    Args:
        scheduler: whose job it is.
        job: its id.
        on: whether to go on until the job ends.
        out: where to. Defaults to ``sys.stdout``.

    Raises:
        InvalidInputError: there is no log, and none will come.
    """
    out, job = sys.stdout if out is None else out, _checked(job)
    if scheduler.follow is not None:
        _call(scheduler, scheduler.follow(job, on), f"{scheduler.name} has no log of job {job}", out)
        return
    position = 0
    while True:
        said, silent = _ask(scheduler, job)
        over = scheduler.ended(said)  # before the file is read: what is written until then is in it
        path = _log_file(scheduler, job, said)
        if path:
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(position)
                shutil.copyfileobj(file, out)
                out.flush()
                position = file.tell()
        if not on or over:
            break
        time.sleep(_TICK)
    if not path:
        if silent is not None:
            raise silent
        where = " or ".join(scheduler.logs(job))
        raise InvalidInputError(f"job {job} has no log yet: {where} is not in {os.getcwd()}, where a job leaves it")


def _log_file(scheduler: Scheduler, job: str, said: str) -> str:
    named = scheduler.log_of(said)
    if named and os.path.exists(named):
        return named
    return next((path for pattern in scheduler.logs(job) for path in sorted(glob.glob(pattern))), "")


def _checked(job: str) -> str:
    if not _ID.fullmatch(job):
        raise InvalidInputError(f"{job!r} is no job's id: give what choros submit printed")
    return job


def _ask(scheduler: Scheduler, job: str) -> tuple[str, _NoAnswer | None]:
    """Return the scheduler's answer about a job, "" if it does not know it; and its error if it does not run itself."""
    try:
        return _call(scheduler, scheduler.status(job), ""), None
    except InvalidInputError as error:
        return "", error if isinstance(error, _NoAnswer) else None


def _call(scheduler: Scheduler, command: Sequence[str], failed: str, out: TextIO | None = None) -> str:
    """Run a command, and return what it printed; with ``out`` it goes there line by line as it comes."""
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        except FileNotFoundError:
            raise InvalidInputError(
                f"there is no {command[0]} on PATH: run this on a login node of the cluster"
            ) from None
        with process:
            for line in process.stdout or ():
                said.append(line)
                if out is not None:
                    out.write(line)
                    out.flush()
        errors.seek(0)
        text = errors.read().strip() or "".join(said[-5:]).strip()
    if process.returncode and any(words in text for words in scheduler.silent):
        raise _NoAnswer(
            f"no {scheduler.name} answers here: give --on and the scheduler that is meant "
            f"({', '.join(SCHEDULERS)}), or go to a machine of its cluster. {command[0]} said: {text}"
        )
    if process.returncode:
        raise InvalidInputError(f"{failed}: {text or f'code {process.returncode}'}")
    return "".join(said)
