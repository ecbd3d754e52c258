import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from choros.errors import BadInput, MeetingTimeout, PeerFailed, WorkerFailed
from choros.launch.local import Pool

CALLS = """
import mmap, os, sys, time

def echo(link, message, blobs, fds):
    link.send({"event": "echo", "rank": link.rank, "size": link.size, "got": message}, blobs)

def look(link, message, blobs, fds):
    link.send({"event": "look", "cores": sorted(os.sched_getaffinity(0)), "env": dict(os.environ), "cwd": os.getcwd(),
               "path": sys.path, "loaded": [name for name in ("numpy", "keras", "jax") if name in sys.modules],
               "sid": os.getsid(0), "pid": os.getpid(), "ppid": os.getppid()})

def torch_threads(link, message, blobs, fds):
    import torch
    link.send({"event": "threads", "count": torch.get_num_threads()})

def write(link, message, blobs, fds):
    with mmap.mmap(fds[0], 16) as memory:
        memory[:5] = b"rank%d" % link.rank
    os.close(fds[0])
    link.send({"event": "written"})

def talk(link, message, blobs, fds):
    link.send({"event": "ready"})
    while True:
        asked, blobs, _ = link.receive(10)
        if asked.get("stop"):
            return
        link.send({"event": "answer", "twice": 2 * asked["n"]})

def fail(link, message, blobs, fds):
    print("a line before")
    raise ValueError("wrong number 7")

def no_memory(link, message, blobs, fds):
    x = bytearray(1 << 60)

def leave(link, message, blobs, fds):
    sys.exit(3)

def peer_gone(link, message, blobs, fds):
    from choros.errors import MeetingTimeout
    raise MeetingTimeout("rank 1 was missing", (1,))

def die(link, message, blobs, fds):
    print("last words")
    os._exit(message["code"])

def grow(link, message, blobs, fds):
    x = bytearray(b"x") * message["size"]
    link.send({"event": "grown"})
    time.sleep(60)

def sleep(link, message, blobs, fds):
    link.send({"event": "asleep"})
    time.sleep(60)

def spawn(link, message, blobs, fds):
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    link.send({"event": "spawned", "pid": child.pid})
    time.sleep(60)

def hang_up(link, message, blobs, fds):
    link._wire.close()
    time.sleep(60)

def flood(link, message, blobs, fds):
    for number in range(message["count"]):
        print("line", number)
    link.send({"event": "flooded"})
"""


def children():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


def gone(pid, within=5.0):
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    before = set(os.listdir("/proc/self/fd")), children(), {thread.name for thread in threading.enumerate()}
    yield
    gc.collect()
    after = set(os.listdir("/proc/self/fd")), children(), {thread.name for thread in threading.enumerate()}
    assert after == before


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The module ``pool_calls``, importable here and so in the workers; what makes a call's name."""
    (tmp_path / "pool_calls.py").write_text(CALLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, **more: {"call": f"pool_calls:{name}", **more}


def test_calls_and_answers(calls):
    with Pool(2) as pool:
        assert pool.size == len(pool.pids) == 2
        for rank in range(2):
            pool.send(rank, calls("echo", n=rank), [b"blob", b""])
        answers = sorted((pool.receive(30) for _ in range(2)), key=lambda answer: answer[0])
        for rank, (sender, event, blobs) in enumerate(answers):
            assert sender == rank
            assert event == {"event": "echo", "rank": rank, "size": 2, "got": calls("echo", n=rank)}
            assert blobs == [b"blob", b""]
        assert pool.alive(0)
        with pytest.raises(MeetingTimeout, match=r"no worker said anything for 0\.1 s") as caught:
            pool.receive(0.1)
        assert caught.value.missing == (0, 1)
    assert not pool.alive(0)


def test_what_a_worker_finds(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHOROS_RANK", "5")
    monkeypatch.setenv("CHOROS_GROUP_FD", "77")
    usable = sorted(os.sched_getaffinity(0))
    cores = [[usable[0]], [usable[-1]]]
    with Pool(2, environment=[{"MINE": "a"}, {"MINE": "b"}], cores=cores) as pool:
        for rank in range(2):
            pool.send(rank, calls("look"))
        for rank, event, _ in (pool.receive(30), pool.receive(30)):
            assert event["cores"] == cores[rank]
            assert event["env"]["MINE"] == "ab"[rank]
            assert event["env"]["CHOROS_WORKER"] == "1"
            left = {"CHOROS_RANK", "CHOROS_GROUP_FD", "CHOROS_CORES", "CHOROS_PARENT"} & set(event["env"])
            assert not left
            assert event["cwd"] == str(tmp_path)
            assert str(tmp_path) in event["path"]
            assert event["loaded"] == []
            assert event["sid"] == event["pid"] == pool.pids[rank]
            assert event["ppid"] == os.getpid()


def test_a_framework_in_a_worker_obeys(calls):
    pytest.importorskip("torch", reason="torch is not installed")
    with Pool(1, environment=[{"OMP_NUM_THREADS": "1"}]) as pool:
        pool.send(0, calls("torch_threads"))
        assert pool.receive(100)[1] == {"event": "threads", "count": 1}


def test_a_descriptor_reaches_a_running_worker(calls):
    fd = os.memfd_create("test")
    os.truncate(fd, 16)
    with Pool(2) as pool:
        pool.send(1, calls("write"), fds=[fd])
        assert pool.receive(30)[:2] == (1, {"event": "written"})
        assert os.pread(fd, 5, 0) == b"rank1"
    os.close(fd)


def test_a_conversation_within_a_call(calls):
    with Pool(1) as pool:
        pool.send(0, calls("talk"))
        assert pool.receive(30)[1] == {"event": "ready"}
        for number in range(3):
            pool.send(0, {"n": number})
            assert pool.receive(30)[1] == {"event": "answer", "twice": 2 * number}
        pool.send(0, {"stop": True})
        pool.send(0, calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


def test_an_exception_is_an_event_and_the_worker_serves_on(calls):
    with Pool(2) as pool:
        pool.send(1, calls("fail"))
        rank, event, _ = pool.receive(30)
        assert (rank, event["event"], event["type"], event["message"]) == (1, "failed", "ValueError", "wrong number 7")
        assert 'raise ValueError("wrong number 7")' in event["traceback"]
        assert "a line before" in event["output"]
        assert event["host"] == os.uname().nodename
        assert event["peak_memory"] > 1_000_000
        error = pool.failure(rank, event, weights=[1])
        assert isinstance(error, WorkerFailed)
        assert str(error).startswith("worker 1 of 2 (counted from 0) on host")
        assert "raised ValueError: wrong number 7" in str(error)
        assert "a line before" in str(error)
        assert (error.rank, error.weights, error.signal) == (1, [1], "")
        pool.send(1, calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no_memory", "MemoryError", "fewer workers"),
        ("leave", "SystemExit", "3"),
        ("absent", "choros.errors.BadInput", "the module pool_calls has no function absent"),
        ("peer_gone", "choros.errors.MeetingTimeout", "rank 1 was missing"),
    ],
)
def test_other_failures_of_a_call(calls, name, kind, words):
    with Pool(1) as pool:
        pool.send(0, calls(name))
        rank, event, _ = pool.receive(30)
        assert (event["event"], event["type"]) == ("failed", kind)
        assert words in str(pool.failure(rank, event))
        assert event.get("missing") == ([1] if name == "peer_gone" else None)
        assert pool.alive(0)


def test_a_module_that_is_not_there(calls):
    with Pool(1) as pool:
        pool.send(0, {"call": "no_such_module:f"})
        rank, event, _ = pool.receive(30)
        assert event["type"] == "ModuleNotFoundError"
        assert "sys.path" in str(pool.failure(rank, event))


def test_a_killed_worker_is_noticed_at_once(calls):
    with Pool(2) as pool:
        pool.send(1, calls("grow", size=150_000_000))
        assert pool.receive(30)[1] == {"event": "grown"}
        time.sleep(0.6)  # its memory is looked at every half second
        began = time.monotonic()
        os.kill(pool.pids[1], signal.SIGKILL)
        rank, event, _ = pool.receive(10)
        assert time.monotonic() - began < 0.5
        assert (rank, event["event"], event["signal"], event["exit"]) == (1, "died", "SIGKILL", -1)
        assert 150_000_000 < event["peak_memory"] < 300_000_000
        error = pool.failure(rank, event)
        assert "was ended by SIGKILL (peak memory 1" in str(error)
        assert "out-of-memory killer" in str(error)
        assert error.signal == "SIGKILL"
        assert not pool.alive(1)
        with pytest.raises(PeerFailed, match="worker 1 of 2 has ended"):
            pool.send(1, calls("echo"))
        pool.send(0, calls("echo"))
        assert pool.receive(30)[0] == 0


def test_a_send_to_a_worker_whose_death_is_not_noticed_yet(calls):
    with Pool(1) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        for _ in range(20):
            pool.send(0, calls("echo"))
            time.sleep(0.01)
        assert pool.receive(10)[1]["signal"] == "SIGKILL"
    with pytest.raises(PeerFailed, match="has ended"):
        pool.send(0, calls("echo"))


@pytest.mark.parametrize("names", [["pidfd_open"], ["pidfd_open", "waitid"]], ids=["old kernel", "as on macOS"])
def test_without_the_newer_calls_of_the_kernel(calls, monkeypatch, names):
    for name in names:
        monkeypatch.delattr(os, name)
    with Pool(2) as pool:
        pool.send(0, calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"
        began = time.monotonic()
        os.kill(pool.pids[1], signal.SIGKILL)
        assert pool.receive(10)[1]["signal"] == "SIGKILL"
        assert time.monotonic() - began < 0.5


def test_a_worker_that_somebody_else_has_reaped(calls):
    with Pool(1) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        os.waitpid(pool.pids[0], 0)
        assert pool.receive(10)[1]["event"] == "died"


def test_windows_is_refused():
    code = "import sys; sys.platform = 'win32'\nimport choros.launch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "WSL" in done.stderr.splitlines()[-1]


def test_a_worker_that_exits(calls):
    with Pool(1) as pool:
        pool.send(0, calls("die", code=9))
        rank, event, _ = pool.receive(30)
        assert (event["event"], event["signal"], event["exit"]) == ("died", "", 9)
        assert "last words" in event["output"]
        assert "exit code 9" in str(pool.failure(rank, event))
        with pytest.raises(PeerFailed, match="no worker is left"):
            pool.receive(5)


def test_a_worker_that_hangs_up_is_ended(calls):
    with Pool(1) as pool:
        pool.send(0, calls("hang_up"))
        assert pool.receive(30)[1]["event"] == "died"


def test_the_first_cause_is_found_behind_its_echo(calls):
    with Pool(2) as pool:
        pool.send(0, calls("peer_gone"))
        rank, event, _ = pool.receive(30)
        pool.send(1, calls("die", code=4))
        cause, found = pool.cause(rank, event, grace=10)
        assert (cause, found["event"], found["exit"]) == (1, "died", 4)
        assert pool.cause(cause, found) == (cause, found)
        assert pool.cause(rank, event, grace=0.1) == (rank, event)


def test_ctrl_c_does_not_reach_the_workers(calls):
    with Pool(1) as pool:
        os.kill(pool.pids[0], signal.SIGINT)
        pool.send(0, calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


def test_lines_are_handed_on_and_the_last_are_kept(calls):
    lines = []
    with Pool(1, echo=lambda rank, line: lines.append((rank, line))) as pool:
        pool.send(0, calls("flood", count=500))
        assert pool.receive(30)[1] == {"event": "flooded"}
        pool.send(0, calls("die", code=1))
        output = pool.receive(30)[1]["output"].splitlines()
    assert lines == [*((0, f"line {number}") for number in range(500)), (0, "last words")]
    assert output == [f"line {number}" for number in range(461, 500)] + ["last words"]


def test_kill_ends_what_workers_started(calls):
    pool = Pool(2)
    pool.send(0, calls("spawn"))
    spawned = pool.receive(30)[1]["pid"]
    pids = pool.pids
    began = time.monotonic()
    pool.kill()
    pool.kill()
    pool.close()
    assert time.monotonic() - began < 2
    assert all(gone(pid, 0.1) for pid in pids)
    assert gone(spawned)


def test_close_kills_what_does_not_end_by_itself(calls, monkeypatch):
    monkeypatch.setattr("choros.launch.local._EXIT", 0.3)
    pool = Pool(1)
    pool.send(0, calls("sleep"))
    assert pool.receive(30)[1] == {"event": "asleep"}
    pool.close()
    assert gone(pool.pids[0], 0.1)


def test_a_forgotten_pool_is_ended(calls):
    pool = Pool(1)
    pids = pool.pids
    pool.send(0, calls("sleep"))
    del pool
    gc.collect()
    assert gone(pids[0])


def test_an_exception_in_the_caller_ends_the_pool(calls):
    pids = []

    def use():
        with Pool(1) as pool:
            pids.extend(pool.pids)
            pool.send(0, calls("sleep"))
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert gone(pids[0], 0.1)


def test_a_pool_outlives_the_thread_that_made_it(calls):
    made = []
    thread = threading.Thread(target=lambda: made.append(Pool(1)))
    thread.start()
    thread.join(60)
    time.sleep(0.2)
    with made[0] as pool:
        pool.send(0, calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


PARENT = """
import os, sys, time
sys.path.insert(0, {path!r})
from choros.launch.local import Pool
pool = Pool(2)
pool.send(0, {{"call": "pool_calls:sleep"}})
pool.receive(30)
print(*pool.pids, flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [("time.sleep(60)", -signal.SIGKILL), ("sys.exit(5)", 5), ("raise SystemError", 1), ("os.kill(0, 15)", -15)],
    ids=["killed", "exits", "raises", "terminated"],
)
def test_workers_end_with_the_caller(calls, tmp_path, then, code):
    script = textwrap.dedent(PARENT).format(path=str(tmp_path), then=then)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as parent:
        pids = parent.stdout.readline().split()
        assert len(pids) == 2
        if code == -signal.SIGKILL:
            parent.kill()
        assert parent.wait(30) == code
    assert all(gone(int(pid)) for pid in pids)


def test_a_worker_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "choros").mkdir()
    (tmp_path / "choros" / "__init__.py").write_text("print('the wrong choros')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkerFailed, match="the wrong choros") as caught:
        Pool(2)
    assert "ended with exit code 1" in str(caught.value)


def test_no_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(BadInput, match="cannot be started with /no/such/python"):
        Pool(1)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(BadInput, match="own executable"):
        Pool(1)


def test_a_worker_that_is_not_ready_in_time(monkeypatch):
    with pytest.raises(MeetingTimeout, match=r"the workers \(0,\) did not start within 0 s") as caught:
        Pool(1, start_timeout=0)
    assert caught.value.missing == (0,)


def test_cores_that_cannot_be_had():
    with pytest.raises(WorkerFailed, match="cannot bind to the cores 1000"):
        Pool(1, cores=[[1000]])


@pytest.mark.parametrize("more", [{"environment": [{}]}, {"cores": [[0], [0], [0]]}])
def test_lengths_that_do_not_fit(more):
    with pytest.raises(BadInput, match="for 2 workers"):
        Pool(2, **more)
    with pytest.raises(BadInput, match="1 worker or more"):
        Pool(0)
