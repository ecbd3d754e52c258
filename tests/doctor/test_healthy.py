"""On a healthy job there is no finding, whoever started it; and what the report has."""

import subprocess
import sys

import pytest

from choros.backend_choice import BACKENDS
from choros.cli import main

from .conftest import DOCTOR, Report, clean, run_command


@pytest.mark.long
def test_a_healthy_job_with_its_trainings(doctor, two_cores):
    report = doctor(2, smoke=True, timeout=150)
    assert report.findings == []
    assert report.code == 0
    assert report.all["healthy"] is True
    first, second = report.all["ranks"]
    assert (first["rank"], second["rank"], second["size"]) == (0, 1, 2)
    assert first["machine"] == second["machine"]
    installed = [name for name in BACKENDS if first["versions"][name]]
    for rank in ("0", "1"):
        assert [end["backend"] for end in report.all["smoke"][rank]] == installed
        assert all(end["difference"] < 1e-6 for end in report.all["smoke"][rank])
        assert all(end["peak"] > 50_000_000 for end in report.all["smoke"][rank])
        assert all(end["gpus"] is not None for end in report.all["smoke"][rank])
    measures = report.all["measures"]
    assert len(measures["memory"]) == len(measures["clock"]) == 2
    assert measures["wrong"] == []
    assert set(measures["engines"]) == {"shared memory"}
    assert "1000" in measures["engines"]["shared memory"]["sum"]


def test_a_healthy_job_of_mpi(mpiexec, two_cores):
    command, needed = mpiexec.starting(2, *DOCTOR, "--backends", "jax")
    report = Report(run_command(command, clean(**needed)), False)
    assert report.findings == []
    assert report.code == 0
    assert set(report.all["measures"]["engines"]) == {"MPI", "shared memory"}
    assert [each["chosen"]["KMP_BLOCKTIME"] for each in report.all["ranks"]] == ["0", "0"]  # mpiexec sets no threads
    assert [end["backend"] for end in report.all["smoke"]["1"]] == ["jax"]


def test_a_library_that_dies_under_mpi_is_named_by_the_rank(mpiexec, first_on_path, two_cores):
    path = first_on_path("numpy/__init__.py", "import os\nos.kill(os.getpid(), 4)\n")
    command, needed = mpiexec.starting(2, *DOCTOR[:-1], "--timeout", "20")
    done = run_command(command, clean(**needed, PYTHONPATH=path))
    assert done.returncode != 0
    assert "ERROR sigill: Rank 0 on " in done.stdout
    assert "ERROR sigill: Rank 1 on " in done.stderr
    assert "built for another processor" in done.stderr


def test_the_words_for_people(two_cores):
    done = run_command([*DOCTOR[:-1], "-n", "2", "--no-smoke"], clean())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert rows["ranks"] == "2 by choros; exchange by: shared memory, brought by choros run"
    assert rows["memory"].endswith("B") or "limited to" in rows["memory"]
    assert "gather" in rows["engine"]
    assert done.stdout.splitlines()[-1] == "nothing to change"


def test_one_process_needs_no_exchange():
    done = run_command([*DOCTOR[:-1], "--backends", "jax"], clean())
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line)
    assert rows["ranks"] == "1 (started without a launcher); no exchange needed"
    assert rows["training"].startswith("jax: a small training agrees with a numpy reference (difference ")


def test_quiet_says_nothing_where_nothing_is_wrong():
    done = run_command([*DOCTOR[:-1], "--quiet", "--no-smoke"], clean())
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
    done = run_command([*DOCTOR[:-1], "--quiet", "--no-smoke"], clean(NCCL_SOCKET_IFNAME="nosuch"))
    assert done.returncode == 1
    assert "ERROR interface: Rank 0 on " in done.stdout


def test_ranks_are_not_started_from_ranks(capsys, monkeypatch):
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"CHOROS_{name}", value)
    assert main(["doctor", "-n", "2"]) == 2
    assert "already rank 0 of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-n", "0"], "must be a whole number of 1 or more, got 0"),
        (["--timeout", "soon"], "must be a number of seconds, got soon"),
        (["--backends", "mxnet"], "mxnet is none of jax, torch, tensorflow"),
    ],
)
def test_bad_options(arguments, why, capsys):
    assert main(["doctor", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_help_and_facts_import_no_framework_and_no_numpy():
    heavy = "('keras', 'jax', 'torch', 'tensorflow', 'numpy', 'mpi4py')"
    code = (
        "import sys; from choros.cli import main; main(['doctor', '--help']); "
        "import choros.tools.doctor.rank_check, choros.tools.doctor.report, choros.tools.doctor.facts as facts; "
        "facts.look(facts.Place()); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.splitlines()[-1] == "[]"
    assert "choros doctor -n 4" in " ".join(out.split())  # argparse breaks lines by the width of the terminal
