"""The interface of a scheduler: a script's text, and the commands that handle a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from choros.launch.schedulers.job import Job


@dataclass(frozen=True)
class Scheduler:
    """One scheduler.

    Attributes:
        name: str. As ``--on`` takes it.
        program: str. The command that submits; the scheduler is here where it is on PATH.
        beside: str. Another command that must be there too, to tell schedulers with equal names apart.
        ending: str. Of the script's file.
        script: makes the text of a job.
        submit: makes the command that submits a file.
        job_id: finds the job's id in what that printed.
        status, cancel: make the command for an id.
        logs: makes the patterns of an id's log files; none where ``follow`` brings the log.
        follow: makes the command that prints the log, and goes on (True) until the job ends.
        tell: words what ``status`` printed; None passes it on.
        log_of: finds the log's path in what ``status`` printed.
        ended: tells from what ``status`` printed whether the job has ended.
        silent: words by which its commands say that they reach no such scheduler.
        attached: whether what submits a job runs, and shows its output, until the job ends; such a scheduler must be
            named.
    """

    name: str
    program: str
    script: Callable[[Job], str]
    submit: Callable[[str], list[str]]
    job_id: Callable[[str], str]
    status: Callable[[str], list[str]]
    cancel: Callable[[str], list[str]]
    logs: Callable[[str], list[str]] = lambda _: []
    follow: Callable[[str, bool], list[str]] | None = None
    tell: Callable[[str], str] | None = None
    log_of: Callable[[str], str] = lambda _: ""
    ended: Callable[[str], bool] = lambda said: not said.strip()
    silent: tuple[str, ...] = ()
    beside: str = ""
    ending: str = ".sh"
    attached: bool = False
