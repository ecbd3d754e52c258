"""A host's server of its part of the center: ``python -m choros.training.async_control.shard_server``.

The host's first rank starts it. It is a separate process, so it can reply while that rank computes; a thread would wait
for Python's global lock. It maps the same memory as the ranks of the host, and ends with the rank that started it. If
it ends earlier, that rank starts another server. No state is lost, because the whole state is in the shared memory and
the rank keeps the listening port open.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from choros import algorithms, pickling
from choros.cluster.hardware import raise_descriptors
from choros.comm.fork_hooks import close_in_children
from choros.comm.messages import Messages, Router, decode, header_of
from choros.comm.shm.segment import Segment
from choros.comm.tcp.auth_socket import AuthListener, RankGreeting, listening_socket
from choros.comm.tcp.rpc import RpcConnection
from choros.console import write_line
from choros.errors import PeerLostError
from choros.launch.process.failure_report import signalled
from choros.param_server import sharded_center_state
from choros.param_server.messages import SHARD_REQUESTS, STATE_REQUESTS
from choros.param_server.shard_service import ParameterShard
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.param_server.transfer_slots import TransferSlots, serve_transfers
from choros.training.async_control import remote_control
from choros.training.async_control.center_snapshots import CenterSnapshots
from choros.training.async_control.control_block import ControlBlock
from choros.training.async_control.epoch_log import EpochLog

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0  # to wait for the end of a server
_POLL_SECONDS = 1.0  # between two polls of the process, if its pipe shows no end
_MAX_RESTARTS = 3


@dataclass(frozen=True)
class ControlConfig:
    """The control block and the epoch log, which the server of the first host has.

    Attributes:
        epochs: int. Number of epochs.
        values: int. Number of values of an epoch (``FitConfig.epoch_values``).
        control_block: int. Descriptor of the control block's segment.
        epoch_log: int. Descriptor of the epoch log's segment.
        snapshots: int, or None if no callback reads the center. Descriptor of the segment of ``CenterSnapshots``.
    """

    epochs: int
    values: int
    control_block: int
    epoch_log: int
    snapshots: int | None


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a server process, in the encoding of ``choros.comm.messages``.

    Attributes:
        algorithm: dict. See ``algorithms.to_config``.
        algorithm_code: str. Pickle of a custom algorithm's class, in hexadecimal digits; "" for any other.
        workers: int. Number of workers of the job.
        timeout: float. Seconds to wait for the lock, and for one send or receive.
        secret: str. The job's secret, in hexadecimal digits.
        address: str. Address on which the server listens.
        center: int. Descriptor of the shard's segment.
        replies: int. Descriptor of the segment of ``reply_segment``.
        transfers: int, or None if vectors are sent by sockets. Descriptor of the segment of ``TransferSlots``.
        control: ControlConfig, or None on other hosts than the first one.
        cores: list of int. Cores on which the server runs; any, if empty.
        listener: int. Descriptor of the listening socket, which ``ShardServerProcess`` makes.
    """

    algorithm: dict[str, Any]
    algorithm_code: str
    workers: int
    timeout: float
    secret: str = field(repr=False)
    address: str
    center: int
    replies: int
    transfers: int | None = None
    control: ControlConfig | None = None
    cores: list[int] = field(default_factory=list)
    listener: int = -1

    def descriptors(self) -> list[int]:
        """Return the descriptors that the process inherits."""
        control = self.control
        control_descriptors = (
            (control.control_block, control.epoch_log, control.snapshots) if control is not None else ()
        )
        all_descriptors = self.center, self.replies, self.transfers, self.listener, *control_descriptors
        return [descriptor for descriptor in all_descriptors if descriptor is not None]


class ShardServerProcess:
    """The server process of this host, in the rank that starts it and restarts it after a failure.

    Args:
        config: ServerConfig. It names the memory that the server inherits.
        rank: int. The rank that starts the server. Defaults to 0.

    Attributes:
        address: str. Host and port of the server. They stay the same after a restart.

    Raises:
        PeerLostError: the server could not start; its output has the reason.
    """

    def __init__(self, config: ServerConfig, rank: int = 0) -> None:
        self._starter = f"rank {rank} on {os.uname().nodename}"
        # A forked child may outlive this rank. Its copy of the listening socket would keep the port open, and its copy
        # of ``_server_input`` would keep the server alive. So children close both.
        port, listen_fd = listening_socket(config.address)
        self._listener = close_in_children(socket.socket(fileno=listen_fd))
        self._server_input: socket.socket | None = None
        self.address = f"{config.address}:{port}"
        self._config = replace(config, listener=listen_fd)
        self._lock, self._closing = threading.Lock(), False
        self._process = self._start()
        assert self._process.stdout is not None  # noqa: S101 - a pipe, as requested
        # The server prints its address once it accepts connections. The end of the pipe means that it has ended.
        if not self._process.stdout.readline():
            self.close()
            raise PeerLostError(
                f"The server of the center on {os.uname().nodename} did not start: see what it printed."
            )
        threading.Thread(target=self._watch, name="choros-server", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        rank_end, server_end = socket.socketpair()
        close_in_children(rank_end)
        with server_end:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "choros.training.async_control.shard_server"],
                    stdin=server_end.fileno(),
                    stdout=subprocess.PIPE,
                    pass_fds=self._config.descriptors(),
                    # The variable keeps code of the user from starting a training in this process
                    # (``training/validation.py``).
                    env={**os.environ, "CHOROS_WORKER": "server"},
                )
            except BaseException:
                rank_end.close()
                raise
        self._server_input = rank_end
        with suppress(BrokenPipeError, ConnectionResetError):  # the process has already died
            rank_end.sendall(json.dumps(header_of(self._config)).encode() + b"\n")
        return process

    def _watch(self) -> None:
        """Wait for the end of the server, and restart it unless it was closed. The number of restarts is limited."""
        # One attempt more than restarts: the last one only reports the end, and gives up.
        for attempt in range(1, _MAX_RESTARTS + 2):
            if not self._has_died():
                return
            with self._lock:
                # ``close`` ends the process too, which is not a failure.
                if self._closing:
                    return
                ended = self._process
                self._close_pipes()
                outcome = self._restart(attempt)
            event = f"the server of the center (process {ended.pid}) {_describe_exit(ended.returncode)}"
            logger.warning(f"{self._starter}: {event}; {outcome}")
            if self._process is ended:
                return

    def _restart(self, attempt: int) -> str:
        """Restart the server if restarts are left, else give up; return the outcome as text for the log."""
        reason = f"another one was started {_MAX_RESTARTS} times"
        try:
            if attempt <= _MAX_RESTARTS:
                self._process = self._start()
                return (
                    f"process {self._process.pid} continues with the same center, restart {attempt} of {_MAX_RESTARTS}"
                )
        except OSError as error:
            reason = f"no other one could be started ({error})"
        self._give_up()
        return f"{reason}, so the job ends: see what ends the servers on this host"

    def _has_died(self) -> bool:
        """Wait until the server has ended; return False if it was closed."""
        with self._lock:
            if self._closing:
                return False
            process, poll = self._process, select.poll()
            assert process.stdout is not None  # noqa: S101 - a pipe, as requested
            poll.register(process.stdout.fileno(), select.POLLHUP)
        while not self._closing:
            if poll.poll(_POLL_SECONDS * 1e3):  # the server's end of the pipe was closed
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                    return True
                # A server without its output pipe serves no more, but its process still holds the memory and the
                # socket.
                process.kill()
            elif process.poll() is not None:
                return True
        return False

    def _give_up(self) -> None:
        """Close the listening socket, so that new connections are refused."""
        # As long as the socket is open, the kernel accepts connections, and clients would wait for a server that never
        # comes.
        self._listener.close()

    def close(self) -> None:
        """End the server, after all workers have closed their connections."""
        with self._lock:
            self._closing = True
            self._give_up()
            process = self._process
        if self._server_input is not None:
            self._server_input.close()  # which ends the server
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)
        self._close_pipes()

    def _close_pipes(self) -> None:
        """Close this process's ends of the connections with the server."""
        for pipe in (self._server_input, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _describe_exit(code: int) -> str:
    """Return a description of how a process ended.

    Example:
        >>> _describe_exit(1)
        'ended with exit code 1, see what it printed'
    """
    if code >= 0:
        return f"ended with exit code {code}, see what it printed"
    name = signal.Signals(-code).name
    cause, _ = signalled(name)
    return f"was ended by {name}" + (f" ({cause})" if cause else "")


def main() -> int:
    """Serve until the rank that started this process closes its end of the connection.

    Returns:
        0.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)  # a scheduler signals the whole job; only its ranks react
    raise_descriptors()
    config = decode(ServerConfig, json.loads(sys.stdin.buffer.readline()))
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    # The rank that started this process sent this by a private connection, so it may contain a pickle.
    algorithm_class = pickling.loads(bytes.fromhex(config.algorithm_code)) if config.algorithm_code else None
    rule = algorithms.from_config(config.algorithm, algorithm_class)
    segment, replies = Segment(config.center), Segment(config.replies)
    slots = None
    if config.transfers is not None:  # ranks of other hosts send their vectors by messages
        slots = TransferSlots(Segment(config.transfers), SharedMemoryParameterServer(segment))
    control_protocols = [] if config.control is None else _control_protocols(config.control, config.workers)

    def serve(rank: int, connection: RpcConnection) -> None:
        shard = ParameterShard(segment, rule, rank, config.workers, replies, config.timeout)
        state = STATE_REQUESTS, partial(sharded_center_state.reply, shard)
        handler = Router((SHARD_REQUESTS, shard.reply), state, *control_protocols).handle
        connection.serve(handler if slots is None else serve_transfers(slots, shard, handler))

    def accept() -> None:
        while True:
            greeting, sock = listener.next_peer(threading.TIMEOUT_MAX)
            connection = RpcConnection(sock, f"rank {greeting.rank} on {greeting.host}", config.timeout)
            threading.Thread(target=serve, args=(greeting.rank, connection), daemon=True).start()

    listener = AuthListener(
        config.address, bytes.fromhex(config.secret), RankGreeting, listen_fd=config.listener
    )  # never closed: the socket also belongs to the rank that started this process
    threading.Thread(target=accept, daemon=True).start()
    write_line(listener.address)
    # The pipe ends when the rank that started this process closes it or dies, however it dies.
    sys.stdin.buffer.read()
    os._exit(0)  # threads with open connections, of a job that has failed, must not delay the exit


def _control_protocols(config: ControlConfig, workers: int) -> list[tuple[Messages, Callable[[Any], object]]]:
    control_block = ControlBlock(Segment(config.control_block), workers, config.epochs, config.values)
    snapshots = CenterSnapshots(Segment(config.snapshots)) if config.snapshots is not None else None
    return remote_control.protocols(control_block, EpochLog(Segment(config.epoch_log), control_block, snapshots))


if __name__ == "__main__":
    sys.exit(main())
