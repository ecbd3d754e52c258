"""Requests for jobs: the options of ``choros submit`` and ``choros.submit``, the user's defaults and the site."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from choros import backend_choice
from choros.cluster.hardware import cpu_features, find_mpi
from choros.errors import InvalidInputError
from choros.launch.schedulers.file_systems import FILE_SYSTEMS, has_option, parse_file_systems, without_file_systems
from choros.launch.schedulers.job import Job, parse_time
from choros.launch.schedulers.option_names import named, names_keywords
from choros.launch.schedulers.option_support import BY_MPI, accepts, check_options
from choros.launch.schedulers.registry import SCHEDULERS
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.site import Site, load_site
from choros.launch.schedulers.user_config import submit_defaults

_EXPORT_ENVIRONMENT = ("slurm", "flux", "lsf")  # schedulers that pass this process's environment to the job


@dataclass
class JobOptions:
    """The options of ``choros submit`` that describe a job, by the names of the command line.

    An empty value or None stands for an option that is not given. ``docs/reference/cli.md`` describes each option.
    """

    on: str = ""
    site: str = ""
    account: str = ""
    queue: str = ""
    filesystems: str | None = None
    directive: Sequence[str] = ()
    nodes: int | str | None = None
    max_nodes: int | None = None
    resource_manager: str = ""
    ranks_per_node: int | None = None
    cores: int | None = None
    threads_per_core: int = 0
    gpus: int | None = None
    time: str | None = None
    signal: int | None = None
    setup: Sequence[str] = ()
    env: Sequence[str] = ()
    wrap: str = ""
    mpi: str = ""
    python: str | None = None
    image: str = ""
    kind: str | None = None
    runtime: str | None = None
    master: str = ""
    archive: str = ""
    name: str = ""
    script: str = ""

    def interpreter(self, on: str) -> str:
        """Return the Python program of the ranks: this one, or ``python`` where the ranks' environment is another."""
        return self.python or ("python" if self.setup or on == "k8s" else sys.executable)

    def same_environment(self, on: str) -> bool:
        """Return whether the ranks use this Python with its packages."""
        return not (self.python or self.setup or on == "k8s")


def complete(options: JobOptions, choose: Callable[[str], Scheduler]) -> tuple[Scheduler, Site, str]:
    """Set the options that are not given to the user's defaults, and check them for the scheduler.

    Args:
        options: the options, which are changed.
        choose: returns the scheduler of the given name; without a name, that of this machine.

    Returns:
        The scheduler, the site, and the options that come from the user's defaults, as words of a command.

    Raises:
        InvalidInputError: an option has no effect for the scheduler, or there is no such site or scheduler.
    """
    defaults = submit_defaults()
    if not options.site:
        options.site = "generic" if options.on else str(defaults.get("site", "generic"))
    site = load_site(options.site)
    if not options.on and not site.scheduler and "on" in defaults:
        options.on = str(defaults["on"])
    if options.on and site.scheduler and options.on != site.scheduler:
        raise InvalidInputError(
            f"the site {site.name} has {site.scheduler}: leave {named('on', options.on)} out, or "
            f"{named('site', options.site)}"
        )
    scheduler = choose(options.on or site.scheduler)
    words = _use_defaults(options, _without_given_file_systems(options, defaults), scheduler.name)
    check_options(scheduler.name, vars(options))
    return scheduler, site, words


def default_scheduler() -> str:
    """Return the scheduler that the user's defaults name, by a site or by its name; "" if they name none.

    Raises:
        InvalidInputError: the file of the defaults is not valid, or there is no such site or scheduler.
    """
    defaults = submit_defaults()
    return load_site(str(defaults.get("site", "generic"))).scheduler or str(defaults.get("on", ""))


def _use_defaults(options: JobOptions, defaults: Mapping[str, str | list[str]], on: str) -> str:
    """Set the options that are not given to the user's defaults, if the script for this scheduler uses them."""
    words: list[str] = []
    for name, value in defaults.items():
        option = "-o" if name == "directive" else f"--{name}"
        if name in ("site", "on"):
            if getattr(options, name) == value:
                words += [option, str(value)]
        elif not getattr(options, name) and accepts(on, name):
            setattr(options, name, value)
            words += [word for item in ([value] if isinstance(value, str) else value) for word in (option, item)]
    return shlex.join(words)


def _without_given_file_systems(
    options: JobOptions, defaults: Mapping[str, str | list[str]]
) -> Mapping[str, str | list[str]]:
    """Return the defaults without the file systems, if the options name some by ``--filesystems`` or by ``-o``."""
    remaining = dict(defaults)
    if any(has_option(line, FILE_SYSTEMS) for line in options.directive):
        remaining.pop("filesystems", None)
    if options.filesystems and "directive" in remaining:
        remaining["directive"] = without_file_systems(remaining["directive"])
    return remaining


def job_of(options: JobOptions, site: Site, on: str, command: Sequence[str], written_by: str) -> Job:
    """Return the job for the options.

    Args:
        options: the options, after ``complete``, with a name.
        site: the preset of the cluster.
        on: the scheduler's name.
        command: the command of each rank.
        written_by: the command or call that made this request, for the script.

    Raises:
        InvalidInputError: an option is not valid.
    """
    filesystems = "" if options.filesystems is None else parse_file_systems(options.filesystems)
    if filesystems:
        site = replace(site, directives=tuple(without_file_systems(site.directives)))
    return Job(
        command=tuple(command),
        name=options.name,
        nodes=1 if options.nodes is None else int(options.nodes),
        ranks_per_node=site.ranks_per_node if options.ranks_per_node is None else options.ranks_per_node,
        cores=site.cores if options.cores is None else options.cores,
        threads_per_core=options.threads_per_core,
        gpus=site.gpus if options.gpus is None else options.gpus,
        time=parse_time(options.time) if options.time is not None else 0,
        account=options.account,
        queue=options.queue,
        filesystems=filesystems,
        setup=tuple(options.setup),
        env=(*_chosen_backend(options.same_environment(on)), *(_pair(text) for text in options.env)),
        directives=tuple(options.directive),
        wrap=_words(options.wrap),
        mpi=options.mpi or site.mpi or (_local_mpi(on) if on in BY_MPI else ""),
        signal=90 if options.signal is None else options.signal,
        features="" if on == "k8s" else os.environ.get("CHOROS_SUBMIT_CPU", " ".join(cpu_features())),
        site=site,
        script=options.script or f"{options.name}{SCHEDULERS[on].ending}",
        written_by=written_by,
        image=options.image,
        kind=options.kind or "job",
        runtime=options.runtime or "torch-distributed",
        master=options.master,
        archive=options.archive,
        secret=(os.environ.get("CHOROS_SECRET") or secrets.token_hex(32)) if on == "k8s" else "",
    )


def transport_warning(options: JobOptions, scheduler: Scheduler, job: Job) -> str:
    """Return a warning if the ranks of a job could not communicate with the packages of this Python, else "".

    Args:
        options: the options, after ``complete``.
        scheduler: the scheduler.
        job: the job of the options.
    """
    if scheduler.attached or scheduler.named_only or job.size == 1 or not options.same_environment(scheduler.name):
        return ""
    inherited = os.environ if scheduler.name in _EXPORT_ENVIRONMENT else {}
    variables = {**inherited, **job.exports()}
    chosen = variables.get("CHOROS_SECRET") or variables.get("CHOROS_COMM") not in (None, "", "mpi")
    if chosen or backend_choice.is_installed("mpi4py") or job.command[0] != sys.executable:
        return ""
    secret = ", or export CHOROS_SECRET=$(openssl rand -hex 32) before you submit, for TCP"
    return (
        f"mpi4py is not installed here, and the {job.size} ranks need it to communicate: pip install 'choros[mpi]'"
        f"{secret if scheduler.name in _EXPORT_ENVIRONMENT else ''}"
    )


def _chosen_backend(same_environment: bool) -> list[tuple[str, str]]:
    """Return the variable that ``choros.backend_choice`` set here, for a job that uses the same Python.

    Another Python may have other backends installed, so the job must choose again.
    """
    if not backend_choice.chosen:
        return []
    if not same_environment:
        os.environ.pop("KERAS_BACKEND", None)  # most schedulers would pass it to the job
        return []
    return [("KERAS_BACKEND", backend_choice.chosen)]


def _local_mpi(on: str) -> str:
    return "jsrun" if on == "lsf" and shutil.which("jsrun") else find_mpi()


def _pair(text: str) -> tuple[str, str]:
    name, equal, value = text.partition("=")
    if not equal:
        raise InvalidInputError(f"--env {text}: give a name and a value, as in --env {text or 'NAME'}=1")
    return name, value


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidInputError(f"--wrap {text!r} is not a valid command ({error}): close its quotes") from None


def name_of(target: str) -> str:
    """Return a job's name from its script, program or function, with only characters that schedulers accept.

    Example:
        >>> name_of("jobs/train net.py"), name_of("<lambda>"), name_of("2.py")
        ('train-net', 'job--lambda-', 'job-2')
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "-", Path(target).name.partition(".")[0])[:60]
    return name if name[:1].isalpha() and name.isascii() else f"job-{name}"


def write_script(path: str, text: str) -> None:
    """Write the script of a job; replace a file of that name only if Choros wrote it.

    Raises:
        InvalidInputError: a file of that name is something else, or the file cannot be written.
    """
    file = Path(path)
    try:
        if file.exists() and "choros submit" not in file.read_text(encoding="utf-8", errors="replace")[:4000]:
            remedy = "another name" if names_keywords() else "another --script, or --name"
            raise InvalidInputError(f"{path} is there and was not written by choros submit: give {remedy}")
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"the script {path} cannot be written: {error.strerror}") from None
