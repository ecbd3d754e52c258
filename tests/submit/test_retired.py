"""``--launcher aprun`` and ``--on cobalt``, which were Theta's: each is refused with the line of today, which works."""

import itertools
import shlex
import subprocess
import sys

import pytest

from choros.cli import main


@pytest.fixture
def refused(script_folder, capsys):
    """The lines of the error of a command that is refused as wrong usage; nothing is written or started."""

    def run(message):
        assert main(shlex.split(message)) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert sorted(path.name for path in script_folder.iterdir() if path.suffix != ".sc") == ["train.py"]
        return [line.strip() for line in output.err.splitlines()]

    return run


@pytest.fixture
def printed(capsys):
    """The script that a line of ``choros submit`` prints."""

    def run(line):
        command = shlex.split(line)
        assert command[0] == "choros"
        assert main([*command[1:2], "--dry-run", *command[2:]]) == 0, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()

    return run


APRUN = {
    "-n 128 -N 64 -d 2 -j 1 train.py": ("-n 128 --ppn 64 --depth 2 --cpu-bind depth", "train.py", 2, 1),
    "-n 128 -N 64 -d 2 -j 1 -cc depth -e OMP_NUM_THREADS=2 -e A='b c' python train.py --epochs 3": (
        "-n 128 --ppn 64 --depth 2 --cpu-bind depth --env OMP_NUM_THREADS=2 --env 'A=b c'",
        "train.py --epochs 3",
        2,
        1,
    ),
    "-n 10 -N4 -d4 -j2 -cc none -- train.py -n 7": ("-n 10 --ppn 4 --depth 4 --cpu-bind none", "train.py -n 7", 3, 2),
    "-N 4 -n 4 -cc numa_node -m pkg.train -d 3": ("-n 4 --ppn 4 --depth 1 --cpu-bind numa", "-m pkg.train -d 3", 1, 1),
    "-n 2 -N 2 -cc 0-7:8-15 train.py": ("-n 2 --ppn 2 --depth 1 --cpu-bind list:0-7:8-15", "train.py", 1, 1),
}


@pytest.mark.parametrize("launcher", ["--launcher aprun", "--launcher=/opt/cray/bin/aprun"])
@pytest.mark.parametrize("options", APRUN)
def test_aprun_is_refused_with_the_line_of_pals(refused, printed, options, launcher):
    """The job of the second line starts the ranks by the first line's options."""
    ranks, target, nodes, per_core = APRUN[options]
    first, mpiexec, _, submit, *_, last = refused(f"run {launcher} {options}")
    assert first.startswith(
        "choros run: error: aprun started the ranks under Cray's ALPS (Theta), and that machine is retired."
    )
    assert f"inside a job of {nodes} node" in first
    assert mpiexec == f"mpiexec {ranks} python {target}"
    assert last.startswith("docs/from-alcf.md")
    script = printed(submit)
    [line] = [line for line in script if line.startswith("mpiexec")]
    begun = shlex.split(line)
    requested = shlex.split(mpiexec)
    assert begun[3:7] == requested[3:7]  # --ppn and --depth
    assert begun[2] == str(nodes * int(requested[4]))
    assert f"select={nodes}:" in "\n".join(script)
    assert line.endswith(target)
    for text in (word for name, word in itertools.pairwise(requested) if name == "--env"):
        name, _, value = text.partition("=")
        assert f"export {name}={shlex.quote(value)}" in script
    assert f"--threads-per-core {per_core}" in submit or per_core == 1


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ("-n 4 -N 2 -j 2 -d 2", "-j 2: mpiexec has no such option, --depth counts hardware threads"),
        ("-n 4 -d 2", "without -N aprun filled each node: give PALS the ranks of a node by --ppn"),
        ("-n 5 -N 2", "-n 5 -N 2: choros submit fills all nodes, with 6 ranks"),
        ("-n 4 -N 2 -cc 0,8", "-cc 0,8: a list of PALS has the CPUs of each rank, with a colon between two ranks"),
        ("-n 4 -N 2 -cc none", "-cc none: choros submit binds ranks by --cpu-bind depth"),
        ("-n 4 -N 2 -d 3 -j 2", "-d 3 -j 2: the last core is used in part"),
        ("-n 4 -N 2 -S 1", "-S 1: PALS places ranks by --ppn, --depth and --cpu-bind alone"),
        ("-n 4 -N 2 -b -q", "-q: PALS needs no such option"),
        ("-n 4 -N 2 -L 12,13", "-L 12,13: the nodes are those of the job"),
    ],
)
def test_what_aprun_s_options_lose_is_said(refused, options, note):
    assert any(
        line.startswith(f"Not translated: {note}") for line in refused(f"run --launcher aprun {options} train.py")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--launcher aprun -n 4 -N 0", "choros run: error: aprun -N 0: must be a whole number of 1 or more"),
        ("--launcher aprun -n 4 -N 2 -e A", "choros run: error: aprun -e A: give a name and a value"),
        ("-n 4 -N 2", "choros run: error: -N is an option of aprun, not of choros run: -H n1:4,n2:4 gives the number"),
        ("-n 4 -d 2", "choros run: error: -d is an option of aprun, not of choros run: --threads gives the threads"),
        (
            "-n 4 --launcher mpiexec -cc depth",
            "choros run: error: -cc is an option of aprun, not of choros run: each rank",
        ),
        ("-n 4 -e A=1", "choros run: error: -e is an option of aprun, not of choros run: export it"),
    ],
)
def test_options_of_aprun_that_cannot_be_meant(refused, options, message):
    line, see = refused(f"run {options} train.py")
    assert see == "See 'choros run --help'"
    assert line.startswith(message)


def test_a_script_s_own_options_stay_its_own(script_folder):
    """After the script everything is the script's, whatever aprun or Cobalt called so."""
    (script_folder / "train.py").write_text("import sys; print(sys.argv[1:])")
    arguments = ["-N", "2", "--launcher", "aprun", "--on", "cobalt"]
    command = [sys.executable, "-m", "choros", "run", "-n", "1", "train.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"[0] {arguments}\n"), done.stderr


COBALT = {
    "-n 128 -t 60 -q prod -A phys": (
        "--on pbs --mpi pals --nodes 128 --time 60m --queue prod --account phys",
        ["#PBS -l walltime=01:00:00", "#PBS -q prod", "#PBS -A phys"],
    ),
    "-n2 -t 1:30:00 --project=phys --jobname fit": (
        "--on pbs --mpi pals --nodes 2 --time 1:30:00 --account phys --name fit",
        ["#PBS -N fit", "#PBS -l walltime=01:30:00"],
    ),
    "--env A=1:B=x:y --mode c16 -M me@there": (
        "--on pbs --mpi pals --env A=1 --env B=x:y --ranks-per-node 16 -o '-M me@there'",
        ["export A=1", "export B=x:y", "#PBS -M me@there"],
    ),
    "-n 2 --attrs mcdram=cache:filesystems=home,eagle --dependencies 12:13 -o out.txt --mode script": (
        "--on pbs --mpi pals --nodes 2 --filesystems home:eagle -o '-W depend=afterok:12:13' -o '-o out.txt'",
        ["#PBS -l filesystems=home:eagle", "#PBS -W depend=afterok:12:13", "#PBS -o out.txt"],
    ),
    "--site polaris -n 2 -t 60 -A phys -o '-l filesystems=home' --cores 8": (
        "--site polaris --nodes 2 --time 60m --account phys -o '-l filesystems=home' --cores 8",
        ["#PBS -l select=2:system=polaris"],
    ),
    "--attrs filesystems=home:filesystems=eagle": (
        "--on pbs --mpi pals --filesystems home:eagle",
        ["#PBS -l filesystems=home:eagle"],
    ),
}


@pytest.mark.parametrize("options", COBALT)
def test_cobalt_is_refused_with_the_line_for_pbs(refused, printed, options):
    line, directives = COBALT[options]
    first, submit, *_, last = refused(f"submit --on cobalt {options} train.py -n 3")
    assert first.startswith("choros submit: error: Cobalt was the scheduler of Theta, which is retired.")
    assert submit == f"choros submit {line} train.py -n 3"
    assert last.startswith("docs/from-alcf.md")
    script = printed(submit)
    assert set(directives) <= set(script)


def test_what_cobalt_s_options_lose_is_said(refused):
    lines = refused(
        "submit --on=cobalt -n 2 -e err.txt --attrs mcdram=cache:numa=quad -I --proccount 8 -i in --disable_preboot"
    )
    assert "choros submit --on pbs --mpi pals --nodes 2 SCRIPT.py" in lines
    notes = [line.removeprefix("Not translated: ") for line in lines if line.startswith("Not translated: ")]
    begins = ["-e err.txt: ", "--attrs mcdram=cache:numa=quad: ", "-I: an interactive job is PBS' own: qsub -I"]
    begins += ["--proccount 8: give --ranks-per-node", "-i in: ", "--disable_preboot: PBS has no such step"]
    assert len(notes) == len(begins)
    assert all(note.startswith(begin) for note, begin in zip(notes, begins, strict=True)), notes


@pytest.mark.parametrize(
    ("options", "advice"),
    [("", True), ("--attrs filesystems=home", False), ("-o '-l filesystems=home'", False)],
)
def test_file_systems_are_proposed_if_there_are_none(refused, options, advice):
    [line] = [line for line in refused(f"submit --on cobalt {options} train.py") if line.startswith("with --site")]
    assert line.endswith("pals, and there with --filesystems home:eagle (those that the job uses).") is advice


def test_file_systems_that_are_typed_replace_those_of_the_script(refused, script_folder):
    (script_folder / "qsub.sc").write_text("#COBALT --attrs filesystems=home\naprun -n 2 -N 2 python train.py\n")
    lines = refused("submit --on cobalt --attrs filesystems=eagle qsub.sc")
    [line] = [line for line in lines if line.startswith("choros submit --on pbs")]
    assert line.count("--filesystems") == 1
    assert "--filesystems eagle" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 0", "argument --nodes: must be a whole number of 1 or more, or auto, got 0"),
        ("-n abc", "argument --nodes: must be a whole number of 1 or more, or auto, got abc"),
        ("-n2.5", "argument --nodes: must be a whole number of 1 or more, or auto, got 2.5"),
        ("-t 1x", "--time must be as 1:30:00 (hours), 2-00:00:00 (days) or 1h30m, got '1x'"),
        ("-t 1", "the limit of 60 s ends before the ranks could receive a signal"),
        ("--bogus 3", "unrecognized arguments: --bogus (did you mean --gpus?)"),
        ("-z 1", "unrecognized arguments: -z"),
        ("--mode c0", "argument --ranks-per-node: must be a whole number of 1 or more, got 0"),
        ("--mode c", "--mode c: Cobalt has script, and c16 for 16 ranks on each node"),
        ("--env A", "--env A: give a name and a value, as in --env A=1"),
        ("--attrs mcdram", "--attrs mcdram: give names and values, as in filesystems=home,eagle:mcdram=cache"),
        (
            "--attrs filesystems=a;b",
            "--filesystems must be names of letters, digits, _ and -, with colons between them",
        ),
        ("--dependencies job", "--dependencies job: give the numbers of jobs, as in 12:13"),
        ("--image train:1", "--image is for --on k8s: pbs has no use for it, leave it out"),
        ("--site nowhere", "there is no site 'nowhere': known are"),
        ("-A 'my project'", "--account must be one word, got 'my project'"),
    ],
)
@pytest.mark.parametrize("where", ["typed", "in the script"])
def test_options_of_cobalt_are_checked_as_those_of_another_scheduler(script_folder, capsys, options, message, where):
    (script_folder / "qsub.sc").write_text(f"#COBALT {options}\naprun -n 2 -N 2 python train.py\n")
    line = f"submit --on cobalt {options} train.py" if where == "typed" else "submit --on cobalt qsub.sc"
    assert main(shlex.split(line)) == 2
    *_, last, see = capsys.readouterr().err.splitlines()
    assert see == "See 'choros submit --help'"
    assert last.startswith(f"choros submit: error: {message}")


def test_help_with_cobalt_is_the_help_page(capsys):
    assert main(["submit", "--on", "cobalt", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: choros submit")


def test_another_scheduler_beside_cobalt_is_left_out(refused):
    _, submit, *_ = refused("submit --on cobalt --on slurm -n 2 train.py")
    assert submit == "choros submit --on pbs --mpi pals --nodes 2 train.py"


QSUB = """#!/bin/bash
#COBALT -n 128
#COBALT -t 00:30:00
#COBALT -q debug-cache-quad --attrs mcdram=cache:numa=quad
#COBALT -A datascience
module load datascience/keras-2.2.4
echo "Running on $COBALT_JOBSIZE nodes"
aprun -n $((COBALT_JOBSIZE*4)) -N 4 -d 32 -j 2 -cc depth \\
    -e OMP_NUM_THREADS=32 -e KMP_BLOCKTIME=0 -b python train.py --epochs 3
"""


def test_a_script_of_cobalt_is_read(script_folder, refused, printed):
    """Its directives, its modules and its aprun; what was typed comes before what it has."""
    (script_folder / "qsub.sc").write_text(QSUB)
    _, submit, *rest = refused("submit --on cobalt -t 10 -q debug qsub.sc")
    assert submit == (
        "choros submit --on pbs --mpi pals --nodes 128 --account datascience --time 10m --queue debug "
        "--setup 'module load datascience/keras-2.2.4' --ranks-per-node 4 --cores 16 --threads-per-core 2 "
        "--env OMP_NUM_THREADS=32 --env KMP_BLOCKTIME=0 train.py --epochs 3"
    )
    assert any("its other lines" in line for line in rest)
    [line] = [line for line in printed(submit) if line.startswith("mpiexec")]
    assert line.startswith("mpiexec -n 512 --ppn 4 --depth 32 --cpu-bind depth ")
    assert line.endswith("python train.py --epochs 3")


def test_a_script_of_cobalt_with_variables_gets_names_to_fill_in(script_folder, refused):
    (script_folder / "qsub.sc").write_text(
        "#COBALT -n 2\naprun -n $ranks -N ${each} -d $depth -e A=$a ./a.out\naprun ./b.out\n"
    )
    _, submit, *rest = refused("submit --on cobalt qsub.sc")
    assert submit == (
        "choros submit --on pbs --mpi pals --nodes 2 --ranks-per-node RANKS_PER_NODE --cores CORES ./a.out"
    )
    assert any("1 more aprun" in line for line in rest)
    assert any("give --env A=VALUE" in line for line in rest)
    (script_folder / "qsub.sc").write_text("#COBALT -n 2\npython train.py\n")
    _, submit, *rest = refused("submit --on cobalt qsub.sc")
    assert submit.endswith("--nodes 2 SCRIPT.py")
    assert any("it has no aprun" in line for line in rest)
