"""Fixtures of the doctor's tests: a job of ``choros doctor`` with an injected fault, and its report."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from choros.cluster.hardware import usable_cores
from choros.cluster.hardware.gpus import DEVICE_VARIABLES
from choros.cluster.hardware.thread_env import NAMES

DOCTOR = [sys.executable, "-m", "choros", "doctor", "--json"]
_OURS = ("CHOROS_", "SLURM_", "PMI", "OMPI_", "MPI_", "NCCL_", "GLOO_", "UCX_", "FI_")


class Report:
    """The report of ``choros doctor``."""

    def __init__(self, done, marked):
        self.code, self.errors = done.returncode, done.stderr
        lines = done.stdout.splitlines()
        if marked:
            lines = [line.partition("] ")[2] for line in lines if line.startswith("[0] ")]
        assert lines, f"it said nothing, and ended with {done.returncode}:\n{done.stderr}"
        self.all = json.loads("\n".join(lines))
        self.findings = self.all["findings"]
        self.names = [finding["name"] for finding in self.findings]

    def one(self, name, ranks=None, kind="error"):
        """The finding of this name: there is one, of this kind and of these ranks."""
        [problem] = [finding for finding in self.findings if finding["name"] == name]
        assert problem["kind"] == kind, problem
        assert ranks is None or problem["ranks"] == ranks, problem
        assert self.code == int(any(finding["kind"] == "error" for finding in self.findings)), self.errors
        assert problem["remedy"]
        return problem


def clean(**more):
    """The environment without what would be a fault, or a place, of this test's own process."""
    saved_environment = {
        k: v for k, v in os.environ.items() if not k.startswith(_OURS) and k not in (*NAMES, *DEVICE_VARIABLES)
    }
    return {**saved_environment, "KERAS_BACKEND": "jax", **more}


def run_command(command, environment, timeout=60):
    """Run a command that leaves nothing behind."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as job:
        try:
            out, errors = job.communicate(timeout=timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, job.returncode, out, errors)


@pytest.fixture
def doctor():
    """Run ``choros doctor``: ``doctor(size, options, first="shell commands in each rank", NAME="value")``.

    ``outer`` are commands before all of it. ``by`` is who starts the ranks: ``"doctor"`` itself, ``"run"`` (which
    ``first`` needs), or None for one process.
    """

    def run_doctor(size, *options, by="doctor", first="", outer="", smoke=False, timeout=60, **variables):
        command = [*DOCTOR, *([] if smoke else ["--no-smoke"]), *options]
        if first:
            by = "run"
            command = ["sh", "-c", f"{first}\nexec {shlex.join(command)}"]
        if by == "doctor":
            command += ["-n", str(size)]
        elif by == "run":
            command = [sys.executable, "-m", "choros", "run", "-n", str(size), "--", *command]
        if outer:
            command = ["sh", "-c", f"{outer}\nexec {shlex.join(command)}"]
        return Report(run_command(command, clean(**variables), timeout), by == "run")

    return run_doctor


@pytest.fixture
def two_cores():
    """Two cores that this process may use."""
    if len(usable_cores()) < 2:
        pytest.skip("two ranks need two cores, and this process may use one")
    return usable_cores()[:2]


@pytest.fixture
def first_on_path(tmp_path, monkeypatch):
    """Write a file into a folder that is first on the path of ranks: of all, or of one."""

    def write(name, text):
        path = tmp_path / "first" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(tmp_path / "first") + os.pathsep + os.environ.get("PYTHONPATH", "")

    return write
