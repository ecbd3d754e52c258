"""A real Ray cluster of two nodes, both on this machine, for the whole session."""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import tempfile
import time
import uuid

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOKEN = "TOKEN_OF_RAY_TESTS"  # an environment variable of the cluster and of all that it starts

PROGRAMS = ("choros run", "choros.launch.ssh.agent", "choros.launch.ray_cluster", "choros.training.worker.remote_main")


# Ray forks when it starts a node, and does not close the files of its logs.
OF_RAY = ("ignore:os.fork:RuntimeWarning", "ignore:Exception ignored in. <_io.FileIO name='/tmp/ray-")


def pytest_collection_modifyitems(items):
    """Ignore the warnings that the code of Ray causes in this process."""
    here = str(pathlib.Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            for warning in OF_RAY:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def cluster():
    """The head with two CPUs, and a node with two CPUs and, by what it is told, two GPUs."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'choros[ray]'")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", **{TOKEN: uuid.uuid4().hex})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ["PYTHONPATH"]])
    import ray
    from ray.cluster_utils import Cluster

    # Ray writes the address of a new cluster into this folder, whatever ``temp_dir`` is, and expects it to exist.
    shared = pathlib.Path("/tmp/ray")
    shared.mkdir(exist_ok=True)
    room = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of Ray's sockets have to be
    nodes = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False, "temp_dir": room})
    try:
        nodes.add_node(num_cpus=2, num_gpus=2)
        os.environ["RAY_ADDRESS"] = nodes.address
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(room, ignore_errors=True)
        (shared / "ray_current_cluster").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another cluster uses it
            shared.rmdir()
        for name in ("RAY_ADDRESS", TOKEN):
            os.environ.pop(name, None)


@pytest.fixture(name="running_processes")
def _running_processes():
    return running_processes


def running_processes():
    """Return the command lines of all processes of jobs of Choros on this cluster."""
    token, lines = f"{TOKEN}={os.environ[TOKEN]}".encode(), []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if any(f" -m {name}" in line for name in PROGRAMS) and token in (process / "environ").read_bytes():
                lines.append(line)
        except OSError:  # it has ended
            continue
    return lines


@pytest.fixture(autouse=True)
def all_is_free(cluster, tmp_path, monkeypatch):
    """Check that a test leaves no file, no process and no resource of the cluster in use."""
    import ray

    monkeypatch.chdir(tmp_path)
    yield
    assert not [name for name in os.listdir() if name.startswith(".choros-")]
    limit = time.monotonic() + 30
    while True:
        free = ray.available_resources() if ray.is_initialized() else {"CPU": 4, "GPU": 2}
        processes = running_processes()
        if (free.get("CPU"), free.get("GPU"), processes) == (4, 2, []):
            break
        assert time.monotonic() < limit, (free, processes)
        time.sleep(0.2)
    assert not list(pathlib.Path(tempfile.gettempdir()).glob("choros-ray-*"))
