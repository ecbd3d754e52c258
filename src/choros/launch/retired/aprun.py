"""``aprun`` of Cray's ALPS, which started the ranks on Theta: its options as those of PALS' ``mpiexec``.

Sources: Cray's manual S-2496, "Running Applications"; for PALS github.com/argonne-lcf/user-guides,
docs/polaris/running-jobs (2026-08).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from choros.errors import InvalidInputError, counted

GONE = (
    "aprun started the ranks under Cray's ALPS (Theta), and that machine is retired. Polaris and Aurora start them by "
    "PALS' mpiexec"
)
PAGE = "docs/from-alcf.md lists the options."


@dataclass(frozen=True)
class AprunOption:
    """Some options of ``aprun`` that are translated alike.

    Attributes:
        names: tuple of str. The options as they are typed.
        values: int. The number of values: 0 or 1.
        field: str. The field of ``AprunLine`` that the value sets; "" if PALS has no equivalent.
        instead: str. What ``choros run`` has instead, or the reason why it needs nothing.
    """

    names: tuple[str, ...]
    values: int
    field: str
    instead: str


_PLACEMENT = "PALS places ranks by --ppn, --depth and --cpu-bind alone"

OPTIONS = (
    AprunOption(("-N", "--pes-per-node"), 1, "ranks_per_node", "-H n1:4,n2:4 gives the number of ranks of each host"),
    AprunOption(("-d", "--cpus-per-pe"), 1, "depth", "--threads gives the threads of each rank"),
    AprunOption(("-j", "--cpus-per-cu"), 1, "threads_per_core", "--threads gives the threads of each rank"),
    AprunOption(("-cc", "--cpu-binding"), 1, "binding", "each rank is bound to cores of its own, or --no-bind"),
    AprunOption(
        ("-e", "--env", "--environment-override"), 1, "environment", "export it: the ranks get this shell's variables"
    ),
    AprunOption(("-S", "-sn", "-sl", "-cp", "-r"), 1, "", _PLACEMENT),
    AprunOption(("-ss",), 0, "", _PLACEMENT),
    AprunOption(("-L",), 1, "", "the nodes are those of the job: PALS' --hosts chooses some of them"),
    AprunOption(("-b", "-B", "-q", "-C", "-T"), 0, "", "PALS needs no such option"),
    AprunOption(("-a", "-D", "-F", "-R", "-t"), 1, "", "PALS has no such option"),
)
_RANKS = AprunOption(("-n", "--pes"), 1, "ranks", "-n gives the number of ranks")  # choros run has -n itself
_KNOWN = {name: option for option in (_RANKS, *OPTIONS) for name in option.names}
_BINDINGS = {"": "depth", "cpu": "depth", "depth": "depth", "none": "none", "numa_node": "numa"}
_EXPRESSION = re.compile(r"(?:\w+=)?\$(?:\w+|\{\w+\}|\(\([^()]*\)\))", re.ASCII)  # $ranks, ${ranks}, $((nodes * 4))


@dataclass(frozen=True)
class AprunLine:
    """The options of one ``aprun``; numbers are text, because a script may have an expression of the shell there.

    Attributes:
        ranks, ranks_per_node: str. The number of ranks, in all and on a node. The second is "" if it is not given.
        depth: str. The hardware threads of each rank. Defaults to "1".
        threads_per_core: str. The hardware threads that are used of each core; "" if it is not given.
        binding: str. The value of ``-cc``; "" if it is not given.
        environment: tuple of str. Variables, as NAME=VALUE.
        notes: tuple of str. What is not translated, and why.

    Raises:
        InvalidInputError: a number is not valid, or a variable has no value.

    Example:
        >>> AprunLine("8", "4").nodes
        2
    """

    ranks: str = "1"
    ranks_per_node: str = ""
    depth: str = "1"
    threads_per_core: str = ""
    binding: str = ""
    environment: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = {"-n": self.ranks, "-N": self.ranks_per_node, "-d": self.depth, "-j": self.threads_per_core}
        for name, text in numbers.items():
            if text and not _EXPRESSION.fullmatch(text):
                number, least = _number(text), 0 if name == "-j" else 1  # -j 0: all hardware threads of a core
                if number is None or number < least:
                    raise InvalidInputError(f"aprun {name} {text}: must be a whole number of {least} or more")
        for text in self.environment:
            if not re.match(r"[A-Za-z_]\w*=", text):
                raise InvalidInputError(f"aprun -e {text}: give a name and a value, as in -e OMP_NUM_THREADS=64")

    @property
    def nodes(self) -> int | None:
        """The number of nodes; None if ``-N`` is not given, or a number is an expression of the shell."""
        ranks, per_node = _number(self.ranks), _number(self.ranks_per_node)
        return -(-ranks // per_node) if ranks and per_node else None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def split_line(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split the arguments of ``aprun`` into its options and the command that it starts.

    Args:
        arguments: the arguments.

    Returns:
        The options with their values, and the command.

    Example:
        >>> split_line(["-n", "8", "-N4", "-b", "python", "a.py", "-n", "1"])
        ([('-n', '8'), ('-N', '4'), ('-b', '')], ['python', 'a.py', '-n', '1'])
    """
    flags = [name for name, option in _KNOWN.items() if not option.values]
    return split_words(arguments, flags, lambda name: name not in _KNOWN and name[:2] in _KNOWN)


def split_words(
    words: Sequence[str], flags: Collection[str], is_glued: Callable[[str], bool], ends: Collection[str] = ()
) -> tuple[list[tuple[str, str]], list[str]]:
    """Split words into the options with which they begin, and the words after them.

    Args:
        words: the arguments.
        flags: names of options without a value. All others have one.
        is_glued: whether the value of an option with one dash follows its letter without a space, as in ``-N64``.
        ends: words with a dash that are not options, and end them. Defaults to none.

    Returns:
        The options with their values, "" for a flag; and the words that are left.
    """
    remaining, options = list(words), list[tuple[str, str]]()
    while remaining and remaining[0].startswith("-") and remaining[0] not in ends:
        name, equal, value = remaining.pop(0).partition("=")
        if not name.startswith("--") and is_glued(name):
            name, value, equal = name[:2], f"{name[2:]}{equal}{value}", "="
        if not equal and name not in flags and remaining:
            value = remaining.pop(0)
        options.append((name, value))
    return options, remaining


def read_options(options: Sequence[tuple[str, str]]) -> AprunLine:
    """Return the line that has these options.

    Args:
        options: the options with their values.

    Raises:
        InvalidInputError: a value is not valid.

    Example:
        >>> read_options([("-n", "8"), ("-N", "4"), ("-d", "2")]).depth
        '2'
    """
    texts, environment, notes = dict[str, str](), list[str](), list[str]()
    for name, value in options:
        option = _KNOWN.get(name)
        if option is None:
            notes.append(f"{name} {value}".rstrip() + ": not an option of aprun that is known here")
        elif option.field == "environment":
            environment.append(value)
        elif option.field:
            texts[option.field] = value
        else:
            notes.append(f"{name} {value}".rstrip() + f": {option.instead}")
    line = AprunLine(**texts, environment=tuple(environment), notes=tuple(notes))
    return AprunLine(**texts, environment=line.environment, notes=(*notes, *_notes(line)))


def _notes(line: AprunLine) -> list[str]:
    notes = []
    if not line.ranks_per_node:
        notes.append("without -N aprun filled each node: give PALS the ranks of a node by --ppn")
    if line.binding not in _BINDINGS and ":" not in line.binding:
        notes.append(
            f"-cc {line.binding}: a list of PALS has the CPUs of each rank, with a colon between two ranks, as in "
            "--cpu-bind list:0-7:8-15"
        )
    if line.binding not in ("", "cpu", "depth"):
        notes.append(f"-cc {line.binding}: choros submit binds ranks by --cpu-bind depth, or as the --site has it")
    notes += [
        f"-e {text}: choros submit takes no expression of the shell; give --env {text.partition('=')[0]}=VALUE"
        for text in line.environment
        if _EXPRESSION.fullmatch(text)
    ]
    depth, per_core = _number(line.depth), _number(line.threads_per_core)
    if depth and per_core and depth % per_core:
        notes.append(
            f"-d {depth} -j {per_core}: the last core is used in part; choros submit gives each rank whole cores"
        )
    ranks, per_node = _number(line.ranks), _number(line.ranks_per_node)
    if ranks and per_node and ranks % per_node:
        notes.append(
            f"-n {ranks} -N {per_node}: choros submit fills all nodes, with "
            f"{counted(-(-ranks // per_node) * per_node, 'rank')}"
        )
    return notes


def mpiexec_command(line: AprunLine, command: Sequence[str]) -> str:
    """Return the ``mpiexec`` of PALS that starts the same ranks.

    Args:
        line: the options of ``aprun``.
        command: the program of each rank, and its arguments.

    Example:
        >>> mpiexec_command(AprunLine("128", "64", "2", environment=("A=1",)), ["python", "a.py"])
        'mpiexec -n 128 --ppn 64 --depth 2 --cpu-bind depth --env A=1 python a.py'
    """
    mpiexec = ["mpiexec", "-n", line.ranks, *(["--ppn", line.ranks_per_node] if line.ranks_per_node else [])]
    binding = f"list:{line.binding}" if ":" in line.binding else _BINDINGS.get(line.binding, "depth")
    mpiexec += ["--depth", line.depth, "--cpu-bind", binding]
    mpiexec += [option for text in line.environment for option in ("--env", text)]
    return " ".join(map(shell_word, (*mpiexec, *command)))


def submit_options(line: AprunLine) -> list[str]:
    """Return the options of ``choros submit`` for these ranks, without the number of nodes.

    Args:
        line: the options of ``aprun``. A number that is an expression of the shell becomes a name in capitals.

    Example:
        >>> submit_options(AprunLine("128", "64", "4", "2"))
        ['--ranks-per-node', '64', '--cores', '2', '--threads-per-core', '2']
    """
    depth, per_core = _number(line.depth), _number(line.threads_per_core) or 1
    options = ["--ranks-per-node", line.ranks_per_node if _number(line.ranks_per_node) else "RANKS_PER_NODE"]
    options += ["--cores", str(-(-depth // per_core)) if depth else "CORES"]
    options += ["--threads-per-core", str(per_core)] if per_core > 1 else []
    literal = (text for text in line.environment if not _EXPRESSION.fullmatch(text))
    return options + [option for text in literal for option in ("--env", text)]


def shell_word(text: str) -> str:
    """Return text quoted for a shell, but a variable such as ``$ranks`` as it is.

    Example:
        >>> shell_word("a b"), shell_word("A=$ranks")
        ("'a b'", 'A=$ranks')
    """
    return text if _EXPRESSION.fullmatch(text) else shlex.quote(text)


def submitted_target(command: Sequence[str]) -> list[str]:
    """Return a rank's command as ``choros submit`` takes it, which adds the interpreter itself.

    Example:
        >>> submitted_target(["python3", "train.py"]), submitted_target(["python", "-u", "train.py"])
        (['train.py'], ['python', '-u', 'train.py'])
    """
    first, *rest = [*command, ""]
    python = re.fullmatch(r"(?:.*/)?python[\d.]*", first)
    return list(command[1:] if python and (rest[0] == "-m" or not rest[0].startswith("-")) else command)


def translation(options: Sequence[tuple[str, str]], target: Sequence[str], module: bool = False) -> str:
    """Return the text of the error for ``choros run --launcher aprun``: the lines of today for its options.

    Args:
        options: the options of ``aprun`` with their values, ``-n`` too.
        target: the script or program, and its arguments, as ``choros run`` was given them.
        module: whether the target is a module, as in ``python -m``. Defaults to False.

    Raises:
        InvalidInputError: a value is not valid.

    Example:
        >>> print(translation([("-n", "8"), ("-N", "4")], ["train.py"]).splitlines()[1].strip())
        mpiexec -n 8 --ppn 4 --depth 1 --cpu-bind depth python train.py
    """
    line = read_options(options)
    command = list(target[1:] if target[:1] == ["--"] else target) or ["SCRIPT.py"]
    script = ["-m", *command] if module else submitted_target(command)
    python = module or (script and script[0].endswith(".py"))
    where = f"inside a job of {line.nodes} node{'s' * (line.nodes != 1)}" if line.nodes else "inside a job"
    submit = ["choros", "submit", "--on", "pbs", "--mpi", "pals", "--nodes", str(line.nodes or "NODES")]
    per_core = line.threads_per_core
    notes = [f"-j {per_core}: mpiexec has no such option, --depth counts hardware threads"] if per_core else []
    notes += line.notes
    text = [
        f"{GONE}, which is, {where}:",
        f"    {mpiexec_command(line, ['python', *script] if python else command)}",
        "A job with it is written and submitted (or only printed: --dry-run) by",
        f"    {shlex.join([*submit, *submit_options(line), *script])}",
        "with --site polaris or --site aurora instead of --on pbs --mpi pals on these machines.",
        *(f"Not translated: {note}." for note in notes),
        PAGE,
    ]
    return "\n".join(text)
