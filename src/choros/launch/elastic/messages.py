"""Messages between the driver of an elastic job and its processes, in the encoding of ``choros.comm.messages``.

A generation is the time in which the job has the same ranks. ``generation`` is its number, counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from choros.comm.messages import Messages


@dataclass(frozen=True)
class DriverAddress:
    """The address of the driver for a process, as a message in its environment.

    Attributes:
        place: str. ``address:port`` of the ``ControlServer``.
        member: int. The number of the process, for its ``ProcessGreeting``.
        secret: str. The job's secret in hex.
    """

    place: str
    member: int
    secret: str


# -- from a process to the driver
@dataclass(frozen=True)
class ProcessGreeting:
    """A process connects. ``member``: its number among all processes that the driver has started."""

    member: int


@dataclass(frozen=True)
class Connected:
    """The process has connected. Only the driver makes this message."""


@dataclass(frozen=True)
class RequestRank:
    """The process waits for a rank.

    Attributes:
        sync: whether it needs rank 0's state.
        lost: the reason why the last generation is over, if this process saw it; else "".
        missing: ranks that did not answer this process in time.
    """

    sync: bool
    lost: str
    missing: list[int]


@dataclass(frozen=True)
class ShareText:
    """A text of the process for all ranks of its generation."""

    generation: int
    text: str


@dataclass(frozen=True)
class Alive:
    """Reply to a ``Ping``."""


# -- from the driver to a process
@dataclass(frozen=True)
class Ping:
    """Request for an ``Alive``."""


@dataclass(frozen=True)
class AssignRank:
    """Rank of the process in a new generation, under the names of ``choros.cluster.Place``.

    Attributes:
        sync: whether the ranks take rank 0's state before they continue.
        local: whether all ranks are on the driver's host.
        hosts: the names of the hosts.
    """

    generation: int
    sync: bool
    local: bool
    hosts: list[str]
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int


@dataclass(frozen=True)
class SharedTexts:
    """Texts of all ranks of the generation, by rank."""

    generation: int
    texts: list[str]


@dataclass(frozen=True)
class RanksChange:
    """Ranks will leave or join; ``joining``: some will join. The generation ends at the next commit."""

    generation: int
    joining: bool


@dataclass(frozen=True)
class GenerationBroken:
    """The generation is over, as a rank was lost."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Leave:
    """The process is no longer part of the job."""


OF_PROCESSES = Messages(RequestRank, ShareText, Alive)
OF_DRIVER = Messages(Ping, AssignRank, SharedTexts, RanksChange, GenerationBroken, Leave)
