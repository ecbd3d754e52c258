"""Cobalt, the scheduler of Theta: its ``qsub`` options and ``#COBALT`` scripts as those of ``choros submit --on pbs``.

Source: www.alcf.anl.gov/user-guides/running-jobs-xc40, "Running Jobs on XC40".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from choros.errors import InvalidInputError
from choros.launch.retired.aprun import (
    PAGE,
    AprunLine,
    read_options,
    split_line,
    split_words,
    submit_options,
    submitted_target,
)

_FLAGS = ("--dry-run", "-I", "--interactive", "--disable_preboot", "-d", "--debug", "--hold")
_HELP = ("-h", "--help")
_EQUIVALENTS = {  # Cobalt's names of options that choros submit has too
    "-n": "--nodes",
    "--nodecount": "--nodes",
    "-t": "--time",
    "--walltime": "--time",
    "-q": "--queue",
    "-A": "--account",
    "--project": "--account",
    "-O": "--name",
    "--outputprefix": "--name",
    "--jobname": "--name",
}
_REPEATABLE = ("--env", "--attrs")  # others hold once: what was typed comes before the script's
_NO_EQUIVALENT = {  # options without an equivalent, and what to do
    "-e": "the job's errors go into the same log: choros log ID",
    "--error": "the job's errors go into the same log: choros log ID",
    "--proccount": "give --ranks-per-node",
    "--cwd": "call choros submit in that directory: the ranks start there",
    "-i": "ranks read nothing from stdin",
    "--inputfile": "ranks read nothing from stdin",
    "--disable_preboot": "PBS has no such step",
    "-d": "choros submit --dry-run prints the script",
    "--debug": "choros submit --dry-run prints the script",
    "--hold": "PBS has it as -o -h",
    "--kernel": "that is of Blue Gene's nodes",
    "--geometry": "that is of Blue Gene's nodes",
    "-I": "an interactive job is PBS' own: qsub -I -l select=1 -l walltime=1:00:00 -l filesystems=home -A PROJECT",
}
_NO_EQUIVALENT["--interactive"] = _NO_EQUIVALENT["-I"]


@dataclass(frozen=True)
class Translation:
    """A job for Cobalt in the terms of ``choros submit``.

    Attributes:
        text: str. The text of the error for ``choros submit --on cobalt``, with the line of today.
        options: list of str. The options of that line for what was typed, or is in the script's directives.
    """

    text: str
    options: list[str]


def is_asked(words: Sequence[str]) -> bool:
    """Return whether the arguments of ``choros submit`` name Cobalt as the scheduler.

    Args:
        words: the arguments after ``submit``.

    Example:
        >>> is_asked(["--on", "cobalt", "-n", "2", "a.py"]), is_asked(["--on", "pbs", "a.py", "--on", "cobalt"])
        (True, False)
    """
    return ("--on", "cobalt") in split_options(words)[0]


def is_help_asked(words: Sequence[str]) -> bool:
    """Return whether the arguments ask for the help page.

    Example:
        >>> is_help_asked(["--on", "cobalt", "--help"]), is_help_asked(["--on", "cobalt", "a.py", "-h"])
        (True, False)
    """
    return any(name in _HELP for name, _ in split_options(words)[0])


def split_options(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split arguments into options, of Cobalt or of ``choros submit``, and what the ranks run.

    Args:
        arguments: the arguments.

    Returns:
        The options with their values, and the target.

    Example:
        >>> split_options(["-n2", "--env", "A=1", "--dry-run", "a.py", "-t", "1"])
        ([('-n', '2'), ('--env', 'A=1'), ('--dry-run', '')], ['a.py', '-t', '1'])
    """
    return split_words(arguments, (*_FLAGS, *_HELP), lambda name: len(name) > 2, ends=("-m", "--"))


def translate(words: Sequence[str]) -> Translation:
    """Translate the arguments of ``choros submit --on cobalt``.

    An option that Cobalt did not have stays as it is: ``choros submit`` may have it, or refuses it. A target with
    ``#COBALT`` lines is read: its directives, its ``module`` lines and its ``aprun`` count too.

    Args:
        words: the arguments after ``submit``.

    Raises:
        InvalidInputError: a value is none of Cobalt's.

    Example:
        >>> made = translate(["--on", "cobalt", "-n", "2", "-t", "60", "-q", "debug", "-A", "phys", "train.py"])
        >>> print(made.text.splitlines()[1].strip())
        choros submit --on pbs --mpi pals --nodes 2 --time 60m --queue debug --account phys train.py
    """
    options, target = split_options(words)
    options = [(name, value) for name, value in options if name != "--on"]
    notes: list[str] = []
    more, written, target = _read_script(target, notes)
    named = {_EQUIVALENTS.get(name, name) for name, _ in options}
    options = [
        (name, value) for name, value in more if name in _REPEATABLE or _EQUIVALENTS.get(name, name) not in named
    ] + options
    translated = [option for name, value in options for option in _translated(name, value, notes)]
    while translated.count("--filesystems") > 1:  # what was typed comes last
        first = translated.index("--filesystems")
        del translated[first : first + 2]
    site = [] if any(name == "--site" for name, _ in options) else ["--on", "pbs", "--mpi", "pals"]
    line = shlex.join(["choros", "submit", *site, *translated, *written, *(target or ["SCRIPT.py"])])
    file_systems = (
        ""
        if "--filesystems" in translated or any("filesystems=" in word for word in translated)
        else ", and there with --filesystems home:eagle (those that the job uses)"
    )
    text = [
        "Cobalt was the scheduler of Theta, which is retired. Polaris and Aurora have PBS; the same job for it:",
        f"    {line}",
        *([f"with --site polaris or --site aurora instead of --on pbs --mpi pals{file_systems}."] if site else []),
        "Queues and modules have other names there than on Theta.",
        *(f"Not translated: {note}." for note in notes),
        PAGE,
    ]
    return Translation("\n".join(text), [*site, *translated])


def _translated(name: str, value: str, notes: list[str]) -> list[str]:
    """Return the words for one option; what has none becomes a note."""
    name = _EQUIVALENTS.get(name, name)
    if name == "--time" and value.isdecimal():
        return [name, f"{value}m"]  # a bare number is minutes to Cobalt, and seconds to PBS
    if name == "--env":  # A=1:B=2 is two variables
        return [option for text in re.split(r":(?=[A-Za-z_]\w*=)", value) for option in ("--env", text)]
    if name == "--mode":
        ranks = re.fullmatch(r"c(\d+)", value)
        if not ranks and value not in ("script", "interactive"):
            raise InvalidInputError(f"--mode {value}: Cobalt has script, and c16 for 16 ranks on each node")
        return ["--ranks-per-node", ranks[1]] if ranks else []  # "script" is what choros submit always writes
    if name == "--attrs":
        return _attributes(value, notes)
    if name in ("-o", "--output") and not value.startswith("-"):  # a file; else a directive of choros submit
        return ["-o", f"-o {value}"]
    if name == "-M":
        return ["-o", f"-M {value}"]
    if name == "--dependencies":
        if not re.fullmatch(r"\d+(:\d+)*", value):
            raise InvalidInputError(f"--dependencies {value}: give the numbers of jobs, as in 12:13")
        return ["-o", f"-W depend=afterok:{value}"]
    if name in _NO_EQUIVALENT:
        notes.append(f"{name} {value}".rstrip() + f": {_NO_EQUIVALENT[name]}")
        return []
    return [name] if name in _FLAGS else [name, value]


def _attributes(value: str, notes: list[str]) -> list[str]:
    """Return the option for the file systems; the other attributes chose the memory mode of Theta's processors."""
    parts = value.split(":")
    if not all(re.fullmatch(r"\w+=.+", part) for part in parts):
        raise InvalidInputError(f"--attrs {value}: give names and values, as in filesystems=home,eagle:mcdram=cache")
    systems = [part.partition("=")[2].replace(",", ":") for part in parts if part.startswith("filesystems=")]
    others = [part for part in parts if not part.startswith("filesystems=")]
    if others:
        notes.append(f"--attrs {':'.join(others)}: that is of Theta's nodes; PBS has -o '-l select=...'")
    return ["--filesystems", ":".join(systems)] if systems else []


def _read_script(target: Sequence[str], notes: list[str]) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Return the options and the target of a Cobalt script; a target that is none is returned as it is."""
    path = Path(target[0]) if target else Path()
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() and path.suffix != ".py" else ""
    except (OSError, UnicodeDecodeError):
        text = ""
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines()]
    directives = [line.removeprefix("#COBALT") for line in lines if line.startswith("#COBALT")]
    runs = [line for line in lines if line.startswith("aprun ")]
    if not directives and not runs:
        return [], [], list(target)
    options = [pair for line in directives for pair in split_options(_words(line))[0]]
    written = [
        option for line in lines if line.startswith(("module ", "source ", "conda ")) for option in ("--setup", line)
    ]
    if not runs:
        notes.append(f"{path}: it has no aprun; give its program")
        return options, written, ["SCRIPT.py"]
    aprun_options, command = split_line(_words(runs[0])[1:])
    line: AprunLine = read_options(aprun_options)
    written += submit_options(line)
    notes += line.notes
    if len(runs) > 1:
        notes.append(f"{path}: {len(runs) - 1} more aprun; submit a job for each, or write them into the PBS script")
    notes.append(f"{path}: its other lines; those before aprun go into --setup LINE")
    return options, written, submitted_target(command)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation that goes on in the next line
        return line.split()
