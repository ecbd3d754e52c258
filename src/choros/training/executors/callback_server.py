"""The caller's server for ranks that a launcher started: it runs the callbacks for rank 0, and serves all ranks."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from choros.backends.host_values import to_host
from choros.cluster.hardware.network_address import head_address
from choros.comm.messages import Messages, header_of
from choros.comm.tcp.auth_socket import AuthListener
from choros.comm.tcp.rpc import RpcAddress, RpcConnection
from choros.console import write_line
from choros.errors import ChorosError, CommTimeoutError, PeerLostError
from choros.launch.process.failure_report import RankFailure
from choros.training.callback_runner import CallbackRunner
from choros.training.payload import put, shown
from choros.training.spec import FitConfig
from choros.training.worker.messages import (
    RANK_EVENTS,
    RANK_REQUESTS,
    BatchEnded,
    CallbackGreeting,
    ConnectionClosed,
    Control,
    EpochEnded,
    OutputLine,
    ShowWeights,
    TrainingBegins,
    WeightsShown,
)

if TYPE_CHECKING:
    import keras

Reply = tuple[dict[str, Any], list[Any]]
CONTROLLED = (TrainingBegins, BatchEnded, EpochEnded)  # messages to which the reply is a control message
_OUTPUT = Messages(OutputLine)


class RankEvent(NamedTuple):
    """An event of a rank.

    Attributes:
        rank: the rank.
        message: a message of ``RANK_EVENTS``, or ``ConnectionClosed``.
        arrays: the arrays of the message.
        reply: the queue on which the thread that serves the rank waits for the reply.
    """

    rank: int
    message: Any
    arrays: list[Any]
    reply: queue.Queue[Reply | None]


class CallbackServer(ABC):
    """The caller's end of the connections with ranks. One thread serves each connection.

    Callbacks run in the thread that called ``fit``, which takes events from a queue (``next``, ``apply_control``).

    Args:
        model: the model given to the Trainer.
        job: FitConfig.
        callbacks: CallbackRunner.

    Attributes:
        latest: list. The last weights received, as ``shown`` returns them.
        hosts: dict. By rank, the hosts of the ranks that have connected.
        begun: bool. Whether training has begun.
    """

    def __init__(self, model: keras.Model, job: FitConfig, callbacks: CallbackRunner) -> None:
        self.model, self.job, self.callbacks = model, job, callbacks
        self.latest: list[Any] = []
        self.hosts: dict[int, str] = {}
        self._events: queue.Queue[RankEvent] = queue.Queue()
        self.begun = False
        self._postponed: deque[RankEvent] = deque()
        # The reply queue of rank 0, while it waits and can send its weights.
        self._waiting_reply: queue.Queue[Reply | None] | None = None
        callbacks.fetch = self.fetch

    def fetch(self, epoch: int | None) -> None:
        """Load the last received weights into the model. Within an epoch (None), request them from rank 0 first.

        Raises:
            PeerLostError: rank 0 has ended.
            CommTimeoutError: rank 0 does not reply.
        """
        if epoch is None and self._waiting_reply is not None:
            self._waiting_reply.put((header_of(ShowWeights()), []))
            deadline = time.monotonic() + self.job.timeout
            while True:
                # Not ``next``, which would return the events that this loop has stored.
                received = self._receive(0.5)
                message = received.message if received is not None and received.rank == 0 else None
                if received is not None and isinstance(message, WeightsShown):
                    self.latest, self._waiting_reply = received.arrays, received.reply
                    self.callbacks.show_metrics(message.metrics)
                    break
                if received is not None:
                    # Events of other ranks may come meanwhile. They are handled after this callback, in the order of
                    # their arrival.
                    self._postponed.append(received)
                if isinstance(message, (ConnectionClosed, RankFailure)):
                    raise PeerLostError("rank 0 has ended while a callback read its weights: see what it printed.")
                if time.monotonic() > deadline:
                    raise CommTimeoutError(
                        f"rank 0 has not sent its weights for a callback within {self.job.timeout:g} s: see its "
                        "output, or give the Trainer a larger timeout."
                    )
        put(self.model, self.latest)

    @contextmanager
    def opened(self, network: str, on_this_host: bool) -> Iterator[RpcAddress]:
        """Accept connections of ranks within this context. Yield the address for them.

        Args:
            network: the network to listen on, as in ``Trainer``; empty for the default.
            on_this_host: whether some of the ranks run on this host.
        """
        secret = secrets.token_bytes(32)
        # A restart opens this server again: events of earlier ranks must not be read as those of the new ones.
        self.hosts, self._events = {}, queue.Queue()
        with AuthListener(head_address(network, on_this_host), secret, CallbackGreeting) as listener:
            threading.Thread(target=self._accept_ranks, args=(listener,), name="choros-home", daemon=True).start()
            yield RpcAddress(listener.address, secret.hex(), self.job.first_timeout)

    def _accept_ranks(self, listener: AuthListener[CallbackGreeting]) -> None:
        while True:
            try:
                greeting, sock = listener.next_peer(threading.TIMEOUT_MAX)
            except ChorosError:
                return
            self.hosts[greeting.rank] = greeting.host
            peer = f"rank {greeting.rank} on {greeting.host}"
            channel = RpcConnection(sock, peer, self.job.first_timeout)
            arguments = (greeting.rank, channel, self._events, greeting.aside)
            threading.Thread(target=self._serve_rank, args=arguments, name="choros-rank", daemon=True).start()

    def _serve_rank(self, rank: int, channel: RpcConnection, events: queue.Queue[RankEvent], further: bool) -> None:
        def reply(header: dict[str, Any], arrays: list[Any]) -> Reply:
            if _OUTPUT.has(header):
                self.show_output(rank, _OUTPUT.decode(header).text)
                return {}, []
            if RANK_REQUESTS.has(header):
                return self.answer(RANK_REQUESTS.decode(header), rank)
            reply_queue: queue.Queue[Reply | None] = queue.Queue()
            message = RANK_EVENTS.decode(header)
            # Copies, because the connection reuses its buffers for the next message.
            events.put(RankEvent(rank, message, [np.array(array) for array in arrays], reply_queue))
            if events is not self._events:  # no code reads this queue any more
                self._dismiss(events)
            try:
                answer = reply_queue.get(timeout=threading.TIMEOUT_MAX)
            except queue.Empty:
                raise CommTimeoutError("the callbacks did not end: see what they wait for.") from None
            if answer is None:
                raise PeerLostError("the run has ended: see what it printed.")
            return answer

        channel.serve(reply)
        # The end of a further connection, for states or polling, does not mean that the rank has ended.
        if not further:
            events.put(RankEvent(rank, ConnectionClosed(), [], queue.Queue()))

    def dismiss(self) -> None:
        """Stop replying to ranks: waiting and later requests fail with the error that the run has ended."""
        # The queue is replaced first. A thread that still puts an event into the old one then sees that, and dismisses
        # the event itself.
        events, self._events = self._events, queue.Queue()
        while self._postponed:
            self._postponed.popleft().reply.put(None)
        self._waiting_reply = None
        self._dismiss(events)

    @staticmethod
    def _dismiss(events: queue.Queue[RankEvent]) -> None:
        with suppress(queue.Empty):
            while True:
                events.get_nowait().reply.put(None)

    @abstractmethod
    def answer(self, request: object, rank: int) -> Reply:
        """Return the reply to a request of a rank outside of callbacks, such as for its job.

        Args:
            request: a message of ``RANK_REQUESTS``.
            rank: the rank that sent it.
        """

    def show_output(self, rank: int, text: str) -> None:
        """Print a line of a rank's output, with its rank."""
        write_line(f"[{rank}] {text}")

    def next(self, timeout: float) -> RankEvent | None:
        """Return the next event, or None after ``timeout`` seconds."""
        return self._postponed.popleft() if self._postponed else self._receive(timeout)

    def _receive(self, timeout: float) -> RankEvent | None:
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def apply_control(self, event: RankEvent) -> None:
        """Run the callbacks of an event, and reply with the control message.

        Args:
            event: of rank 0, whose ``message`` is one of ``CONTROLLED``. Its arrays are the weights, if it has any.
        """
        _, message, arrays, reply_queue = event
        self.latest = arrays or self.latest
        if isinstance(message, TrainingBegins):
            control = self.callbacks.begin(message.epoch)
            self.begun = True
        elif isinstance(message, BatchEnded):
            self._waiting_reply = reply_queue
            control = self.callbacks.batch(message.epoch, message.step, message.logs)
            # A request for weights during the callback has replaced the queue. The rank waits for the newest one.
            reply_queue, self._waiting_reply = self._waiting_reply, None
        else:
            control = self.callbacks.epoch_end(message.epoch, message.logs, message.metrics)
        header = header_of(Control(control, self.callbacks.epoch))
        reply_queue.put((header, shown(self.model) if control.variables else []))

    def last(self) -> list[Any]:
        """Return the values of ``model.trainable_variables`` in the last received weights, else in the given ones."""
        if not self.latest:
            return to_host(self.model.trainable_variables)
        model_weights = shown(self.model)
        put(self.model, self.latest)
        last = to_host(self.model.trainable_variables)
        # The user's model keeps its weights: this method only reads values, for an error.
        put(self.model, model_weights)
        return last
