"""The terms of an elastic job: least and most ranks, hosts, and the time for which it may have too few."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from choros.cluster import Slots, is_this_machine
from choros.errors import InvalidInputError
from choros.launch.elastic.host_discovery import script_of


@dataclass(frozen=True)
class ElasticSettings:
    """The terms of an elastic job.

    Attributes:
        first: int. Ranks to begin with, at least.
        least: int. Ranks to go on with, at least. most: int or None. At most; None: one for each slot.
        script: tuple of str. The host discovery script and its arguments; empty where the hosts are fixed.
        hosts: Slots. The fixed hosts. each: int. Slots of a host of which the script tells none.
        timeout: float. Seconds that it may be short of ranks. resets: int or None. How often ranks may change.
        cooldown: the shortest and longest time, in seconds, that a host with failed ranks is out; None: for ever.
        pulse: float. Seconds after which a process that gives no sign of life is given up.
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
        """True if all ranks are on this machine, now and later."""
        return not self.script and all(is_this_machine(host) for host, _ in self.hosts)


def terms_of(
    asked: int | None,
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
    """Check what was asked for; None where the job is not elastic, as neither ``least`` nor a script is given.

    Args:
        asked: the number of ranks to begin with.
        least: the fewest.
        most: the most.
        slots: the hosts that were given, none where they were not.
        script: the host discovery script.
        each: slots of a host of which it tells none.
        timeout: seconds that the job may be short of ranks.
        resets: how often its ranks may change.
        cooldown: the shortest and longest time that a host is out.

    Raises:
        InvalidInputError: what was given does not fit together, or the script cannot be run; nothing was started.

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
        raise InvalidInputError("--slots-per-host is for hosts of which --host-discovery-script tells no slots")
    group = os.environ.get("CHOROS_COMM", "")
    if group not in ("", "shared", "tcp"):
        raise InvalidInputError(
            f"CHOROS_COMM={group}: the ranks of an elastic job meet in shared memory or by sockets; unset it"
        )
    first = asked or least
    if first is None:
        raise InvalidInputError("say how many ranks: -n N, or --min-np N")
    least = first if least is None else least
    _check_numbers(first, least, most, cooldown)
    if not slots and script is None:
        slots = (("localhost", most or first),)
    if slots and sum(count for _, count in slots) < first:
        raise InvalidInputError(
            f"{first} ranks were asked for, but the hosts have {sum(count for _, count in slots)} slots"
        )
    words = tuple(script_of(script)) if script is not None else ()
    terms = ElasticSettings(
        first, least, most, words, slots, each or 1, resets=resets, cooldown=cooldown, pulse=_pulse()
    )
    return terms if timeout is None else replace(terms, timeout=timeout)


def _refuse_options(options: dict[str, object]) -> None:
    """Raise an error for an option that only an elastic job has."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInputError(f"{name} is for an elastic job: give --min-np or --host-discovery-script too")


def _check_numbers(first: int, least: int, most: int | None, cooldown: tuple[float, float] | None) -> None:
    if least > first:
        raise InvalidInputError(f"--min-np {least} is more than the {first} ranks of -n: give --min-np {first} or less")
    if most is not None and most < first:
        raise InvalidInputError(f"--max-np {most} is less than the {first} ranks of -n: give --max-np {first} or more")
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise InvalidInputError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: give 0 < MIN <= MAX")


def _pulse() -> float:
    text = os.environ.get("CHOROS_PULSE", "").strip() or "15"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 2 <= seconds < 1e6:
        raise InvalidInputError(f"CHOROS_PULSE={text!r} is no number of seconds of 2 or more: see docs/failures.md")
    return seconds
