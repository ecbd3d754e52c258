"""``history.run``: what a run did besides what Keras logs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from choros.training.spec import WorkerStats

_SLOW, _SHORT, _FEW = 1.5, 1.0, 10  # times the others' median; seconds and steps below which nobody is called slow


@dataclass(frozen=True)
class WorkerRecord:
    """One worker of a run.

    Attributes:
        rank: int.
        steps, rows: int. Optimizer steps done and rows trained.
        exchanges: int. Times it met the others or the centre.
        staleness: float. Mean number of merges by others between two of its meetings; 0 where all meet together.
        exchanging: float. Share (0 to 1) of its training time spent in meetings, waiting included.
        waiting: float. Share of its training time spent waiting for data.
        calling: float. Share of it in which this worker alone waited for callbacks.
        host: str. The machine it ran on.
        not_finite: (epoch, step), counted from 0, where its own loss, gradients or weights first were not finite, the
            step -1 where only the epoch is known (then, on rank 0, of whichever rank); None where they never were, or
            where another's were before.
        startup, seconds: float. Seconds of start-up (until all were ready, and the first step of each shape, which
            compiles), and of training.
        samples_per_second: float. Rows of the other steps over ``seconds``.
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

    @property
    def step_seconds(self) -> float:
        """Seconds a step outside meetings and callbacks: computing, and waiting for data."""
        return self.seconds * max(0.0, 1 - self.exchanging - self.calling) / max(self.steps, 1)

    @classmethod
    def of(cls, tally: WorkerStats) -> WorkerRecord:
        """Make the record of a worker's tally."""
        seconds = max(tally.seconds, 1e-9)
        return cls(
            tally.rank,
            tally.steps,
            tally.rows,
            tally.exchanges,
            tally.staleness / tally.exchanges if tally.exchanges else 0.0,
            min(1.0, tally.exchanging / seconds),
            min(1.0, tally.waiting / seconds),
            tally.startup,
            tally.seconds,
            (tally.rows - tally.first_rows) / seconds,
            tally.host,
            None if tally.lost_epoch < 0 else (tally.lost_epoch, tally.lost_step),
            min(1.0, tally.calling / seconds),
        )


@dataclass(frozen=True)
class Restart:
    """One time that a worker failed and the run went on.

    Attributes:
        rank: int. host, signal, reason: str. Who failed, where, and why; ``signal`` is empty where none ended it.
        seconds: float. Since the run began.
        epoch, batch: int. With which training went on, counted from 0.
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
    """A whole run, kept at ``history.run``.

    Attributes:
        algorithm: the bound algorithm (``alpha`` and the like filled in).
        mode: "sync", "async" or None, as of the algorithm.
        workers: tuple of WorkerRecord, one a rank.
        startup: float. Seconds of start-up of the slowest worker: processes, imports, loading, compiling.
        seconds: float. Seconds of training of the slowest worker.
        rows: int. Rows trained by all.
        samples_per_second: float. Sum over the workers.
        exchanges: int. Meetings, summed over the workers.
        staleness: float. Mean over meetings.
        exchanging: float. Mean share of training time spent in meetings.
        waiting: float. Mean share of training time spent waiting for data.
        losses: tuple of (seconds of training, compiling left out, epoch, loss), one an epoch.
        group: str. What the workers met in: "shared memory", "MPI over 2 hosts, sums in each host first",
            "torch (gloo) over shared memory", "a center in shared memory", "nothing" ...
        keeping: float. Seconds of processors, all processes together, that went into keeping and writing the state.
        restarts: tuple of Restart. Workers that failed, after which the run went on.
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

    @classmethod
    def of(
        cls,
        algorithm: Any,
        mode: str | None,
        tallies: list[WorkerStats],
        startup: float,
        losses: list[tuple[float, int, float]],
        group: str = "nothing",
    ) -> RunRecord:
        """Sum the workers' tallies."""
        workers = tuple(WorkerRecord.of(tally) for tally in tallies)
        exchanges = sum(worker.exchanges for worker in workers)
        slowest = max(tally.startup for tally in tallies)
        return cls(
            algorithm=algorithm,
            mode=mode,
            workers=workers,
            startup=startup + slowest,
            seconds=max(worker.seconds for worker in workers),
            rows=sum(worker.rows for worker in workers),
            samples_per_second=sum(worker.samples_per_second for worker in workers),
            exchanges=exchanges,
            staleness=sum(tally.staleness for tally in tallies) / exchanges if exchanges else 0.0,
            exchanging=sum(worker.exchanging for worker in workers) / len(workers),
            waiting=sum(worker.waiting for worker in workers) / len(workers),
            losses=tuple(losses),
            group=group,
            keeping=sum(tally.keeping for tally in tallies),
        )

    def stragglers(self) -> dict[int, float]:
        """Return the ranks whose steps take much longer than those of the others.

        Returns:
            By rank, how many times as long as the median of all others it takes for a step, meetings left out, where
            that is more than 1.5. Empty for runs of less than a second or ten steps, which chance decides.
        """
        found = {}
        for worker in self.workers:
            others = [other.step_seconds for other in self.workers if other is not worker]
            if others and worker.seconds >= _SHORT and worker.steps >= _FEW:
                times = worker.step_seconds / max(median(others), 1e-9)
                if times > _SLOW:
                    found[worker.rank] = times
        return found

    def line(self) -> str:
        """Say it in one line."""
        text = (
            f"choros: {len(self.workers)} worker{'s' if len(self.workers) > 1 else ''}, "
            f"start-up {self.startup:.1f} s, training {self.seconds:.1f} s "
            f"({self.samples_per_second:,.0f} samples/s), exchanging {self.exchanging:.0%}, "
            f"waiting for data {self.waiting:.0%}"
        )
        if len(self.workers) > 1:
            text += f", meeting in {self.group}"
        if self.restarts:
            text += f", {len(self.restarts)} restart{'s' if len(self.restarts) > 1 else ''}"
        lost = [worker for worker in self.workers if worker.not_finite is not None]
        if lost:
            worker = min(lost, key=lambda each: each.not_finite or ())
            text += f", not finite from epoch {(worker.not_finite or (0,))[0] + 1} on (rank {worker.rank} first)"
        for rank, times in self.stragglers().items():
            worker = self.workers[rank]
            where = f"rank {rank}" + (f" on {worker.host}" if worker.host else "")
            text += f"; {where} takes {times:.1f} times as long for a step as the others"
            text += ", most of it waiting for data" if worker.waiting > 0.5 else ""
        if len(self.workers) > 1 and self.startup > 4 * self.seconds:
            text += "; with so little to train, one process (model.fit) is faster: most of the time was start-up"
        elif len(self.workers) > 1 and self.exchanging > 0.5:
            text += "; more than half of it exchanging: a larger batch_size or window, or fewer workers, is faster"
        elif self.waiting > 0.3:
            text += "; choros.prefetch reads the next batches while a step runs"
        return text
