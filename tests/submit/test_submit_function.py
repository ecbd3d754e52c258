"""``choros.submit``: functions in a scheduler's job, with commands of SLURM that are simulated by shell scripts.

``tests/real/test_submit_function.py`` has a real SLURM.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

import choros
from choros.errors import CommTimeoutError, NotSerializableError, SchedulerError

SBATCH = """\
#!/bin/sh
for script in "$@"; do :; done
echo RUNNING >state
( bash "$script" >job-17.log 2>&1; echo COMPLETED >state ) </dev/null >/dev/null 2>&1 &
echo $! >pid
echo 17
"""
SRUN = """\
#!/bin/bash
n=1
while [ "${1#-}" != "$1" ]; do case $1 in --ntasks-per-node=*) n=${1#*=};; esac; shift; done
export SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_TASKS=$n SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1
export SLURM_STEP_TASKS_PER_NODE=$n
code=0 pids=
for rank in $(seq 0 $((n - 1))); do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids="$pids $!"; done
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""
SCONTROL = """\
#!/bin/sh
echo "JobId=17 JobName=job JobState=$(cat state) RunTime=00:00:01 TimeLimit=01:00:00 NodeList=n1 StdOut=$PWD/job-17.log"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return the current directory, where commands of SLURM run one job of one node at a time."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    yield tmp_path
    state = tmp_path / "state"
    end = time.monotonic() + 60
    while state.exists() and state.read_text() != "COMPLETED\n" and time.monotonic() < end:
        time.sleep(0.05)


def submit(*args, **options):
    return choros.submit(*args, **{"on": "slurm", "ranks_per_node": 2, "mpi": "none", "name": "job", **options})


def folders(directory):
    return [path for path in directory.iterdir() if path.name.startswith(".choros-job-")]


def test_the_results_of_all_ranks_are_returned_in_rank_order(slurm, capfd):
    factor = 3

    def scaled(value, plus=0):
        import os

        print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
        place = choros.Place.here()
        return place.rank, place.size, factor * value + plus

    job = submit(scaled, (7,), {"plus": 1}, cores=2)
    assert (job.id, job.on, job.size, job.directory) == ("17", "slurm", 2, str(slurm))
    assert repr(job).startswith("SubmittedJob(id='17', on='slurm', size=2, folder=")
    assert os.stat(job.folder).st_mode & 0o077 == 0
    assert job.results(60) == [(0, 2, 22), (1, 2, 22)]
    assert job.result() == (0, 2, 22)
    assert job.done()
    assert "job 17 (job): " in job.status()
    capfd.readouterr()
    job.log(follow=True)
    assert capfd.readouterr().out.count("threads 2") == 2


def test_another_process_reads_the_results(slurm):
    job = submit(lambda: "a result")
    code = "import choros, sys; print(choros.SubmittedJob.load(sys.argv[1]).results(60))"
    printed = subprocess.run([sys.executable, "-c", code, job.folder], cwd="/", capture_output=True, text=True)
    assert printed.stdout == "['a result', 'a result']\n", printed.stderr
    job.delete()
    assert not os.path.exists(job.folder)
    job.delete()
    with pytest.raises(choros.InvalidInputError, match="the folder of job 17 is gone"):
        job.results()
    with pytest.raises(choros.InvalidInputError, match="is not the folder of a job"):
        choros.SubmittedJob.load(job.folder)


def test_functions_of_modules_are_imported_by_the_ranks(slurm, monkeypatch):
    (slurm / "library").mkdir()
    (slurm / "library" / "mine.py").write_text("def here():\n    return __name__\n")
    monkeypatch.syspath_prepend(slurm / "library")
    import mine

    assert submit(mine.here).results(60) == ["mine", "mine"]


def test_a_rank_that_raises_is_named_with_its_traceback(slurm):
    def fail():
        if choros.Place.here().rank == 1:
            raise RuntimeError("no more memory")
        return 0

    job = submit(fail)
    with pytest.raises(choros.WorkerFailedError, match="rank 1 of 2 .* raised RuntimeError: no more memory") as caught:
        job.results(60)
    assert caught.value.rank == 1
    assert 'raise RuntimeError("no more memory")' in caught.value.traceback
    assert "job_entry" not in caught.value.traceback


def test_a_job_that_ends_without_results_names_the_ranks_and_the_log(slurm, monkeypatch):
    monkeypatch.setattr("choros.launch.submit_function._FILE_DELAY_SECONDS", 0.5)

    def end():
        if choros.Place.here().rank == 1:
            os._exit(9)

    job = submit(end)
    with pytest.raises(SchedulerError, match=r"job 17 ended without a result of rank 1 of 2 \(job 17 \(job\): COMPLE"):
        job.results(60)


def test_an_end_before_the_time_limit_is_no_result(slurm, monkeypatch):
    """The job's next turn answers; so the code that requeues the job is that of the ranks."""
    monkeypatch.setattr("choros.launch.submit_function._FILE_DELAY_SECONDS", 0.1)
    job = submit(lambda: sys.exit(75), ranks_per_node=1)
    with pytest.raises(SchedulerError, match="without a result of rank 0 of 1"):
        job.results(60)
    assert "the ranks ended with code 75" in (slurm / "job-17.log").read_text()
    assert sorted(os.listdir(job.folder)) == ["call", "job.json", "job.slurm.sh"]


def test_the_wait_has_a_limit_and_the_job_goes_on(slurm):
    job = submit(lambda: time.sleep(3))
    assert not job.done()
    with pytest.raises(CommTimeoutError, match=r"job 17 has not ended after 0.5 s \(job 17 \(job\): RUNNING"):
        job.results(0.5)
    with pytest.raises(choros.InvalidInputError, match="job 17 has not ended: cancel it first"):
        job.delete()
    assert job.results() == [None, None]


def test_a_scheduler_that_does_not_answer_for_a_while_does_not_end_the_wait(slurm, caplog):
    scontrol = (slurm / "bin" / "scontrol").read_text()
    job = submit(lambda: time.sleep(4))
    (slurm / "bin" / "scontrol").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    with pytest.raises(SchedulerError, match="slurm does not answer"):
        job.done()
    with pytest.raises(CommTimeoutError, match="job 17 has not ended after 1.5 s"):
        job.results(1.5)
    assert "waiting for job 17: slurm does not answer" in caplog.text
    (slurm / "bin" / "scontrol").write_text(scontrol)
    assert job.results(60) == [None, None]


@pytest.mark.parametrize("failure", ["slurm_load_jobs error: Socket timed out on send/recv operation", None])
def test_a_question_that_fails_is_not_the_end_of_the_job(slurm, failure):
    """``delete`` would remove the folder of a running job."""
    scontrol = slurm / "bin" / "scontrol"
    text = scontrol.read_text()
    job = submit(lambda: time.sleep(3))
    if failure is None:
        scontrol.unlink()
    else:
        scontrol.write_text(f"#!/bin/sh\necho {failure} >&2\nexit 1\n")
    for call in (job.done, job.delete, job.cancel):
        with pytest.raises(choros.ChorosError, match="Socket timed out" if failure else "not answer|no scontrol"):
            call()
    assert os.path.isdir(job.folder)
    scontrol.write_text(text)
    scontrol.chmod(0o755)
    assert job.results(60) == [None, None]


def test_a_job_that_the_scheduler_has_forgotten_has_ended(slurm):
    job = submit(lambda: 1)
    assert job.results(60) == [1, 1]
    scontrol = slurm / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2\nexit 1\n")
    assert job.done()
    assert not job.cancel()


def test_lines_that_a_site_adds_are_no_id(slurm):
    sbatch = (slurm / "bin" / "sbatch").read_text()
    (slurm / "bin" / "sbatch").write_text(sbatch.replace("echo RUNNING", "echo Welcome to the cluster\necho RUNNING"))
    assert submit(lambda: 1).id == "17"


def test_the_result_of_rank_0_needs_no_other_value(slurm):
    class Own:
        def __reduce__(self):
            return int, ("no number",)

    job = submit(lambda: 5 if choros.Place.here().rank == 0 else Own())
    assert job.result(60) == 5
    with pytest.raises(NotSerializableError, match="what rank 1 returned"):
        job.results()


def test_a_value_that_cannot_be_sent_is_named(slurm):
    job = submit(threading.Lock)
    with pytest.raises(choros.WorkerFailedError, match="what rank 0 returned, a _thread.lock, cannot be sent"):
        job.results(60)


def test_other_users_files_are_not_read(slurm):
    job = submit(lambda: 1)
    assert job.results(60) == [1, 1]
    os.chmod(os.path.join(job.folder, "answer.1"), 0o644)
    with pytest.raises(choros.InvalidInputError, match="belongs to another user, or other users may read or write it"):
        job.results(60)


def test_a_call_that_changed_is_not_run(slurm, tmp_path):
    """The digest is in the script, which the scheduler copies when the job is submitted."""
    wait = tmp_path / "go"
    job = submit(lambda: 1, setup=[f"while [ ! -e {wait} ]; do sleep 0.1; done"], python=sys.executable)
    with open(os.path.join(job.folder, "call"), "ab") as file:
        file.write(b"!")
    wait.touch()
    with pytest.raises(SchedulerError, match="without a result of ranks 0, 1 of 2"):
        job.results(60)
    assert "is not what choros.submit wrote there: it is not used." in (slurm / "job-17.log").read_text()


def no_scheduler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        submit(print, on="", mpi="")


REFUSED = {
    "choros.submit was given 3 to call": lambda: submit(3),
    "args is of type str": lambda: submit(print, "ab"),
    "nodes=0: give a whole number, 1 or more": lambda: submit(print, nodes=0),
    "there is no site 'polariss': did you mean polaris": lambda: submit(print, on="", site="polariss"),
    "there is no scheduler 'slrum': did you mean slurm?": lambda: submit(print, on="slrum"),
    "there is no scheduler 'xyz': known are slurm, pbs, flux, lsf, sge": lambda: submit(print, on="xyz"),
    "no scheduler is here (looked on PATH for": lambda: no_scheduler(),
    "Without site no preset is used": lambda: submit(print, on="", site="zzzz"),
    "the site Polaris has pbs: leave on='slurm' out, or site='polaris'": lambda: submit(print, site="polaris"),
    "refuses a job without an account: give account='PROJECT'": lambda: submit(print, on="", site="polaris", mpi=""),
    "that it uses, such as filesystems='home:eagle'": lambda: submit(print, on="", site="polaris", account="a", mpi=""),
    "filesystems is for on='pbs': slurm has no use for it": lambda: submit(print, filesystems="home"),
    "filesystems must be names of letters, digits, _ and -, with colons between them, as in filesystems='home:eagle'; "
    "got 'a b'": lambda: submit(print, on="pbs", mpi="pals", filesystems="a b"),
    "with colons between them, as in filesystems='home:eagle'; got ''": lambda: submit(
        print, on="pbs", mpi="pals", filesystems=""
    ),
    "filesystems=['home']: give the names of file systems, such as 'home:eagle'": lambda: submit(
        print, filesystems=["home"]
    ),
    "filesystems='eagle' and directives=['-l filesystems=home'] both name the job's": lambda: submit(
        print, on="pbs", mpi="pals", filesystems="eagle", directives=["-l filesystems=home"]
    ),
    "mpi is for on='slurm' or 'pbs' or 'lsf' or 'sge': flux has": lambda: submit(print, on="flux", mpi="mpich"),
    "mpi='foo' is none of": lambda: submit(print, on="pbs", mpi="foo"),
    "mpi='list': give a value": lambda: submit(print, mpi="list"),
    "queue must be one word, got 'a b'": lambda: submit(print, queue="a b"),
    "signal counts back from the time limit, and the script for pbs has none: give time too": lambda: submit(
        print, on="pbs", mpi="mpich", signal=60
    ),
    "give a longer time, or a shorter signal (0 for none)": lambda: submit(print, time="60s"),
    "setup must be one line, got 'a\\nb': give an item for each line": lambda: submit(print, setup=["a\nb"]),
    "as in directives=['-l filesystems=home']": lambda: submit(print, directives=["x"]),
    "for batch schedulers, and k8s is none: use choros submit": lambda: submit(print, on="k8s", mpi=""),
    "for batch schedulers, and spark is none: Trainer": lambda: submit(print, on="spark", mpi=""),
    "time must be as 1:30:00": lambda: submit(print, time="30"),
    "env={'a-b': ...}: a variable's name has": lambda: submit(print, env={"a-b": 1}),
    "not a directive, which begins with a dash": lambda: submit(print, directives=["exclusive"]),
    "must begin with a letter": lambda: submit(print, name="1"),
    "there is no qsub on PATH": lambda: submit(print, on="pbs", mpi="mpich"),
    "nodes='two': give a whole number": lambda: submit(print, nodes="two"),
    "gpus=True: give a whole number": lambda: submit(print, gpus=True),
    "gpus=-1: give a whole number, 0 or more": lambda: submit(print, gpus=-1),
    "cores=0: give a whole number, 1 or more": lambda: submit(print, cores=0),
    "ranks_per_node=0: give a whole number, 1 or more": lambda: submit(print, ranks_per_node=0),
    "signal=-1: give a whole number, 0 or more": lambda: submit(print, signal=-1),
    "time=30: give a time limit, such as '1:30:00' or '90m'": lambda: submit(print, time=30),
    "setup='a': give a list of texts, such as setup=['a']": lambda: submit(print, setup="a"),
    "env='A=1': give a dict": lambda: submit(print, env="A=1"),
    "env={'A': None}: give a dict": lambda: submit(print, env={"A": None}),
    "the job's name 'a/b' must begin with a letter": lambda: submit(print, name="a/b"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_leaves_nothing(slurm, message):
    with pytest.raises(choros.InvalidInputError) as caught:
        REFUSED[message]()
    assert message in str(caught.value)
    assert not re.search(r"(?<!srun )--[a-z]|-o\b", str(caught.value)), "an option of the command line"
    assert not folders(slurm)


def test_a_value_that_srun_may_not_know_is_warned_of(slurm):
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\necho 17\n")
    with pytest.warns(UserWarning, match="mpi='foo' is not a value that SLURM has: known are .*; srun refuses"):
        submit(print, mpi="foo")


def test_file_systems_are_in_the_script_for_pbs(slurm):
    for name in ("qsub", "qstat"):
        (slurm / "bin" / name).write_text("#!/bin/sh\necho 17\n")
        (slurm / "bin" / name).chmod(0o755)
    job = submit(print, on="", site="polaris", account="a", mpi="", ranks_per_node=None, filesystems="home,eagle")
    script = (slurm / job.folder / "job.pbs.sh").read_text()
    assert "#PBS -l filesystems=home:eagle\n" in script


def test_answers_of_an_earlier_run_of_the_job_are_gone_before_its_ranks_start(slurm):
    """Rank 1 answers again while rank 0 of the requeued job is still starting."""
    job = submit(lambda: 1)
    assert job.results(60) == [1, 1]
    for rank in (0, 1, 9):
        (slurm / job.folder / f"answer.{rank}").touch()
    script = (slurm / job.folder / "job.slurm.sh").read_text()
    lines = script.splitlines()
    first = next(line for line in lines if not line.startswith("#"))
    assert first == f"rm -f {job.folder}/answer.*"
    subprocess.run(["bash", "-c", first], check=True)
    assert not [name for name in os.listdir(job.folder) if name.startswith("answer")]


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), True])
def test_a_timeout_that_is_no_number_is_refused(slurm, timeout):
    job = submit(lambda: 1)
    for call in (job.results, job.result):
        with pytest.raises(
            choros.InvalidInputError, match="timeout=.*: give a number of seconds, or None for no limit"
        ):
            call(timeout)


def test_a_folder_that_is_no_path_is_refused():
    with pytest.raises(choros.InvalidInputError, match="folder=None: give a path"):
        choros.SubmittedJob.load(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on": "slrum"}, "job.json: there is no scheduler 'slrum': did you mean slurm"),
        ({"size": "2"}, "job.json: size='2': give a whole number of ranks, 1 or more"),
        ({"id": 17}, "job.json: id=17: give the text that choros.submit gave it"),
        ({"more": 1}, "is not the folder of a job"),
    ],
)
def test_a_record_that_no_job_has_is_refused(slurm, change, message):
    job = submit(lambda: 1)
    file = slurm / job.folder / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(choros.InvalidInputError, match=message):
        choros.SubmittedJob.load(job.folder)


def test_a_record_that_other_users_may_read_is_named(slurm):
    job = submit(lambda: 1)
    file = os.path.join(job.folder, "job.json")
    os.chmod(file, 0o644)
    with pytest.raises(choros.InvalidInputError, match="job.json .*other users may read or write it: .*chmod 600"):
        choros.SubmittedJob.load(job.folder)
    with pytest.raises(choros.InvalidInputError, match="there is no scheduler 'no'"):
        choros.SubmittedJob("1", "no", 1, job.folder, ".")


def test_what_cannot_be_pickled_leaves_nothing(slurm):
    with pytest.raises(NotSerializableError, match="argument 0, a _thread.lock, cannot be sent"):
        submit(print, (threading.Lock(),))
    assert not folders(slurm)


def test_what_the_scheduler_refuses_leaves_nothing(slurm):
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\necho sbatch: error: Invalid account >&2\nexit 1\n")
    with pytest.raises(SchedulerError, match=r"No job was submitted\. sbatch printed: sbatch: error: Invalid account$"):
        submit(print)
    assert not folders(slurm)


def test_a_job_that_may_have_been_submitted_keeps_its_folder(slurm):
    sbatch = (slurm / "bin" / "sbatch").read_text()
    (slurm / "bin" / "sbatch").write_text(sbatch.replace("echo 17", "echo '***'"))
    with pytest.raises(SchedulerError, match="sbatch may have submitted .*job.slurm.sh, and printed no") as caught:
        submit(print)
    assert "No job was submitted" not in str(caught.value)
    assert len(folders(slurm)) == 1


def test_a_rank_submits_nothing(slurm, monkeypatch):
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"CHOROS_{name}", value)
    with pytest.raises(choros.InvalidInputError, match="this process is already rank 0 of 2"):
        submit(print)


def test_the_backend_and_the_variables_of_the_user_reach_the_ranks(slurm, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")

    def variables():
        return os.environ["KERAS_BACKEND"], os.environ["MINE"]

    job = submit(variables, env={"MINE": "a b"}, ranks_per_node=1)
    assert job.results(60) == [("torch", "a b")]
    script = (slurm / job.folder / "job.slurm.sh").read_text()
    assert "export KERAS_BACKEND=torch" in script
    assert json.loads((slurm / job.folder / "job.json").read_text())["id"] == "17"
