"""A package of somebody else's adds a launcher and a group by entry points, and the laws are tested on it too."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

POINTS = """
[choros.places]
toy = toy:PLACE
[choros.groups]
toy = toy:join
"""
TOY = '''
"""A launcher that tells its ranks their place by TOY_*, and a group whose ranks leave each other files."""

import math, os, pathlib, time
import numpy as np
from choros.cluster import LauncherEnv
from choros.errors import InvalidInputError, CommTimeoutError

PLACE = LauncherEnv(
    launcher="toy", detect_any=("TOY_RANK",), rank=("TOY_RANK",), size=("TOY_SIZE",), local_rank=("TOY_RANK",),
    local_size=("TOY_SIZE",), one_node=True,
)


def join(rank, size, timeout):
    """Take the jobs of this launcher, and of one rank; leave the others to other packages."""
    if size > 1 and "TOY_ROOM" not in os.environ:
        return None
    return Files(rank, size, timeout, pathlib.Path(os.environ.get("TOY_ROOM", ".")))


class Files:
    def __init__(self, rank, size, timeout, room):
        self.rank, self.size, self.timeout, self.room, self.turn = rank, size, timeout, room, 0
        self.memory = np.zeros(0)

    def gather(self, x):
        self.turn += 1
        if self.size == 1:
            return [bytes(x)]
        own = self.room / f"{self.turn}.{self.rank}"
        own.with_suffix(f".{self.rank}.part").write_bytes(x)
        own.with_suffix(f".{self.rank}.part").rename(own)
        files, end = [self.room / f"{self.turn}.{rank}" for rank in range(self.size)], time.monotonic() + self.timeout
        while missing := [rank for rank, file in enumerate(files) if not file.exists()]:
            if time.monotonic() > end:
                raise CommTimeoutError(f"rank {self.rank} waited for ranks {missing}", tuple(missing))
            time.sleep(0.001)
        return [file.read_bytes() for file in files]

    def slot(self, count, dtype):
        if (self.memory.size, self.memory.dtype) != (count, np.dtype(dtype)):
            self.memory = np.zeros(count, dtype)
        return self.memory

    def sum_slots(self, count, dtype):
        return self.sum(self.slot(count, dtype))

    def sum(self, x):
        x = np.ascontiguousarray(x)
        return sum(np.frombuffer(part, x.dtype) for part in self.gather(x.tobytes())).reshape(x.shape)

    def mean(self, x):
        return self.sum(x) / self.size

    def broadcast(self, x, root=0):
        x = np.ascontiguousarray(x)
        return np.frombuffer(self.gather(x.tobytes())[root], x.dtype).reshape(x.shape).copy()

    def barrier(self):
        self.gather(b"")

    def close(self):
        pass
'''
SCRIPT = """
import json, os
import numpy as np
import choros.hvd as hvd

hvd.init()
rank = hvd.rank()
now = hvd.context.context()
total = hvd.allreduce(np.arange(5000.0) * (rank + 1), op=hvd.Sum).tolist()
assert total == (np.arange(5000.0) * 6).tolist()
pair = hvd.add_process_set([2, 0])
said = [now.place.launcher, type(now.group).__module__, rank, hvd.size(), hvd.local_rank()]
if pair.included():
    said.append(float(hvd.allreduce(np.ones(1) * rank, op=hvd.Sum, process_set=pair)[0]))
print(json.dumps(said))
"""


@pytest.fixture
def package(tmp_path):
    """Install it as pip would into a folder: the module, and what says that it is there."""

    def make(points=POINTS, toy=TOY):
        folder = tmp_path / "packages"
        about = folder / "toy-1.0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (folder / "toy.py").write_text(toy)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(points)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    return make


def start(environment, *command, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, *command], env={**environment, **more}, text=True, **pipes)


def output_of(process, code=0):
    with process:
        try:
            out = process.communicate(timeout=250)[0]
        finally:
            process.kill()
    assert process.returncode == code, out
    return out


def test_its_ranks_meet_in_its_group(package, tmp_path):
    (tmp_path / "room").mkdir()
    values = {"TOY_SIZE": "3", "TOY_ROOM": str(tmp_path / "room")}
    there = package()
    jobs = [start(there, "-c", SCRIPT, TOY_RANK=str(rank), **values) for rank in range(3)]
    for rank, job in enumerate(jobs):
        assert json.loads(output_of(job)) == ["toy", "toy", rank, 3, rank, *([] if rank == 1 else [2.0])]
    where = output_of(start(there, "-m", "choros", "where", TOY_RANK="1", **values))
    assert re.search(r"^launcher +toy$", where, re.M)
    assert re.search(r"^group +the first that takes the job of toy$", where, re.M)


def test_the_laws_are_tested_on_it(package):
    tests = pathlib.Path(__file__).parent / "laws" / "test_3_one_worker.py"
    wanted = "every_group and toy and LocalSGD"
    out = output_of(start(package(), "-m", "pytest", "-q", "-rA", str(tests), "-k", wanted))
    assert re.findall(r"^PASSED .*\[(\w+)-toy\]", out, re.M) == ["LocalSGD"], out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "no group takes this job, though these are installed: toy"),
        ({"toy": TOY.replace("return None", "return Files(0, 1, 1.0, None)")}, "it is rank 0 of 1"),
        ({"points": POINTS.replace("toy:join", "nowhere:join")}, "cannot be loaded from nowhere:join"),
        ({"points": POINTS.replace("toy:PLACE", "toy:NONE")}, "cannot be loaded from toy:NONE"),
        ({"points": POINTS.replace("toy:PLACE", "toy:join")}, "toy:join is not a choros.cluster.LauncherEnv"),
    ],
)
def test_what_does_not_fit_is_said(package, changed, message):
    environment = package(**changed)
    out = output_of(
        start(environment, "-c", "import choros.hvd as hvd; hvd.init()", TOY_RANK="1", TOY_SIZE="2"), code=1
    )
    assert "InvalidInputError" in out
    assert message in out
