"""The request for a job, with all checks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from choros.cluster.hardware import variables
from choros.errors import InvalidInputError, counted
from choros.launch.schedulers.file_systems import FILE_SYSTEMS, has_option, parse_file_systems
from choros.launch.schedulers.option_names import named, names_keywords, with_option_names
from choros.launch.schedulers.site import Site

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_][\w.@:+/-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)
_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
MOST = 1_000_000  # of each number of a job
_MAX_THREADS_PER_CORE = 8  # the most hardware threads of a core (POWER)


@dataclass(frozen=True)
class Job:
    """Ranks of one program on the nodes of a cluster.

    Attributes:
        command: tuple of str. The command of each rank.
        name: str. The job's name, and the beginning of its log's name.
        nodes, ranks_per_node: int. Default to 1.
        cores: int. Cores of each rank. Defaults to 1.
        threads_per_core: int. Hardware threads to use of each core; 0 (default) leaves it to the site.
        gpus: int. GPUs of each rank. Defaults to 0.
        time: int. The time limit in seconds; 0 (default) is the queue's limit.
        account, queue: str. "" (default) is the site's default.
        filesystems: str. For PBS: the file systems that the job uses, with colons between them. Defaults to "".
        setup: tuple of str. Shell lines that run before the ranks.
        env: tuple of (name, value). Environment variables of the ranks.
        directives: tuple of str. Written unchanged after ``#SBATCH``, ``#PBS`` ...
        wrap: tuple of str. A program with arguments that starts each rank; ``%r`` in them is the rank.
        mpi: str. The ranks' MPI: mpich, intel, mvapich, openmpi, pals, jsrun, or a value for ``srun --mpi=``.
        signal: int. Seconds before the time limit at which the ranks get a signal; 0 is never. Defaults to 90.
        features: str. The features of the submitting host's processor.
        site: Site. The preset of the cluster.
        script: str. The path of the script.
        written_by: str. The command that made this request.
        image, kind, runtime: str. For Kubernetes: the container image, the kind of manifest, the TrainJob's runtime.
        secret: str. For Kubernetes: the secret by which the pods authenticate.
        master, archive: str. For Spark: the cluster's URL ("" takes Spark's configuration), and a packed environment.

    Raises:
        InvalidInputError: a value that the scheduler or the shell would refuse or misread.

    Example:
        >>> Job(("python", "train.py"), "train", nodes=2, ranks_per_node=4).size
        8
        >>> Job(("true",), "a b")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: the job's name 'a b' must begin with a letter and ...
    """

    command: tuple[str, ...]
    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    cores: int = 1
    threads_per_core: int = 0
    gpus: int = 0
    time: int = 0
    account: str = ""
    queue: str = ""
    filesystems: str = ""
    setup: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    directives: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ()
    mpi: str = ""
    signal: int = 90
    features: str = ""
    site: Site = field(default_factory=Site)
    script: str = ""
    written_by: str = ""
    image: str = ""
    kind: str = "job"
    runtime: str = "torch-distributed"
    secret: str = ""
    master: str = ""
    archive: str = ""

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidInputError("nothing to run: give a script, -m and a module, or a program")
        check_name(self.name)
        self._check_numbers()
        for option, text in {"account": self.account, "queue": self.queue, "mpi": self.mpi}.items():
            if text and not _WORD.fullmatch(text):
                raise InvalidInputError(f"{named(option)} must be one word, got {text!r}")
        if self.threads_per_core > _MAX_THREADS_PER_CORE:
            raise InvalidInputError(
                f"--threads-per-core {self.threads_per_core}: no processor has more than {_MAX_THREADS_PER_CORE} "
                "hardware threads in a core; how many cores a rank gets is --cores"
            )
        if self.time and self.time <= self.signal:
            raise InvalidInputError(
                f"the limit of {self.time} s ends before the ranks could receive a signal {self.signal} s ahead of "
                f"it: give a longer {named('time')}, or a shorter {named('signal')} (0 for none)"
            )
        for name, value in self.env:
            if not _VARIABLE.fullmatch(name):
                variable = f"env={{{name!r}: ...}}" if names_keywords() else f"--env {name}={value}"
                raise InvalidInputError(f"{variable}: a variable's name has letters, digits and _, as in K=V")
        self._check_lines()
        self._check_file_systems()
        self._check_site()

    def _check_numbers(self) -> None:
        positive = {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "cores": self.cores}
        nonnegative = {"gpus": self.gpus, "threads_per_core": self.threads_per_core, "signal": self.signal}
        for minimum, numbers in enumerate((nonnegative, positive)):
            for option, number in numbers.items():
                if not minimum <= number <= MOST:
                    raise InvalidInputError(
                        f"{named(option)} must be a whole number from {minimum} to {MOST}, got {number}"
                    )

    def _check_lines(self) -> None:
        """Check the values that become one line of the script, or one word of a line."""
        texts = {"setup": self.setup, "directive": self.directives, "wrap": self.wrap, "": self.command}
        texts |= {"master": (self.master,), "archive": (self.archive,)}
        texts["env"] = tuple(value for _, value in self.env)
        for option, lines in texts.items():
            for line in lines:
                if re.search(r"[\n\r\0]", line):
                    subject = named(option) if option else "the command"
                    items = "an item" if names_keywords() else "the option once"
                    raise InvalidInputError(f"{subject} must be one line, got {line!r}: give {items} for each line")
        option = "" if names_keywords() else "-o "
        for line in self.directives:
            if not line.startswith("-"):
                raise InvalidInputError(
                    f"{option}{line!r} is not a directive, which begins with a dash, as in "
                    f"{named('directive', '-l filesystems=home')}"
                )

    def _check_file_systems(self) -> None:
        """Refuse file systems that a directive of the user or of the site names too."""
        if not self.filesystems:
            return
        option = named("filesystems", parse_file_systems(self.filesystems))
        directives = {line: named("directive", line) for line in self.directives}
        directives |= {line: f"the directive {line} of the site {self.site.name}" for line in self.site.directives}
        for line, source in directives.items():
            if has_option(line, FILE_SYSTEMS):
                raise InvalidInputError(f"{option} and {source} both name the job's file systems: give one of them")

    def _check_site(self) -> None:
        site = self.site
        for kind, (needed, available) in {
            "cores": (self.ranks_per_node * self.cores, site.cores_per_node),
            "GPUs": (self.ranks_per_node * self.gpus, site.gpus_per_node),
        }.items():
            if available and needed > available:
                raise InvalidInputError(
                    f"{counted(self.ranks_per_node, 'rank')} a node would need {needed} {kind}, and a node of "
                    f"{site.name} has {available}"
                )
        missing = []
        if site.needs_account and not self.account:
            missing.append(f"without an account: give {named('account', 'PROJECT')}")
        directives = (*self.directives, *([f"{FILE_SYSTEMS}{self.filesystems}"] if self.filesystems else []))
        for begin, remedy in site.needs.items():
            if not any(has_option(line, begin) for line in directives):
                option = "" if "--filesystems " in remedy else f" ({named('directive')})"
                missing.append(f"without the directive {begin}...: {with_option_names(remedy)}{option}")
        if missing:
            raise InvalidInputError(f"the site {site.name} refuses a job {'; and '.join(missing)}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def threads(self) -> int:
        """The number of threads of each rank: its cores times ``threads_per_core``."""
        return self.cores * (self.threads_per_core or 1)

    @property
    def cpus(self) -> int:
        """The number of CPUs that SLURM counts for each rank; SLURM may count several for a core."""
        return self.cores * (self.threads_per_core or self.site.cpus_per_core)

    def exports(self) -> dict[str, str]:
        """Return the environment variables to export for the ranks: threads, the site's, the user's."""
        environment = dict(self.env)
        features = {"CHOROS_SUBMIT_CPU": self.features} if self.features else {}
        return {**variables(self.threads, keep=environment), **dict(self.site.environment), **features, **environment}


def check_name(name: str) -> None:
    """Check a job's name.

    Raises:
        InvalidInputError: a scheduler would refuse the name.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"the job's name {name!r} must begin with a letter and have only letters, digits, _, . and -"
        )


def parse_time(text: str) -> int:
    """Return a time limit in seconds.

    Args:
        text: ``"1:30:00"``, ``"2-00:00:00"`` (days), or with units, ``"1h30m"``. A bare number is refused, because it
            means minutes to SLURM and LSF, and seconds to PBS.

    Raises:
        InvalidInputError: the text has none of these forms, or means 0.

    Example:
        >>> parse_time("1:30:00"), parse_time("90m"), parse_time("1-00:00:00")
        (5400, 5400, 86400)
    """
    match = _CLOCK.fullmatch(text) or _UNITS.fullmatch(text)
    parts = [int(part or 0) for part in match.groups()] if match else [0]
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not seconds:
        raise InvalidInputError(f"{named('time')} must be as 1:30:00 (hours), 2-00:00:00 (days) or 1h30m, got {text!r}")
    return seconds
