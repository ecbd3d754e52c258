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

from choros.comm.messages import header_of
from choros.console import write_line
from choros.data import serialization
from choros.errors import WorkerFailedError, counted
from choros.launch.process.failure_report import RankFailure, failure
from choros.launch.specs import LaunchedJob, Launcher, LaunchPreferences
from choros.training.checkpoint.manager import CheckpointManager
from choros.training.checkpoint.snapshot import Snapshot, read_raw, to_blobs
from choros.training.executors.callback_server import CONTROLLED, CallbackServer, Reply
from choros.training.executors.restart_policy import RestartPolicy
from choros.training.payload import HOME, FitPayload, SharedCodeFolder, put, shown
from choros.training.run_record import RunRecord
from choros.training.spec import FitRequest, WorkerStats
from choros.training.worker.messages import (
    AwaitEnd,
    ConnectionClosed,
    DataLayout,
    EndedOnRequest,
    EndReply,
    GetData,
    GetState,
    GetWeights,
    JobReply,
    RanksDone,
    RunStateSaved,
    StateReply,
)

_CAUSE_SECONDS = 5.0  # to wait for the first failure after a report of a rank that only lost its peer
_EXIT_SECONDS = 10.0  # that finished ranks may take to end
_OUTPUT_LINES = 30  # number of lines kept of the ranks' output
_LONG_POLL_SECONDS = 20.0  # until the reply to ``AwaitEnd`` if the end is not requested; rank 0 then asks again


class RemoteRun(CallbackServer):
    """One fit on ranks that a launcher starts. ``run`` is called once.

    Args:
        plan: FitRequest, whose job describes its sources.
        payload: FitPayload.
        launcher: Launcher. Starts the ranks.
        preferences: LaunchPreferences.
        restarts: int. Number of restarts of all ranks. Defaults to 0.
    """

    def __init__(
        self,
        plan: FitRequest,
        payload: FitPayload,
        launcher: Launcher,
        preferences: LaunchPreferences,
        restarts: int = 0,
    ) -> None:
        super().__init__(plan.model, plan.job, plan.callbacks)
        self.plan, self.payload, self.launcher, self.preferences = plan, payload, launcher, preferences
        self.initial_weights = shown(self.model)
        self.output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self.exit_seconds = 0.0  # that ranks may take to end by themselves
        self.entries, self.nbytes = serialization.layout(payload.arrays)
        self.checkpoints: CheckpointManager = plan.checkpoints or CheckpointManager(None)
        self.restart_policy, self.first_job = RestartPolicy(restarts, plan.job.workers), plan.job
        self.end_requested = threading.Event()
        self.lanes: list[bytes] = []

    def run(self) -> RunRecord:
        """Train the model, and return the record of the run.

        Raises:
            WorkerFailedError: a rank raised, died or could not be started. The model is unchanged.
        """
        startup = time.perf_counter() - self.plan.begun
        with (
            SharedCodeFolder([self.payload.model.code, *self.payload.blobs]) as folder,
            self.checkpoints.listening(self.end_requested.set),
        ):
            self.folder = folder
            while True:
                try:
                    all_stats, losses, transport = self._attempt()
                    break
                except WorkerFailedError as error:
                    if not self.prepare_restart(error):
                        raise
        put(self.model, self.latest)
        record = RunRecord.of(self.plan.algorithm, self.job.mode, all_stats, startup, losses, transport)
        return replace(record, restarts=tuple(self.restart_policy.done), keeping=record.keeping + self.checkpoints.busy)

    def _attempt(self) -> tuple[list[WorkerStats], list[tuple[float, int, float]], str]:
        """Start the ranks, and process their events until they end."""
        self.exit_seconds = 0.0
        with self.opened(self.preferences.network, self.launcher.here) as home:
            environ = {HOME: json.dumps(header_of(home))}
            preferences = replace(self.preferences, files=self.folder.paths)
            process = self.launcher.start("choros.training.worker.remote_main", self.job.workers, environ, preferences)
            process.read(self.store_line)
            try:
                return self.follow(process)
            except (KeyboardInterrupt, SystemExit):
                # An interrupted run keeps what it has learned, as ``fit`` of plain Keras does.
                put(self.model, self.latest)
                raise
            except BaseException:
                put(self.model, self.initial_weights)  # later weights may have been loaded for callbacks
                raise
            finally:
                # First the replies: ranks that wait for one then end by themselves, before ``end`` must use force.
                self.dismiss()
                process.end(self.exit_seconds)

    def prepare_restart(self, error: WorkerFailedError) -> bool:
        """Prepare a restart of all ranks from the last state. Return False if no restart is possible."""
        if not (self.restart_policy.retry and self.hosts):  # if no rank has connected, a restart is not likely to help
            return False
        self.job = self.checkpoints.resumed_config(self.first_job)
        self.restart_policy.count(error, (self.job.initial_epoch, self.job.initial_batch), all_ranks=True)
        return True

    def store_line(self, text: str) -> None:
        """Store a line of a rank's output for error messages, and print it if ``echo`` is set."""
        self.output.append(text)
        if self.preferences.echo:
            write_line(text)

    def answer(self, request: object, rank: int) -> Reply:
        """Return the job, the data, the weights or the state of a rank; or whether the end is requested."""
        if isinstance(request, GetWeights):
            return {}, self.initial_weights
        if isinstance(request, AwaitEnd):
            return header_of(EndReply(self.end_requested.wait(_LONG_POLL_SECONDS))), []
        if isinstance(request, GetState):
            return self.state_of(rank)
        if isinstance(request, GetData):
            data = np.empty(self.nbytes, np.uint8)
            serialization.write(self.entries, self.payload.arrays, data)
            return {}, [data]
        layout = DataLayout(self.entries, len(self.payload.model.arrays))
        return header_of(JobReply(self.job, layout, self.nbytes, self.folder.files, self.callbacks.steps)), []

    def state_of(self, rank: int) -> Reply:
        """Return the state from which a rank resumes. Of asynchronous ranks only rank 0 gets arrays."""
        latest = self.checkpoints.latest
        if latest is None:
            return header_of(StateReply(None, None)), []
        # The other asynchronous ranks take their weights from the center, which rank 0 restores.
        if self.job.asynchronous and rank:
            return header_of(StateReply(latest.facts, None)), []
        head, blobs = to_blobs(latest.of_rank(rank))
        return header_of(StateReply(latest.facts, head)), blobs

    # -- the run
    def follow(self, process: LaunchedJob) -> tuple[list[WorkerStats], list[tuple[float, int, float]], str]:
        """Process the ranks' events until all have finished; return counts, losses and the means of exchange."""
        done: dict[int, RanksDone] = {}
        begun = time.monotonic()
        while len(done) < self.job.workers:
            # A short wait: this loop must also notice a failed write of a checkpoint, and a launcher that ends without
            # a message.
            item = self.next(0.5)
            self.checkpoints.poll()
            # The time limit of ``CHOROS_STOP_AT`` sends no signal, so it is polled.
            if self.checkpoints.checkpoint is not None and self.checkpoints.checkpoint.asked:
                self.end_requested.set()
            if item is None:
                if process.code() is not None:
                    self.ended(process, done)
                if not self.hosts and time.monotonic() - begun > self.job.first_timeout:
                    raise WorkerFailedError(
                        f"{self.launcher} has started no rank for {self.job.first_timeout:.0f} s: see what it waits "
                        "for, or give the Trainer a larger first_timeout.",
                        rank=0,
                    )
                continue
            rank, message, arrays, reply_queue = item
            if isinstance(message, RankFailure):
                self.fail(process, rank, message)
            elif isinstance(message, RunStateSaved):
                self.checkpoints.store_state(Snapshot.of(message.facts, read_raw(arrays, message.kinds)))
                reply_queue.put(({}, []))
            elif isinstance(message, EndedOnRequest):
                reply_queue.put(({}, []))
                # The ranks end by themselves, with the exit code that the job's script expects.
                self.exit_seconds = _EXIT_SECONDS
                raise self.checkpoints.flush_for_exit()
            elif isinstance(message, ConnectionClosed) and rank not in done:
                self.fail_without_report(process, rank)
            elif isinstance(message, RanksDone):
                done[rank] = message
                if rank == 0:
                    self.lanes = [lane.tobytes() for lane in arrays[: message.lanes]]
                    self.latest = arrays[message.lanes :]
                reply_queue.put(({}, []))
            elif isinstance(message, CONTROLLED):
                self.apply_control(item)
        self.exit_seconds = _EXIT_SECONDS
        return done[0].stats, done[0].losses, done[0].transport

    # -- failure
    def fail(self, process: LaunchedJob, rank: int, report: RankFailure) -> None:
        """Raise for the rank that failed first, and not for a rank that only lost its peer."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while report.is_echo and time.monotonic() < deadline:
            item = self.next(0.2)
            if item is not None and isinstance(item.message, RankFailure) and not item.message.is_echo:
                rank, report = item.rank, item.message
            elif item is not None and isinstance(item.message, ConnectionClosed) and item.rank != rank:
                # A rank that disappeared without a report is the cause; the first report only says that a peer was
                # lost.
                self.fail_without_report(process, item.rank)
        self.restart_policy.judge(report)
        raise failure(rank, self.job.workers, report, self.last(), what="worker")

    def fail_without_report(self, process: LaunchedJob, rank: int) -> None:
        """Raise for a rank whose connection closed without a report."""
        # Ranks that wait for a reply must get their error now, or the launcher could not end within the wait below.
        self.dismiss()
        code = process.wait(_CAUSE_SECONDS)
        signal_name = ""
        # Launchers report a signal as shells do: 128 plus its number.
        if code is not None and code > 128:
            with suppress(ValueError):
                signal_name = signal.Signals(code - 128).name
        exit_code, output = -1 if code is None else code, "\n".join(self.output)
        report = RankFailure(host=self.hosts.get(rank, ""), signal=signal_name, exit=exit_code, output=output)
        self.restart_policy.judge(report)
        raise failure(rank, self.job.workers, report, self.last(), what="worker")

    def ended(self, process: LaunchedJob, done: dict[int, Any]) -> None:
        """Raise for a launcher that ended before the ranks had finished."""
        output = "\n".join(self.output)
        self.restart_policy.judge(None)
        raise WorkerFailedError(
            f"{self.launcher} ended with code {process.code()}; of {counted(self.job.workers, 'rank')} "
            f"{len(self.hosts)} had connected and {len(done)} had finished. The last lines that it printed:\n{output}",
            rank=min(set(range(self.job.workers)) - done.keys()),
            output=output,
            weights=self.last(),
        )
