import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

import choros as choros_package
from choros.cli import check_build, main
from choros.cluster.hardware import plan, usable_cores
from choros.cluster.hardware.thread_env import NAMES
from choros.launch.horovod_options import OPTIONS


def choros(*arguments, **more):
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment = {**clean, **more.pop("environment", {})}
    command = [sys.executable, "-m", "choros", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False, **more)


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


LOOK = """
import json, os, sys
print(json.dumps({"cores": sorted(os.sched_getaffinity(0)), "env": dict(os.environ), "argv": sys.argv[1:],
                  "path": sys.path[0]}))
"""


def found(done):
    assert done.returncode == 0, done.stderr
    ranks = {}
    for line in done.stdout.splitlines():
        mark, _, text = line.partition(" ")
        ranks[int(mark[1:-1])] = json.loads(text)
    return [ranks[rank] for rank in sorted(ranks)]


def test_ranks_have_their_cores_threads_arguments_and_group(script):
    path = script(LOOK)
    inputs = ["-n", "--threads", "3", "x y", "--timeline", "--timeline-filename", "t", "--out=1", "-v"]
    ranks = found(choros("run", "-n", 2, path, *inputs))
    assert len(ranks) == 2
    for rank, (seen, binding) in enumerate(zip(ranks, plan(2), strict=True)):
        assert seen["cores"] == list(binding.cores or usable_cores())
        assert seen["env"]["OMP_NUM_THREADS"] == seen["env"]["NPROC"] == str(binding.threads)
        assert seen["env"]["CHOROS_RANK"] == str(rank)
        assert seen["argv"] == inputs
        assert seen["path"] == str(path.parent)


def test_threads_and_no_binding(script):
    done = choros("run", "-n", 2, "--no-bind", "--threads", 3, script(LOOK), environment={"OMP_NUM_THREADS": "9"})
    for seen in found(done):
        assert seen["cores"] == list(usable_cores())
        assert seen["env"]["OMP_NUM_THREADS"] == seen["env"]["TF_NUM_INTRAOP_THREADS"] == "3"
        if len(usable_cores()) < 6:
            assert seen["env"]["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_the_user_exported_holds(script):
    for seen in found(choros("run", "-n", 2, script(LOOK), environment={"OMP_NUM_THREADS": "9"})):
        assert seen["env"]["OMP_NUM_THREADS"] == "9"


def test_more_ranks_than_cores_run_unbound_on_one_thread(script):
    size = len(usable_cores()) + 1
    for seen in found(choros("run", "-n", size, script(LOOK))):
        assert seen["cores"] == list(usable_cores())
        assert seen["env"]["OMP_NUM_THREADS"] == "1"


def test_ranks_get_the_network(script):
    (seen,) = found(choros("run", "-n", 1, "--network", "lo", script(LOOK)))
    assert seen["env"]["CHOROS_NETWORK"] == "lo"


def test_ranks_meet_in_the_group_they_inherit(script):
    path = script(
        "import os, numpy as np\n"
        "from choros.cluster import Place\n"
        "from choros.comm.shm.group import SharedGroup\n"
        "here = Place.here()\n"
        "with SharedGroup(int(os.environ['CHOROS_COMM_FD']), here.rank, timeout=60) as group:\n"
        "    assert group.size == here.size == 3\n"
        "    print(group.sum(np.array([here.rank + 1.0]))[0])\n"
    )
    done = choros("run", "-n", 3, path)
    assert sorted(done.stdout.splitlines()) == ["[0] 6.0", "[1] 6.0", "[2] 6.0"], done.stderr


def test_a_framework_in_a_rank_obeys(script):
    pytest.importorskip("torch", reason="torch is not installed")
    done = choros("run", "-n", 2, "--threads", 1, script("import torch; print(torch.get_num_threads())"))
    assert sorted(done.stdout.splitlines()) == ["[0] 1", "[1] 1"]


def test_modules_and_programs(script, tmp_path):
    script("import sys; print(__name__, sys.argv[1:])", "module_to_run.py")
    done = choros("run", "-n", 2, "-m", "module_to_run", "--flag", cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] __main__ ['--flag']", "[1] __main__ ['--flag']"]
    done = choros("run", "-n", 1, "--", "sh", "-c", "echo $CHOROS_SIZE")
    assert done.stdout == "[0] 1\n"


def test_the_code_of_the_first_failure(script):
    path = script("import os, sys, time\nif os.environ['CHOROS_RANK'] == '0': sys.exit(17)\ntime.sleep(100)")
    began = time.monotonic()
    done = choros("run", "-n", 2, path)
    assert done.returncode == 17
    assert time.monotonic() - began < 20
    assert "rank 0 of 2" in done.stderr


@pytest.mark.parametrize(("restarts", "code", "turns"), [(3, 0, 3), (1, 137, 2)])
def test_a_job_that_fails_is_started_again(script, restarts, code, turns):
    path = script("import os; turn = os.environ['CHOROS_RESTART']; os.write(1, f'turn {turn}\\n'.encode())\n"
                  "if turn < '2' and os.environ['CHOROS_RANK'] == '1': os.kill(os.getpid(), 9)\n")  # fmt: skip
    done = choros("run", "-n", 2, "--restarts", restarts, path)
    assert done.returncode == code, done.stderr
    assert sorted({line[4:] for line in done.stdout.splitlines()}) == [f"turn {turn}" for turn in range(turns)]
    lines = [line for line in done.stderr.splitlines() if "started again" in line]
    remaining = "1 restart" if restarts == 2 else f"{restarts - 1} restarts"
    assert lines[0] == f"choros run: the job ended with code 137: started again ({remaining} left)"


def test_a_job_that_asks_for_another_turn_is_not_started_again(script):
    done = choros("run", "-n", 2, "--restarts", 3, script("import sys; print('here', flush=True); sys.exit(75)"))
    assert done.returncode == 75
    assert "started again" not in done.stderr


def test_an_interrupt_shows_one_traceback_and_all_other_errors(script, tmp_path):
    path = script(
        "import os, time\n"
        "try:\n"
        "    print('here', flush=True)\n"  # within try: the signal can arrive as soon as the line does
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    if os.environ['CHOROS_RANK'] == '3':\n"
        "        raise RuntimeError('of rank 3') from None\n"
        "    raise\n"
    )
    command = ["-m", "choros", "run", "-n", "4", "--output-filename", str(tmp_path / "out"), str(path)]
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(4):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    begins = sorted(line for line in err.splitlines() if "Traceback" in line)
    assert begins == ["[0] Traceback (most recent call last):", "[3] Traceback (most recent call last):"]
    assert "[0] KeyboardInterrupt" in err.splitlines()
    assert "[3] RuntimeError: of rank 3" in err.splitlines()
    assert "choros run: interrupted; not shown: the KeyboardInterrupt of 2 other ranks" in err.splitlines()
    assert not any(line.startswith(("[1]", "[2]")) for line in err.splitlines())
    assert "KeyboardInterrupt" in (tmp_path / "out" / "rank.2" / "stderr").read_text()


def test_kill_9_of_the_launcher_leaves_no_ranks(script):
    path = script("import os, time\nprint(os.getpid())\ntime.sleep(100)")
    with subprocess.Popen(
        [sys.executable, "-m", "choros", "run", "-n", "2", str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 5
    while time.monotonic() < limit and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
    remaining = [
        pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert remaining == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-n", "0", "x.py"], "must be a whole number of 1 or more, got 0"),
        (["run", "-n", "two", "x.py"], "must be a whole number of 1 or more, got two"),
        (["run", "true", "-n", "2"], "give the number of ranks, before the program: -n N (or -np N, -H localhost:N"),
        (["run", "-np", "two", "x.py"], "must be a whole number of 1 or more, got two"),
        (["run", "-np", "3", "-H", "localhost:2", "true"], "3 ranks were asked for, but the hosts have 2 slots"),
        (["run", "-H", "localhost", "true"], "not of the form host:slots"),
        (["run", "-H", "localhost:2", "-hostfile", "README.md", "true"], "not allowed with argument"),
        (["run", "--hostfile", "README.md", "true"], "line 1 of the host file README.md is 'text'"),
        (["run", "--hostfile", "none", "true"], "the host file none cannot be read"),
        (["run", "-n", "2", "--network", "nosuch0", "true"], "has no such interface that is up with an address"),
        (["run", "-n", "2", "--min-np", "1", "--network", "nosuch0", "true"], "has no such interface"),
        (["run", "-n", "2", "--output-filename", "README.md", "true"], "cannot be kept in README.md"),
        (["run", "-n", "2", "--start-timeout", "0", "true"], "must be more than 0 seconds, got 0"),
        (["run", "-n", "2", "--stall-check-warning-time-seconds", "-1", "true"], "must be a number of seconds, got -1"),
        (["run", "-n", "2", "--min-np", "3", "true"], "--min-np 3 is more than the 2 ranks of -n"),
        (["run", "-n", "2", "--config-file", "c.yaml", "true"], "give the options themselves"),
        (["run", "-n", "2", "--blacklist-cooldown-range", "1", "2", "true"], "is for an elastic job: give --min-np"),
        (["run", "-n", "2"], "nothing to run"),
        (["run", "-n", "2", "-m"], "nothing to run"),
        (["run", "-n", "2", "absent.py"], "the script absent.py does not exist"),
        (["run", "absent.py", "-n", "2"], "the script absent.py does not exist"),
        (["run", "-n", "2", "--launcher", "no-srun", "absent.py"], "the script absent.py does not exist"),
        (["run", "-n", "2", "."], "a directory without a __main__.py"),
        (["run", "-n", "2", "no-such-program"], "neither a file nor a program"),
        (["run", "-n", "2", "README.md"], "is not executable"),
        (["run", "-n", "2", "--grace", "-1", "true"], "must be a number of seconds"),
        (["xyz"], "choros: error: there is no command 'xyz' (choose from run, submit, "),
        (["rnu"], "choros: error: there is no command 'rnu' (did you mean run?)"),
        (["run", "--np", "2", "true"], "choros run: error: unrecognized arguments: --np (did you mean -np?)"),
        (["where", "--jsno"], "choros where: error: unrecognized arguments: --jsno (did you mean --json?)"),
    ],
)
def test_bad_usage_is_said_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("text")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line, see = err.splitlines()
    assert message in line
    assert see == f"See '{line.partition(':')[0]} --help'"


def test_horovods_options(script, tmp_path):
    (tmp_path / "hosts").write_text("# here\nlocalhost slots=3\n\n127.0.0.1 slots=1\n")
    other = [name for option in OPTIONS if not option.refused for name in (option.names[0], *option.values * ["1"])]
    done = choros(
        *("run", "--num-proc", 2, "-hostfile", tmp_path / "hosts", "--start-timeout", 7, "--verbose"),
        *("--output-filename", tmp_path / "logs", "--timeline-filename", "t.json", "--timeline-mark-cycles"),
        *("--no-stall-check", "--stall-check-warning-time-seconds", 90, "--stall-check-shutdown-time-seconds", 0.5),
        *other,
        *(script(LOOK), "-H", "n2:7"),
    )
    ranks = found(done)
    for rank, seen in enumerate(ranks):
        horovod = {name.removeprefix("HOROVOD_"): seen["env"][name] for name in seen["env"] if "HOROVOD_" in name}
        assert horovod == {
            "RANK": str(rank),
            "SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_SIZE": "2",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "START_TIMEOUT": "7",
            "TIMELINE": "t.json",
            "TIMELINE_MARK_CYCLES": "1",
            "STALL_CHECK_DISABLE": "1",
            "STALL_CHECK_TIME_SECONDS": "90",
            "STALL_SHUTDOWN_TIME_SECONDS": "0.5",
        }
        assert seen["argv"] == ["-H", "n2:7"]
        saved = tmp_path / "logs" / f"rank.{rank}"
        assert json.loads((saved / "stdout").read_text()) == seen
        assert (saved / "stderr").read_text() == ""
    lines = done.stderr.splitlines()
    assert [line for line in lines if f"rank 1 of 2: cores {','.join(map(str, ranks[1]['cores']))}" in line] or (
        plan(2)[1].cores == ()
    )
    warnings_ = [line for line in lines if " is ignored: " in line]
    assert warnings_ == [f"choros run: {option.answer(option.names[0])}" for option in OPTIONS if not option.refused]


def test_slots_are_ranks_and_lines_have_their_time():
    done = choros("run", "-H", f"localhost:1,{platform.node()}:1", "-prefix-timestamp", "sh", "-c", "echo up")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split(" ", 1) for line in done.stdout.splitlines())
    assert sorted(rest for _, rest in lines) == ["[0] up", "[1] up"]
    assert all(abs(datetime.fromisoformat(when).timestamp() - time.time()) < 60 for when, _ in lines)


def test_options_after_the_program_are_the_programs():
    command = ["-c", "-s", "-cb", "-N", "2", "-n4", "--launcher", "aprun"]
    done = choros("run", "-n", 1, "sh", "-c", 'echo "$@"', "sh", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[0]", *command]


MEETING = """
import os, sys, time
import choros.hvd as hvd
if os.environ["CHOROS_RANK"] == "1":
    {before}
hvd.init()
print("met", hvd.size())
"""


@pytest.mark.parametrize(
    ("options", "before", "message"),
    [
        (("--start-timeout", "1"), "time.sleep(60)", " for rank 1 (never joined) of 2. Look"),
        ((), "sys.exit(0)", "rank 1 ended before it connected to the other\n"),
        (("--start-timeout", "40"), "time.sleep(1.5)", ""),
    ],
)
def test_how_long_the_first_meeting_waits(script, options, before, message):
    began = time.monotonic()
    done = choros("run", "-n", 2, *options, script(MEETING.format(before=before)))
    assert time.monotonic() - began < 25
    assert done.returncode == (1 if message else 0), done.stderr
    assert ("[0] met 2" in done.stdout) is not bool(message)
    assert message in done.stderr
    assert ("give choros run a longer --start-timeout" in done.stderr) is (
        "--start-timeout" in options and bool(message)
    )


def test_a_stall_ends_the_job(script):
    stall = "import numpy as np\nif hvd.rank() == 1: time.sleep(60)\nhvd.allreduce(np.zeros(1), name='x')"
    options = ("--stall-check-shutdown-time-seconds", "1")
    began = time.monotonic()
    done = choros("run", "-n", 2, *options, script(MEETING.format(before="pass") + stall))
    assert time.monotonic() - began < 25
    assert done.returncode == 1
    assert "[1] met 2" in done.stdout
    assert "rank 1" in done.stderr
    assert "CommTimeoutError" in done.stderr


def test_check_build_imports_no_framework():
    look = "import sys; from choros.cli import main; code = main(['run', '-cb']); print(code, sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    *lines, last = done.stdout.splitlines()
    assert last.startswith("0 [")
    assert not any(f"'{name}'" in last for name in ("jax", "torch", "tensorflow", "keras", "mpi4py"))
    for name in ("jax", "torch", "tensorflow", "mpi4py"):
        [line] = [line for line in lines if f"] {name}" in line]
        assert line.strip().startswith("[X]" if importlib.util.find_spec(name) else "[ ]")
    assert "    [X] shared memory, on one machine" in lines


def test_check_build_says_what_is_not_there(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("os.memfd_create", lambda *_: os.open("/no/such/place", os.O_RDONLY))
    lines = check_build.report().splitlines()
    assert [line for line in lines if "[X]" in line] == []
    assert "    [ ] jax" in lines
    assert "    [ ] shared memory, on one machine ([Errno 2] No such file or directory: '/no/such/place')" in lines
    assert "    [ ] mpi4py, between hosts" in lines


def test_a_rank_starts_no_ranks(monkeypatch, capsys):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["run", "-n", "2", "true"]) == 2
    assert "already rank 1 of 2 (started by torchrun)" in capsys.readouterr().err


def refuse_to_start(*_, **__):
    raise AssertionError("ranks were started")


@pytest.mark.parametrize("options", [[], ["--min-np", "2"], ["-H", "localhost:99999,localhost:99999"]])
def test_an_absurd_number_of_ranks_is_refused_before_anything_starts(options, monkeypatch, capsys):
    monkeypatch.setattr("choros.launch.local_job.plan", refuse_to_start)
    monkeypatch.setattr("choros.launch.elastic.driver.Driver", refuse_to_start)
    size = "199998" if "-H" in options else "99999999"
    assert main(["run", "-n", size, *options, "true"]) == 2
    err = capsys.readouterr().err
    limit = max(256, 64 * len(usable_cores()))
    assert f"{size} ranks were asked for, but {platform.node()} takes at most " in err
    assert int(err.partition("takes at most ")[2].split()[0]) <= limit
    assert "): ask for fewer, or for more hosts (-H)" in err


def test_a_number_of_ranks_above_the_limit_of_processes_is_refused(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda name: (20, 20))
    with pytest.raises(choros_package.InvalidInputError, match="at most 5 .the limit of open files is 20, see ulimit"):
        choros_package.run(print, num_proc=6)


def test_many_ranks_for_each_core_are_warned_of():
    cores = len(usable_cores())
    done = choros("run", "-n", 4 * cores + 1, "true")
    assert done.returncode == 0
    assert done.stderr.startswith(f"choros run: warning: {4 * cores + 1} ranks share {cores} core")
    assert done.stderr.endswith(f"Give -n {cores}, or use more hosts\n")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (255, ("no.such.host could not be reached by ssh, whose message is above: correct its name in -H", " true")),
        (127, ("no.such.host has no ", "install the same Python there")),
    ],
)
@pytest.mark.parametrize("options", [(), ("--min-np", 1)])
def test_a_host_on_which_nothing_starts_is_named(tmp_path, code, message, options):
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\necho 'ssh: no such name' >&2\nexit {code}\n")
    ssh.chmod(0o755)
    done = choros("run", "-H", "no.such.host:1", "--ssh", ssh, *options, "-n", 1, "true")
    assert done.returncode == 1
    assert "ssh: no such name" in done.stderr
    assert all(text in done.stderr for text in message), done.stderr


def test_the_code_255_of_a_rank_is_not_that_of_ssh(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    done = choros("run", "-H", "another:1", "--ssh", ssh, "sh", "-c", "exit 255")
    assert done.returncode == 255, done.stderr
    assert "could not be reached" not in done.stderr


@pytest.mark.parametrize(("ssh", "message"), [("no-ssh", "there is no no-ssh on PATH"), ("'a", "close its quotes")])
def test_a_command_for_other_hosts_that_is_not_there(ssh, message, capsys):
    assert main(["run", "-H", "another:1", "--ssh", ssh, "true"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("size", "message"), [(2, "; ending the other one"), (3, "; ending the 2 that are left")])
def test_the_ranks_that_are_ended_are_counted(script, size, message):
    path = script("import os, sys, time\nif os.environ['CHOROS_RANK'] == '0': sys.exit(17)\ntime.sleep(100)")
    assert message in choros("run", "-n", size, path).stderr


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("choros ")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("run", "where", "demo"))
    assert main(["run", "--help"]) == 0
    assert "--no-bind" in capsys.readouterr().out


def test_a_closed_stdout_is_no_failure():
    shell = f"{sys.executable} -m choros run -n 2 true >&-"
    done = subprocess.run(["bash", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
