"""A real standalone cluster from the pip package: a master and two workers of one core each, for the whole session."""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from choros.errors import InvalidInputError
from choros.spark.java import ensure_java

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = f"{ROOT}/src:{ROOT}"  # functions of these tests travel by their name

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # JVMs that live for minutes: little is worth compiling


def pytest_collection_modifyitems(items):
    """pyspark warns of much that is its own business."""
    here = str(pathlib.Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("default"))


def _missing():
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'choros[spark]'"
    try:
        ensure_java()
    except InvalidInputError as error:
        return str(error)
    return ""


def pytest_ignore_collect(collection_path, config):
    """Files that cannot be imported without pyspark are one skip, made below."""
    tests = collection_path.name.startswith("test_") and collection_path.name != "test_there.py"
    return True if tests and _missing() else None


@pytest.fixture(scope="session")
def spark_is_there():
    if why := _missing():
        pytest.fail(why)


def _end_with_this_process():
    """Have the kernel end the daemon when pytest is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Cluster:
    """Master and workers as processes of their own, and what they are told."""

    def __init__(self, room, workers=2):
        import pyspark

        self.room, self.processes = room, []
        self.home = pathlib.Path(pyspark.__file__).parent
        self.environment = {
            **os.environ,
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(room),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK,
            "SPARK_LOG_DIR": str(room),
            "PYTHONPATH": SOURCES,
            "PYSPARK_PYTHON": sys.executable,
            "JAX_PLATFORMS": "cpu",
        }
        self.url = self.start("master", "Master", "--port", "0", says=r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            cores = ("--cores", "1", "--memory", "2g", "--work-dir", str(room / f"worker{number}"))
            self.start(f"worker{number}", "Worker", *cores, self.url, says="Successfully registered with master")

    def start(self, name, kind, *arguments, says):
        log = self.room / f"{name}.log"
        command = [self.home / "bin/spark-class", f"org.apache.spark.deploy.{kind.lower()}.{kind}"]
        command += ["--host", "127.0.0.1", "--webui-port", "0", *arguments]
        with log.open("w") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                preexec_fn=_end_with_this_process if sys.platform == "linux" else None,
            )
        self.processes.append(process)
        end = time.monotonic() + 60
        while not (match := re.search(says, log.read_text())):
            assert time.monotonic() < end, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        return match[match.lastindex or 0]

    @contextlib.contextmanager
    def another_worker(self, room):
        """One more of one core, for a job beside the session of these tests, which has the others."""
        cores = ("--cores", "1", "--memory", "1g", "--work-dir", str(room / "work"))
        self.start("another", "Worker", *cores, self.url, says="Successfully registered with master")
        process = self.processes.pop()
        yield
        process.terminate()
        process.wait(20)

    def close(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def cluster(spark_is_there, tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("spark"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def spark(cluster):
    """A session on the cluster, classic."""
    from pyspark.sql import SparkSession

    for name in ("SPARK_HOME", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "SPARK_LOCAL_DIRS"):
        os.environ[name] = cluster.environment[name]
    session = (
        SparkSession.builder.master(cluster.url)
        .appName("choros")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.executor.memory", "1g")
        .config("spark.cores.max", "2")
        .config("spark.executorEnv.PYTHONPATH", SOURCES)
        .config("spark.executorEnv.KERAS_BACKEND", os.environ["KERAS_BACKEND"])
        .config("spark.executorEnv.JAX_PLATFORMS", "cpu")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(cluster.room / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", QUICK)
        .config("spark.executor.extraJavaOptions", QUICK)
        .config("spark.python.worker.faulthandler.enabled", "true")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def free_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as end:
        return end.getsockname()[1]
