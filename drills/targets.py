"""Every parser of Choros that reads what comes from outside, and what it takes when all is well.

A target gets bytes or text and may return, or raise an error that Choros has a name for. Parquet and HDF5
are not here: pyarrow and h5py read them, in C++ that a crafted file can end the process of.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SECRET = b"the secret of the job that is drilled"


@dataclass(frozen=True)
class Target:
    """A parser: how it is called, and inputs that it takes; ``share`` of all inputs go to it, text or bytes."""

    call: Callable[[Any], object]
    examples: tuple[Any, ...]
    share: int = 1


def control_messages(data: bytes) -> None:
    """The header of a request to the control block of another host."""
    from choros.training.async_control.remote_control import REQUESTS

    _decode(REQUESTS, data, 0)


def shard_messages(data: bytes) -> None:
    """The header of a request to the server of a shard, which has two arrays."""
    from choros.comm.messages import Messages
    from choros.param_server.messages import SHARD_REQUESTS, STATE_REQUESTS, TRANSFERS

    _decode(Messages(*SHARD_REQUESTS.kinds, *STATE_REQUESTS.kinds, *TRANSFERS.kinds), data, 2)


def _decode(messages: Any, data: bytes, arrays: int) -> None:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):  # the connection refuses these, see ``frames``
        return
    if isinstance(header, dict):
        messages.decode(header, [np.zeros(1)] * arrays)


def frames(data: bytes) -> None:
    """Messages of a channel, until the line ends."""
    from choros.comm.tcp.rpc import RpcConnection

    near, two = socket.socketpair()
    with near, two:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        channel = RpcConnection(two, "a peer", 5.0)
        for _ in range(4):
            channel.receive()


def guests(data: bytes) -> None:
    """Send a listener what a peer may send before it is authenticated. No connection may result."""
    from choros.errors import CommTimeoutError

    listener, (near, two) = _listener(), socket.socketpair()
    with near, contextlib.redirect_stderr(io.StringIO()):
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        listener._handshakes[two] = "here"
        listener._authenticate(two, "here")
    with contextlib.suppress(CommTimeoutError):
        raise AssertionError(f"let in: {listener.next_peer(0.0)}")


def _listener() -> Any:
    from choros.comm.tcp.auth_socket import AuthListener, RankGreeting

    if not _kept:
        _kept.append(AuthListener("127.0.0.1", SECRET, RankGreeting))
    return _kept[0]


_kept: list[Any] = []


def hosts_of_doors(data: bytes) -> None:
    """Answer a caller as a host may answer before it is authenticated."""
    from choros.comm.tcp.auth_socket import _handshake

    near, two = socket.socketpair()
    with near:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        _handshake(two, "here:1", SECRET, b"{}").close()


def messages(data: bytes) -> None:
    """Messages between two ranks, asked for and not."""
    from choros.comm.tcp.connections import ConnectionMesh, TcpMessages

    near, two = socket.socketpair()
    with near, two:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        link = TcpMessages(ConnectionMesh({1: (two, "rank 1")}), 0, range(2))
        requested = [link.receive(np.empty(16, np.uint8), 1, tag) for tag in (0, 1)]
        try:
            for _ in range(8):
                link.done(requested)
        except ConnectionError as error:
            if "rank 1" not in str(error):
                raise


def decoded(data: bytes) -> None:
    from choros.comm.collectives.object_codec import decode

    decode(data)


def place(text: str) -> None:
    """A process's environment, as any launcher might have left it: lines of NAME=VALUE."""
    from choros.cluster import Place
    from choros.cluster.rank_info import why

    environ = dict(line.partition("=")[::2] for line in text.splitlines())
    why(environ)
    Place.here(environ)


def nodelist(text: str) -> None:
    from choros.cluster.hostlist import expand_hosts

    expand_hosts(text)


def tasks(text: str) -> None:
    from choros.cluster.hostlist import expand_tasks

    expand_tasks(text)


def hosts(text: str) -> None:
    from choros.cluster import parse_slots

    parse_slots(text)


def hostfile(text: str) -> None:
    from choros.cluster import read_hostfile

    with _file(text.encode("utf-8", "surrogatepass"), "hosts") as path:
        read_hostfile(path)


def command(text: str) -> None:
    """A command line, as far as it is read before anything is done."""
    from choros.cli import parse_arguments

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        parse_arguments(text.split("\n"))


def checkpoint(data: bytes) -> None:
    """A file of a directory of checkpoints: as it is, and with the digest that it ought to have."""
    from choros.errors import CheckpointError
    from choros.training.checkpoint.store import _DIGEST, read

    complete = data[:-_DIGEST] + hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest()
    with _file(complete, "state") as path:
        read(Path(path))
    with _file(data, "state") as path, contextlib.suppress(CheckpointError):
        read(Path(path))


def _saved() -> bytes:
    from choros.training.checkpoint.store import _write

    with tempfile.TemporaryDirectory() as room:
        _write(Path(room, "state"), {"epoch": 1, "batch": 2}, [np.arange(6.0).reshape(2, 3), np.ones(2, "int8")])
        return Path(room, "state").read_bytes()


def records(data: bytes) -> None:
    from choros.data.files.tfrecord import _features
    from choros.data.files.tfrecord import records as read

    for record in read(data, "file"):
        _features(record, "file")


def _stored(name: str, **columns: Any) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        from choros.data.files import files

        with _file(data, name) as path:
            files(path, **columns).sample(4)

    return read


@contextlib.contextmanager
def _file(data: bytes, name: str) -> Any:
    room = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(suffix=name, dir=room) as file:
        file.write(data)
        file.flush()
        yield file.name


def _frame(head: Any, kinds: Any, rest: bytes = b"") -> bytes:
    text = json.dumps([head, kinds]).encode()
    return struct.pack("<I", len(text)) + text + rest


def _csv() -> bytes:
    return b"a,b,label\n" + b"".join(f"{i}.5,{-i},{i % 2}\n".encode() for i in range(6))


def _record() -> bytes:
    from choros.data.files.tfrecord import _example, _masked

    example = _example()()
    example.features.feature["a"].float_list.value.extend([1.0, 2.0])
    example.features.feature["label"].int64_list.value.append(1)
    body = example.SerializeToString()
    head = struct.pack("<Q", len(body))
    return head + struct.pack("<I", _masked(head)) + body + struct.pack("<I", _masked(body))


def targets() -> dict[str, Target]:
    """By name."""
    from choros.comm.collectives.object_codec import encode

    read = {"x": ["a", "b"], "y": "label"}
    environ = "CHOROS_RANK=0\nCHOROS_SIZE=2\nCHOROS_LOCAL_RANK=0\nCHOROS_LOCAL_SIZE=2"
    slurm = "SLURM_PROCID=1\nSLURM_NTASKS=4\nSLURM_NODELIST=n[01-03,7],m2\nSLURM_STEP_ID=0\nSLURM_TASKS_PER_NODE=2(x2)"
    others = (
        "PMI_RANK=0\nPMI_SIZE=2\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=2",
        "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\nOMPI_COMM_WORLD_LOCAL_SIZE=2",
        'TF_CONFIG={"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
        "FLUX_TASK_RANK=0\nFLUX_JOB_SIZE=2\nFLUX_JOB_NNODES=1\nFLUX_TASK_LOCAL_ID=0",
        "RANK=0\nWORLD_SIZE=2\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=2\nTORCHELASTIC_RUN_ID=1\nMASTER_ADDR=h\nMASTER_PORT=1",
        "JOB_COMPLETION_INDEX=1\nCHOROS_COMPLETIONS=2\nCHOROS_COORDINATOR=h:1",
    )
    return {
        "frames": Target(
            frames, (_frame({"op": "get"}, [["float32", 2]], b"\0" * 8), _frame({"error": "InvalidInputError"}, [])), 4
        ),
        "control messages": Target(
            control_messages,
            (
                b'{"op": "WriteLog", "epoch": 1, "logs": {"loss": 0.5}, "seconds": 2.0, "held": [1.5]}',
                b'{"op": "ReadHeader", "rank": 1, "steps": 0, "end_requested": false}',
                b'{"op": "HasEnded", "epoch": 0, "rank": null}',
            ),
            3,
        ),
        "shard messages": Target(
            shard_messages,
            (
                b'{"op": "Exchange", "window": 4, "position": 0, "contributions": 1, "clock": 2, "times_set": 0}',
                b'{"op": "Transfer", "number": 3, "request": {"op": "Trial"}}',
                b'{"op": "ShardState"}',
            ),
            3,
        ),
        "guests": Target(guests, (b"choros 1" + b"n" * 16, b"choros 1" + b"n" * 16 + b"p" * 32 + b"\2\0\0\0{}"), 3),
        "doors": Target(hosts_of_doors, (b"n" * 16 + b"p" * 32 + b"\1",), 3),
        "messages": Target(
            messages, (struct.pack("<Qqq", 0, 0, 4) + b"abcd" + struct.pack("<Qqq", 0, 5, 2) + b"ab",), 4
        ),
        "objects": Target(
            decoded, (encode({"a": (1, {2}), "w": np.ones(3), "b": b"x", 3: 1j}), encode([None, "x"])), 4
        ),
        "place": Target(place, (environ, slurm, *others), 2),
        "nodelists": Target(nodelist, ("n[01-03,7],m2", "a[1-2]b[3-4]", "n-[001-010]-ib0"), 3),
        "tasks": Target(tasks, ("2(x3),1", "4"), 2),
        "hosts": Target(hosts, ("n1:2,n2:2", "localhost:4", "a,b,c"), 3),
        "hostfile": Target(hostfile, ("n1 slots=2\n# no\nn2 slots=4\n", "n1:2\nn2"), 2),
        "commands": Target(
            command, ("run\n-n\n2\n-H\na:1,b:1\ntrain.py", "submit\n--on\nslurm\n--time\n1:00:00\nt.py"), 1
        ),
        "records": Target(records, (_record() * 2, gzip.compress(_record())), 3),
        "checkpoint": Target(checkpoint, (_saved(),), 3),
        "csv": Target(_stored(".csv", **read), (_csv(),), 1),
    }
