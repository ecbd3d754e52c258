"""``choros.run``: what travels, what comes back, what is raised, and that nothing is left."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import choros
from choros.cluster.hardware import plan, usable_cores
from choros.errors import InvalidInputError, NotSerializableError, WorkerFailedError

pytestmark = pytest.mark.usefixtures("nothing_left")


class Box:
    def __init__(self, value):
        self.value = value


def test_ranks_are_as_those_of_the_command_and_return_in_order(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    scale = 10

    def look(first, *, second):
        import choros.hvd as hvd

        hvd.init()
        print("hello from", hvd.rank())
        print("a warning", file=sys.stderr)
        total = hvd.allreduce(np.array([scale + hvd.rank()]), op=hvd.Sum)
        names = ("CHOROS_LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "OMP_NUM_THREADS", "CHOROS_CALL")
        return {
            "rank": hvd.rank(),
            "sum": total,
            "cores": sorted(os.sched_getaffinity(0)),
            "told": [os.environ.get(name) for name in names],
            "given": (first, second.value),
            "box": Box,
            "stdin": sys.stdin.read(),
            "frameworks": [name for name in ("jax", "torch", "keras") if name in sys.modules],
        }

    Box.__module__ = "__main__"  # as in a script: travels by value, and comes back as the same class
    try:
        result = choros.run(
            look, (np.arange(3),), {"second": Box("x")}, 2, output_filename=str(tmp_path / "kept"), use_gloo=True
        )
    finally:
        Box.__module__ = __name__
    for rank, (seen, binding) in enumerate(zip(result, plan(2), strict=True)):
        assert seen["rank"] == rank
        assert seen["sum"].tolist() == [21]
        assert seen["cores"] == list(binding.cores or usable_cores())
        assert seen["told"] == [str(rank), str(rank), "2", "1", None]
        assert seen["given"][0].tolist() == [0, 1, 2]
        assert seen["given"][1] == "x"
        assert seen["box"] is Box
        assert seen["stdin"] == ""
        assert seen["frameworks"] == []
        assert (tmp_path / "kept" / f"rank.{rank}" / "stdout").read_text() == f"hello from {rank}\n"
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    assert sorted(captured.err.splitlines()) == [
        "[0] a warning",
        "[1] a warning",
        "choros run: use_gloo is ignored: the ranks of one machine communicate by shared memory",
    ]


def test_large_values_and_another_thread():
    results = []
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        large = np.ones(3_000_000)
        work = threading.Thread(
            target=lambda: results.extend(choros.run(lambda x: (print("in"), x + 1)[1], (large,), np=2))
        )
        work.start()
        work.join(60)
    assert [float(value.sum()) for value in results] == [6e6, 6e6]
    assert sorted(text.getvalue().splitlines()) == ["[0] in", "[1] in"]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_the_others(how, capfd):
    def fails():
        import choros.hvd as hvd

        hvd.init()
        hvd.allreduce(np.zeros(1))
        if hvd.rank() == 1:
            if how == "raise":
                raise ValueError("wrong 7")
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "kill":
            hvd.allreduce(np.zeros(1))  # fails too, for want of the other rank, which is not what is told
        time.sleep(100)

    began = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        choros.run(fails, num_proc=2)
    assert time.monotonic() - began < 20
    error = caught.value
    assert (error.rank, error.host) == (1, os.uname().nodename)
    assert str(error).startswith(f"rank 1 of 2 (counted from 0) on host {error.host} ")
    if how == "raise":
        _, where, *_, last = error.traceback.splitlines()
        assert (error.signal, last) == ("", "ValueError: wrong 7")
        assert where.endswith("in fails")
    else:
        assert (error.signal, error.traceback) == ("SIGKILL", "")
        assert "was ended by SIGKILL (peak memory " in str(error)  # unknown where it lived shorter than a sample
    assert "choros run:" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: (i for i in "ab"), r"what rank \d returned, a generator, cannot be sent to the caller: .*generator"),
        (lambda: os._exit(0), "rank 0 of 2 .* ended with exit code 0 before its work was done"),
        (lambda: sys.exit("enough"), r"rank \d of 2 .* raised SystemExit: enough"),
        (lambda: __import__("no_such_module"), r"raised ModuleNotFoundError: .*\n(.*\n)*.*Install the module"),
    ],
)
def test_ranks_without_an_answer(work, message):
    with pytest.raises(WorkerFailedError, match=message):
        choros.run(work, np=2)


def test_what_cannot_be_built_here():
    def work():
        import types

        sys.modules["only_there"] = module = types.ModuleType("only_there")
        module.Thing = type("Thing", (), {"__module__": "only_there"})
        return module.Thing() if os.environ["CHOROS_RANK"] == "1" else None

    with pytest.raises(NotSerializableError, match="what rank 1 returned, a only_there.Thing, cannot be built in this"):
        choros.run(work, num_proc=2)


def test_what_is_refused_before_anything_starts(monkeypatch):
    lock = threading.Lock()
    for message, call in {
        "argument 1, a _thread.lock, cannot be sent to the ranks": lambda: choros.run(print, (1, lock)),
        "argument sep, a _thread.lock, cannot": lambda: choros.run(print, kwargs={"sep": lock}),
        "the function .*<lambda> cannot be sent": lambda: choros.run(lambda: lock),
        "was given 3 to call: give a function": lambda: choros.run(3),
        "give a function; a script is started by the command choros run": lambda: choros.run("train.py"),
        "args is of type str": lambda: choros.run(print, "ab"),
        "args is of type int": lambda: choros.run(print, 3),
        "kwargs=": lambda: choros.run(print, kwargs={3: 4}),
        "num_proc=0": lambda: choros.run(print, num_proc=0),
        "np=True": lambda: choros.run(print, np=True),
        "num_proc=2 and np=3": lambda: choros.run(print, num_proc=2, np=3),
        "start_timeout=0": lambda: choros.run(print, start_timeout=0),
        "n2 is not this machine": lambda: choros.run(print, hosts="n2:2"),
        "min_num_proc is an option of horovodrun": lambda: choros.run(print, min_num_proc=1),
        "threads=0: give a whole number, 1 or more": lambda: choros.run(print, threads=0),
        "cannot be kept in": lambda: choros.run(print, output_filename="/dev/null"),
    }.items():
        with pytest.raises(InvalidInputError, match=message):
            call()
    with pytest.raises(TypeError, match="no keyword 'processes'"):
        choros.run(print, processes=2)
    monkeypatch.setenv("CHOROS_RANK", "0")
    for name in ("CHOROS_SIZE", "CHOROS_LOCAL_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("CHOROS_LOCAL_RANK", "0")
    with pytest.raises(InvalidInputError, match=r"already rank 0 of 2 .*: call the function itself there"):
        choros.run(print)


def test_it_has_horovods_names():
    import choros.hvd as hvd

    assert hvd.run is choros.run


def python(script, *arguments, **more):
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


def test_a_script_from_stdin_trains():
    script = """
        import choros
        print("once", flush=True)
        def train(rate):
            import keras, numpy as np
            x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(rate), "mse")
            choros.Trainer(model).fit(x, x[:, :1], batch_size=8, epochs=2, seed=0, verbose=0)
            return model.get_weights()
        one, other = choros.run(train, (0.1,), num_proc=2)
        assert all((a == b).all() for a, b in zip(one, other)), (one, other)
        assert abs(one[0][0, 0] - 1) < 1, one
        print("same weights")
    """
    with python(None, "-", stdin=subprocess.PIPE) as process:
        output, _ = process.communicate(textwrap.dedent(script), timeout=120)
    assert process.returncode == 0, output
    assert output.splitlines()[0] == "once"
    assert output.count("once") == output.count("same weights") == 1, output


NOTEBOOK = '''
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()

    def cell(source):
        return shell.run_cell(source, store_history=True)

    cell("""
    import choros, os, time
    base = 40
    def slow(rank_1):
        print("PID", os.getpid(), flush=True)
        time.sleep(100)
    """).raise_error()
    cell("choros.run(slow, (1,), np=2)")
    result = cell("choros.run(lambda x: base + x, [2], num_proc=2)")
    result.raise_error()
    print("AFTER", result.result, flush=True)
'''


def test_an_interrupted_cell_ends_the_ranks_and_keeps_the_kernel(tmp_path):
    pytest.importorskip("IPython", reason="IPython is not installed: pip install ipython")
    (tmp_path / "kernel.py").write_text(textwrap.dedent(NOTEBOOK))
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path)}
    with python(None, "kernel.py", cwd=tmp_path, env=environment) as kernel:
        lines, pids = [], []
        try:
            for line in kernel.stdout:
                lines.append(line)
                if "PID" in line:
                    pids.append(int(line.split()[-1]))
                    if len(pids) == 2:
                        kernel.send_signal(signal.SIGINT)
                if "KeyboardInterrupt" in line:
                    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        finally:
            kernel.kill()
    text = "".join(lines)
    assert "KeyboardInterrupt" in text, text
    assert "AFTER [42, 42]" in text, text
    assert "[0] Traceback" not in text, text
    assert "[1] Traceback" not in text, text
