"""The timeline's file under ``choros run``: lanes, names, times, bytes; what is left when ranks fail; the profilers."""

import collections
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

import choros.hvd as hvd
from choros.comm import trace_format
from choros.errors import InvalidInputError


def lanes(path):
    """Each lane's name, spans and marks, after a look at what must hold for any file."""
    events = json.loads(path.read_text())["traceEvents"]
    results = {}
    for pid in sorted({event["pid"] for event in events}):
        values = [event for event in events if event["pid"] == pid]
        names = {event["name"]: event["args"] for event in values if event["ph"] == "M"}
        assert names["process_sort_index"]["sort_index"] == pid - 1
        assert names["thread_name"]["name"]
        spans = [event for event in values if event["ph"] == "X"]
        for span in spans:
            assert span["ts"] >= 0
            assert span["dur"] >= 0
            assert span["tid"] == 1
        for outer in spans:  # two spans of a lane lie apart, or one in the other
            for inner in spans:
                apart = (
                    inner["ts"] >= outer["ts"] + outer["dur"] - 1e-3 or outer["ts"] >= inner["ts"] + inner["dur"] - 1e-3
                )
                a, b = ((result["ts"], result["ts"] + result["dur"]) for result in (outer, inner))
                assert apart or (a[0] <= b[0] and b[1] <= a[1] + 1e-3) or (b[0] <= a[0] and a[1] <= b[1] + 1e-3)
        calls = [span for span in spans if span["cat"] in ("call", "step")]
        for call in calls:
            assert call["args"]["wait_us"] + call["args"]["reduce_us"] <= call["dur"] + 1e-3
        marks = [event for event in values if event["ph"] == "i"]
        assert len(values) == len(spans) + len(marks) + 3
        results[names["process_name"]["name"]] = (spans, calls, marks)
    return results


def test_lanes_of_two_ranks(run, tmp_path, monkeypatch):
    """Collectives and a whole ``fit``, whose stall is told too; restarts, errors on all ranks; the profiler beside."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.5")
    script = """
    import io, sys, time
    place = os.environ["SAID"]

    def wrong(call):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    said["stop first"] = wrong(hvd.stop_timeline)
    said["no room"] = wrong(lambda: hvd.start_timeline(place + "/nowhere/t.json"))
    said["no path"] = wrong(lambda: hvd.start_timeline(place + "/t.json" if rank == 0 else None))
    said["alone"] = wrong(lambda: hvd.start_timeline(place + "/t.json") if rank else hvd.allreduce(1.0, name="other"))
    said["left"] = sorted(f for f in os.listdir(place) if f.startswith("t."))
    hvd.start_timeline(place + "/t.json", mark_cycles=True)
    said["twice"] = wrong(lambda: hvd.start_timeline(place + "/u.json"))
    said["stop alone"] = wrong(lambda: hvd.stop_timeline() if rank else hvd.allreduce(1.0, name="other"))
    hvd.barrier()
    time.sleep(rank)
    hvd.allreduce(np.ones(3, "float32"), name="loss")
    hvd.allgather_object({"rank": rank}, name="who")

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank and batch == 2:
                time.sleep(1.2)

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)], name="net")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    errors, sys.stderr = sys.stderr, io.StringIO()
    model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), Slow(),
        hvd.callbacks.ProfileCallback(place + "/profile", first_step=2, steps=2, ranks=[1]),
    ])
    said["heard"], sys.stderr = sys.stderr.getvalue(), errors
    hvd.stop_timeline()
    said["there"] = os.path.exists(place + "/t.json")
    said["stop again"] = wrong(hvd.stop_timeline)
    hvd.barrier()
    os.rename(place + "/t.json", place + "/first.json") if rank == 0 else None
    hvd.barrier()
    for name in ("one", "two"):  # the second into the file of the first
        hvd.start_timeline(place + "/t.json")
        hvd.allreduce(np.ones(2), name=name)
        hvd.stop_timeline()
    hvd.start_timeline(place + "/lost.json")
    os.mkdir(place + "/lost.json") if rank == 0 else None
    said["lost"] = wrong(hvd.stop_timeline)
    """
    both = run(2, script)
    for rank, result in enumerate(both):
        assert f"InvalidInputError: Rank {rank} records no timeline" in result["stop first"]
        assert "No timeline was started. rank 0: it cannot write " in result["no room"]
        assert "No such file or directory" in result["no room"]
        assert "No timeline was started. rank 1: it cannot write None" in result["no path"]
        for item in ("alone", "stop alone"):
            assert "RankMismatchError" in result[item]
            assert "allreduce 'other'" in result[item]
        assert "rank 0: it is recording one already, into " in result["twice"]
        assert "rank 1: it is recording one already, into " in result["twice"]
        assert result["there"] is True
        assert "records no timeline" in result["stop again"]
        assert "Rank 0 cannot write the timeline to " in result["lost"]
    assert both[0]["left"] == []
    stall = r"has waited \d\.\d s at gradients of net \(4 variables, 33 values, 0 local\) for rank 1"
    assert len(re.findall(stall, both[0]["heard"])) >= 2, both[0]["heard"]
    assert "profiler" not in both[1]["heard"]
    assert os.listdir(tmp_path / "profile") == ["rank-1"]
    assert [file for _, _, files in os.walk(tmp_path / "profile") for file in files]

    actual = lanes(tmp_path / "first.json")
    assert [name.partition(" (")[0] for name in actual] == [f"rank {r} on {os.uname().nodename}" for r in range(2)]
    (_, zero, _), (_, item, _) = actual.values()
    for spans, calls, marks in actual.values():
        kinds = collections.Counter(span["cat"] for span in spans)
        names = collections.Counter(call["name"] for call in calls)
        steps = [call for call in calls if call["cat"] == "step"]
        assert kinds["step"] == names["gradients of net (4 variables, 33 values, 0 local)"] == 8
        assert names["end of an epoch (gradients of net (4 variables, 33 values, 0 local))"] == 2
        assert {step["args"]["bytes"] for step in steps} == {4 * 34}
        data = [span for span in spans if span["cat"] == "data"]
        assert len(data) >= 8
        assert sum(step["args"]["data_us"] for step in steps) <= sum(span["dur"] for span in data) + 1e-3
        assert all(step["args"]["data_us"] > 0 for step in steps)
        assert all(0 < step["args"]["reduce_us"] < step["dur"] for step in steps)
        assert [mark["name"] for mark in marks] == [f"step {n}" for n in range(1, 9)]
        assert [mark["ts"] for mark in marks] == [step["ts"] for step in steps]
        assert kinds["wait"] > kinds["call"] + kinds["step"]
        assert names["allgather_object 'who'"] == 1
    first, second = (next(c for c in calls if "'loss'" in c["name"]) for calls in (zero, item))
    assert first["name"] == "allreduce 'loss' of float32 (3,) by Average"
    assert first["args"]["bytes"] == second["args"]["bytes"] == 12
    assert first["args"]["wait_us"] > 0.3e6 > second["args"]["wait_us"]  # of the second that rank 1 came later
    assert first["ts"] + 0.3e6 < second["ts"] < first["ts"] + first["dur"]  # one clock
    repeated = lanes(tmp_path / "t.json")
    assert all(len([c for c in calls if "'two'" in c["name"]]) == 1 for _, calls, _ in repeated.values())
    assert not [c for _, calls, _ in repeated.values() for c in calls if "'one'" in c["name"]]
    assert not [marks for *_, marks in repeated.values() if marks]


def start(tmp_path, size, script, **environment):
    """Run a script that needs no Keras on ``size`` ranks."""
    file = tmp_path / "script.py"
    head = "import os, signal, sys, time\nimport numpy as np\nimport choros.hvd as hvd\nhvd.init()\nrank = hvd.rank()\n"
    file.write_text(head + textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "choros", "run", "-n", str(size), "--threads", "1", str(file)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )


def test_the_environment_records_a_whole_script(tmp_path):
    """From ``init`` to the end of a script that says nothing of it; no part is left beside the file."""
    (tmp_path / "t.rank-1.json").write_text("an old one")
    script = """
    hvd.allreduce(np.ones(3), name="loss")
    child = os.fork()
    if child == 0:
        sys.exit()  # a child that ends writes nothing
    os.waitpid(child, 0)
    time.sleep(0.2 * rank)
    """
    done = start(tmp_path, 3, script, HOROVOD_TIMELINE="t.json")
    assert done.returncode == 0, done.stderr
    assert "HOROVOD_TIMELINE" not in done.stderr
    result = lanes(tmp_path / "t.json")
    assert len(result) == 3
    for _, calls, _ in result.values():
        assert [call["name"] for call in calls] == ["allreduce 'loss' of float64 (3,) by Average"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["script.py", "t.json"]


def test_parts_of_those_that_live(tmp_path):
    """Rank 1 is killed: one rank that computes, and one that waits for it, leave their parts."""
    script = """
    hvd.start_timeline("t.json")
    pair = hvd.add_process_set([0, 2])
    hvd.allreduce(np.ones(3), name="loss")
    if rank != 1:
        hvd.allreduce(np.ones(3), name="pair", process_set=pair)
    hvd.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        hvd.allreduce(np.ones(3), name="never")
    time.sleep(30)
    """
    done = start(tmp_path, 3, script)
    assert done.returncode == 128 + 9
    assert "rank 1 of 3" in done.stderr
    assert "was ended by SIGKILL" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["t.rank-0.json", "t.rank-2.json"]
    for rank in (0, 2):
        assert f"rank {rank} on {os.uname().nodename} left its part of the timeline in " in done.stderr
        ((name, (_, calls, _)),) = lanes(tmp_path / f"t.rank-{rank}.json").items()
        assert name.startswith(f"rank {rank} on")
        assert [c["name"].split()[1] for c in calls if c["name"].startswith("allreduce")][:2] == ["'loss'", "'pair'"]


def test_a_script_that_raises_leaves_its_part_and_its_error(tmp_path):
    script = """
    hvd.start_timeline("t.json")
    hvd.allreduce(np.ones(3), name="loss")
    if rank == 0:
        raise ValueError("no rows")
    hvd.allreduce(np.ones(3), name="never")
    """
    done = start(tmp_path, 2, script)
    assert done.returncode == 1
    assert "ValueError: no rows" in done.stderr
    assert "RankMismatchError" not in done.stderr  # the end of one rank's script is no call that the other is to make
    assert "rank 0 of 2" in done.stderr
    assert "[0] choros: rank 0 on" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["t.rank-0.json", "t.rank-1.json"]


def test_one_rank(tmp_path, capsys):
    """One rank without a launcher: errors, and a file that is replaced when the recording stops."""
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match="call hvd.init"):
        hvd.start_timeline(path)
    hvd.init()
    try:
        with pytest.raises(InvalidInputError, match="call hvd.start_timeline"):
            hvd.stop_timeline()
        with pytest.raises(InvalidInputError, match="Is a directory"):
            hvd.start_timeline(tmp_path)
        path.write_text("before")
        hvd.start_timeline(path)
        hvd.allreduce([1.0, 2.0], name="loss")
        assert path.read_text() == "before"
    finally:
        hvd.shutdown()
    ((_, calls, marks),) = lanes(path).values()
    assert [(call["name"], call["args"]["bytes"]) for call in calls] == [
        ("allreduce 'loss' of float64 (2,) by Average", 16)
    ]
    assert not marks
    assert capsys.readouterr().err == ""


def test_lanes_of_two_machines_are_set_by_their_wall_clocks(tmp_path):
    clocks = [("near", 10**18, 1_000_000), ("far", 10**18 - 50_000_000, 51_250_000)]
    texts = []
    for rank, (_, _, now) in enumerate(clocks):
        barrier = ("call", "barrier", now, now + 1_000_000, -1)
        texts.append(trace_format.lane(rank, [barrier], trace_format.zero_of(rank, clocks), cut=rank == 1))
    trace_format.write(str(tmp_path / "t.json"), texts)
    (zero, rank_1) = lanes(tmp_path / "t.json").values()
    assert zero[0][0]["ts"] == 0
    assert rank_1[0][0]["ts"] == 250
    assert [mark["name"] for mark in rank_1[2]] == ["older events were dropped"]
    assert "bytes" not in rank_1[0][0]["args"]
