"""Messages between a worker and the server of a shard on another host, in the encoding of ``choros.comm.messages``.

A request may be sent twice; see ``choros.param_server.shard_service``. Some fields are in several messages. The fields
``contributions``, ``clock`` and ``times_set`` are the worker's counters for the shard: the number of its contributions,
the clock that it saw last, and the number of times that the center had been set. ``statistics`` are the moving
statistics, which only the first shard has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from choros.comm.messages import Messages
from choros.types import Array


# -- exchanges
@dataclass(frozen=True)
class Exchange:
    """Merge a worker's message, and commit its ``position_word`` (``center_state.encode_position``)."""

    window: int
    position_word: int
    contributions: int
    clock: int
    times_set: int
    message: Array
    statistics: Array


@dataclass(frozen=True)
class ExchangeReply:
    """The center to adopt. ``taken``: it was set, so the worker takes it as it is, and its message was not merged."""

    staleness: int
    taken: bool
    clock: int
    times_set: int
    shown: Array
    statistics: Array


@dataclass(frozen=True)
class PublishPending:
    """Keep the message of an exchange for ``Trial``."""

    window: int
    contributions: int
    clock: int
    times_set: int
    message: Array
    statistics: Array


@dataclass(frozen=True)
class Trial:
    """Request the center with all pending messages."""


@dataclass(frozen=True)
class TrialReply:
    """The center with all pending messages."""

    center: Array
    statistics: Array


@dataclass(frozen=True)
class ReadCenter:
    """Request the center."""


@dataclass(frozen=True)
class CenterReply:
    """The center."""

    clock: int
    times_set: int
    center: Array
    statistics: Array


@dataclass(frozen=True)
class ReadTimesSet:
    """Request the number of times that the center was set, and its clock."""


@dataclass(frozen=True)
class TimesSetReply:
    """Number of times that the center was set, and its clock."""

    times_set: int
    clock: int


@dataclass(frozen=True)
class ReplaceCenter:
    """Set the center and its clock, if it was set ``times_set`` times until now."""

    times_set: int
    clock: int
    center: Array
    statistics: Array


# -- the whole state
@dataclass(frozen=True)
class ExportState:
    """Request the state of the shard."""


@dataclass(frozen=True)
class ShardState:
    """The header of the shard, and the center, the moving statistics and the rule's memory; of ``export_state``."""

    header: Array
    vectors: list[Array]


@dataclass(frozen=True)
class ReadWorkerPosition:
    """Request the position of a worker at its last exchange."""

    rank: int


@dataclass(frozen=True)
class WorkerPosition:
    """A position (epoch, batch); None before the first exchange."""

    position: tuple[int, int] | None


@dataclass(frozen=True)
class RefreshCounters:
    """Request this worker's counters after ``ShardState`` was imported."""


@dataclass(frozen=True)
class CountersReply:
    """A worker's counters."""

    contributions: int
    times_set: int


# -- vectors by messages: see ``choros.param_server.transfer_slots``
@dataclass(frozen=True)
class Transfer:
    """Envelope of a request whose first array, or whose reply's first array, is sent by a message.

    Attributes:
        number: of the transfer of the request's first array; None for a request without arrays.
        request: the header of the request.
        arrays: its further arrays.
    """

    number: int | None
    request: dict[str, Any]
    arrays: list[Array]


@dataclass(frozen=True)
class TransferReply:
    """Envelope of the reply.

    Attributes:
        source: where the server has the reply's first array, which ``Fetch`` requests; None for a reply without arrays.
        reply: the header of the reply.
        arrays: its further arrays.
    """

    source: int | None
    reply: dict[str, Any]
    arrays: list[Array]


@dataclass(frozen=True)
class Fetch:
    """Request the transfer of this number, which sends the array at ``source``."""

    number: int
    source: int


VECTOR_REQUESTS = Messages(Exchange, PublishPending, Trial, ReadCenter, ReplaceCenter)  # of one vector of the shard
SHARD_REQUESTS = Messages(*VECTOR_REQUESTS.kinds, ReadTimesSet)
STATE_REQUESTS = Messages(ExportState, ShardState, ReadWorkerPosition, RefreshCounters)
TRANSFERS = Messages(Transfer, Fetch)
