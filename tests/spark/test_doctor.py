"""The doctor asks every executor, also one that has no choros, and says which lacks what."""

import os
import subprocess
import sys

import pytest

from choros.cli import main
from choros.errors import MissingPackageError
from choros.spark import doctor


def test_each_task_slot_answers(spark):
    facts = doctor.examine(spark)
    assert [fact["executor"] == "driver" for fact in facts] == [True, False, False]
    assert facts[0]["slots"] == 2
    assert facts[1]["executor"] != facts[2]["executor"]  # two executors
    for fact in facts[1:]:
        assert fact["packages"]["keras"] == facts[0]["packages"]["keras"]
        assert fact["task_cores"] == 1
        assert fact["shm"] > 0
    text = doctor.report(facts)
    assert text.count("Python 3.") == 3
    assert "task 1" in text


def test_what_differs_is_told():
    actual = {"host": "driver", "python": "3.11.7", "shm": 1 << 30, "backend": "jax", "cores": 4}
    actual["packages"] = {"choros": "0.1.0", "keras": "3.15.1", "jax": "0.10.2", "torch": "2.0", "pandas": None}
    ill = {**actual, "host": "a", "python": "3.12.1", "shm": 1 << 20, "backend": "torch"}
    ill["packages"] = {"choros": None, "keras": "3.14.0", "jax": "0.10.2", "torch": None, "pandas": None}
    assert doctor.findings([actual, actual]) == []
    finding = doctor.findings([actual, {**actual, "host": "b"}, ill])
    assert len(finding) == 5
    for message in (
        "another Python",
        "no choros (the driver has 0.1.0)",
        "keras 3.14.0",
        "/dev/shm",
        "KERAS_BACKEND=jax",
    ):
        assert sum(message in result and " on a " in result for result in finding) == 1, message


def test_it_finds_a_java_and_starts_no_cluster_for_its_help(monkeypatch, capsys):
    requested = []

    def started(master, name):
        requested.append(master)
        raise MissingPackageError("Spark needs Java 17 or later: install one.")

    monkeypatch.setattr(doctor, "session", started)
    monkeypatch.setattr(doctor, "unreachable", lambda url: "")
    assert main(["spark", "doctor", "--help"]) == 0
    assert requested == []
    capsys.readouterr()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # also without pyspark
    assert main(["spark", "doctor", "spark://head:7077"]) == 1
    assert requested == ["spark://head:7077"]
    assert capsys.readouterr().err == "choros spark doctor: error: Spark needs Java 17 or later: install one\n"


@pytest.mark.parametrize(
    ("master", "code", "reason"),
    [
        ("spark://127.0.0.1:1", 1, "no Spark master answers at spark://127.0.0.1:1 (Connection refused): correct the"),
        ("spark://127.0.0.1:1,127.0.0.1:2", 1, "no Spark master answers at spark://127.0.0.1:1,127.0.0.1:2 (Conn"),
        ("sc://127.0.0.1:1", 1, "no Spark Connect server answers at sc://127.0.0.1:1 (Connection refused): correct"),
        ("yarn", 1, "yarn needs the cluster's settings: set HADOOP_CONF_DIR to the directory that has its yarn-site"),
        ("lokal-cluster[2,1,512]", 2, "'lokal-cluster[2,1,512]' is not the URL of a Spark cluster: give one such as s"),
        ("spark://head", 2, "'spark://head' is not the URL of a Spark cluster"),
        ("spark://head:99999", 2, "'spark://head:99999' is not the URL of a Spark cluster"),
        ("sc://head:abc", 2, "'sc://head:abc' is not the URL of a Spark cluster"),
        ("sc://[::1", 2, "'sc://[::1' is not the URL of a Spark cluster"),
    ],
)
def test_a_master_that_cannot_be_used_is_an_error_of_its_own(tmp_path, master, code, reason):
    places = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_HOME", "SPARK_CONF_DIR")
    names = [name for name in os.environ if name in places or name.lower().endswith("_proxy")]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "choros", "spark", "doctor", master]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    error, *see = done.stderr.splitlines()  # nothing of Spark, which was not started
    assert error.startswith("choros spark doctor: error: ")
    assert reason in error
    assert see == ["See 'choros spark doctor --help'"] * (code == 2)


def test_a_cluster_at_which_spark_cannot_start_is_an_error_with_its_cause(monkeypatch, capsys):
    text = "An error\n: org.apache.spark.SparkException: no\n\tat a.b\nCaused by: java.net.ConnectException: refused\n"

    def started(master, name):
        raise RuntimeError(text)

    monkeypatch.setattr(doctor, "session", started)
    assert main(["spark", "doctor", "k8s://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "choros spark doctor: error: Spark could not start at k8s://127.0.0.1:1 (refused): correct the URL, or see "
        "whether the cluster runs and can be reached from here\n"
    )
