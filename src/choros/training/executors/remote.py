"""The caller's side of a fit whose ranks a launcher starts: give them their work, run the callbacks, take the end."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from choros.data import serialization
from choros.errors import WorkerFailedError
from choros.launch.process.failure_report import failure, is_echo
from choros.launch.specs import LaunchedJob, Launcher, LaunchPreferences
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.checkpoint.snapshot import Snapshot, read_raw, to_blobs
from choros.training.executors.callback_server import CallbackServer, Told
from choros.training.executors.restart_policy import RestartPolicy
from choros.training.payload import HOME, FitPayload, SharedCodeFolder, put, shown
from choros.training.run_record import RunRecord
from choros.training.spec import FitRequest, WorkerStats

_CAUSE = 5.0  # seconds in which the rank that failed first is heard of, after one that only lost it
_ENDS = 10.0  # seconds that ranks take to end when they have done their work
_SAID = 30  # lines that are kept of what the ranks print
_POLL = 20.0  # seconds after which rank 0 is told that nobody has asked for the end yet


class RemoteRun(CallbackServer):
    """One fit on ranks that a launcher starts. ``run`` is called once.

    Args:
        plan: what to do, its job knowing where the parts of its sources are.
        cargo: FitPayload.
        launcher: what starts the ranks.
        how: what is wished of it.
        restarts: int. How often the ranks may be started again.
    """

    def __init__(
        self, plan: FitRequest, cargo: FitPayload, launcher: Launcher, how: LaunchPreferences, restarts: int = 0
    ) -> None:
        super().__init__(plan.model, plan.job, plan.conductor)
        self.plan, self.cargo, self.launcher, self.how = plan, cargo, launcher, how
        self.given = shown(self.model)
        self.said: deque[str] = deque(maxlen=_SAID)
        self.patience = 0.0  # seconds that ranks may take to end by themselves
        self.entries, self.nbytes = serialization.layout(cargo.arrays)
        self.saver: CheckpointManager = plan.saver or CheckpointManager(None)
        self.mender, self.first_job = RestartPolicy(restarts, plan.job.workers), plan.job
        self.asked = threading.Event()

    def run(self) -> RunRecord:
        """Train; returns the record of the run, with the model trained.

        Raises:
            WorkerFailedError: a rank raised, died or could not be started; the model is as it was.
        """
        startup = time.perf_counter() - self.plan.begun
        with (
            SharedCodeFolder([self.cargo.model.code, *self.cargo.blobs]) as folder,
            self.saver.listening(self.asked.set),
        ):
            self.folder = folder
            while True:
                try:
                    tallies, losses, met = self._attempt()
                    break
                except WorkerFailedError as error:
                    if not self.again(error):
                        raise
        put(self.model, self.latest)
        record = RunRecord.of(self.plan.algorithm, self.job.mode, tallies, startup, losses, met)
        return replace(record, restarts=tuple(self.mender.done), keeping=record.keeping + self.saver.busy)

    def _attempt(self) -> tuple[list[WorkerStats], list[tuple[float, int, float]], str]:
        """Start the ranks, and follow them to their end."""
        self.patience = 0.0
        with self.opened(self.how.network, self.launcher.here) as home:
            process = self.launcher.start(
                "choros.training.worker.remote_main", self.job.workers, {HOME: json.dumps(home)}, self.how
            )
            process.read(self.line)
            try:
                return self.follow(process)
            except (KeyboardInterrupt, SystemExit):
                put(self.model, self.latest)
                raise
            except BaseException:
                put(self.model, self.given)  # callbacks may have seen later ones
                raise
            finally:
                self.dismiss()
                process.end(self.patience)

    def again(self, error: WorkerFailedError) -> bool:
        """Make ready to start all ranks again, from the last state; False where that cannot be."""
        if not (self.mender.retry and self.hosts):  # a launcher that starts none will not do better
            return False
        self.job = self.saver.onward(self.first_job)
        self.mender.count(error, (self.job.initial_epoch, self.job.initial_batch), whole=True)
        return True

    def line(self, text: str) -> None:
        """Keep what a rank printed, and show it where that is wished."""
        self.said.append(text)
        if self.how.echo:
            print(text, flush=True)

    def tell(self, what: str, rank: int) -> Told:
        """Give a rank its work, the data, the model's weights or its state; or tell it that all are to end."""
        if what == "weights":
            return {}, self.given
        if what == "end":
            return {"asked": self.asked.wait(_POLL)}, []
        if what == "state":
            return self.state_of(rank)
        if what == "data":
            whole = np.empty(self.nbytes, np.uint8)
            serialization.write(self.entries, self.cargo.arrays, whole)
            return {}, [whole]
        told = {
            "job": self.job.json(),
            "arrays": self.entries,
            "model_arrays": len(self.cargo.model.arrays),
            "bytes": self.nbytes,
            "code": self.folder.told,
            "steps": self.conductor.steps,
        }
        return told, []

    def state_of(self, rank: int) -> Told:
        """Return the state that a rank goes on from: of ranks that train alone, rank 0 alone has it."""
        latest = self.saver.latest
        if latest is None:
            return {"facts": None, "part": None}, []
        if self.job.alone and rank:
            return {"facts": latest.facts, "part": None}, []
        head, blobs = to_blobs(latest.of_rank(rank))
        return {"facts": latest.facts, "part": head}, blobs

    # -- the run
    def follow(self, process: LaunchedJob) -> tuple[list[WorkerStats], list[tuple[float, int, float]], str]:
        """Follow the run to its end."""
        done: dict[int, dict[str, Any]] = {}
        begun = time.monotonic()
        while len(done) < self.job.workers:
            found = self.next(0.5)
            self.saver.look()
            if self.saver.checkpoint is not None and self.saver.checkpoint.asked:
                self.asked.set()
            if found is None:
                if process.code() is not None:
                    self.ended(process, done)
                if not self.hosts and time.monotonic() - begun > self.job.first_timeout:
                    raise WorkerFailedError(
                        f"{self.launcher} has started no rank for {self.job.first_timeout:.0f} s.", rank=0
                    )
                continue
            rank, head, arrays, back = found
            event = head["event"]
            if event == "failed":
                self.fail(process, rank, head)
            elif event == "state":
                self.saver.kept(Snapshot.of(head["facts"], read_raw(arrays, head["kinds"])))
                back.put(({}, []))
            elif event == "left":
                back.put(({}, []))
                self.patience = _ENDS
                raise self.saver.leave()
            elif event == "gone" and rank not in done:
                self.gone(process, rank)
            elif event == "done":
                done[rank] = head
                if rank == 0:
                    self.latest = arrays
                back.put(({}, []))
            elif event in ("begin", "batch", "epoch_end"):
                self.obey(head, arrays, back)
        self.patience = _ENDS
        losses = [(seconds, epoch, loss) for seconds, epoch, loss in done[0]["losses"]]
        return [WorkerStats(**tally) for tally in done[0]["tallies"]], losses, done[0]["met"]

    # -- failure
    def fail(self, process: LaunchedJob, rank: int, event: dict[str, Any]) -> None:
        """Raise for the rank that failed first: not for one that only lost another."""
        until = time.monotonic() + _CAUSE
        while is_echo(event) and time.monotonic() < until:
            found = self.next(0.2)
            if found is not None and found[1]["event"] == "failed" and not is_echo(found[1]):
                rank, event = found[0], found[1]
            elif found is not None and found[1]["event"] == "gone" and found[0] != rank:
                self.gone(process, found[0])
        self.mender.judge(event)
        raise failure(rank, self.job.workers, event, self.last(), what="worker")

    def gone(self, process: LaunchedJob, rank: int) -> None:
        """Raise for a rank that went without a word."""
        self.dismiss()
        code = process.wait(_CAUSE)
        event: dict[str, Any] = {"event": "died", "host": self.hosts.get(rank, ""), "output": "\n".join(self.said)}
        if code is not None and code > 128:
            with suppress(ValueError):
                event["signal"] = signal.Signals(code - 128).name
        event["exit"] = code if code is not None else -1
        self.mender.judge(event)
        raise failure(rank, self.job.workers, event, self.last(), what="worker")

    def ended(self, process: LaunchedJob, done: dict[int, Any]) -> None:
        """Raise for a launcher that ended before the ranks had done their work."""
        said = "\n".join(self.said)
        self.mender.judge({})
        raise WorkerFailedError(
            f"{self.launcher} ended with code {process.code()}; of {self.job.workers} ranks {len(self.hosts)} had come "
            f"and {len(done)} had done their work. The last lines that it printed:\n{said}",
            rank=min(set(range(self.job.workers)) - done.keys()),
            output=said,
            weights=self.last(),
        )
