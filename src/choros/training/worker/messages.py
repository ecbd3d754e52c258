"""Messages between a rank and the process that called ``fit``, in the encoding of ``choros.comm.messages``.

Arrays are sent beside a message: weights, a saved state, the lane of a timeline. Events go from a rank to the caller.
The caller replies to some of them with a ``Control`` or with ``ShowWeights``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from choros.comm.messages import Messages
from choros.comm.tcp.auth_socket import RankGreeting
from choros.launch.process.failure_report import RankFailure
from choros.training.spec import FitConfig, TrainerControl, WorkerStats

Logs = dict[str, Any]  # as Keras gives them to callbacks: numbers, or lists of numbers


# -- the start of a connection
@dataclass(frozen=True)
class CallbackGreeting(RankGreeting):
    """A rank connects to the process that called ``fit``.

    Attributes:
        aside: bool. Whether the connection is a further one of the rank: its end is not the end of the rank.
    """

    aside: bool = False


# -- events of all ranks
@dataclass(frozen=True)
class BatchEnded:
    """Rank 0 has trained a step. ``logs``: the logs after it."""

    epoch: int
    step: int
    logs: Logs


@dataclass(frozen=True)
class EpochEnded:
    """Rank 0 has ended an epoch, after ``seconds`` of training. ``metrics``: values of the metrics' variables, flat."""

    epoch: int
    logs: Logs
    metrics: list[float]
    seconds: float = 0.0


@dataclass(frozen=True)
class WeightsShown:
    """Rank 0 has written or sent the weights that callbacks have requested. ``metrics``: as in ``EpochEnded``."""

    metrics: list[float]


# -- events of local workers
@dataclass(frozen=True)
class Ready:
    """The worker has its model and its connections."""


@dataclass(frozen=True)
class BatchRecorded:
    """A record of rank 0 has arrived in the pipe of ``BatchChannel``."""


@dataclass(frozen=True)
class StateSaved:
    """State of a rank for a checkpoint. ``part``: the head of ``to_blobs``. ``asked``: the end was requested."""

    part: dict[str, Any]
    asked: bool


@dataclass(frozen=True)
class OptimizerSent:
    """State of an asynchronous worker's optimizer. ``part``: the head of ``to_blobs``."""

    part: dict[str, Any]


@dataclass(frozen=True)
class WorkerDone:
    """The worker has trained.

    ``score``: loss of an Ensemble's member. ``lanes``: number of its timeline's arrays. ``files``: ``loaded_files``.
    """

    stats: WorkerStats
    score: float
    lanes: int
    files: dict[str, list[int]]


# -- events and requests of ranks that a launcher started
@dataclass(frozen=True)
class TrainingBegins:
    """All ranks are ready to train from this epoch on."""

    epoch: int


@dataclass(frozen=True)
class RunStateSaved:
    """State of all ranks for a checkpoint. ``facts``: of ``Snapshot.flat``. ``kinds``: of ``kinds_of``."""

    facts: dict[str, Any]
    kinds: list[Any]


@dataclass(frozen=True)
class RanksDone:
    """The rank has trained. ``lanes``: number of the timeline's arrays, which come before rank 0's weights."""

    stats: list[WorkerStats]
    losses: list[tuple[float, int, float]]
    transport: str
    lanes: int


@dataclass(frozen=True)
class EndedOnRequest:
    """The rank ends, as the end was requested and the state is saved."""


@dataclass(frozen=True)
class ConnectionClosed:
    """The connection with a rank was closed."""


@dataclass(frozen=True)
class OutputLine:
    """Line of a rank's output."""

    text: str


@dataclass(frozen=True)
class GetJob:
    """Request for the ``JobReply``."""


@dataclass(frozen=True)
class GetData:
    """Request for all arrays of the job, as one array of bytes."""


@dataclass(frozen=True)
class GetWeights:
    """Request for the initial weights, as ``shown`` returns them."""


@dataclass(frozen=True)
class GetState:
    """Request for the ``StateReply``."""


@dataclass(frozen=True)
class AwaitEnd:
    """Request for the ``EndReply``, which comes when the end is requested, or after some time."""


# -- from the caller to a rank
@dataclass(frozen=True)
class DataLayout:
    """Layout of the arrays of a job. ``model_arrays``, ``foreign``: the numbers of arrays of ``PackedModel``.

    The arrays of the model come first.
    """

    entries: list[dict[str, Any]]
    model_arrays: int
    foreign: int = 0


@dataclass(frozen=True)
class WorkerTask:
    """Job of a local worker.

    Attributes:
        job: FitConfig.
        weights: dict. The layout of ``SharedWeights``.
        data: the layout of the data.
        depth: int. The number of slots of the ring of a stream; 0 (default) if the data are not a stream.
        ahead: int. The number of batches of a stream to prepare. Defaults to 0.
        resumes: bool. Whether this rank has exchanged before. Defaults to False.
        snapshots: bool. Whether there are snapshots of the center. Defaults to False.
        best: bool. Whether there are slots for the best member. Defaults to False.
        batch_channel: bool. Whether there is a ``BatchChannel``. Defaults to False.
        state: dict. The layout of the state to resume from; empty (default) at the beginning of a run.
    """

    job: FitConfig
    weights: dict[str, Any]
    data: DataLayout
    depth: int = 0
    ahead: int = 0
    resumes: bool = False
    snapshots: bool = False
    best: bool = False
    batch_channel: bool = False
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobReply:
    """Job of a launcher's ranks. ``nbytes``: of the data. ``code``: see ``read_code``. ``steps``: of an epoch."""

    job: FitConfig
    data: DataLayout
    nbytes: int
    code: dict[str, Any]
    steps: int | None


@dataclass(frozen=True)
class StateReply:
    """State to resume from, or None. ``part``: the head of ``to_blobs``, or None for a rank without arrays."""

    facts: dict[str, Any] | None
    part: dict[str, Any] | None


@dataclass(frozen=True)
class EndReply:
    """Reply to ``AwaitEnd``."""

    requested: bool


@dataclass(frozen=True)
class Control:
    """Changes by callbacks, and the epoch whose callbacks come next (None: training is over)."""

    control: TrainerControl
    epoch: int | None = None


@dataclass(frozen=True)
class ShowWeights:
    """Request of the caller, while rank 0 waits for a ``Control``: a callback reads weights."""


WORKER_EVENTS = Messages(
    Ready, BatchEnded, BatchRecorded, EpochEnded, WeightsShown, StateSaved, OptimizerSent, WorkerDone
)
RANK_EVENTS = Messages(
    TrainingBegins, BatchEnded, EpochEnded, WeightsShown, RunStateSaved, RanksDone, EndedOnRequest, RankFailure
)
RANK_REQUESTS = Messages(GetJob, GetData, GetWeights, GetState, AwaitEnd)
REPLIES = Messages(Control, ShowWeights)
