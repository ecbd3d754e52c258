"""``history.run``: the figures of a run that Keras does not log."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal

from choros.errors import counted
from choros.training import record_view
from choros.training.data_advice import DataKind, copy_remedy, read_remedy
from choros.training.spec import WorkerStats

# A straggler takes more than 1.5 times the others' median per step, in at least 1 second and 10 steps of training.
_SLOW_RATIO, _MIN_SECONDS, _MIN_STEPS = 1.5, 1.0, 10
_MIN_SHARE = 0.05  # of the training time: a smaller cause is no bottleneck
_DATA_SHARE, _EXCHANGE_SHARE = 0.3, 0.5  # shares above which the summary names the remedy


@dataclass(frozen=True)
class WorkerRecord:
    """The figures of one worker of a run.

    Attributes:
        rank: int.
        steps, rows: int. Optimizer steps done and rows trained.
        exchanges: int. Exchanges with the other workers or with the center.
        staleness: float. Mean number of merges by other workers between two exchanges; 0 if synchronous.
        exchanging: float. Share (0 to 1) of training time spent in exchanges, with the waits for other workers in them.
        waiting: float. Share (0 to 1) of training time in which steps waited for data. It has no waits for workers.
        decoding, copying: float. Shares (0 to 1) of training time in which steps waited until batches had been read and
            decoded, and until they had been converted and copied to the device. On JAX without ``choros.prefetch`` the
            step itself copies, so ``copying`` has the conversion only.
        calling: float. Share (0 to 1) of training time in which only this worker waited for callbacks.
        ahead: int. Number of batches that ``choros.prefetch`` prepares before their steps; 0 without it.
        host: str. The machine of the worker.
        not_finite: (epoch, step), counted from 0, at which this worker's loss, gradients or weights were first not
            finite. The step is -1 if only the epoch is known; on rank 0 it may then be the epoch of any rank. None if
            all were finite, or if another worker's became not finite earlier.
        startup, seconds: float. Seconds of start-up and of training. Start-up is the time until all workers were ready,
            and the first step of each batch shape, which compiles.
        samples_per_second: float. Rows of all other steps, divided by ``seconds``.
    """

    rank: int
    steps: int
    rows: int
    exchanges: int
    staleness: float
    exchanging: float
    waiting: float
    startup: float
    seconds: float
    samples_per_second: float
    host: str = ""
    not_finite: tuple[int, int] | None = None
    calling: float = 0.0
    decoding: float = 0.0
    copying: float = 0.0
    ahead: int = 0

    @property
    def step_seconds(self) -> float:
        """Seconds per step of computing and of waiting for data, without exchanges and callbacks."""
        return self.seconds * max(0.0, 1 - self.exchanging - self.calling) / max(self.steps, 1)

    @classmethod
    def of(cls, stats: WorkerStats) -> WorkerRecord:
        """Return the record of a worker's counts."""
        seconds = max(stats.seconds, 1e-9)
        waiting = min(1.0, stats.waiting / seconds)
        read = stats.reading / (stats.reading + stats.copying) if stats.ahead and stats.reading + stats.copying else 1.0
        copying = (1 - read) * waiting if stats.ahead else min(1.0, stats.copying / seconds)
        return cls(
            stats.rank,
            stats.steps,
            stats.rows,
            stats.exchanges,
            stats.staleness / stats.exchanges if stats.exchanges else 0.0,
            min(1.0, stats.exchanging / seconds),
            waiting,
            stats.startup,
            stats.seconds,
            (stats.rows - stats.first_rows) / seconds,
            stats.host,
            None if stats.lost_epoch < 0 else (stats.lost_epoch, stats.lost_step),
            min(1.0, stats.calling / seconds),
            read * waiting,
            copying,
            stats.ahead,
        )


@dataclass(frozen=True)
class Bottleneck:
    """A reason why workers did not compute.

    Attributes:
        cause: "decode" (steps waited until batches had been read and decoded), "copy" (until they had been converted
            and copied to the device), "exchange", or "slow rank" (the others waited for it).
        share: float. Share (0 to 1) of the training time, mean over the workers.
        remedy: str. The setting to change.
        rank: int or None. The slow rank; None for the other causes.
    """

    cause: Literal["decode", "copy", "exchange", "slow rank"]
    share: float
    remedy: str
    rank: int | None = None


@dataclass(frozen=True)
class Restart:
    """One failure of a worker after which training resumed.

    Attributes:
        rank: int. The rank of the failed worker.
        host, signal, reason: str. Its host, the signal that ended it (empty if none did), and the reason.
        seconds: float. Time from the beginning of the run to the restart.
        epoch, batch: int. Where training resumed, counted from 0.
    """

    rank: int
    host: str
    signal: str
    reason: str
    seconds: float
    epoch: int
    batch: int


@dataclass(frozen=True)
class RunRecord:
    """The figures of a whole run, at ``history.run``. ``print`` shows a summary and a table, a notebook HTML.

    Attributes:
        algorithm: the bound algorithm (with ``alpha`` and similar hyper-parameters filled in).
        mode: "sync", "async" or None, as in ``Trainer``.
        workers: tuple of WorkerRecord, one per rank.
        startup: float. Seconds of start-up of the slowest worker: processes, imports, loading, compiling.
        seconds: float. Seconds of training of the slowest worker.
        rows: int. Rows trained by all workers.
        samples_per_second: float. Sum over the workers.
        exchanges: int. Sum over the workers.
        staleness: float. Mean over all exchanges.
        exchanging, waiting: float. Means of the workers' shares (0 to 1) of training time: see ``WorkerRecord``.
        losses: tuple of (seconds of training without compiling, epoch, loss), one per epoch.
        group: str. The means of exchange: "shared memory", "MPI over 2 hosts, sums in each host first",
            "torch (gloo) over shared memory", "a center in shared memory", "nothing" ...; followed by ", optimizer
            divided" if each rank updated a part of the weights.
        keeping: float. CPU seconds, summed over all processes, for collecting and writing the state.
        restarts: tuple of Restart. The failures after which training resumed.
        data: the kind of the data, on which the advice of ``bottlenecks`` depends.
    """

    algorithm: Any
    mode: str | None
    workers: tuple[WorkerRecord, ...]
    startup: float
    seconds: float
    rows: int
    samples_per_second: float
    exchanges: int
    staleness: float
    exchanging: float
    waiting: float
    losses: tuple[tuple[float, int, float], ...]
    group: str = "nothing"
    restarts: tuple[Restart, ...] = ()
    keeping: float = 0.0
    data: DataKind = field(default_factory=DataKind)

    @classmethod
    def of(
        cls,
        algorithm: Any,
        mode: str | None,
        all_stats: list[WorkerStats],
        startup: float,
        losses: list[tuple[float, int, float]],
        group: str = "nothing",
    ) -> RunRecord:
        """Return the record of a run from the workers' counts.

        Args:
            algorithm: the bound algorithm.
            mode: "sync", "async" or None.
            all_stats: one for each rank.
            startup: seconds of start-up in the caller, before that of the workers.
            losses: (seconds of training, epoch, loss) of each epoch.
            group: the means of exchange.
        """
        workers = tuple(WorkerRecord.of(stats) for stats in all_stats)
        group += ", optimizer divided" if any(stats.divided for stats in all_stats) else ""
        exchanges = sum(worker.exchanges for worker in workers)
        slowest = max(stats.startup for stats in all_stats)
        return cls(
            algorithm=algorithm,
            mode=mode,
            workers=workers,
            startup=startup + slowest,
            seconds=max(worker.seconds for worker in workers),
            rows=sum(worker.rows for worker in workers),
            samples_per_second=sum(worker.samples_per_second for worker in workers),
            exchanges=exchanges,
            staleness=sum(stats.staleness for stats in all_stats) / exchanges if exchanges else 0.0,
            exchanging=sum(worker.exchanging for worker in workers) / len(workers),
            waiting=sum(worker.waiting for worker in workers) / len(workers),
            losses=tuple(losses),
            group=group,
            keeping=sum(stats.keeping for stats in all_stats),
        )

    def __repr__(self) -> str:
        speed = f", {self.samples_per_second:,.0f} samples/s" if self.samples_per_second else ""
        return (
            f"<RunRecord of {counted(len(self.workers), 'worker')}, training {self.seconds:.1f} s{speed}: "
            "see print(run), .summary(), .plot(), .bottlenecks()>"
        )

    def __str__(self) -> str:
        return record_view.text(self)

    def _repr_html_(self) -> str:
        return record_view.as_html(self)

    def plot(self) -> Any:
        """Return a ``matplotlib.figure.Figure`` of the losses, the throughput and the shares of the workers' time.

        Raises:
            InvalidInputError: matplotlib is not installed.
        """
        return record_view.plot(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the record in JSON types; the algorithm as its ``repr``.

        Example:
            >>> from choros.training.spec import WorkerStats
            >>> RunRecord.of(None, "sync", [WorkerStats(0, steps=1)], 0.0, []).to_dict()["workers"][0]["steps"]
            1
        """
        values = asdict(replace(self, algorithm=repr(self.algorithm)))
        result: dict[str, Any] = json.loads(json.dumps(values))
        return result

    def stragglers(self) -> dict[int, float]:
        """Return the ranks whose steps take much longer than those of the other ranks.

        It compares the ranks with each other, and names none if all are equally slow. ``bottlenecks`` returns what
        that and other causes cost the run, as shares of the training time.

        Returns:
            By rank, its time per step divided by the median of the other ranks, without exchanges, if that is more than
            1.5. A rank with less than one second or ten steps is left out, because its times are too random.
        """
        slow_ranks = {}
        for worker in self.workers:
            other_seconds = [other.step_seconds for other in self.workers if other is not worker]
            if other_seconds and worker.seconds >= _MIN_SECONDS and worker.steps >= _MIN_STEPS:
                times = worker.step_seconds / max(median(other_seconds), 1e-9)
                if times > _SLOW_RATIO:
                    slow_ranks[worker.rank] = times
        return slow_ranks

    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """Return the reasons why the workers did not compute, each with the setting to change.

        It divides the time of the run by cause. A slow rank is one of the causes, with the time for which the others
        waited for it; ``stragglers`` returns how slow its steps are, also if no rank waits for them.

        In the synchronous mode, a rank whose own work took less time than that of the slowest rank waited for it in the
        exchanges. In the other modes, the run lasted until the slowest rank had ended.

        Returns:
            The bottlenecks of at least 5 % of the training time, the largest first.

        Example:
            >>> from choros.training.spec import WorkerStats
            >>> counts = WorkerStats(0, steps=100, rows=3200, seconds=10.0, waiting=6.0, reading=6.0)
            >>> [(b.cause, b.share) for b in RunRecord.of(None, None, [counts], 0.0, []).bottlenecks()]
            [('decode', 0.6)]
        """
        workers = self.workers
        if self.mode == "sync":
            work = [worker.step_seconds * worker.steps for worker in workers]
            lags = [
                (max(work) - rank_work) / max(worker.seconds, 1e-9)
                for worker, rank_work in zip(workers, work, strict=True)
            ]
            waits = [min(worker.exchanging, lag) for worker, lag in zip(workers, lags, strict=True)]
            exchanging = [worker.exchanging - wait for worker, wait in zip(workers, waits, strict=True)]
        else:
            work = [worker.seconds for worker in workers]
            waits = [1 - rank_work / max(self.seconds, 1e-9) for rank_work in work]
            exchanging = [worker.exchanging for worker in workers]
        slowest = workers[work.index(max(work))]
        possible = (
            Bottleneck("decode", fmean(worker.decoding for worker in workers), read_remedy(self.data, slowest)),
            Bottleneck("copy", fmean(worker.copying for worker in workers), copy_remedy(slowest)),
            Bottleneck("exchange", fmean(exchanging), self._exchange_remedy()),
            Bottleneck("slow rank", fmean(waits), self._slow_remedy(slowest), slowest.rank),
        )
        return tuple(sorted((b for b in possible if b.share >= _MIN_SHARE), key=lambda b: -b.share))

    def _exchange_remedy(self) -> str:
        batch_text = "batch_size" if self.data.kind in ("arrays", "files") else "global batch"
        level, window = getattr(self.algorithm, "level", ""), getattr(self.algorithm, "window", 1)
        window_text = "" if level == "gradients" or window == 0 else " or window"
        fewer_text = "one process (model.fit)" if len(self.workers) == 2 else "fewer workers"
        return f"a larger {batch_text}{window_text}, or {fewer_text}, is faster"

    def _slow_remedy(self, worker: WorkerRecord) -> str:
        if worker.waiting > 0.5:
            return f"most of its time it waits for data: {read_remedy(self.data, worker)}"
        place = f" on {worker.host}" if worker.host else " there"
        alternative = "an asynchronous algorithm such as 'aeasgd' does not wait for it" if self.mode == "sync" else ""
        remedy = f"end other programs{place}, or train without this rank"
        return f"{remedy}; {alternative}" if alternative else remedy

    def summary(self) -> str:
        """Return the summary of the run in one line. Its percentages are means over the workers."""
        # The first step of a worker compiles, so it is no measure: with no other step there is no speed.
        speed = f" ({self.samples_per_second:,.0f} samples/s)" if self.samples_per_second else ""
        text = (
            f"choros: {counted(len(self.workers), 'worker')}, start-up and compilation {self.startup:.1f} s, training "
            f"{self.seconds:.1f} s{speed}, of which {self.exchanging:.0%} exchanging and "
            f"{self.waiting:.0%} waiting for data"
        )
        if len(self.workers) > 1:
            text += f", exchange by {self.group}"
        if self.restarts:
            text += f", {counted(len(self.restarts), 'restart')}"
        nonfinite = [worker for worker in self.workers if worker.not_finite is not None]
        if nonfinite:
            worker = min(nonfinite, key=lambda item: item.not_finite or ())
            text += f", not finite from epoch {(worker.not_finite or (0,))[0] + 1} on (rank {worker.rank} first)"
        for rank, times in self.stragglers().items():
            worker = self.workers[rank]
            rank_text = f"rank {rank}" + (f" on {worker.host}" if worker.host else "")
            text += f"; {rank_text} takes {times:.1f} times as long for a step as the others"
            text += ", most of it waiting for data" if worker.waiting > 0.5 else ""
        if len(self.workers) > 1 and self.startup > 4 * self.seconds:
            text += "; with so little to train, one process (model.fit) is faster: most of the time was start-up"
        else:
            limits = {"decode": _DATA_SHARE, "copy": _DATA_SHARE, "exchange": _EXCHANGE_SHARE}
            for bottleneck in self.bottlenecks():
                if bottleneck.share > limits.get(bottleneck.cause, 1.0):
                    text += f"; {bottleneck.share:.0%} of training for {bottleneck.cause}: {bottleneck.remedy}"
                    break
        return text
