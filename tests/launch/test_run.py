import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from choros.errors import InvalidInputError
from choros.launch.process.failure_report import signalled
from choros.launch.process.rank_supervisor import run

ENGINE = """
import json, signal, sys
from choros.launch.process.rank_supervisor import run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
sys.exit(run(**json.loads(sys.argv[1])).code)
"""


@contextlib.contextmanager
def launcher(code, size=2, **more):
    """The engine in a process of its own, its output buffered as is usual, the ranks running ``code``."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    arguments = json.dumps({"command": [sys.executable, "-c", code], "size": size, **more})
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=env,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def outcome(code, size=2, **more):
    with launcher(code, size, **more) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def ranks_of(process, size):
    """The pids that the ranks print as their first line."""
    return [int(process.stdout.readline().split()[1]) for _ in range(size)]


def test_every_rank_knows_its_place_and_shares_the_token():
    code = (
        "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CHOROS_')}));"
        "print(open('/dev/stdin').read() == '')"
    )
    status, out, err = outcome(code, 3, environment=[{"CHOROS_X": str(number)} for number in range(3)])
    assert (status, err) == (0, "")
    results = {}
    for line in out.splitlines():
        mark, _, text = line.partition(" ")
        if text != "True":
            results[mark] = json.loads(text)
    assert sorted(results) == ["[0]", "[1]", "[2]"]
    assert len({place["CHOROS_RUN"] for place in results.values()}) == 1
    for rank in range(3):
        place = results[f"[{rank}]"]
        assert len(place.pop("CHOROS_RUN")) == 16
        assert place == {
            "CHOROS_RANK": str(rank),
            "CHOROS_SIZE": "3",
            "CHOROS_LOCAL_RANK": str(rank),
            "CHOROS_LOCAL_SIZE": "3",
            "CHOROS_X": str(rank),
        }
    assert out.count("True") == 3  # standard input is empty


def test_cores_are_set_before_the_program_is_loaded():
    usable = sorted(os.sched_getaffinity(0))
    cores = [[usable[0]], [usable[-1]]]
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    status, out, _ = outcome(code, cores=cores)
    assert status == 0
    assert sorted(out.splitlines()) == [f"[{rank}] {cores[rank]}" for rank in range(2)]


def test_a_descriptor_is_inherited():
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    code = f"import os; assert os.pread({fd}, 10, 0) == b'shared'"
    assert run([sys.executable, "-c", code], 2, pass_fds=[fd]).code == 0
    os.close(fd)


def test_lines_are_whole_marked_and_in_their_stream():
    code = (
        "import os, sys\n"
        "r = os.environ['CHOROS_RANK']\n"
        "for n in range(300): print('out', r, n, 'x' * 500)\n"
        "print('err', r, file=sys.stderr); sys.stdout.write('no end ' + r)"
    )
    status, out, err = outcome(code, 3)
    assert status == 0
    lines = out.splitlines()
    for rank in range(3):
        actual = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert actual == [f"[{rank}] out {rank} {n} {'x' * 500}" for n in range(300)] + [f"[{rank}] no end {rank}"]
    assert len(lines) == 903
    assert sorted(err.splitlines()) == [f"[{rank}] err {rank}" for rank in range(3)]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("raise ValueError('wrong')", 1, "exited with code 1"),
        ("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 4)", 132, "was ended by SIGILL (a native library was built for another processor"),
        ("os.abort()", 134, "was ended by SIGABRT"),
    ],
)
def test_the_first_failure_ends_all_and_gives_its_code(ending, code, message):
    began = time.monotonic()
    fails = f"if os.environ['CHOROS_RANK'] == '1': {ending}"
    status, out, err = outcome(f"import os, sys, time\nprint('up', flush=True)\n{fails}\ntime.sleep(100)", 3)
    assert status == code
    assert time.monotonic() - began < 20
    [line] = [line for line in err.splitlines() if line.startswith("choros run: ")]
    assert line.startswith("choros run: rank 1 of 3 (pid ")
    assert message in line
    assert line.partition("; ending the 2 that are left")[2] == (
        f". {signalled(signal.Signals(code - 128).name)[1]}" if code in (132, 137) else ""
    )
    if "ValueError" in ending:
        assert err.index("[1] ValueError: wrong") < err.index("choros run: ")
    assert "[1] up" in out


def test_ranks_that_ignore_sigterm_are_killed(gone):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True)\n"
        "if os.environ['CHOROS_RANK'] == '1': time.sleep(1); sys.exit(7)\n"
        "time.sleep(100)"
    )
    with launcher(code, 2, grace=0.3) as process:
        pids = ranks_of(process, 2)
        assert process.wait(30) == 7
    assert all(gone(pid) for pid in pids)


def test_of_ranks_that_fail_at_the_same_time_the_killed_rank_is_the_cause(tmp_path):
    """The launcher is stopped meanwhile, so it sees both ends at once. Rank 0 exits as if it had lost its peer."""
    go = tmp_path / "go"
    code = (
        "import os, signal, sys, time\nprint(os.getpid(), flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['CHOROS_RANK'] == '1' else sys.exit(1)"
    )
    with launcher(code) as process:
        pids = ranks_of(process, 2)
        os.kill(process.pid, signal.SIGSTOP)
        go.touch()
        end = time.monotonic() + 30
        while not all(state_of(pid) == "Z" for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "choros run: rank 1 of 2" in err


def state_of(pid):
    """Return the state of a process: Z if it has ended and its parent has not seen that."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_stopped_rank_is_ended_too(gone):
    code = (
        "import os, sys, time\nprint(os.getpid(), flush=True)\n"
        "if os.environ['CHOROS_RANK'] == '1': time.sleep(1); sys.exit(7)\n"
        "os.kill(os.getpid(), 19); time.sleep(100)"
    )
    with launcher(code, 2, grace=20) as process:
        pids = ranks_of(process, 2)
        began = time.monotonic()
        assert process.wait(30) == 7
        assert time.monotonic() - began < 15
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_ends_well_does_not_end_the_others():
    code = "import os, time\nif os.environ['CHOROS_RANK'] == '1': time.sleep(1)\nprint('done')"
    status, out, err = outcome(code)
    assert (status, sorted(out.splitlines()), err) == (0, ["[0] done", "[1] done"], "")


def listening(number, does):
    """A rank that says its process' number, waits, and does that when it is told by the signal."""
    return (
        f"import os, signal, sys, time\ndef told(*_): {does}\nsignal.signal({int(number)}, told)\n"
        "print(os.getpid(), flush=True)\ntime.sleep(100)"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_are_handed_on(number, code, gone):
    with launcher(listening(number, "print('told', flush=True); sys.exit(0)")) as process:
        pids = ranks_of(process, 2)
        process.send_signal(number)
        assert process.wait(30) == code
        assert sorted(process.stdout.read().splitlines()) == ["[0] told", "[1] told"]
        assert process.stderr.read() == ""
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_after_which_the_ranks_have_left_a_checkpoint(number, gone):
    with launcher(listening(number, "time.sleep(0.2); sys.exit(75)")) as process:
        pids = ranks_of(process, 2)
        process.send_signal(number)
        assert process.wait(30) == 75
    assert all(gone(pid) for pid in pids)


def test_a_second_signal_kills(gone):
    body = "import os, signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\ntime.sleep(100)"
    with launcher(body, grace=60) as process:
        pids = ranks_of(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    assert all(gone(pid) for pid in pids)


def test_no_rank_outlives_a_killed_launcher(gone):
    with launcher("import os, time; print(os.getpid(), flush=True); time.sleep(100)") as process:
        pids = ranks_of(process, 2)
        process.kill()
        process.wait(10)
    assert all(gone(pid) for pid in pids)


def test_what_a_rank_leaves_behind_is_ended(gone):
    code = "import os, subprocess; print(subprocess.Popen(['sleep', '100']).pid, flush=True)"
    with launcher(code) as process:
        pids = ranks_of(process, 2)
        assert process.wait(30) == 0
    assert all(gone(pid) for pid in pids)


def test_a_reader_that_goes_away_ends_the_run():
    with launcher("import time\nwhile True: print('x' * 100); time.sleep(0.001)") as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 141


def test_a_program_that_cannot_be_started(capfd, tmp_path):
    assert run([str(tmp_path / "none")], 1).code == 127
    assert f"[0] choros: cannot start {tmp_path / 'none'}: No such file" in capfd.readouterr().err
    (tmp_path / "text").write_text("x")
    assert run([str(tmp_path / "text")], 1).code == 126


def test_nothing_is_left_in_this_process(capfd):
    before = set(os.listdir("/proc/self/fd")), [signal.getsignal(number) for number in (2, 15, 1)]
    assert run(["sh", "-c", "echo $CHOROS_RANK"], 2).code == 0
    assert run(["false"], 2).code == 1
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
    assert (set(os.listdir("/proc/self/fd")), [signal.getsignal(number) for number in (2, 15, 1)]) == before


def test_what_has_become_of_it(capfd):
    actual = [os.memfd_create(f"rank {rank}") for rank in range(3)]
    code = (
        "import os, sys; rank = int(os.environ['CHOROS_RANK']);"
        f"there = [fd for fd in {actual} if os.path.exists(f'/proc/self/fd/{{fd}}')];"
        f"os.write({actual}[rank], str(there == [{actual}[rank]]).encode());"
        "print('last words', rank, flush=True); sys.exit(5 * (rank == 1))"
    )
    ended = []
    outcome = run([sys.executable, "-c", code], 3, own_fds=[[fd] for fd in actual], on_end=ended.append, announce=False)
    assert outcome.code == outcome.failed[0][1].exit == 5
    assert [(rank, text) for rank, _, text in outcome.failed] == [(1, "last words 1")]
    assert sorted(ended) == [0, 1, 2]
    assert "choros run" not in capfd.readouterr().err
    for fd in actual:
        assert os.pread(fd, 10, 0) in (b"True", b"")  # the others may have been ended before they wrote
        os.close(fd)
    assert outcome.signal == 0
    assert run(["true"], 1).failed == ()


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidInputError, match="1 rank or more"):
        run(["true"], 0)
    with pytest.raises(InvalidInputError, match="1 environments were given for 2 ranks"):
        run(["true"], 2, environment=[{}])
