"""The scripts that ``choros submit --dry-run`` prints: as they were read and found right, and sound for the shell.

After a change that is meant, ``CHOROS_WRITE_GOLDEN=1 pytest tests/submit`` writes them anew, to be read in the diff.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from choros.cli import main
from choros.launch.schedulers import SCHEDULERS, Job, load_site, site_names
from choros.launch.schedulers.mpiexec import launch_line
from choros.launch.schedulers.shell_script import rank_script

GOLDEN = pathlib.Path(__file__).parent / "golden"
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

SIZE = "--nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python"
ALL = f"{SIZE} --gpus 1 --threads-per-core 2 --account phys --queue long --env A='b c' --setup 'module load conda'"
WRAP = "--wrap 'vtune -collect hotspots -r out.%r --'"
CASES = {
    "slurm.sh": f"--on slurm {SIZE} --mpi mpich",
    "slurm-all.sh": f"--on slurm {ALL} {WRAP} --mpi openmpi --signal 120 -o --exclusive -o '--mail-type=END'",
    "slurm-smallest.sh": "--on slurm --python python --mpi cray_shasta --signal 0",
    "slurm-frontier.sh": "--site frontier --nodes 4 --time 2h --account phys --queue batch --python python",
    "slurm-lumi.sh": "--site lumi --nodes 2 --time 30m --account project_1 --queue standard-g --python python",
    "slurm-perlmutter.sh": "--site perlmutter --nodes 2 --time 30m --account m1 --queue regular --python python",
    "pbs.sh": f"--on pbs {SIZE} --mpi mpich",
    "pbs-all.sh": f"--on pbs {ALL} {WRAP} --mpi openmpi -o '-l filesystems=home:eagle' -o '-m abe'",
    "pbs-polaris.sh": f"--site polaris --nodes 2 --time 1h --account a --queue debug --filesystems home:eagle {WRAP} "
    "--python python",
    "pbs-aurora.sh": "--site aurora --nodes 2 --time 1h --account a --filesystems home:flare --python python",
    "flux.sh": f"--on flux {ALL} {WRAP} -o --exclusive",
    "lsf.sh": f"--on lsf {ALL} {WRAP} --mpi jsrun",
    "lsf-mpich.sh": f"--on lsf {SIZE} --gpus 1 --mpi mpich",
    "sge.sh": f"--on sge {SIZE} --mpi openmpi",
    "sge-all.sh": f"--on sge {ALL} {WRAP} --mpi mpich -o '-pe orte 64'",
    "k8s-job.json": f"--on k8s {SIZE} --gpus 1 --env A=b --queue team --image me/train:1 {WRAP}",
    "k8s-job-one-node.json": "--on k8s --ranks-per-node 4 --cores 2 --image me/train:1",
    "k8s-jobset.json": f"--on k8s {SIZE} --image me/train:1 --kind jobset",
    "spark.sh": f"--on spark --master spark://head:7077 {SIZE.replace(' --time 1:30:00', '')} --env A='b c' --gpus 1",
    "spark-yarn.sh": "--on spark --master yarn --nodes 3 --cores 4 --queue long --python python --archive env.tar.gz "
    "-o '--deploy-mode client' -o '--conf spark.executor.memory=8g' --setup 'module load conda'",
    "spark-connect.sh": "--on spark --master sc://head:15002 --python python --env A=b",
    "k8s-trainjob.json": f"--on k8s {SIZE} --image me/train:1 --kind trainjob --runtime jax-distributed",
}


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Return the output of --dry-run beside a script, on a machine with a known processor."""
    monkeypatch.setenv("CHOROS_SUBMIT_CPU", "avx avx2")
    monkeypatch.setenv("CHOROS_SECRET", "ab" * 32)
    monkeypatch.chdir(tmp_path)
    for name in ("env.tar.gz", "train.py"):
        (tmp_path / name).touch()

    def dry_run(options, target="train.py --epochs 3"):
        assert main(["submit", *shlex.split(options), "--dry-run", *shlex.split(target)]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["env.tar.gz", "train.py"]  # nothing was written
        return capsys.readouterr().out

    return dry_run


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_as_it_was_read(printed, name):
    text, file = printed(CASES[name]), GOLDEN / name
    if os.environ.get("CHOROS_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(".sh")])
def test_the_shell_reads_it(name):
    done = subprocess.run(["bash", "-n", GOLDEN / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_file_has_a_case_and_every_scheduler_and_site_a_file():
    assert {path.name for path in GOLDEN.iterdir()} == CASES.keys()
    assert {name.partition(".")[0].partition("-")[0] for name in CASES} == SCHEDULERS.keys()
    named = {word for options in CASES.values() for word in options.split()}
    assert set(site_names()) - {"generic"} <= named


def test_every_site_names_its_source():
    for name in set(site_names()) - {"generic"}:
        site = load_site(name)
        assert site.source
        assert all("20" in source for source in site.source), f"{name}: when was it read?"
        assert site.scheduler in SCHEDULERS


JOBS = [f"{name}.{scheduler}.sh" for name in ("hvd_linear_regression", "hvd_mnist") for scheduler in ("slurm", "pbs")]


@pytest.mark.parametrize("name", [*JOBS, "hvd_mnist.polaris.pbs.sh"])
def test_the_examples_scripts_are_what_submit_prints(name, monkeypatch, capsys):
    """Each says in its second line how it was made."""
    file = EXAMPLES / "jobs" / name
    written = file.read_text().splitlines()[1].removeprefix("# Written by: choros submit ")
    monkeypatch.setenv("CHOROS_SUBMIT_CPU", "")
    monkeypatch.chdir(EXAMPLES)
    assert main(["submit", "--dry-run", *shlex.split(written)]) == 0
    text = capsys.readouterr().out
    if os.environ.get("CHOROS_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def shell(job, launcher, **environment):
    """Become a rank, in this very machine's shell."""
    arguments = ["bash", "-c", rank_script(job, launcher), "rank", *job.command]
    environment = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("site", "launcher", "name", "rank", "gpus", "expected"),
    [
        ("polaris", "pals", "PALS_LOCAL_RANKID", 0, 1, "3"),
        ("polaris", "pals", "PALS_LOCAL_RANKID", 3, 1, "0"),
        ("polaris", "pals", "PALS_LOCAL_RANKID", 1, 2, "1,0"),
        ("polaris", "pals", "PMI_LOCAL_RANK", 3, 1, "0"),
        ("perlmutter", "srun", "SLURM_LOCALID", 1, 1, "2"),
        ("generic", "openmpi", "OMPI_COMM_WORLD_LOCAL_RANK", 1, 2, "2,3"),
        ("generic", "", "MPI_LOCALRANKID", 0, 1, "0"),
    ],
)
def test_a_rank_is_shown_its_own_gpus(site, launcher, name, rank, gpus, expected):
    needs = {"account": "a", "directives": ("-l filesystems=home",)}
    command = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    job = Job(command, "a", ranks_per_node=4 // gpus, gpus=gpus, site=load_site(site), **needs)
    assert shell(job, launcher, **{name: str(rank)}).strip() == expected


def test_the_gpus_that_a_scheduler_gave_are_those_that_are_divided():
    job = Job(("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"), "a", ranks_per_node=2, gpus=1)
    inputs = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "MPI_LOCALRANKID": "1"}
    assert shell(job, "", **inputs).strip() == "GPU-b"


@pytest.mark.parametrize("gpus", [1, 2])
def test_frontier_gives_each_rank_the_gpus_that_were_asked_for(gpus, printed):
    text = printed(f"--on slurm --site frontier --account a --ranks-per-node 4 --gpus {gpus}")
    assert f"#SBATCH --gpus-per-task={gpus}\n" in text
    assert f" --gpus-per-task={gpus} " in text


def test_words_reach_the_rank_as_they_were_given():
    command = ("python3", "-c", "import sys; print(sys.argv[1:])", "a b", "$HOME", "it's", '"', "*", "")
    job = Job(command, "a", wrap=("env", "R=%r"))
    assert shell(job, "srun", SLURM_PROCID="5").strip() == str(list(command[3:]))
    show = Job(("sh", "-c", 'echo "$R|$X"'), "a", wrap=("env", "R=%r.%r", "X=$Y z"))
    assert shell(show, "srun", SLURM_PROCID="5").strip() == "5.5|$Y z"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed; .ci/run installs it")
def test_a_wrapper_is_what_runs_the_rank(tmp_path):
    job = Job(("true",), "a", wrap=("strace", "-o", f"{tmp_path}/out.%r", "--"))
    shell(job, "", PMI_RANK="3")
    assert 'execve("' in (tmp_path / "out.3").read_text()


def test_a_whole_script_runs_its_ranks_and_asks_for_another_turn(printed, tmp_path):
    """PBS' script, with an mpiexec and a qsub that write down how they were called."""
    text = printed("--on pbs --python python3 --mpi mpich --time 10m --setup 'export SET=up'", "train.py 'a b'")
    bin = tmp_path / "bin"
    bin.mkdir()
    report = '#!/bin/sh\necho "$(basename $0) $*" >>"$TOLD"\n'
    (bin / "qsub").write_text(report)
    (bin / "mpiexec").write_text(report + 'echo "$SET $OMP_NUM_THREADS $(($CHOROS_STOP_AT - $(date +%s)))" >>"$TOLD"\n'
                                 '[ -z "$SAVED" ] || touch "$CHOROS_REQUEUE"\nexit 3\n')  # fmt: skip
    for file in bin.iterdir():
        file.chmod(0o755)
    message = tmp_path / "told"
    environment = {"PATH": f"{bin}:{os.environ['PATH']}", "TOLD": str(message), "PBS_O_WORKDIR": str(tmp_path)}
    environment |= {"PBS_JOBID": "7.here", "PBS_NODEFILE": "/nodes"}

    def run(**more):
        message.unlink(missing_ok=True)
        command = ["bash", "-c", text]
        done = subprocess.run(command, env={**environment, **more}, cwd="/", capture_output=True, text=True)
        return done.returncode, done.stdout, message.read_text().splitlines()

    code, output, lines = run()
    assert code == 3
    assert output == "choros: the ranks ended with code 3\n"
    assert lines[0] == 'mpiexec -n 1 -ppn 1 -f /nodes bash -c trap "" USR2; exec "$@" rank python3 train.py a b'
    up, threads, remaining = lines[1].split()
    assert (up, threads) == ("up", "1")
    assert 505 <= int(remaining) <= 510
    code, output, lines = run(SAVED="1")
    assert code == 0
    assert "stopped before the time limit" in output
    assert lines[-1] == "qsub train.pbs.sh"
    assert not list(tmp_path.glob(".choros*"))


def test_grid_engine_is_given_the_sites_own_and_told_what_it_decides(printed):
    size = "--on sge --nodes 2 --ranks-per-node 4 --cores 8 --gpus 1 --mpi mpich"
    text = printed(size)
    assert "#$ -pe mpi 64" in text
    assert "#$ -l gpu=1" in text
    assert "\n# meant are 2, by an allocation_rule of 32. Name one that has it by -o '-pe NAME 64'.\n" in text
    assert "consumable is YES, once where it is JOB\n# (qconf -sc): meant are 8 in all." in text
    assert "    exit 99\nfi" in text  # nothing after it would ever run
    text = printed(f"{size} -o '-pe x 64' -o '-l gpus_per_host=4'")
    assert "gpu=1" not in text
    assert "consumable" not in text
    assert "allocation_rule" not in text


def test_pods_find_each_other_and_their_place(printed):
    """The pods know the address of the first, their number, and the secret, which is not in the job itself."""
    job, env = None, {}
    for kind in ("job", "jobset", "trainjob"):
        secret, *rest = json.loads(printed(f"--on k8s --nodes 3 --image i --kind {kind}"))["items"]
        made = rest[-1]
        assert secret["stringData"] == {"secret": "ab" * 32}
        assert "ab" * 32 not in json.dumps(rest)
        if kind == "job":
            service, job = rest
            assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "train"
            assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
            env = job["spec"]["template"]["spec"]["containers"][0]["env"]
        elif kind == "jobset":
            env = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
        else:
            env = made["spec"]["trainer"]["env"]
        facts = {result["name"]: result["value"] for result in env if "value" in result}
        source = next(result["valueFrom"]["secretKeyRef"] for result in env if result["name"] == "CHOROS_SECRET")
        assert source == {"name": secret["metadata"]["name"], "key": "secret"}
        assert facts["CHOROS_COMPLETIONS"] == "3"
        assert facts["OMP_NUM_THREADS"] == "1"
        assert facts["CHOROS_STOP_SIGNALS"] == "SIGTERM"
    from choros.cluster import Place

    assert Place.here({**facts, "JOB_COMPLETION_INDEX": "2"}).rank == 2


def test_pods_get_words_and_values_as_they_were_given(printed):
    """The kubelet replaces $(NAME) by a variable and $$ by $, which is all that it replaces."""
    inputs = {"A": "p$$w", "B": "$(A)", "C": "$HOME ${A}"}
    env = " ".join(shlex.quote(f"--env={name}={value}") for name, value in inputs.items())
    job = json.loads(printed(f"--on k8s --image i --name {'a' * 39}-b {env}", "train.py 'x$$y' '$(A)'"))["items"][-1]
    assert job["metadata"]["name"] == "a" * 39  # of 40 characters the last would be a dash
    container = job["spec"]["template"]["spec"]["containers"][0]

    def kubelet(text):
        assert not re.search(r"(?<!\$)(\$\$)*\$\(", text), text
        return text.replace("$$", "$")

    facts = {result["name"]: kubelet(result["value"]) for result in container["env"]}
    assert inputs.items() <= facts.items()
    command = list(map(kubelet, container["command"]))
    assert command[-2:] == ["x$$y", "$(A)"]
    assert command[2].endswith('exec "$@"')


@pytest.mark.parametrize("on", ["pbs --mpi mpich", "flux"])
def test_the_next_turn_is_asked_for_where_the_first_one_was(printed, tmp_path, monkeypatch, on):
    """Wherever a line of --setup has gone meanwhile."""
    text = printed(f"--on {on} --setup 'cd /'")
    requested = next(line for line in text.splitlines() if "qsub" in line or "flux --parent" in line)
    for name in ("qsub", "flux"):
        (tmp_path / name).write_text("#!/bin/sh\npwd\n")
        (tmp_path / name).chmod(0o755)
    begin = [line for line in text.splitlines() if line == "begun_in=$PWD"]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    shell = "\n".join(["cd there", *begin, "cd /", requested])
    (tmp_path / "there").mkdir()
    environment = {**os.environ, "PBS_O_WORKDIR": str(tmp_path / "there")}
    output = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert output.stdout.strip() == str(tmp_path / "there")


@pytest.mark.parametrize("names", ["home:eagle", "home,eagle"])
@pytest.mark.parametrize("site", ["--on pbs --mpi pals", "--site polaris --account a", "--site aurora --account a"])
def test_file_systems_are_a_resource_of_pbs(printed, site, names):
    """Also on a site that does not need them: its server decides."""
    lines = printed(f"{site} --filesystems {names}").splitlines()
    assert [line for line in lines if "filesystems=" in line] == ["#PBS -l filesystems=home:eagle"]


def test_file_systems_replace_those_of_the_file_of_the_site(printed, tmp_path_factory):
    file = tmp_path_factory.mktemp("site") / "mine.toml"
    file.write_text('scheduler = "pbs"\nmpi = "pals"\ndirectives = ["-l filesystems=home", "-m abe"]\n')
    assert "#PBS -l filesystems=home\n#PBS -m abe\n" in printed(f"--site {file}")
    text = printed(f"--site {file} --filesystems eagle")
    assert "#PBS -l filesystems=eagle\n" in text
    assert "filesystems=home" not in text
    assert "#PBS -m abe\n" in text


@pytest.mark.parametrize(
    "directive",
    ["-l filesystems=home", "-lfilesystems=home", "-l walltime=1:00:00,filesystems=home", "-m abe -l filesystems=home"],
)
def test_a_directive_with_file_systems_is_enough_for_a_site_that_needs_them(printed, directive):
    assert f"#PBS {directive}\n" in printed(f"--site polaris --account a -o '{directive}'")


def test_open_mpi_is_told_which_variables_to_take_along():
    line = launch_line(Job(("a",), "a", mpi="openmpi", env=(("MINE", "1"),)))
    assert " -x MINE " in line
    assert " -x OMP_NUM_THREADS " in line
    assert "CHOROS_STOP_AT" not in line  # there is no limit


def test_the_lines_of_the_readme_and_the_documentation_work(printed):
    pages = [EXAMPLES.parent / "README.md", *sorted((EXAMPLES.parent / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    lines = [line.partition("   #")[0] for line in text.splitlines() if re.match("choros submit .* train.py", line)]
    assert len(lines) >= 7
    assert any("--site polaris" in line for line in lines)
    for line in lines:
        options, script, arguments = line.removeprefix("choros submit ").replace("--dry-run", "").partition("train.py")
        assert f" {script}{arguments}".rstrip() in printed(options, script + arguments)
