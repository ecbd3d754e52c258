"""Fixtures of the tests of processes: calls for workers, and checks that nothing is left behind."""

import time
from pathlib import Path

import pytest

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
    from choros.errors import CommTimeoutError
    raise CommTimeoutError("rank 1 was missing", (1,))

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


def _gone(pid, within=5.0):
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
def _nothing_is_left(nothing_left):
    """Every test of this folder leaves nothing behind."""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The module ``pool_calls``, importable here and so in the workers; the function and the arguments of a call."""
    (tmp_path / "pool_calls.py").write_text(CALLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, **arguments: (f"pool_calls:{name}", arguments)


@pytest.fixture
def gone():
    """Return whether a process ends within some seconds."""
    return _gone
