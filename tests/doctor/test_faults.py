"""Faults that are really there, each in a job of its own: each is named, with its ranks and its remedy."""

import os
import signal
import subprocess
import sys

import pytest

from choros.cluster.hardware import cpu_features, plan, usable_cores
from choros.launch.process.failure_report import signalled

SECOND = 'if [ "$CHOROS_RANK" = 1 ]; then {}; fi'
PLACES = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def test_more_ranks_than_cores(doctor):
    size = (os.cpu_count() or 1) + 1
    finding = doctor(size).one("oversubscribed", list(range(size)))
    assert f"{size} ranks run on {len(usable_cores())} core" in finding["what"]
    assert f"-n {size - 1}" in finding["remedy"]


def test_ranks_bound_to_one_core(doctor, two_cores):
    finding = doctor(2, first=f"taskset -p -c {two_cores[0]} $$ >/dev/null").one("bound-together", [0, 1])
    assert f"2 ranks run on 1 core ({two_cores[0]}), of the host's {os.cpu_count()}" in finding["what"]
    assert "--bind-to core" in finding["remedy"]


def test_more_threads_than_cores(doctor, two_cores):
    cores = len(plan(2)[0].cores)
    finding = doctor(2, OMP_NUM_THREADS="640").one("threads", [0, 1])
    assert "OMP_NUM_THREADS=640, but each rank has" in finding["what"]
    assert f"Set OMP_NUM_THREADS={cores}" in finding["remedy"]


def test_ranks_that_share_their_cores_with_as_many_threads_each(doctor, two_cores):
    """This is what mpiexec and srun do by default."""
    free = ",".join(map(str, usable_cores()))
    first = f"taskset -p -c {free} $$ >/dev/null; unset OMP_NUM_THREADS"
    finding = doctor(2, first=first, KERAS_BACKEND="torch").one("threads", [0, 1])
    assert f"run {2 * len(usable_cores())} threads in all, which on PyTorch wait for each other" in finding["what"]
    assert "Export OMP_NUM_THREADS=" in finding["remedy"]
    doctor(2, first=first).one("threads", [0, 1], kind="warning")


@pytest.mark.long
def test_a_rank_that_a_busy_process_slows(doctor, two_cores):
    """The bound rank gets a twentieth of its core. Other tests slow the other rank, too: then the doctor runs again."""
    core = plan(2)[1].cores[0]
    text = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    if len(plan(2)[1].cores) > 1:
        pytest.skip("each rank has several cores here, so a busy one does not slow it")
    busy = [subprocess.Popen([sys.executable, "-c", text], start_new_session=True) for _ in range(19)]
    try:
        for _ in range(4):
            report = doctor(2)
            if any(finding["name"] == "slow-rank" and finding["kind"] == "error" for finding in report.findings):
                break
        problem = report.one("slow-rank", [1])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "times as long as the others" in problem["what"]
    assert "Something else runs on its cores" in problem["what"]
    assert "--exclusive" in problem["remedy"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NCCL_SOCKET_IFNAME", "nosuch"), ("GLOO_SOCKET_IFNAME", "nosuch0"), ("CHOROS_NETWORK", "203.0.113.0/24")],
)
def test_an_interface_that_is_not_there(doctor, variable, value):
    finding = doctor(1, by=None, **{variable: value}).one("interface", [0])
    assert f"{variable}={value} names no interface" in finding["what"]
    assert f"Set {variable} to one of " in finding["remedy"]


def test_other_versions_on_one_rank(doctor, first_on_path):
    path = first_on_path("keras-3.1.4.dist-info/METADATA", "Metadata-Version: 2.1\nName: keras\nVersion: 3.1.4\n")
    finding = doctor(2, first=SECOND.format(f"export PYTHONPATH={path}")).one("versions", [1])
    assert "keras 3.1.4, where the others have 3." in finding["what"]
    assert "one environment" in finding["remedy"]


def test_another_backend_on_one_rank(doctor):
    finding = doctor(2, first=SECOND.format("export KERAS_BACKEND=torch")).one("backend", [1])
    assert "Keras' backend is torch, where the others have jax" in finding["what"]
    assert "Export the same KERAS_BACKEND" in finding["remedy"]


def test_a_backend_that_is_not_installed(user):
    done = user("-m", "choros", "doctor", "--no-smoke", KERAS_BACKEND="torch", code=1)
    assert "ERROR no-backend: Rank 0 on " in done.stdout
    assert "Keras would take torch (KERAS_BACKEND), which is not installed." in done.stdout
    assert "pip install 'choros[torch]'" in done.stdout


@pytest.mark.parametrize(("name", "reason"), [("foo", "is not a backend of Keras"), ("numpy", "cannot train a model")])
def test_a_backend_that_cannot_train(doctor, name, reason):
    finding = doctor(1, by=None, KERAS_BACKEND=name).one("no-backend", [0])
    assert f"Keras would take {name} (KERAS_BACKEND), which {reason}." in finding["what"]
    assert "Set KERAS_BACKEND to jax, torch or tensorflow" in finding["remedy"]


def test_a_processor_that_can_do_less_than_the_submitting_machines(doctor):
    if not cpu_features():
        pytest.skip("this system does not tell what its processor can do")
    message = " ".join([*cpu_features(), "avx9000"])
    finding = doctor(1, by=None, CHOROS_SUBMIT_CPU=message).one("processor", [0])
    assert "the processor has no avx9000, which the submitting machine's has" in finding["what"]
    assert finding["remedy"] == signalled("SIGILL")[1]


def test_a_rank_that_dies_of_sigill(doctor, first_on_path):
    text = "import os\nif os.environ.get('CHOROS_RANK') == '1':\n    os.kill(os.getpid(), 4)\n"
    report = doctor(2, PYTHONPATH=first_on_path("sitecustomize.py", text))
    finding = report.one("sigill", [1])
    assert "Rank 1 of 2" in finding["what"]
    assert "was ended by SIGILL (a native library was built for another processor" in finding["what"]
    assert finding["remedy"] == signalled("SIGILL")[1]
    assert report.names == ["sigill"]


@pytest.mark.parametrize(
    ("ending", "name", "message", "remedy"),
    [
        ("os._exit(3)", "died", "exited with code 3: last words", "The last lines that it printed"),
        ("os.kill(os.getpid(), 9)", "sigkill", "was ended by SIGKILL (the kernel's out-of-memory", "If memory ran out"),
    ],
)
def test_a_rank_that_ends(doctor, first_on_path, ending, name, message, remedy):
    text = "import os\nif os.environ.get('CHOROS_RANK') == '1':\n    os.write(2, b'last words\\n')\n    " + ending
    report = doctor(2, PYTHONPATH=first_on_path("sitecustomize.py", text))
    finding = report.one(name, [1])
    assert message in finding["what"]
    assert finding["remedy"].startswith(remedy)
    assert report.names == [name]


def test_a_library_that_dies_of_sigill_when_a_rank_loads_it(doctor, first_on_path):
    """The rank itself lives, and says so under every launcher."""
    path = first_on_path("numpy/__init__.py", "import os\nos.kill(os.getpid(), 4)\n")
    finding = doctor(1, by=None, PYTHONPATH=path).one("sigill", [0])
    assert "cannot load numpy: a process that tried was ended by SIGILL" in finding["what"]
    assert finding["remedy"] == signalled("SIGILL")[1]


def test_a_backend_that_dies_of_sigill_in_training(doctor, first_on_path):
    path = first_on_path("torch/__init__.py", "import os\nos.kill(os.getpid(), 4)\n")
    report = doctor(1, "--backends", "torch", by=None, smoke=True, PYTHONPATH=path)
    finding = report.one("sigill", [0])
    assert "The training on torch by rank 0" in finding["what"]
    assert finding["remedy"] == signalled("SIGILL")[1]


def test_a_backend_that_fails_in_training(doctor, first_on_path):
    path = first_on_path("torch/__init__.py", "raise ImportError('libcudart is missing.')\n")
    finding = doctor(1, "--backends", "torch", by=None, smoke=True, PYTHONPATH=path).one("training", [0])
    assert finding["what"].endswith("ImportError: libcudart is missing.")


def test_a_training_that_does_not_end(doctor, first_on_path):
    path = first_on_path("torch/__init__.py", "import time\ntime.sleep(60)\n")
    options = ["--backends", "torch", "--smoke-timeout", "2"]
    finding = doctor(1, *options, by=None, smoke=True, PYTHONPATH=path).one("training", [0])
    assert "did not end in time" in finding["what"]


def test_an_mpi_in_which_each_rank_is_alone(doctor, mpiexec):
    """The launcher said 2, the library's communicator has 1: it belongs to another MPI."""
    finding = doctor(1, by=None, **PLACES, timeout=30).one("singleton")
    assert finding["ranks"] == [0]
    assert (
        "is one of 2, says the launcher, but in its group it is rank 0 of 1: the ranks would train separate models"
        in finding["what"]
    )
    assert "which belongs to" in finding["remedy"]


def test_mpich_under_a_launcher_of_pmix(doctor, mpiexec):
    if mpiexec.open:
        pytest.skip("this MPI is Open MPI")
    place = {
        f"OMPI_COMM_WORLD_{k}": v for k, v in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "0202", strict=True)
    }
    finding = doctor(1, by=None, **place, PMIX_RANK="0").one("meeting", [0])
    assert finding["what"].startswith("Rank 0 on ")
    assert "the launcher uses PMIx, which mpi4py's MPICH" in finding["what"]
    assert finding["remedy"].startswith("Start the ranks with ")


def test_a_job_that_brings_nothing_to_meet_in(doctor):
    finding = doctor(1, by=None, JOB_COMPLETION_INDEX="0", CHOROS_COMPLETIONS="2").one("meeting", [0])
    assert finding["remedy"].startswith("Start it with `choros run -n RANKS")


def test_one_process_in_an_allocation_for_several(doctor):
    finding = doctor(1, by=None, SLURM_JOB_ID="7", SLURM_NTASKS="4").one("alone", [0], kind="warning")
    assert "srun choros doctor" in finding["remedy"]


def test_launchers_that_contradict_themselves(doctor):
    finding = doctor(1, by=None, CHOROS_RANK="9", CHOROS_SIZE="2", CHOROS_LOCAL_RANK="1", CHOROS_LOCAL_SIZE="2").one(
        "place"
    )
    assert "the rank 9 is not below the size 2" in finding["what"]


def test_two_ranks_with_the_same_gpu(doctor):
    finding = doctor(2, CUDA_VISIBLE_DEVICES="0").one("devices", [0, 1])
    assert "CUDA_VISIBLE_DEVICES gives several ranks the same GPU (0)" in finding["what"]
    assert "--gpus-per-task=1" in finding["remedy"]
    assert "devices" not in doctor(2, CUDA_VISIBLE_DEVICES="0,1").names  # each rank takes that of its local rank
    turned = "export CUDA_VISIBLE_DEVICES=$CHOROS_LOCAL_RANK,$((1 - CHOROS_LOCAL_RANK))"
    finding = doctor(2, first=turned).one("devices", [0, 1], kind="warning")
    assert "from lists that differ" in finding["what"]


def test_a_clock_that_is_ahead(doctor, first_on_path):
    ahead = "import os, time\nnow = time.time\n"
    text = ahead + "if os.environ.get('CHOROS_RANK') == '1':\n    time.time = lambda: now() + 5\n"
    finding = doctor(2, PYTHONPATH=first_on_path("sitecustomize.py", text)).one("clock", [1], kind="warning")
    assert "s ahead of rank 0's" in finding["what"]
    assert "NTP" in finding["remedy"]


def test_few_open_files(doctor):
    finding = doctor(2, first="ulimit -S -n 128").one("open-files", [0, 1])
    assert "128 open files are allowed" in finding["what"]
    assert finding["remedy"].startswith("ulimit -n ")


def test_a_limit_of_addresses(doctor):
    finding = doctor(2, outer="ulimit -v 4000000").one("memory", [0, 1])
    assert "the address space is limited to 4.1 GB" in finding["what"]
    assert "ulimit -v unlimited" in finding["remedy"]
    assert doctor(2, first="ulimit -v 2000000").names == [
        "meeting",
        "memory",
    ]  # in what choros run made without a limit


def test_another_working_directory(doctor):
    finding = doctor(2, first=SECOND.format("cd /")).one("directory", [1], kind="warning")
    assert "the working directory is /, where the others have" in finding["what"]


def test_a_rank_that_never_comes(doctor):
    report = doctor(2, "--timeout", "3", first=SECOND.format("kill -STOP $$"))
    finding = report.one("missing", [1])
    assert "rank 1" in finding["what"]


def test_cores_that_are_left_idle(doctor, two_cores):
    """As Open MPI leaves them, which binds a rank to one core."""
    if len(usable_cores()) != 2:
        pytest.skip("one rank on one core leaves half of the cores idle where there are two")
    finding = doctor(1, first=f"taskset -p -c {two_cores[0]} $$ >/dev/null").one("idle-cores", [0], kind="warning")
    assert "bound to 1 core in all, of the 2" in finding["what"]
    assert "--bind-to none" in finding["remedy"]


def test_signals_have_one_place_for_their_words():
    assert all(signalled(number.name) != ("", "") for number in (signal.SIGILL, signal.SIGKILL, signal.SIGTERM))
