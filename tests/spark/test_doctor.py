"""The doctor asks every executor, also one that has no choros, and says which lacks what."""

from choros.cli import main
from choros.errors import MissingPackageError
from choros.spark import doctor


def test_each_task_slot_answers(spark):
    facts = doctor.examine(spark)
    assert [one["executor"] == "driver" for one in facts] == [True, False, False]
    assert facts[0]["slots"] == 2
    assert facts[1]["executor"] != facts[2]["executor"]  # two executors
    for one in facts[1:]:
        assert one["packages"]["keras"] == facts[0]["packages"]["keras"]
        assert one["task_cores"] == 1
        assert one["shm"] > 0
    text = doctor.report(facts)
    assert text.count("Python 3.") == 3
    assert "task 1" in text


def test_what_differs_is_told():
    mine = {"host": "driver", "python": "3.11.7", "shm": 1 << 30, "backend": "jax", "cores": 4}
    mine["packages"] = {"choros": "0.1.0", "keras": "3.15.1", "jax": "0.10.2", "torch": "2.0", "pandas": None}
    ill = {**mine, "host": "a", "python": "3.12.1", "shm": 1 << 20, "backend": "torch"}
    ill["packages"] = {"choros": None, "keras": "3.14.0", "jax": "0.10.2", "torch": None, "pandas": None}
    assert doctor.findings([mine, mine]) == []
    found = doctor.findings([mine, {**mine, "host": "b"}, ill])
    assert len(found) == 5
    for words in (
        "another Python",
        "no choros (the driver has 0.1.0)",
        "keras 3.14.0",
        "/dev/shm",
        "KERAS_BACKEND=jax",
    ):
        assert sum(words in one and " on a " in one for one in found) == 1, words


def test_it_finds_a_java_and_starts_no_cluster_for_its_help(monkeypatch, capsys):
    asked = []

    def started(master, name):
        asked.append(master)
        raise MissingPackageError("Spark needs Java 17 or later: install one.")

    monkeypatch.setattr(doctor, "session", started)
    assert main(["spark", "doctor", "--help"]) == 0
    assert asked == []
    capsys.readouterr()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # also without pyspark
    assert main(["spark", "doctor", "spark://head:7077"]) == 1
    assert asked == ["spark://head:7077"]
    assert capsys.readouterr().err == "choros spark doctor: error: Spark needs Java 17 or later: install one\n"
