"""Faults that only root can make: namespaces with a small /dev/shm or an unknown name, control groups, two machines."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

DOCTOR = [sys.executable, "-m", "choros", "doctor", "--json", "--no-smoke"]


def report(arguments, **variables):
    """Run a command; the report that it printed, and its exit code."""
    with subprocess.Popen(
        [str(word) for word in arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "jax", **variables},
        start_new_session=True,
    ) as job:
        try:
            out, errors = job.communicate(timeout=60)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            raise
    assert out.strip(), errors
    return json.loads(out), job.returncode


def one(arguments, name, kind, code, **variables):
    problem, ended = report(arguments, **variables)
    [finding] = [each for each in problem["findings"] if each["name"] == name]
    assert (finding["kind"], ended) == (kind, code)
    return finding


def inside(namespaces, text):
    """The doctor in namespaces of its own, after some commands."""
    return ["unshare", *namespaces, "sh", "-c", f"{text}\nexec {shlex.join(DOCTOR)} -n 2"]


def test_a_small_dev_shm():
    finding = one(inside(["-m"], "mount -t tmpfs -o size=8m none /dev/shm"), "shared-memory", "warning", 0)
    assert "/dev/shm has 8.4 MB free of 8.4 MB" in finding["what"]
    assert finding["ranks"] == [0, 1]
    assert "--shm-size=2g" in finding["remedy"]


def test_a_small_dev_shm_under_mpi_is_an_error(mpiexec):
    """MPI's own segments lie there."""
    command, needed = mpiexec.starting(2, "sh", "-c", f"exec {shlex.join(DOCTOR)}")
    first = "mount -t tmpfs -o size=64m none /dev/shm"
    finding = one(
        ["unshare", "-m", "sh", "-c", f"{first}\nexec {shlex.join(command)}"], "shared-memory", "error", 1, **needed
    )
    assert "end by SIGBUS when it is full" in finding["what"]


def test_a_host_whose_name_nobody_knows():
    finding = one(inside(["--uts"], "hostname nobody-knows.invalid"), "host-name", "warning", 0)
    assert "nobody-knows.invalid cannot be looked up" in finding["what"]
    assert "/etc/hosts" in finding["remedy"]


@pytest.fixture
def limited(tmp_path):
    """Make a control group with one limit; it is gone when the test ends."""
    rooms = []

    def make(controller, limits):
        root = pathlib.Path("/sys/fs/cgroup")
        place = next((result for result in (root / controller, root) if (result / "cgroup.procs").exists()), None)
        if place is None:
            pytest.skip(f"the control groups of {controller} are not mounted here")
        room = place / f"choros-doctor-{os.getpid()}"
        room.mkdir()
        rooms.append(room)
        for name, value in limits.items():
            with contextlib.suppress(FileNotFoundError, PermissionError):  # the other version's
                (room / name).write_text(value)
        return room / "cgroup.procs"

    yield make
    for room in rooms:
        room.rmdir()


def test_a_control_group_with_little_memory(limited):
    size = str(700_000_000)
    procs = limited("memory", {"memory.limit_in_bytes": size, "memory.max": size})
    command = ["sh", "-c", f"echo $$ > {procs}\nexec {shlex.join(DOCTOR)} -n 2"]
    finding = one(command, "memory", "error", 1)
    assert "by the control group's limit of 7" in finding["what"]
    assert "start fewer ranks" in finding["remedy"]


def test_a_control_group_with_little_processor_time(limited):
    procs = limited("cpu", {"cpu.cfs_quota_us": "60000", "cpu.max": "60000 100000"})
    command = ["sh", "-c", f"echo $$ > {procs}\nexec {shlex.join(DOCTOR)} -n 2"]
    finding = one(command, "quota", "error", 1)
    assert "allows the time of 0.6 cores, but 2 threads run" in finding["what"]


SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts --ipc --pid --mount-proc --fork --kill-child sh -c "hostname $host; $*"
"""


def test_the_loopback_in_a_job_of_two_machines(mpiexec, tmp_path):
    assert importlib.util.find_spec("mpi4py") is not None
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    mpich = ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", "one:1,two:1"]
    how = ["--prtemca", "plm_ssh_agent", ssh, "--host", "one:1,two:1"] if mpiexec.open else mpich
    command, needed = mpiexec.starting(2, *DOCTOR, more=how)
    measured = report(command, **needed)[0]["measures"]
    assert set(measured["engines"]) == {"MPI"}
    assert set(measured["links"]) == {"0", "1"}
    assert min(measured["links"].values()) > 0
    finding = one(command, "interface", "error", 1, **needed, CHOROS_NETWORK="127.0.0.0/8")
    assert finding["hosts"] == ["one", "two"]
    assert "CHOROS_NETWORK=127.0.0.0/8 names the loopback, which reaches no other host" in finding["what"]
