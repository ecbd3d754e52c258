"""Host lists, task counts and numbers in SLURM's compressed form."""

from __future__ import annotations

import re
from collections.abc import Iterable

from choros.errors import InvalidInputError

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)|(,)")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?\Z")
_MAX_HOSTS = 1_000_000


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a compressed list, in its order and with zero padding.

    Args:
        text: such as ``"n[1-2,4],login1"``. Several brackets in one name give all combinations.

    Returns:
        The names of the hosts, as ``scontrol show hostnames`` prints them.

    Raises:
        InvalidInputError: brackets do not match, a range is invalid, or there are more than 1,000,000 hosts.

    Example:
        >>> expand_hosts("n[1-2,4],login1")
        ('n1', 'n2', 'n4', 'login1')
        >>> expand_hosts("gpu-a[09-10]-b[3-4]")
        ('gpu-a09-b3', 'gpu-a09-b4', 'gpu-a10-b3', 'gpu-a10-b4')
    """
    hosts: list[str] = []
    names: list[str] = []
    position = 0
    if not isinstance(text, str):
        raise InvalidInputError(f"the host list {text!r} is not text: give one such as 'n[1-3]'")
    while position < len(text):
        match = _PIECE.match(text, position)
        if match is None:
            raise InvalidInputError(f"the host list {text!r} has brackets that do not match")
        position = match.end()
        inside, plain, comma = match.groups()
        if comma:
            hosts += names
            names = []
        else:
            endings = [plain] if plain is not None else _numbers(inside, text)
            names = [name + ending for name in (names or [""]) for ending in endings]
            if len(hosts) + len(names) > _MAX_HOSTS:
                raise InvalidInputError(f"the host list {text[:80]!r} names more than {_MAX_HOSTS} hosts")
    return tuple(hosts + names)


def _numbers(inside: str, text: str) -> list[str]:
    """Expand ``"1-3,07"`` to ``["1", "2", "3", "07"]``."""
    numbers: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < int(first) + _MAX_HOSTS):
            raise InvalidInputError(f"the host list {text!r} has {part!r} where a number or a range was expected")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node, from SLURM's compressed counts.

    Args:
        text: such as ``"2(x3),1"``.

    Returns:
        One count for each node, in the order of the host list.

    Raises:
        InvalidInputError: the text does not have this form.

    Example:
        >>> expand_tasks("2(x3),1")
        (2, 2, 2, 1)
    """
    if not isinstance(text, str):
        raise InvalidInputError(f"the tasks per node {text!r} are not text: give one such as '2(x3),1'")
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.match(part.strip())
        if match is None or int(match[2] or 1) > _MAX_HOSTS:
            raise InvalidInputError(
                f"the tasks per node {text!r} have {part!r} where a count such as 2(x3) was expected"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def number_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges in the form of SLURM.

    Example:
        >>> number_ranges([5, 0, 1, 2]), number_ranges([])
        ('0-2,5', '')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
