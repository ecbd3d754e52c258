"""Law 5: loud. Every wait has a limit and names who was missing; what is not a whole job is refused.

What a worker's failure looks like to the caller is in ``tests/training/test_failures.py``.
"""

import ast
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import choros
from choros.comm.shm.group import SharedGroup, share
from choros.errors import CommTimeoutError, InvalidInputError, PeerLostError
from choros.launch.process.unix_socket import UnixConnection
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.control_block import ControlBlock
from choros.training.worker.exchange import AsyncExchange, SyncExchange

LIMIT = 0.4


@contextlib.contextmanager
def within(seconds):
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds, "the wait did not end when it should"


MEETINGS = {
    "barrier": lambda group: group.barrier(),
    "sum_slots": lambda group: group.sum_slots(4, "float32"),
    "sum": lambda group: group.sum(np.ones(3)),
    "mean": lambda group: group.mean(np.ones(3)),
    "gather": lambda group: group.gather(b"x"),
    "broadcast": lambda group: group.broadcast(np.ones(3), root=1),
    "collect": lambda group: group.collect(np.ones(3, "uint8"), root=1),
    "share": lambda group: share(group, None, root=1),
    "exchange": lambda group: SyncExchange(choros.LocalSGD(), group, np.zeros(4)).run(np.zeros(4), 1, 8),
}


@pytest.mark.parametrize("call", MEETINGS.values(), ids=MEETINGS)
def test_a_group_names_the_ranks_that_did_not_come(call):
    with SharedGroup.create(3, 1 << 12) as segment:
        group = SharedGroup(segment, 1, timeout=LIMIT)
        with within(10), pytest.raises(CommTimeoutError, match=r"rank 1.*\b0\b.*\b2\b") as caught:
            call(group)
        assert caught.value.missing == (0, 2)
        group.close()


HOLD = """
import sys, time
from choros.param_server.shared_memory import SharedMemoryParameterServer
class Slow:
    shows, elementwise, uses_seen = "after", False, False
    def propose(self, local, seen, window): return local
    def adopt(self, local, shown): return shown
    def merge(self, center, message, meeting, memory):
        print("held", flush=True)
        time.sleep(60)
import numpy as np
center = SharedMemoryParameterServer(int(sys.argv[1]), Slow(), 1, 2)
center.exchange(np.zeros(4), np.zeros(4), 1, np.zeros(0))
"""
NOTICES = """
import sys, time
from choros.training.async_control.control_block import ControlBlock
from choros.comm.shm.segment import Segment
control_block = ControlBlock(Segment.attach(int(sys.argv[1])), 2, 1, 1)
with control_block.locked():
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def held_elsewhere(text, fd):
    """Another process that holds a lock; it is killed in the end."""
    command = [sys.executable, "-c", text, str(fd)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[fd], text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            yield other
        finally:
            other.kill()


def test_a_center_names_who_holds_it_and_is_free_when_the_holder_dies():
    none = np.zeros(0)
    segment = SharedMemoryParameterServer.create(np.zeros(4), none, (), workers=2)
    with segment:
        center = SharedMemoryParameterServer(segment, choros.AEASGD(alpha=0.5), 0, 2, timeout=LIMIT)
        exchange = AsyncExchange(center, np.zeros(4))
        with held_elsewhere(HOLD, segment.fd) as other:
            with (
                within(10),
                pytest.raises(CommTimeoutError, match=rf"held by rank 1 \(process {other.pid}\)") as caught,
            ):
                exchange.run(np.ones(4), 1, none)
            assert caught.value.missing == (1,)
            with within(10), pytest.raises(CommTimeoutError, match="rank 1"):
                center.replace(np.zeros(4), none)
        local = np.ones(4)
        with within(5):
            assert exchange.run(local, 1, none) == 0
        assert local.tolist() == [0.5] * 4


def test_the_noticeboard_waits_with_a_limit_and_is_free_when_the_holder_dies():
    control_block = ControlBlock.create(2, 1, 1)
    control_block.timeout = LIMIT
    with held_elsewhere(NOTICES, control_block.segment.fd) as other, within(10):
        with pytest.raises(CommTimeoutError, match=f"process {other.pid}"):
            control_block.add(0, 1, np.zeros(1), np.zeros(1))
        assert other.poll() is None
    with within(5):
        assert control_block.add(0, 0, np.ones(1), np.zeros(1)) is False
    control_block.close()


def test_a_pipe_has_a_limit_and_tells_when_the_other_end_has_gone():
    ours, expected = socket.socketpair()
    wire = UnixConnection(ours, "worker 1 of 2")
    with within(10), pytest.raises(CommTimeoutError, match="worker 1 of 2"):
        wire.receive(LIMIT)
    with within(30), pytest.raises(CommTimeoutError, match="worker 1 of 2"):  # nobody reads
        wire.send({}, [bytes(1 << 24)], stalled=LIMIT)
    expected.close()
    with within(10), pytest.raises(PeerLostError, match="worker 1 of 2"):
        wire.receive(None)
    wire.close()


def test_a_pool_that_is_silent_names_its_ranks(pools):
    pool = pools(2).start()
    with within(10), pytest.raises(CommTimeoutError, match=r"0.*1") as caught:
        pool.receive(LIMIT)
    assert caught.value.missing == (0, 1)


ENDLESS = {  # waits without a limit of their own, and what ends them
    ("launch/process/pool_worker.py", "receive"): "an idle worker, until its caller calls or has gone",
    ("hvd/collectives.py", "join"): "a collective, whose group has a limit",
    ("launch/ssh/agent_client.py", "wait"): "a host's agent, which ends with its ranks or with this process",
    ("launch/ray_cluster/holder.py", "wait"): "a node's agent, which ends with its ranks or with this process",
    ("launch/mpi/rank_wrapper.py", "wait"): "a rank, whose launcher ends it",
    ("training/worker/main.py", "receive"): "orders after callbacks, which may take any time, or the caller has gone",
}


def test_no_other_wait_is_without_a_limit():
    root, result = pathlib.Path(choros.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, text = ast.unparse(node.func).rpartition(".")[2], ast.unparse(node)
            file = str(path.relative_to(root))
            waits_for_ever = (
                (name == "receive" and text.endswith("(None)"))
                or (name in ("lockf", "flock") and "LOCK_EX" in text and "LOCK_NB" not in text)
                or (name in ("wait", "communicate") and not node.args and not node.keywords)
                or (name == "join" and not node.args and not node.keywords)
            )
            if waits_for_ever:
                result.add((file, name))
    assert result <= ENDLESS.keys(), sorted(result - ENDLESS.keys())


def test_a_launcher_without_a_group_is_refused(monkeypatch, make_mlp, data):
    for name, value in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(f"CHOROS_{name}", value)
    monkeypatch.delenv("CHOROS_COMM_FD", raising=False)
    x, y = data(rows=32)
    with pytest.raises(InvalidInputError, match="choros run -n"):
        choros.Trainer(make_mlp()).fit(x, y, verbose=0)


def test_a_silent_singleton_is_refused(monkeypatch, make_mlp, data):
    """The launcher says 4, the group that it brought is of 1."""
    from choros.comm.bootstrap import init

    monkeypatch.setattr(init, "_joined", {})
    with SharedGroup.create(1, 1 << 16) as segment:
        for name, value in {"RANK": "0", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "4"}.items():
            monkeypatch.setenv(f"CHOROS_{name}", value)
        monkeypatch.setenv("CHOROS_COMM_FD", str(os.dup(segment.fd)))
        x, y = data(rows=32)
        with within(60), pytest.raises(InvalidInputError, match="4.*1|1.*4"):
            choros.Trainer(make_mlp()).fit(x, y, verbose=0)


DIVERGING = """
import os
import choros, keras, numpy as np
rank = int(os.environ["CHOROS_RANK"])
def attempt(what, units=3, rows=32, batch=8, **more):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    try:
        choros.Trainer(model, "localsgd", first_timeout=60, timeout=60).fit(
            np.zeros((rows, 4), "float32"), np.zeros((rows, units), "float32"), batch_size=batch, verbose=0, **more)
    except choros.InvalidInputError as error:
        print(what, "refused:", str(error).replace(chr(10), " "), flush=True)
    else:
        print(what, "trained", flush=True)
attempt("batch", batch=8 + rank)
attempt("model", units=3 + rank)
attempt("rows", rows=32 + 8 * rank)
attempt("same")
"""


def test_ranks_that_diverge_are_told_so(clean_python):
    with within(240):
        done = clean_python(DIVERGING, before=("-m", "choros", "run", "-n", "2"), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        messages = {line.split()[0]: line for line in lines if " " in line}
        for kind, word in {"batch": "batch_size", "model": "model (layer 1 (Dense): units", "rows": "rows"}.items():
            assert "refused" in messages[kind], messages[kind]
            assert word in messages[kind]
            assert "Rank 1 on " in messages[kind]
        assert messages["same"] == "same trained"
