"""The settings of an elastic job: the fewest and most ranks, the hosts, and the time limits."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from choros.cluster import Slots, is_this_machine
from choros.errors import InvalidInputError, counted
from choros.launch.elastic.host_discovery import script_of


@dataclass(frozen=True)
class ElasticSettings:
    """The settings of an elastic job.

    Attributes:
        first: int. The fewest ranks at the start.
        least: int. The fewest ranks to continue with. most: int or None. The most ranks; None: one for each slot.
        script: tuple of str. The host discovery script and its arguments; empty if the hosts are fixed.
        hosts: Slots. The fixed hosts. each: int. Slots of a host for which the script prints no number.
        timeout: float. Seconds that the job may have too few ranks. Defaults to 600.
        resets: int or None. The largest number of changes of the ranks. Defaults to None, no limit.
        cooldown: the shortest and longest time, in seconds, that a host with failed ranks is barred; None: forever.
        pulse: float. Seconds without a reply to pings after which a process is ended. Defaults to 15.
    """

    first: int
    least: int
    most: int | None = None
    script: tuple[str, ...] = ()
    hosts: Slots = ()
    each: int = 1
    timeout: float = 600.0
    resets: int | None = None
    cooldown: tuple[float, float] | None = None
    pulse: float = 15.0

    @property
    def here(self) -> bool:
        """True if all ranks are always on this host."""
        return not self.script and all(is_this_machine(host) for host, _ in self.hosts)


def terms_of(
    requested: int | None,
    least: int | None,
    most: int | None,
    slots: Slots,
    *,
    script: str | None = None,
    each: int | None = None,
    timeout: float | None = None,
    resets: int | None = None,
    cooldown: tuple[float, float] | None = None,
) -> ElasticSettings | None:
    """Return the checked settings; None if the job is not elastic, because neither ``least`` nor a script is given.

    Args:
        requested: the number of ranks to begin with. Defaults to ``least`` if None.
        least: the fewest ranks. Defaults to ``requested`` if None.
        most: the most ranks, or None.
        slots: the given hosts and their slots; empty if none are given.
        script: the host discovery script, or None.
        each: slots of a host for which the script prints no number. Defaults to 1.
        timeout: seconds that the job may have too few ranks. Defaults to 600.
        resets: the largest number of changes of the ranks. Defaults to no limit.
        cooldown: the shortest and longest time, in seconds, that a host is barred. Defaults to forever.

    Raises:
        InvalidInputError: the options contradict each other, or the script cannot be run; nothing was started.

    Example:
        >>> terms_of(4, 2, None, ()).hosts
        (('localhost', 4),)
        >>> terms_of(4, None, None, ()) is None
        True
    """
    if least is None and script is None:
        options = {"--max-np": most, "--slots-per-host": each, "--elastic-timeout": timeout, "--reset-limit": resets}
        _refuse_options({**options, "--blacklist-cooldown-range": cooldown})
        return None
    if script is not None and slots:
        raise InvalidInputError(
            "the hosts are given by -H or a host file, or found by --host-discovery-script: give one"
        )
    if each is not None and script is None:
        raise InvalidInputError("--slots-per-host is for hosts that --host-discovery-script lists without slots")
    group = os.environ.get("CHOROS_COMM", "")
    if group not in ("", "shared", "tcp"):
        raise InvalidInputError(
            f"CHOROS_COMM={group}: the ranks of an elastic job communicate by shared memory or sockets; unset it"
        )
    first = requested or least
    if first is None:
        raise InvalidInputError("give the number of ranks: -n N, or --min-np N")
    least = first if least is None else least
    _check_numbers(first, least, most, cooldown)
    if not slots and script is None:
        slots = (("localhost", most or first),)
    if slots and sum(count for _, count in slots) < first:
        raise InvalidInputError(
            f"{first} ranks were asked for, but the hosts have {counted(sum(count for _, count in slots), 'slot')}"
        )
    command = tuple(script_of(script)) if script is not None else ()
    settings = ElasticSettings(
        first, least, most, command, slots, each or 1, resets=resets, cooldown=cooldown, pulse=_pulse()
    )
    return settings if timeout is None else replace(settings, timeout=timeout)


def _refuse_options(options: dict[str, object]) -> None:
    """Raise InvalidInputError for a given option that only an elastic job has."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInputError(f"{name} is for an elastic job: give --min-np or --host-discovery-script too")


def _check_numbers(first: int, least: int, most: int | None, cooldown: tuple[float, float] | None) -> None:
    if least > first:
        raise InvalidInputError(
            f"--min-np {least} is more than the {counted(first, 'rank')} of -n: give --min-np {first} or less"
        )
    if most is not None and most < first:
        raise InvalidInputError(
            f"--max-np {most} is less than the {counted(first, 'rank')} of -n: give --max-np {first} or more"
        )
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise InvalidInputError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: give 0 < MIN <= MAX")


def _pulse() -> float:
    text = os.environ.get("CHOROS_PULSE", "").strip() or "15"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 2 <= seconds < 1e6:
        raise InvalidInputError(f"CHOROS_PULSE={text!r} is not a number of seconds of 2 or more: see docs/failures.md")
    return seconds
