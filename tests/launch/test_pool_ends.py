import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from choros.errors import InvalidInputError, WorkerFailedError
from choros.launch.process.worker_pool import Pool


def test_kill_ends_what_workers_started(calls, gone):
    pool = Pool(2)
    pool.call(0, *calls("spawn"))
    spawned = pool.receive(30)[1]["pid"]
    pids = pool.pids
    began = time.monotonic()
    pool.kill()
    pool.kill()
    pool.close()
    assert time.monotonic() - began < 8
    assert all(gone(pid, 0.1) for pid in pids)
    assert gone(spawned)


def test_close_kills_what_does_not_end_by_itself(calls, monkeypatch, gone):
    monkeypatch.setattr("choros.launch.process.worker_pool._EXIT_SECONDS", 0.3)
    pool = Pool(1)
    pool.call(0, *calls("sleep"))
    assert pool.receive(30)[1] == {"event": "asleep"}
    pool.close()
    assert gone(pool.pids[0], 0.1)


def test_a_forgotten_pool_is_ended(calls, gone):
    pool = Pool(1)
    pids = pool.pids
    pool.call(0, *calls("sleep"))
    del pool
    gc.collect()
    assert gone(pids[0])


def test_an_exception_in_the_caller_ends_the_pool(calls, gone):
    pids = []

    def use():
        with Pool(1) as pool:
            pids.extend(pool.pids)
            pool.call(0, *calls("sleep"))
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
        pool.call(0, *calls("echo"))
        assert pool.receive(30)[1]["event"] == "echo"


PARENT = """
import os, sys, time
sys.path.insert(0, {path!r})
from choros.launch.process.worker_pool import Pool
pool = Pool(2)
pool.call(0, "pool_calls:sleep", {{}})
pool.receive(30)
print(*pool.pids, flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [("time.sleep(60)", -signal.SIGKILL), ("sys.exit(5)", 5), ("raise SystemError", 1), ("os.kill(0, 15)", -15)],
    ids=["killed", "exits", "raises", "terminated"],
)
def test_workers_end_with_the_caller(calls, tmp_path, then, code, gone):
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
    with pytest.raises(WorkerFailedError, match="the wrong choros") as caught:
        Pool(2)
    assert "ended with exit code 1" in str(caught.value)


def test_no_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(InvalidInputError, match="cannot be started with /no/such/python"):
        Pool(1)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(InvalidInputError, match="own executable"):
        Pool(1)


def test_a_worker_that_is_not_ready_in_time(monkeypatch):
    with pytest.raises(WorkerFailedError, match=r"^worker 0 of 1 .* did not start within 0 s") as caught:
        Pool(1, start_timeout=0)
    assert caught.value.rank == 0


def test_cores_that_cannot_be_had():
    with pytest.raises(WorkerFailedError, match="cannot bind to the cores 1000"):
        Pool(1, cores=[[1000]])


@pytest.mark.parametrize("more", [{"environment": [{}]}, {"cores": [[0], [0], [0]]}])
def test_lengths_that_do_not_fit(more):
    with pytest.raises(InvalidInputError, match="for 2 workers"):
        Pool(2, **more)
    with pytest.raises(InvalidInputError, match="1 worker or more"):
        Pool(0)
