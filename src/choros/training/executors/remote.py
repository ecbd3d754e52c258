"""The caller's side of a fit whose ranks a launcher starts: send the job, run the callbacks, collect the result."""

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

from choros.console import write_line
from choros.data import serialization
from choros.errors import WorkerFailedError
from choros.launch.process.failure_report import failure, is_echo
from choros.launch.specs import LaunchedJob, Launcher, LaunchPreferences
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.checkpoint.snapshot import Snapshot, read_raw, to_blobs
from choros.training.executors.callback_server import CallbackServer, Reply
from choros.training.executors.restart_policy import RestartPolicy
from choros.training.payload import HOME, FitPayload, SharedCodeFolder, put, shown
from choros.training.run_record import RunRecord
from choros.training.spec import FitRequest, WorkerStats

_CAUSE = 5.0  # seconds to wait for the first failure after a report of a rank that only lost its peer
_ENDS = 10.0  # seconds that finished ranks may take to end
_OUTPUT_LINES = 30  # number of lines kept of the ranks' output
_POLL = 20.0  # seconds until the reply to rank 0 if the end is not requested; rank 0 then asks again


class RemoteRun(CallbackServer):
    """One fit on ranks that a launcher starts. ``run`` is called once.

    Args:
        plan: FitRequest, whose job describes its sources.
        payload: FitPayload.
        launcher: Launcher. Starts the ranks.
        how: LaunchPreferences.
        restarts: int. Number of restarts of all ranks. Defaults to 0.
    """

    def __init__(
        self, plan: FitRequest, payload: FitPayload, launcher: Launcher, how: LaunchPreferences, restarts: int = 0
    ) -> None:
        super().__init__(plan.model, plan.job, plan.conductor)
        self.plan, self.payload, self.launcher, self.how = plan, payload, launcher, how
        self.given = shown(self.model)
        self.output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self.patience = 0.0  # seconds that ranks may take to end by themselves
        self.entries, self.nbytes = serialization.layout(payload.arrays)
        self.saver: CheckpointManager = plan.saver or CheckpointManager(None)
        self.restart_policy, self.first_job = RestartPolicy(restarts, plan.job.workers), plan.job
        self.asked = threading.Event()
        self.lanes: list[bytes] = []

    def run(self) -> RunRecord:
        """Train the model, and return the record of the run.

        Raises:
            WorkerFailedError: a rank raised, died or could not be started. The model is unchanged.
        """
        startup = time.perf_counter() - self.plan.begun
        with (
            SharedCodeFolder([self.payload.model.code, *self.payload.blobs]) as folder,
            self.saver.listening(self.asked.set),
        ):
            self.folder = folder
            while True:
                try:
                    tallies, losses, transport = self._attempt()
                    break
                except WorkerFailedError as error:
                    if not self.again(error):
                        raise
        put(self.model, self.latest)
        record = RunRecord.of(self.plan.algorithm, self.job.mode, tallies, startup, losses, transport)
        return replace(record, restarts=tuple(self.restart_policy.done), keeping=record.keeping + self.saver.busy)

    def _attempt(self) -> tuple[list[WorkerStats], list[tuple[float, int, float]], str]:
        """Start the ranks, and process their events until they end."""
        self.patience = 0.0
        with self.opened(self.how.network, self.launcher.here) as home:
            process = self.launcher.start(
                "choros.training.worker.remote_main", self.job.workers, {HOME: json.dumps(home)}, self.how
            )
            process.read(self.store_line)
            try:
                return self.follow(process)
            except (KeyboardInterrupt, SystemExit):
                put(self.model, self.latest)
                raise
            except BaseException:
                put(self.model, self.given)  # later weights may have been loaded for callbacks
                raise
            finally:
                self.dismiss()
                process.end(self.patience)

    def again(self, error: WorkerFailedError) -> bool:
        """Prepare a restart of all ranks from the last state. Return False if no restart is possible."""
        if not (self.restart_policy.retry and self.hosts):  # if no rank has connected, a restart is not likely to help
            return False
        self.job = self.saver.resumed_config(self.first_job)
        self.restart_policy.count(error, (self.job.initial_epoch, self.job.initial_batch), whole=True)
        return True

    def store_line(self, text: str) -> None:
        """Store a line of a rank's output for error messages, and print it if ``echo`` is set."""
        self.output.append(text)
        if self.how.echo:
            write_line(text)

    def answer(self, request: str, rank: int) -> Reply:
        """Return the job, the data, the weights or the state of a rank; or whether the end is requested."""
        if request == "weights":
            return {}, self.given
        if request == "end":
            return {"asked": self.asked.wait(_POLL)}, []
        if request == "state":
            return self.state_of(rank)
        if request == "data":
            data = np.empty(self.nbytes, np.uint8)
            serialization.write(self.entries, self.payload.arrays, data)
            return {}, [data]
        message = {
            "job": self.job.json(),
            "arrays": self.entries,
            "model_arrays": len(self.payload.model.arrays),
            "bytes": self.nbytes,
            "code": self.folder.files,
            "steps": self.conductor.steps,
        }
        return message, []

    def state_of(self, rank: int) -> Reply:
        """Return the state from which a rank resumes. Of asynchronous ranks only rank 0 gets arrays."""
        latest = self.saver.latest
        if latest is None:
            return {"facts": None, "part": None}, []
        if self.job.asynchronous and rank:
            return {"facts": latest.facts, "part": None}, []
        head, blobs = to_blobs(latest.of_rank(rank))
        return {"facts": latest.facts, "part": head}, blobs

    # -- the run
    def follow(self, process: LaunchedJob) -> tuple[list[WorkerStats], list[tuple[float, int, float]], str]:
        """Process the ranks' events until all have finished; return counts, losses and the means of exchange."""
        done: dict[int, dict[str, Any]] = {}
        begun = time.monotonic()
        while len(done) < self.job.workers:
            item = self.next(0.5)
            self.saver.look()
            if self.saver.checkpoint is not None and self.saver.checkpoint.asked:
                self.asked.set()
            if item is None:
                if process.code() is not None:
                    self.ended(process, done)
                if not self.hosts and time.monotonic() - begun > self.job.first_timeout:
                    raise WorkerFailedError(
                        f"{self.launcher} has started no rank for {self.job.first_timeout:.0f} s.", rank=0
                    )
                continue
            rank, head, arrays, back = item
            event = head["event"]
            if event == "failed":
                self.fail(process, rank, head)
            elif event == "state":
                self.saver.store_state(Snapshot.of(head["facts"], read_raw(arrays, head["kinds"])))
                back.put(({}, []))
            elif event == "left":
                back.put(({}, []))
                self.patience = _ENDS
                raise self.saver.flush_for_exit()
            elif event == "gone" and rank not in done:
                self.gone(process, rank)
            elif event == "done":
                done[rank] = head
                if rank == 0:
                    self.lanes = [lane.tobytes() for lane in arrays[: head["lanes"]]]
                    self.latest = arrays[head["lanes"] :]
                back.put(({}, []))
            elif event in ("begin", "batch", "epoch_end"):
                self.apply_control(head, arrays, back)
        self.patience = _ENDS
        losses = [(seconds, epoch, loss) for seconds, epoch, loss in done[0]["losses"]]
        return [WorkerStats(**tally) for tally in done[0]["tallies"]], losses, done[0]["met"]

    # -- failure
    def fail(self, process: LaunchedJob, rank: int, event: dict[str, Any]) -> None:
        """Raise for the rank that failed first, and not for a rank that only lost its peer."""
        until = time.monotonic() + _CAUSE
        while is_echo(event) and time.monotonic() < until:
            item = self.next(0.2)
            if item is not None and item[1]["event"] == "failed" and not is_echo(item[1]):
                rank, event = item[0], item[1]
            elif item is not None and item[1]["event"] == "gone" and item[0] != rank:
                self.gone(process, item[0])
        self.restart_policy.judge(event)
        raise failure(rank, self.job.workers, event, self.last(), what="worker")

    def gone(self, process: LaunchedJob, rank: int) -> None:
        """Raise for a rank whose connection closed without a report."""
        self.dismiss()
        code = process.wait(_CAUSE)
        event: dict[str, Any] = {"event": "died", "host": self.hosts.get(rank, ""), "output": "\n".join(self.output)}
        if code is not None and code > 128:
            with suppress(ValueError):
                event["signal"] = signal.Signals(code - 128).name
        event["exit"] = code if code is not None else -1
        self.restart_policy.judge(event)
        raise failure(rank, self.job.workers, event, self.last(), what="worker")

    def ended(self, process: LaunchedJob, done: dict[int, Any]) -> None:
        """Raise for a launcher that ended before the ranks had finished."""
        output = "\n".join(self.output)
        self.restart_policy.judge({})
        raise WorkerFailedError(
            f"{self.launcher} ended with code {process.code()}; of {self.job.workers} ranks {len(self.hosts)} had "
            f"connected and {len(done)} had finished. The last lines that it printed:\n{output}",
            rank=min(set(range(self.job.workers)) - done.keys()),
            output=output,
            weights=self.last(),
        )
