"""``choros run --launcher``: ranks that an MPI's launcher starts meet by MPI; the first failure's code is kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from choros.cli import main
from choros.errors import InvalidInputError
from choros.launch.local_job import LaunchOptions
from choros.launch.mpi.launcher import start_under
from choros.launch.process.rank_supervisor import GRACE
from choros.launch.specs import LaunchPreferences, Srun

SCRIPT = """
import json, os, sys, time
import numpy as np
import choros.hvd as hvd

hvd.init()
rank, how = hvd.rank(), sys.argv[1]
total = float(hvd.allreduce(np.ones(3) * rank, op=hvd.Sum)[0])
cores = sorted(os.sched_getaffinity(0))
threads = os.environ["OMP_NUM_THREADS"]
print("said " + json.dumps([rank, hvd.size(), hvd.mpi_enabled(), total, cores, threads]), flush=True)
if rank == 1:
    exec(how)
hvd.barrier()
"""


@pytest.fixture
def run(mpiexec, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}

    def start(how, *more):
        command = [sys.executable, "-m", "choros", "run", "-n", "2", "--launcher", "mpiexec", *more]
        return subprocess.Popen(
            [*command, str(tmp_path / "script.py"), how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


LINES = """
import sys
for number in range(200):
    print("of one", "line", number, "end")
    print("of", "another", number, "end", file=sys.stderr)
"""


def test_each_line_is_marked_once_at_its_beginning(mpiexec, tmp_path):
    (tmp_path / "script.py").write_text(LINES)
    command = [sys.executable, "-m", "choros", "run", "-n", "3", "--launcher", "mpiexec", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for result, message in ((done.stdout, "of one line"), (done.stderr, "of another")):
        lines = [f"[{rank}] {message} {number} end" for rank in range(3) for number in range(200)]
        assert sorted(result.splitlines()) == sorted(lines)


def test_ranks_meet_by_mpi_each_on_cores_of_its_own(run):
    job = run("pass")
    out = job.communicate(timeout=60)[0]
    assert job.returncode == 0, out
    matches = sorted(json.loads(text) for text in re.findall(r'said (\[.*?"\d+"\])', out))
    assert [result[:4] for result in matches] == [[rank, 2, True, 1.0] for rank in range(2)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        assert not set(matches[0][4]) & set(matches[1][4])
    assert all(1 <= int(result[5]) <= len(cores) for result in matches)


KILLED = "137: SIGKILL (the kernel's out-of-memory killer sends this signal). If memory ran out, use fewer workers"
ILL = "132: SIGILL (a native library was built for another processor than this host's). Install the libraries"


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        ("sys.exit(7)", "7\n"),
        ("sys.exit(256 + 7)", "7\n"),  # of which the system keeps eight bits
        ("raise KeyboardInterrupt", "130: SIGINT\n"),
        ("sys.exit('no')", "1\n"),
        ("raise ValueError", "1\n"),
        ("os.kill(os.getpid(), 9)", KILLED),
        ("os.kill(os.getpid(), 4)", ILL),
    ],
)
def test_the_first_failure_s_code_is_that_of_the_run(run, how, ending):
    begun = time.monotonic()
    job = run(how)
    out = job.communicate(timeout=60)[0]
    assert job.returncode == int(re.match(r"\d+", ending)[0]), out
    assert f"rank 1 (host {os.uname().nodename}) ended with code {ending}" in out
    assert time.monotonic() - begun < 30


def test_an_exit_in_the_middle_of_training_keeps_its_code(failing, mpiexec):
    end = failing([sys.executable, "-m", "choros", "run", "-n", "2", "--launcher", "mpiexec"], "exit", code=3)
    assert f"rank 1 (host {os.uname().nodename}) ended with code 3\n" in end + "\n"


def test_a_signal_for_the_launcher_reaches_the_ranks(run, tmp_path):
    job = run("time.sleep(60)", "--grace", "1")
    for line in job.stdout:
        if "said" in line:
            break
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=30)
    assert job.returncode not in (0, None)
    limit = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", str(tmp_path)], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < limit
        time.sleep(0.1)


WAITING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
print("said", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGTERM, 1), (signal.SIGHUP, 0), (signal.SIGINT, 0)]
)
def test_who_is_told_to_end_does_not_start_again(mpiexec, tmp_path, number, code):
    """Its code is the signal's, whatever the ranks make of it; the rank that ended so is not called a failure."""
    (tmp_path / "script.py").write_text(WAITING)
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "--launcher", "mpiexec", "--restarts", "2"]
    with subprocess.Popen(
        [*command, str(tmp_path / "script.py"), str(code)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as job:
        output = ""
        while output.count("said") < 2:
            output += job.stderr.readline()
        job.send_signal(number)
        output += job.communicate(timeout=30)[1]
    assert job.returncode == 128 + number, output
    assert "choros run:" not in output


READING = """
import os, sys
print("said", repr(sys.stdin.read()), os.environ["OMP_NUM_THREADS"])
"""


def test_ranks_read_nothing_and_have_the_threads_that_were_asked_for(mpiexec, tmp_path):
    (tmp_path / "script.py").write_text(READING)
    command = [sys.executable, "-m", "choros", "run", "-n", "2", "--launcher", "mpiexec", "--threads", "3"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        input="hello",
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] said '' 3" for rank in range(2)]


def test_what_a_launcher_has_options_of_its_own_for_is_refused(capsys):
    command = ["run", "-n", "2", "--launcher", "mpiexec", "--output-filename", "there", "--verbose", "script.py"]
    assert main(command) != 0
    assert "--output-filename, --verbose: for ranks that choros run starts itself" in capsys.readouterr().err


def test_a_launcher_that_is_none_is_refused(monkeypatch):
    with pytest.raises(InvalidInputError, match="--launcher aprun is none of ssh, srun, mpiexec"):
        start_under("aprun", ["true"], LaunchOptions(2, grace=GRACE), ())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidInputError, match="there is no srun on PATH"):
        start_under("srun", ["true"], LaunchOptions(2), ())


def test_an_srun_without_slurm_is_not_started(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >{tmp_path}/started\n'
        'echo "srun: fatal: Could not establish a configuration source" >&2\nexit 1\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    text = "no SLURM answers on .*: run this inside an allocation.* srun printed: srun: fatal: Could not establish"
    with pytest.raises(InvalidInputError, match=text):
        start_under("srun", ["true"], LaunchOptions(2), ())
    with pytest.raises(InvalidInputError, match=text):
        Srun().start("choros", 2, {}, LaunchPreferences())
    assert not (tmp_path / "started").exists()
