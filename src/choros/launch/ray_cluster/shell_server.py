"""The caller's end of ``node_shell``: it runs commands by the actors on the nodes, and forwards their pipes."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from choros.launch.ray_cluster.connection import cause

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_MAX_FOLDER = 80  # characters of a folder; the path of a socket has at most 107
_JOIN_SECONDS = 5.0  # seconds that a thread may take to end after its program has ended


@dataclass(frozen=True)
class NodeActor:
    """The first holder of a node, the node's host name, and the environment variables of commands there."""

    actor: ActorHandle
    host: str
    variables: Mapping[str, str]


class ShellServer:
    """A socket in a private folder, on which ``node_shell`` asks for commands. ``close`` ends it.

    Args:
        nodes: the actor of each node, by the node's id.
    """

    def __init__(self, nodes: Mapping[str, NodeActor]) -> None:
        self._nodes = nodes
        place = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="choros-ray-", dir=place if len(place) <= _MAX_FOLDER else "/tmp")
        self._path = os.path.join(self._folder, "shell")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(len(nodes))
        self._threads = [threading.Thread(target=self._accept, name="choros-ray", daemon=True)]
        self._threads[0].start()

    @property
    def command(self) -> str:
        """The command that is followed by a node's id and a command, for ``choros run --ssh``."""
        return shlex.join([sys.executable, "-m", "choros.launch.ray_cluster.node_shell", self._path])

    def close(self) -> None:
        """Accept no command any more, and wait for the threads of those that have ended."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in ``accept``
        self._listener.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="choros-ray-shell", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Run the command of one ``node_shell``, and send it the exit code."""
        with connection:
            request, pipes, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            try:
                while request and not request.endswith(b"\n"):
                    part = connection.recv(1 << 16)
                    request = request + part if part else b""
                if not request or len(pipes) != 3:  # the program was ended
                    return
                for pipe in pipes:
                    os.set_inheritable(pipe, False)
                facts = json.loads(request)
                code = _run(self._nodes[facts["node"]], facts["command"], pipes, connection)
            finally:
                for pipe in pipes:
                    os.close(pipe)
            with suppress(OSError):
                connection.sendall(b"%d" % code)


def _run(node: NodeActor, command: str, pipes: list[int], connection: socket.socket) -> int:
    """Run a command on a node; return its exit code, or 1 with a message on its stderr if Ray cannot run it."""
    import ray

    try:
        ray.get(node.actor.start.remote(command, dict(node.variables)))
        with _Input(node.actor, pipes[0], connection):
            while True:
                out, err, code = ray.get(node.actor.read.remote())
                _write(pipes[1], out)
                _write(pipes[2], err)
                if code is not None:
                    return int(code)
    except Exception as error:  # the node or the connection to Ray was lost
        _write(pipes[2], f"choros: Ray has ended the ranks on {node.host}: {cause(error)}\n".encode())
        return 1


class _Input:
    """A thread that forwards the stdin of a ``node_shell`` to the command, until the context ends."""

    def __init__(self, actor: ActorHandle, pipe: int, connection: socket.socket) -> None:
        self._actor, self._pipe, self._connection = actor, pipe, connection
        self._stop_reading, self._stop_writing = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="choros-ray-input", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.close(self._stop_writing)
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # else it waits for Ray, and uses this descriptor later
            os.close(self._stop_reading)

    def _forward(self) -> None:
        import ray

        while True:
            poll = select.poll()
            for source in (self._pipe, self._connection.fileno(), self._stop_reading):
                poll.register(source, select.POLLIN)
            ready = {source for source, _ in poll.poll()}
            if self._stop_reading in ready:
                return
            # A program that was killed has closed its connection, as its stdin may still be open elsewhere.
            data = b"" if self._connection.fileno() in ready else os.read(self._pipe, 1 << 16)
            try:
                ray.get(self._actor.write.remote(data))
            except Exception:  # the actor has ended, which the thread that reads reports
                return
            if not data:
                return


def _write(pipe: int, data: bytes) -> None:
    """Write all bytes to a pipe; drop them if nothing reads it any more."""
    with suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]
