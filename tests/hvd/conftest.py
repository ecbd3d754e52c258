"""Scripts that run as ranks under ``choros run`` or ``mpiexec``, each leaving what it found."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

HEAD = """
    import json, os, sys
    import numpy as np
    import keras
    import choros.hvd as hvd
    from choros.errors import RankMismatchError

    hvd.init()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    said = {}

    def numbers(x):
        return np.asarray(keras.ops.convert_to_numpy(x)).astype(float).tolist()

    def end():
        path = os.path.join(os.environ["SAID"], f"{rank}.json")
        with open(path + "-", "w") as file:
            json.dump(said, file)
        os.rename(path + "-", path)
"""
TAIL = """
    end()
    hvd.shutdown()
    keras.utils.clear_session()
"""
# One rank: it takes up scripts until there is a file called "end". What is slow, the imports, is done once.
RANK = """
    import json, os, sys, time
    room, number = sys.argv[1], 0
    while not os.path.exists(f"{room}/end"):
        try:
            with open(f"{room}/{number}") as file:
                order = json.load(file)
        except FileNotFoundError:
            time.sleep(0.02)
            continue
        os.environ |= order["environment"]
        exec(compile(order["script"], "script.py", "exec"), {"__name__": "__main__"})
        for name in order["environment"]:
            del os.environ[name]
        number += 1
    import atexit
    atexit._run_exitfuncs()
    os._exit(0)  # taking a framework down takes a second of each rank
"""


class Job:
    """Ranks that run one script after the other."""

    def __init__(self, room, command, environment):
        self.room, self.number = room, 0
        self.output = room / "output"
        (room / "rank.py").write_text(textwrap.dedent(RANK))
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [*command, str(room / "rank.py"), str(room)],
                env={**os.environ, "HOROVOD_CYCLE_TIME": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, size, script, place, environment, within=200.0):
        """Run a script on each rank, and return the results that the ranks have written."""
        order = {"script": script, "environment": {"SAID": str(place), **environment}}
        (self.room / "order").write_text(json.dumps(order))
        (self.room / "order").rename(self.room / str(self.number))
        self.number += 1
        remaining = [place / f"{rank}.json" for rank in range(size)]
        end = time.monotonic() + within
        while not all(path.exists() for path in remaining):
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise AssertionError(self.output.read_text()[-20_000:])
            time.sleep(0.02)
        while "no meaning here: HOROVOD_CYCLE_TIME" not in self.output.read_text():  # the launcher passes it on
            assert time.monotonic() < end, self.output.read_text()[-20_000:]
            time.sleep(0.02)
        return [json.loads(path.read_text()) for path in remaining]

    def close(self):
        """End the ranks."""
        (self.room / "end").touch()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # which ends its ranks too
            try:
                self.process.wait(10)
            finally:
                self.process.kill()


@pytest.fixture(scope="package")
def jobs():
    """The last four jobs, by launcher and size."""
    saved = {}
    yield saved
    for job in saved.values():
        job.close()


@pytest.fixture
def launcher():
    """The launcher of tests that do not choose one; "any" is mpiexec if it is installed."""
    return "choros run"


@pytest.fixture
def run(tmp_path, tmp_path_factory, backend, launcher, request, jobs):
    """Run a script on ``size`` ranks, with this test's ``HOROVOD_*`` variables; return what each left."""
    if launcher == "any":
        launcher = "mpiexec" if importlib.util.find_spec("mpi4py") else "choros run"
    elif launcher == "mpiexec" and backend != "jax":
        pytest.skip("what moves the bytes is the same on every backend: once is enough")

    def start(size, script):
        key = launcher, size
        if key not in jobs or jobs[key].process.poll() is not None:
            while len(jobs) > 3:
                jobs.pop(next(iter(jobs))).close()
            jobs[key] = Job(tmp_path_factory.mktemp("job"), *_start(size))
        jobs[key] = jobs.pop(key)
        user_environment = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
        full_script = textwrap.dedent(HEAD) + textwrap.dedent(script) + textwrap.dedent(TAIL)
        return jobs[key].run(size, full_script, tmp_path, user_environment)

    def _start(size):
        if launcher == "mpiexec":
            return request.getfixturevalue("mpiexec").starting(size, sys.executable)
        return [sys.executable, "-m", "choros", "run", "-n", str(size), "--threads", "1"], {}

    return start
