"""The caller's side of a fit whose ranks a launcher starts: give them their work, run the callbacks, take the end."""

from __future__ import annotations

import json
import queue
import secrets
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from choros.backend.base import model_variables
from choros.data import packing
from choros.errors import ChorosError, MeetingTimeout, WorkerFailed
from choros.launch.failure import failure, is_echo
from choros.launchers import How, Launcher, Started
from choros.machine.address import own_address
from choros.training.conductor import values
from choros.training.engine import Cargo
from choros.training.job import Plan, Tally
from choros.training.parcel import CodeFolder
from choros.training.record import RunRecord
from choros.training.sent import HOME, put, shown
from choros.transport.tcp.channel import Channel
from choros.transport.tcp.wire import Door

_CAUSE = 5.0  # seconds in which the rank that failed first is heard of, after one that only lost it
_ENDS = 10.0  # seconds that ranks take to end when they have done their work
_SAID = 30  # lines that are kept of what the ranks print


class Home:
    """One run. Make it, ``run()`` it once.

    Args:
        plan: what to do, its job knowing where the parts of its sources are.
        cargo: Cargo.
        launcher: what starts the ranks.
        how: what is wished of it.
    """

    def __init__(self, plan: Plan, cargo: Cargo, launcher: Launcher, how: How) -> None:
        self.plan, self.cargo, self.launcher, self.how = plan, cargo, launcher, how
        self.model, self.job, self.conductor = plan.model, plan.job, plan.conductor
        self.variables = model_variables(self.model)
        self.latest: list[Any] = []  # the weights that came last
        self.came: queue.Queue[tuple[int, dict[str, Any], list[Any], queue.Queue[Any]]] = queue.Queue()
        self.hosts: dict[int, str] = {}
        self.said: deque[str] = deque(maxlen=_SAID)
        self.patience = 0.0  # seconds that ranks may take to end by themselves
        self.entries, self.nbytes = packing.layout(cargo.arrays)

    def run(self) -> RunRecord:
        """Train; returns the record of the run, with the model trained.

        Raises:
            WorkerFailed: a rank raised, died or could not be started; the model is as it was.
        """
        given, begun, secret = values(self.variables), time.perf_counter(), secrets.token_bytes(32)
        self.given = shown(self.model, True)
        self.conductor.fetch = lambda: put(self.model, self.latest)
        code = [self.cargo.custom, *self.cargo.blobs]
        with CodeFolder(code) as folder, Door(own_address(self.how.network), secret) as door:
            self.folder = folder
            home = {"place": door.place, "secret": secret.hex(), "timeout": self.job.first_timeout}
            process = self.launcher.start("choros.training.sent", self.job.workers, {HOME: json.dumps(home)}, self.how)
            threading.Thread(target=self.welcome, args=(door,), name="choros-home", daemon=True).start()
            process.read(self.line)
            try:
                tallies, losses = self.follow(process)
            except KeyboardInterrupt:
                put(self.model, self.latest)
                raise
            except BaseException:
                for variable, value in zip(self.variables, given, strict=True):
                    variable.assign(value)  # callbacks may have seen later ones
                raise
            finally:
                process.end(self.patience)
        put(self.model, self.latest)
        startup = begun - self.plan.begun
        return RunRecord.of(self.plan.algorithm, self.job.meet, tallies, startup, losses)

    # -- the ranks
    def line(self, text: str) -> None:
        """Keep what a rank printed, and show it."""
        self.said.append(text)
        print(text, flush=True)

    def welcome(self, door: Door) -> None:
        """Speak with each rank that comes in a thread of its own."""
        while True:
            try:
                hello, end = door.next(threading.TIMEOUT_MAX)
            except ChorosError:
                return
            rank, host = int(hello["rank"]), str(hello["host"])
            self.hosts[rank] = host
            channel = Channel(end, f"rank {rank} on {host}", self.job.first_timeout)
            threading.Thread(target=self.guest, args=(rank, channel), name="choros-rank", daemon=True).start()

    def guest(self, rank: int, channel: Channel) -> None:
        """Answer one rank until it leaves."""

        def reply(head: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
            if "ask" in head:
                return self.tell(head["ask"])
            back: queue.Queue[Any] = queue.Queue()
            self.came.put((rank, head, [np.array(array) for array in arrays], back))
            try:
                told: tuple[dict[str, Any], list[Any]] = back.get(timeout=threading.TIMEOUT_MAX)
            except queue.Empty:
                raise MeetingTimeout("The callbacks did not end.") from None
            return told

        channel.answer(reply)
        self.came.put((rank, {"event": "gone"}, [], queue.Queue()))

    def tell(self, what: str) -> tuple[dict[str, Any], list[Any]]:
        """Answer what a rank asks for before it trains."""
        if what == "weights":
            return {}, self.given
        if what == "data":
            whole = np.empty(self.nbytes, np.uint8)
            packing.write(self.entries, self.cargo.arrays, whole)
            return {}, [whole]
        told = {
            "job": self.job.json(),
            "arrays": self.entries,
            "bytes": self.nbytes,
            "code": self.folder.told,
            "watched": bool(self.conductor.user),
            "steps": self.conductor.steps,
        }
        return told, [np.frombuffer(self.cargo.model, np.uint8)]

    # -- the run
    def follow(self, process: Started) -> tuple[list[Tally], list[tuple[float, int, float]]]:
        """Follow the run to its end."""
        done: dict[int, dict[str, Any]] = {}
        begun = time.monotonic()
        while len(done) < self.job.workers:
            found = self.next(0.5)
            if found is None:
                if process.code() is not None and self.came.empty():
                    self.ended(process, done)
                if not self.hosts and time.monotonic() - begun > self.job.first_timeout:
                    raise WorkerFailed(
                        f"{self.launcher} has started no rank for {self.job.first_timeout:.0f} s.", rank=0
                    )
                continue
            rank, head, arrays, back = found
            event = head["event"]
            if event == "failed":
                self.fail(process, rank, head)
            elif event == "gone" and rank not in done:
                self.gone(process, rank)
            elif event == "done":
                done[rank] = head
                if rank == 0:
                    self.latest = arrays
                back.put(({}, []))
            elif event in ("begin", "batch", "epoch_end"):
                back.put(self.obey(head, arrays))
        self.patience = _ENDS
        losses = [(seconds, epoch, loss) for seconds, epoch, loss in done[0]["losses"]]
        return [Tally(**tally) for tally in done[0]["tallies"]], losses

    def obey(self, head: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Run the callbacks; returns what they decided."""
        self.latest = arrays or self.latest
        if head["event"] == "begin":
            orders = self.conductor.begin(head["epoch"])
        elif head["event"] == "batch":
            orders = self.conductor.batch(head["epoch"], head["step"], head["logs"])
        else:
            orders = self.conductor.epoch_end(head["epoch"], head["logs"])
        told = {"orders": vars(orders), "epoch": self.conductor.epoch}
        return told, shown(self.model, True) if orders.weights else []

    def next(self, timeout: float) -> tuple[int, dict[str, Any], list[Any], queue.Queue[Any]] | None:
        """Return what a rank says next, or None."""
        try:
            return self.came.get(timeout=timeout)
        except queue.Empty:
            return None

    # -- failure
    def fail(self, process: Started, rank: int, event: dict[str, Any]) -> None:
        """Raise for the rank that failed first: not for one that only lost another."""
        until = time.monotonic() + _CAUSE
        while is_echo(event) and time.monotonic() < until:
            found = self.next(0.2)
            if found is not None and found[1]["event"] == "failed" and not is_echo(found[1]):
                rank, event = found[0], found[1]
            elif found is not None and found[1]["event"] == "gone" and found[0] != rank:
                self.gone(process, found[0])
        raise failure(rank, self.job.workers, event, self.last(), what="worker")

    def gone(self, process: Started, rank: int) -> None:
        """Raise for a rank that went without a word."""
        code = process.wait(_CAUSE)
        event: dict[str, Any] = {"event": "died", "host": self.hosts.get(rank, ""), "output": "\n".join(self.said)}
        if code is not None and code > 128:
            with suppress(ValueError):
                event["signal"] = signal.Signals(code - 128).name
        event["exit"] = code if code is not None else -1
        raise failure(rank, self.job.workers, event, self.last(), what="worker")

    def ended(self, process: Started, done: dict[int, Any]) -> None:
        """Raise for a launcher that ended before the ranks had done their work."""
        said = "\n".join(self.said)
        raise WorkerFailed(
            f"{self.launcher} ended with code {process.code()}; of {self.job.workers} ranks {len(self.hosts)} had come "
            f"and {len(done)} had done their work. The last lines that it printed:\n{said}",
            rank=min(set(range(self.job.workers)) - done.keys()),
            output=said,
            weights=self.last(),
        )

    def last(self) -> list[Any] | None:
        """Return the last weights that came, in the order of ``model.trainable_variables``."""
        if not self.latest:
            return None
        put(self.model, self.latest)
        return values(self.model.trainable_variables)
