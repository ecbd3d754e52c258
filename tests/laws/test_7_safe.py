"""Law 7: safe. No pickle but between a process and its own children; one file has sockets, for who knows a secret."""

import ast
import io
import json
import os
import pathlib
import pickle
import socket
import types

import numpy as np
import pytest

import choros
from choros.comm.shm.group import SharedGroup
from choros.comm.shm.segment import Segment
from choros.errors import InvalidInputError
from choros.launch.process.frame import pack
from choros.launch.process.unix_socket import UnixConnection
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.model_io.serialization import PackedModel
from choros.training.payload import SharedCodeFolder, read_code

ROOT = pathlib.Path(choros.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Objects of the user's own, between their own processes: on a worker's pipe, in memory without a name (``choros.run``).
PARENT_AND_CHILD = {"pickling.py"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}


def nodes(path):
    return ast.walk(ast.parse(path.read_text(), str(path)))


def named(path):
    return str(path.relative_to(ROOT))


def test_pickle_is_only_between_a_parent_and_its_children():
    users = set()
    for path in FILES:
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in PICKLES for name in names):
                users.add(named(path))
    assert users <= PARENT_AND_CHILD


def test_nothing_is_evaluated_or_loaded_with_pickle_allowed():
    wrong = []
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "compile", "os.system", "os.popen"):
                wrong.append((named(path), node.lineno, name))
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg, value) in (("allow_pickle", "True"), ("shell", "True"), ("safe_mode", "False")):
                    wrong.append((named(path), node.lineno, f"{keyword.arg}={value}"))
    assert not wrong


def test_keras_reads_no_file_without_its_safe_mode():
    names = {"_unpickle_model", "enable_unsafe_deserialization", "_load_model_from_fileobj"}
    wrong = [
        (named(path), node.lineno, node.attr)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in names
    ]
    assert not wrong


def test_the_line_to_the_ranks_of_a_launcher_carries_no_pickle():
    """A rank receives JSON over the socket: the places of the pickles and their digests."""
    from choros.training.executors.remote import RemoteRun
    from choros.training.spec import FitConfig
    from choros.training.worker.messages import GetJob

    home = RemoteRun.__new__(RemoteRun)
    code = pickle.dumps(Bomb())
    home.job, home.entries, home.nbytes = FitConfig({"name": "Single"}, "sync", 2, 4, 1), [], 0
    home.payload, home.callbacks = types.SimpleNamespace(model=PackedModel(code)), types.SimpleNamespace(steps=1)
    with SharedCodeFolder([code]) as home.folder:
        message, arrays = home.answer(GetJob(), 0)
        assert arrays == []
        assert json.loads(json.dumps(message)) == message
        assert read_code(message["code"]) == [code]


def test_sockets_with_an_address_are_in_one_file():
    calls = {"bind", "listen", "accept", "connect", "connect_ex", "create_server", "create_connection", "socketserver"}
    # By ioctl, for the address of an interface: its socket is bound to nothing.
    asks_the_kernel = "cluster/hardware/interfaces.py"
    # Sockets of the machine, in a folder that only this user can open.
    of_the_machine = ("launch/ray_cluster/node_shell.py", "launch/ray_cluster/shell_server.py")
    # They connect to Ray's or Spark's own port, send nothing, and close.
    probes = ("launch/ray_cluster/connection.py", "spark/master_url.py")
    wrong = []
    for path in FILES:
        if named(path) == "comm/tcp/auth_socket.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                if named(path) in probes and function == "socket.create_connection":
                    continue
                if named(path) in of_the_machine:
                    if function == "socket.socket" and "socket.AF_UNIX" not in ast.unparse(node):
                        wrong.append((named(path), node.lineno, ast.unparse(node)))
                    continue
                if isinstance(node.func, ast.Attribute) and node.func.attr in calls:
                    wrong.append((named(path), node.lineno, function))
                if (
                    function == "socket.socket"
                    and named(path) != asks_the_kernel
                    and not all(k.arg == "fileno" for k in node.keywords)
                ):
                    wrong.append((named(path), node.lineno, ast.unparse(node)))
            elif (
                isinstance(node, ast.Attribute)
                and node.attr in ("AF_INET", "AF_INET6")
                and named(path) != asks_the_kernel
            ):
                wrong.append((named(path), node.lineno, node.attr))
    assert not wrong


def test_workers_listen_on_nothing(pools):
    """The sockets that workers hold are of no network: none is in the kernel's tables of TCP and UDP."""
    network = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        table = pathlib.Path(f"/proc/net/{name}")
        if table.exists():
            network |= {line.split()[9] for line in table.read_text().splitlines()[1:]}
    for pid in pools(2).start().pids:
        links = [os.readlink(entry) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
        sockets = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
        assert sockets
        assert not sockets & network


SEGMENTS = {
    "segment": lambda: Segment.create(64),
    "group": lambda: SharedGroup.create(2, 64),
    "center": lambda: SharedMemoryParameterServer.create(np.zeros(3), np.zeros(0), (), workers=2),
}


@pytest.mark.parametrize("make", SEGMENTS.values(), ids=SEGMENTS)
def test_shared_memory_has_no_name_and_is_not_inherited_unasked(make):
    with make() as segment:
        facts = os.fstat(segment.fd)
        assert facts.st_nlink == 0  # no file system knows it
        assert os.readlink(f"/proc/self/fd/{segment.fd}").endswith("(deleted)")
        assert not os.get_inheritable(segment.fd)
        assert facts.st_uid == os.getuid()
        with pytest.raises(OSError):
            os.ftruncate(segment.fd, 1)  # sealed: nobody takes memory away from under a peer


@pytest.mark.parametrize(
    "thing", [object(), {1, 2}, b"bytes", np.zeros(2), lambda: 0, 1j], ids=lambda t: type(t).__name__
)
def test_what_is_not_json_is_refused_by_type(thing):
    with pytest.raises(InvalidInputError, match=type(thing).__name__):
        pack({"thing": thing}, [], [])


class Bomb:
    def __reduce__(self):
        return os.putenv, ("CHOROS_BOMB", "went off")


def test_a_message_is_json_and_a_pickle_in_it_stays_bytes():
    ours, expected = socket.socketpair()
    first, other = UnixConnection(ours, "one"), UnixConnection(expected, "other")
    evil = pickle.dumps(Bomb())
    first.send({"a": [1, "two", None, 0.5]}, [evil])
    message, blobs, _ = other.receive(5)
    assert message == {"a": [1, "two", None, 0.5]}
    assert bytes(blobs[0]) == evil
    first.close()
    other.close()
    captured = io.BytesIO()
    head, _ = pack({"k": "v"}, [], [])
    captured.write(head)
    text = captured.getvalue()
    assert json.loads(text[text.index(b"{") :]) == {"k": "v"}


def test_a_group_gathers_bytes_as_bytes():
    with SharedGroup.create(1, 1 << 12) as segment, SharedGroup(segment, 0) as group:
        evil = pickle.dumps(Bomb())
        assert group.gather(evil) == [evil]
        with pytest.raises(InvalidInputError, match="objects"):
            group.broadcast(np.array([Bomb()], dtype=object))
