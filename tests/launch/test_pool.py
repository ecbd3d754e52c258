import os
import signal
import subprocess
import sys
import time

import pytest

from choros.errors import CommTimeoutError, PeerLostError, WorkerFailedError
from choros.launch.process.failure_report import amount, signalled
from choros.launch.process.worker_pool import Pool


def test_calls_and_answers(calls):
    with Pool(2) as pool:
        assert pool.size == len(pool.pids) == 2
        for rank in range(2):
            pool.call(rank, *calls("echo", n=rank), [b"blob", b""])
        answers = sorted((pool.receive(30) for _ in range(2)), key=lambda answer: answer[0])
        for rank, (sender, event, blobs) in enumerate(answers):
            assert sender == rank
            assert event == {"event": "echo", "rank": rank, "size": 2, "got": {"n": rank}}
            assert blobs == [b"blob", b""]
        assert pool.alive(0)
        with pytest.raises(CommTimeoutError, match=r"no worker sent an event for 0\.1 s") as caught:
            pool.receive(0.1)
        assert caught.value.missing == (0, 1)
    assert not pool.alive(0)


def test_a_watched_descriptor_is_an_event_until_it_is_read(calls):
    reading, writing = os.pipe()
    with Pool(1) as pool:
        pool.watch(reading, 0, {"event": "readable"})
        with pytest.raises(CommTimeoutError):
            pool.receive(0.05)
        os.write(writing, b"x")
        assert pool.receive(30) == pool.receive(30) == (0, {"event": "readable"}, [])
        os.read(reading, 1)
        pool.call(0, *calls("echo", n=1))
        assert pool.receive(30)[1]["event"] == "echo"
        os.write(writing, b"x")
        pool.unwatch(reading)
        with pytest.raises(CommTimeoutError):
            pool.receive(0.05)
    os.close(reading)
    os.close(writing)


def test_what_a_worker_finds(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHOROS_RANK", "5")
    monkeypatch.setenv("CHOROS_COMM_FD", "77")
    usable = sorted(os.sched_getaffinity(0))
    cores = [[usable[0]], [usable[-1]]]
    with Pool(2, environment=[{"MINE": "a"}, {"MINE": "b"}], cores=cores) as pool:
        for rank in range(2):
            pool.call(rank, *calls("look"))
        for rank, event, _ in (pool.receive(30), pool.receive(30)):
            assert event["cores"] == cores[rank]
            assert event["env"]["MINE"] == "ab"[rank]
            assert event["env"]["CHOROS_WORKER"] == "1"
            remaining = {"CHOROS_RANK", "CHOROS_COMM_FD", "CHOROS_CORES", "CHOROS_PARENT"} & set(event["env"])
            assert not remaining
            assert event["cwd"] == str(tmp_path)
            assert str(tmp_path) in event["path"]
            assert event["loaded"] == []
            assert event["sid"] == event["pid"] == pool.pids[rank]
            assert event["ppid"] == os.getpid()


def test_a_framework_in_a_worker_obeys(calls):
    pytest.importorskip("torch", reason="torch is not installed")
    with Pool(1, environment=[{"OMP_NUM_THREADS": "1"}]) as pool:
        pool.call(0, *calls("torch_threads"))
        assert pool.receive(100)[1] == {"event": "threads", "count": 1}


def test_a_descriptor_reaches_a_running_worker(calls):
    fd = os.memfd_create("test")
    os.truncate(fd, 16)
    with Pool(2) as pool:
        pool.call(1, *calls("write"), fds=[fd])
        assert pool.receive(30)[:2] == (1, {"event": "written"})
        assert os.pread(fd, 5, 0) == b"rank1"
    os.close(fd)


def test_a_conversation_within_a_call(calls):
    with Pool(1) as pool:
        pool.call(0, *calls("talk"))
        assert pool.receive(30)[1] == {"event": "ready"}
        for number in range(3):
            pool.send(0, {"n": number})
            assert pool.receive(30)[1] == {"event": "answer", "twice": 2 * number}
        pool.send(0, {"stop": True})
        pool.call(0, *calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


def test_an_exception_is_an_event_and_the_worker_serves_on(calls):
    with Pool(2) as pool:
        pool.call(1, *calls("fail"))
        rank, event, _ = pool.receive(30)
        assert (rank, event.type, event.message) == (1, "ValueError", "wrong number 7")
        assert 'raise ValueError("wrong number 7")' in event.traceback
        assert "a line before" in event.output
        assert event.host == os.uname().nodename
        assert event.peak_memory > 1_000_000
        error = pool.failure(rank, event, weights=[1])
        assert isinstance(error, WorkerFailedError)
        assert str(error).startswith("worker 1 of 2 (counted from 0) on host")
        assert "raised ValueError: wrong number 7" in str(error)
        assert "a line before" in str(error)
        assert (error.rank, error.weights, error.signal) == (1, [1], "")
        pool.call(1, *calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("no_memory", "MemoryError", "fewer workers"),
        ("leave", "SystemExit", "3"),
        ("absent", "choros.errors.InvalidInputError", "the module pool_calls has no function absent"),
        ("peer_gone", "choros.errors.CommTimeoutError", "rank 1 was missing"),
    ],
)
def test_other_failures_of_a_call(calls, name, kind, message):
    with Pool(1) as pool:
        pool.call(0, *calls(name))
        rank, event, _ = pool.receive(30)
        assert event.type == kind
        assert message in str(pool.failure(rank, event))
        assert event.missing == ([1] if name == "peer_gone" else [])
        assert pool.alive(0)


def test_a_module_that_is_not_there(calls):
    with Pool(1) as pool:
        pool.call(0, "no_such_module:f", {})
        rank, event, _ = pool.receive(30)
        assert event.type == "ModuleNotFoundError"
        assert "sys.path" in str(pool.failure(rank, event))


def test_a_killed_worker_is_noticed_at_once(calls):
    with Pool(2) as pool:
        pool.call(1, *calls("grow", size=150_000_000))
        assert pool.receive(30)[1] == {"event": "grown"}
        end = time.monotonic() + 30
        while pool._workers.children[1].peak_memory < 150_000_000 and time.monotonic() < end:
            time.sleep(0.02)  # its memory is looked at every half second
        began = time.monotonic()
        os.kill(pool.pids[1], signal.SIGKILL)
        rank, event, _ = pool.receive(10)
        assert time.monotonic() - began < 5
        assert (rank, event.died, event.signal, event.exit) == (1, True, "SIGKILL", -1)
        assert 150_000_000 < event.peak_memory < 300_000_000
        error = pool.failure(rank, event)
        assert "was ended by SIGKILL (peak memory 1" in str(error)
        assert "out-of-memory killer" in str(error)
        assert error.signal == "SIGKILL"
        assert not pool.alive(1)
        with pytest.raises(PeerLostError, match="worker 1 of 2 has ended"):
            pool.call(1, *calls("echo"))
        pool.call(0, *calls("echo"))
        assert pool.receive(30)[0] == 0


def test_a_worker_that_dies_of_sigill_is_told_so_with_the_remedy(calls):
    with Pool(1) as pool:
        pool.call(0, *calls("sleep"))
        assert pool.receive(30)[1] == {"event": "asleep"}
        os.kill(pool.pids[0], signal.SIGILL)
        rank, event, _ = pool.receive(10)
        error = pool.failure(rank, event)
        assert error.signal == "SIGILL"
        cause, remedy = signalled("SIGILL")
        assert f"was ended by SIGILL (peak memory {amount(event.peak_memory)}; {cause})" in str(error)
        assert f"{remedy}\nWith restarts=3" in str(error)


def test_a_send_to_a_worker_whose_death_is_not_noticed_yet(calls):
    with Pool(1) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        for _ in range(20):
            pool.call(0, *calls("echo"))
            time.sleep(0.01)
        assert pool.receive(10)[1].signal == "SIGKILL"
    with pytest.raises(PeerLostError, match="has ended"):
        pool.call(0, *calls("echo"))


@pytest.mark.parametrize("names", [["pidfd_open"], ["pidfd_open", "waitid"]], ids=["old kernel", "as on macOS"])
def test_without_the_newer_calls_of_the_kernel(calls, monkeypatch, names):
    for name in names:
        monkeypatch.delattr(os, name)
    with Pool(2) as pool:
        pool.call(0, *calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"
        began = time.monotonic()
        os.kill(pool.pids[1], signal.SIGKILL)
        assert pool.receive(10)[1].signal == "SIGKILL"
        assert time.monotonic() - began < 5


def test_a_worker_that_somebody_else_has_reaped(calls):
    with Pool(1) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        os.waitpid(pool.pids[0], 0)
        assert pool.receive(10)[1].died


def test_windows_is_refused():
    code = "import sys; sys.platform = 'win32'\nimport choros.launch.process"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "WSL" in done.stderr.splitlines()[-1]


def test_a_worker_that_exits(calls):
    with Pool(1) as pool:
        pool.call(0, *calls("die", code=9))
        rank, event, _ = pool.receive(30)
        assert (event.died, event.signal, event.exit) == (True, "", 9)
        assert "last words" in event.output
        assert "exit code 9" in str(pool.failure(rank, event))
        with pytest.raises(PeerLostError, match="no worker is left"):
            pool.receive(5)


def test_a_worker_that_hangs_up_is_ended(calls):
    with Pool(1) as pool:
        pool.call(0, *calls("hang_up"))
        assert pool.receive(30)[1].died


def test_the_first_cause_is_found_behind_its_echo(calls):
    with Pool(2) as pool:
        pool.call(0, *calls("peer_gone"))
        rank, event, _ = pool.receive(30)
        pool.call(1, *calls("die", code=4))
        cause, result = pool.cause(rank, event, grace=10)
        assert (cause, result.died, result.exit) == (1, True, 4)
        assert pool.cause(cause, result) == (cause, result)
        assert pool.cause(rank, event, grace=0.1) == (rank, event)


def test_ctrl_c_does_not_reach_the_workers(calls):
    with Pool(1) as pool:
        os.kill(pool.pids[0], signal.SIGINT)
        pool.call(0, *calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


def test_lines_are_handed_on_and_the_last_are_kept(calls):
    lines = []
    with Pool(1, echo=lambda rank, line: lines.append((rank, line))) as pool:
        pool.call(0, *calls("flood", count=500))
        assert pool.receive(30)[1] == {"event": "flooded"}
        pool.call(0, *calls("die", code=1))
        output = pool.receive(30)[1].output.splitlines()
    assert lines == [*((0, f"line {number}") for number in range(500)), (0, "last words")]
    assert output == [f"line {number}" for number in range(461, 500)] + ["last words"]
