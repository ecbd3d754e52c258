"""The interface of a scheduler: the text of a script, and the commands for a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from choros.launch.schedulers.job import Job


@dataclass(frozen=True)
class Scheduler:
    """One scheduler.

    Attributes:
        name: str. The name for ``--on``.
        program: str. The command that submits a job. If it is on PATH, the scheduler counts as present.
        beside: str. A second command that must be on PATH too, to distinguish schedulers with the same ``program``.
        ending: str. The suffix of the script's file name.
        script: function from a Job to the text of its script.
        submit: function from the script's path to the command that submits it.
        job_id: function from the output of ``submit`` to the job's id.
        status, cancel: functions from an id to the command.
        logs: function from an id to the patterns of its log files; unused if ``follow`` is given.
        follow: function from an id, and whether to continue until the job ends, to the command that prints the log.
        describe: function from the output of ``status`` to a text for users; None shows the output itself.
        log_of: function from the output of ``status`` to the path of the log, or "".
        ended: function from the output of ``status`` to whether the job has ended.
        silent: parts of error messages by which its commands report that no such scheduler can be reached.
        unknown: parts of error messages, in lower case, by which ``status`` reports that it does not know a job.
        attached: whether the submitting command runs, and shows the output, until the job ends.
        named_only: whether it is used only if ``--on`` names it: its command on PATH does not mean that it is meant.
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
    describe: Callable[[str], str] | None = None
    log_of: Callable[[str], str] = lambda _: ""
    ended: Callable[[str], bool] = lambda output: not output.strip()
    silent: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    beside: str = ""
    ending: str = ".sh"
    attached: bool = False
    named_only: bool = False
