"""Fixtures of all tests: one worker pool for each size, and checks that nothing is left behind."""

import collections
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import pathlib
import pickle
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import zlib

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.pop("PYTHONUNBUFFERED", None)  # with it each word of a print is a write of its own, and ranks' words mingle

import numpy as np
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup leaves it: jobs would ignore what a test sends them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


STARTED = time.time()


FOLDERS = {"privileged": "privileged", "real": "slurm", "ray_cluster": "ray", "spark": "spark"}  # their tests' marker
QUICK = {"algorithms", "cluster", "collectives", "data", "demo", "exchange", "machine", "submit"}  # not ``slow``
HERE = pathlib.Path(__file__).parent

# This process, what it starts, and the workers, which get ``sys.path``: Keras is imported without unneeded packages.
STARTUP = str(HERE / "startup")
collect_ignore = [STARTUP]
runpy.run_path(f"{STARTUP}/sitecustomize.py")
sys.path.append(STARTUP)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what its option -m does not name
def pytest_collection_modifyitems(items):
    """Mark the tests by the folder that they are in, by the programs that they need, and cases that are long."""
    cases = collections.Counter()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if marker := item.get_closest_marker("every"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % marker.args[0]:
                item.add_marker("long")
            cases[test] += 1
        folder = item.path.relative_to(HERE).parts[0]
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])
        if "mpiexec" in getattr(item, "fixturenames", ()):
            item.add_marker("mpi")
        marked = {marker.name for marker in item.iter_markers()}
        if (folder not in QUICK and "quick" not in marked) or marked & {"long", "mpi", *FOLDERS.values()}:
            item.add_marker("slow")


def pytest_addoption(parser):
    parser.addoption(
        "--within",
        type=float,
        metavar="SECONDS",
        help="leave out slow tests, of all files alike, where this machine takes longer for them all",
    )


def pytest_configure(config):
    config.schedule = None
    config.generators = []  # of the modules of tests, each with its state after the import


def relative_path(item):
    """Return the path of a test's file from the root of the repository."""
    return item.path.relative_to(HERE.parent).as_posix()


class Schedule:
    """The share of the work before each test, and the share of the time that has passed.

    The cost of a test is that of its file in ``seconds.json``, divided by its number of tests: processor seconds of all
    processes, from an earlier run on the same backend. Only ratios matter.
    """

    def __init__(self, items, limit):
        paths = list(map(relative_path, items))
        seconds = json.loads((HERE / "seconds.json").read_text())[os.environ["KERAS_BACKEND"]]
        counts = collections.Counter(paths)
        costs = [seconds.get(path, 0.0) / counts[path] + 0.02 for path in paths]
        done, total = itertools.accumulate(costs[:-1], initial=0.0), sum(costs)
        self.cost = dict(zip(items, costs, strict=True))
        self._due = {item: limit * cost / total for item, cost in zip(items, done, strict=True)}
        self._begin, self.left_out = time.monotonic(), collections.Counter()

    def is_late(self, item):
        """Return whether more time has passed than the tests before this one should take."""
        return time.monotonic() - self._begin > self._due[item]


def pytest_collection_finish(session):
    """Note the generators of all modules; begin to measure the time for ``--within``, when all tests are known."""
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(f"{HERE}{os.sep}"):
            generators = [each for each in vars(module).values() if isinstance(each, np.random.Generator)]
            session.config.generators += [(each, each.bit_generator.state) for each in generators]
    if limit := session.config.getoption("--within"):
        session.config.schedule = Schedule(session.items, limit)


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item):
    """Leave out a slow test if the run is late, and set all seeds. A test that takes little is run in any case.

    Data and weights of a test must not depend on the tests that ran before it. Keras draws seeds by ``random``.
    """
    random.seed(item.nodeid)
    np.random.seed(zlib.crc32(item.nodeid.encode()))
    for generator, state in item.config.generators:
        generator.bit_generator.state = state
    schedule = item.config.schedule
    if schedule and schedule.cost[item] > 0.2 and item.get_closest_marker("slow") and schedule.is_late(item):
        schedule.left_out[relative_path(item)] += 1
        pytest.skip("left out: this machine is too slow for all tests in the time of --within")


def pytest_terminal_summary(terminalreporter, config):
    """Name the files of tests that were left out because of ``--within``."""
    left_out = config.schedule.left_out if config.schedule else {}
    if left_out:
        terminalreporter.section(f"{left_out.total()} tests left out, as this machine is slow")
        terminalreporter.write_line(", ".join(f"{path} ({count})" for path, count in left_out.items()))


def pytest_sessionfinish():
    """Remove what MPI leaves of ranks that tests kill: memory that no process maps, and its notes on the machine."""
    memory = pathlib.Path("/dev/shm")
    remaining = [*memory.glob("mpich_shm_*"), *memory.glob("sm_segment.*")]
    if remaining := unmapped_of_this_run(remaining):
        time.sleep(1)  # ranks of another run of tests map theirs right after they have made them
        for path in unmapped_of_this_run(remaining):
            path.unlink(missing_ok=True)
    for path in pathlib.Path("/tmp").glob("hydra_hwloc_xmlfile_*"):
        with contextlib.suppress(OSError):
            if STARTED < path.stat().st_mtime < time.time() - 60:  # a job reads it when it starts
                path.unlink()


def unmapped_of_this_run(paths):
    """Return the files that were made since this run began, and that no process maps."""
    maps = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            maps.append((process / "maps").read_text())
    results = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > STARTED and not any(str(path) in each for each in maps):
                results.append(path)
    return results


OLD_COMMANDS = HERE.parent / "docs" / "from-keras-experiments.md"


def pytest_generate_tests(metafunc):
    """Give a test with ``old_command`` each command line of the table in docs/from-keras-experiments.md that runs."""
    if "old_command" in metafunc.fixturenames:
        lines = re.findall(r"^\| `([^`|]+\.py[^`|]*)` \| runs", OLD_COMMANDS.read_text(), re.MULTILINE)
        if metafunc.module.__name__.endswith("real.test_old_commands"):  # .ci/run has time for those of srun alone
            lines = [
                pytest.param(line, marks=() if line.startswith("srun") else pytest.mark.long, id=line) for line in lines
            ]
        metafunc.parametrize("old_command", lines)


@pytest.fixture
def old_scripts(tmp_path):
    """Return a folder with the examples, and a KERAS_HOME in it with 60 pictures of CIFAR-10's form to train on."""
    for path in (HERE.parent / "examples").glob("*.py"):
        (tmp_path / path.name).symlink_to(path)
    write_cifar10(tmp_path / "home" / "datasets" / "cifar-10-batches-py-target" / "cifar-10-batches-py")
    return tmp_path


def write_cifar10(folder, rows=12):
    """Write the files that keras.datasets.cifar10 unpacks, with a few rows of noise in each."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        part = {b"data": rng.integers(0, 256, (rows, 3072), "uint8"), b"labels": rng.integers(0, 10, rows).tolist()}
        (folder / name).write_bytes(pickle.dumps(part))


def launched(line, launcher):
    """Return an old command line with another launcher in the place of ``mpirun``, ``srun`` and ``python``."""
    changed, count = re.subn(r"^((?:\w+=\S+ )*)(?:srun |mpirun OPTIONS )?python ", rf"\1{launcher} ", line)
    assert count == 1, f"{line}: no python in it"
    return changed


@pytest.fixture
def old_launched():
    """The function ``launched``."""
    return launched


@pytest.fixture(scope="session")
def backend():
    """The backend that this process tests."""
    return os.environ["KERAS_BACKEND"]


@pytest.fixture(scope="session")
def pools():
    """Worker pools by size, started when first asked for and kept for the whole session."""
    import choros

    by_size = {}

    def pool(size):
        if size not in by_size:
            by_size[size] = choros.WorkerPool(size)
        return by_size[size]

    yield pool
    for result in by_size.values():
        result.close()


@pytest.fixture
def children():
    """Return a function that ends idle workers, and returns the process ids of all other children of this process."""

    def look():
        if idle_workers := sys.modules.get("choros.training.executors.idle_workers"):
            idle_workers.close()
        results = set()
        for task in pathlib.Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                results |= set((task / "children").read_text().split())
        return results

    return look


@pytest.fixture
def nothing_left(children):
    """Check that the test leaves no process, no thread and no open file behind."""

    def open_resources():
        processes = children()  # first: it ends idle workers, whose descriptors do not count
        gc.collect()
        fds = {fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}  # not the list's own
        return fds, processes, {thread.name for thread in threading.enumerate()}

    before = open_resources()
    yield
    limit = time.monotonic() + 2  # a pool that other tests keep opens a file for a moment, to look at its workers
    while (
        any(remaining := [now - then for now, then in zip(open_resources(), before, strict=True)])
        and time.monotonic() < limit
    ):
        time.sleep(0.02)
    assert not any(remaining), remaining


HIDING = """
import importlib.machinery
hidden = {hidden}
find_spec = importlib.machinery.PathFinder.find_spec
def find_some(cls, name, *more):
    return None if name.partition(".")[0] in hidden else find_spec(name, *more)
importlib.machinery.PathFinder.find_spec = classmethod(find_some)
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Run Python as a user with an empty home, for whom some of the three backends are not installed."""
    for backend in ("jax", "torch", "tensorflow"):
        if importlib.util.find_spec(backend) is None:
            pytest.skip(
                f"the choice is among three backends, and {backend} is not installed: pip install 'choros[test]'"
            )
    import choros

    home, site = tmp_path / "home", tmp_path / "site"
    home.mkdir()
    site.mkdir()

    def run(*command, without=("torch", "tensorflow"), code=0, **environment):
        (site / "sitecustomize.py").write_text(HIDING.format(hidden=set(without)))
        saved_environment = {
            name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "KERAS_HOME")
        }
        path = os.pathsep.join([str(site), str(pathlib.Path(choros.__file__).parents[1])])
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env={**saved_environment, "HOME": str(home), "PYTHONPATH": path, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.home = home
    return run


PRELUDE = """
import json, os, signal, sys, time
import numpy as np
from choros.errors import ChorosError
from choros.comm.shm.segment import Segment
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.comm.shm.group import SharedGroup, share
from choros.comm.shm import group_header as board
fd, rank, size = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def say(**facts):
    print(json.dumps(facts), flush=True)

def trying(call):
    begin = time.perf_counter()
    try:
        call()
    except ChorosError as error:
        say(error=type(error).__name__, text=str(error), seconds=time.perf_counter() - begin,
            missing=list(getattr(error, "missing", ())))
    else:
        say(error=None, seconds=time.perf_counter() - begin)
"""


class Ranks:
    """Ranks as real processes: each runs a script with a segment's descriptor, and is gone when the test ends."""

    def __init__(self):
        self.processes = []

    def start(self, script, segment, size, ranks=None, prelude=PRELUDE):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for rank in range(size) if ranks is None else ranks:
            fds = [segment.fd] if segment is not None else []
            process = subprocess.Popen(
                [sys.executable, "-c", prelude + script, str(fds[0] if fds else -1), str(rank), str(size)],
                pass_fds=fds,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            self.processes.append(process)
        return self

    def next_line(self, rank):
        """Return the next line of a rank, parsed as JSON."""
        line = self.processes[rank].stdout.readline()
        assert line, f"rank {rank} said nothing: {self.processes[rank].stderr.read()}"
        return json.loads(line)

    def kill(self, rank, number=signal.SIGKILL):
        self.processes[rank].send_signal(number)

    def finish(self, within=60.0, codes=None):
        """Each rank's remaining lines, once all have ended with the expected codes."""
        end = time.monotonic() + within
        output = []
        for rank, process in enumerate(self.processes):
            process.wait(timeout=max(end - time.monotonic(), 0.1))
            out, errors = process.stdout.read(), process.stderr.read()
            expected = (codes or {}).get(rank, 0)
            assert process.returncode == expected, f"rank {rank} ended with {process.returncode}:\n{errors}"
            output.append([json.loads(line) for line in out.splitlines()])
        return output

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


@pytest.fixture
def ranks():
    running = Ranks()
    yield running
    running.close()


class Mpi:
    """The ``mpiexec`` beside this Python, and what it needs to start ranks here."""

    def __init__(self, path):
        self.path = path
        self.name = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
        self.open = "Open MPI" in self.name or "prte" in self.name.lower()

    def starting(self, size, *command, more=()):
        """The command that starts a program on so many ranks, and the variables that it needs."""
        needed = {f"OMPI_ALLOW_RUN_AS_ROOT{suffix}": "1" for suffix in ("", "_CONFIRM")}
        # A rank on a simulated host has crashed in MPI_Init while it took the machine's topology from shared memory,
        # which the daemons of these hosts publish on one file system. With this each rank reads the topology itself.
        apart = ["--pmixmca", "pmix_hwloc_hole_kind", "none"]
        options_ = ["--oversubscribe", "--bind-to", "none", *apart] if self.open else []
        arguments = [self.path, *options_, *map(str, more), "-n", str(size), *map(str, command)]
        return arguments, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **needed}

    def __call__(self, size, *command, timeout=240, code=0, cwd=None, more=(), **environment):
        """Run a program on so many ranks; return what they printed once it has ended with the expected code."""
        arguments, needed = self.starting(size, *command, more=more)
        with subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, **needed, **environment},
        ) as job:
            try:
                output = job.communicate(timeout=timeout)[0]
            except BaseException:
                job.terminate()  # which ends its ranks too
                try:
                    job.wait(10)
                finally:
                    job.kill()
                raise
        assert code is None or job.returncode == code, f"{command} ended with {job.returncode}:\n{output}"
        return output


@pytest.fixture(scope="session")
def mpiexec():
    """Start ranks by MPI: ``mpiexec(size, program, argument ...)``."""
    path = pathlib.Path(sys.executable).parent / "mpiexec"
    if not path.exists() or importlib.util.find_spec("mpi4py") is None:
        pytest.skip(f"no mpiexec beside {sys.executable}, or no mpi4py: pip install 'choros[mpi-wheel]'")
    return Mpi(str(path))


FAILING = """
import os, sys, time
import keras
import numpy as np
import choros
import choros.hvd as hvd

def fail():
    if hvd.rank() == 1:
        print(f"raised at {time.time()}", flush=True)
        if sys.argv[1] == "exit":
            sys.exit(3)
        raise ValueError("the cause")

class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            fail()

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        if i > 7:
            fail()
            time.sleep(0.2)  # rank 0 would go on for minutes, and waits for nobody
        return x[:8], x[:8, 0]

hvd.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).standard_normal((640, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
if sys.argv[1] == "callback":
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(hvd.shard(x, x[:, 0], per_rank_batch_size=16), verbose=0, callbacks=[Callback()])
elif sys.argv[1] in ("trainer", "exit"):
    model.compile("sgd", "mse")
    choros.Trainer(model, choros.AEASGD(window=2)).fit(Data(), verbose=0)
else:
    fail()
    time.sleep(120)
"""


@pytest.fixture
def failing(tmp_path):
    """Run a script of which rank 1 of 2 raises under a launcher; return the last lines of the whole job."""
    (tmp_path / "failing.py").write_text(FAILING)

    def run(launcher, how, lines=60, says=True, code=None, **environment):
        job = subprocess.run(
            [*map(str, launcher), str(tmp_path / "failing.py"), how],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        assert job.returncode == code if code else job.returncode, job.stdout
        took = time.time() - float(re.search(r"raised at (\d+\.\d+)", job.stdout)[1])
        # About 5 s on a quiet machine. Far below the 120 s that the other rank of "script" would sleep.
        assert took < 30, f"{took} s after rank 1 raised:\n{job.stdout}"
        end = "\n".join(job.stdout.rstrip("\0 \n").splitlines()[-lines:])  # Open MPI may end with a NUL
        cause = "SystemExit: 3" if how == "exit" else "ValueError: the cause"
        for message in ("Traceback (most recent call last):", "in fail", cause):
            assert message in end, job.stdout
        if says:
            word = r"failed \(ValueError\), which ends the job"
            word = r"ended in the middle of training, by sys.exit\(3\)" if how == "exit" else word
            assert re.search(rf"choros: rank 1 of 2 on \S+ {word}", end), end
        return end

    return run


@pytest.fixture(autouse=True)
def _nothing_in_shared_memory():
    """Law 6: /dev/shm is after a test what it was before."""
    room = pathlib.Path("/dev/shm")
    before = sorted(room.iterdir()) if room.is_dir() else []
    yield
    after = sorted(room.iterdir()) if room.is_dir() else []
    remaining = [path for path in after if path not in before and "choros" in path.name]
    assert not remaining, f"left in shared memory: {remaining}"
