"""A user's own sites and defaults: what the script has, what is printed, what is refused."""

import os
import shlex

import pytest

from choros.cli import main
from choros.launch.schedulers import load_site


@pytest.fixture
def write(config):
    """Write a file of the user's settings."""

    def write_file(name, text):
        (config / name).parent.mkdir(parents=True, exist_ok=True)
        (config / name).write_text(text)
        return config / name

    return write_file


DEFAULTS = """[defaults]
on = "slurm"
account = "physics"
queue = "debug"
setup = ["module load python", "cd x"]
directive = ["--constraint=cpu"]
"""


def test_defaults_are_in_the_script_and_are_shown(script_folder, write, capsys):
    file = write("config.toml", DEFAULTS)
    assert main(["submit", "--queue", "long", "--dry-run", "train.py"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert {"#SBATCH --account=physics", "#SBATCH --partition=long", "#SBATCH --constraint=cpu"} <= set(lines)
    assert lines.index("module load python") == lines.index("cd x") - 1
    options = "--on slurm --account physics --setup 'module load python' --setup 'cd x' -o --constraint=cpu"
    assert err == f"choros submit: from {file}: {options}\n"
    written_by = next(line for line in lines if line.startswith("# Written by: "))
    assert written_by == f"# Written by: choros submit {options} --queue long train.py"
    file.unlink()
    command = shlex.split(written_by.removeprefix("# Written by: choros submit "))
    assert main(["submit", "--dry-run", *command]) == 0
    assert capsys.readouterr() == (out, "")


def test_defaults_that_a_scheduler_does_not_know_are_left_out(script_folder, write, capsys):
    write("config.toml", DEFAULTS)
    assert main(["submit", "--on", "k8s", "--image", "a", "--dry-run", "train.py"]) == 0
    assert "physics" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "text", ['on = "slurm"', 'site = "mine"', 'site = "mine"\non = "pbs"'], ids=["on", "site", "both"]
)
@pytest.mark.parametrize("verb", ["status", "log", "cancel"])
def test_commands_for_jobs_use_the_default_scheduler(script_folder, write, capsys, monkeypatch, verb, text):
    monkeypatch.setenv("PATH", "")
    write("sites/mine.toml", 'scheduler = "slurm"\n')
    file = write("config.toml", f"[defaults]\n{text}\n")
    assert main([verb, "7"]) == 2
    said, error, _ = capsys.readouterr().err.splitlines()
    assert said == f"choros {verb}: from {file}: --on slurm"
    assert f"choros {verb}: error: there is no {'scancel' if verb == 'cancel' else 'scontrol'} on PATH" in error
    assert main([verb, "--on", "pbs", "7"]) == 2  # the option has priority
    assert "there is no q" in capsys.readouterr().err


def test_jobs_of_spark_have_no_status(script_folder, write, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    write("config.toml", '[defaults]\non = "spark"\n')
    assert main(["status", "7"]) == 2
    assert "no scheduler is here" in capsys.readouterr().err


FILE_SYSTEMS = '[defaults]\nsite = "polaris"\naccount = "physics"\n'


def directives(capsys, *options):
    """The directives with file systems that a call prints, and what it prints of the file."""
    assert main(["submit", *options, "--dry-run", "train.py"]) == 0
    out, err = capsys.readouterr()
    return [line for line in out.splitlines() if line.startswith("#PBS") and "filesystems=" in line], err


def test_file_systems_are_a_default(script_folder, write, capsys):
    file = write("config.toml", FILE_SYSTEMS + 'filesystems = "home:eagle"\n')
    begin = f"choros submit: from {file}: --site polaris --account physics"
    assert directives(capsys) == (["#PBS -l filesystems=home:eagle"], f"{begin} --filesystems home:eagle\n")
    assert directives(capsys, "--filesystems", "home") == (["#PBS -l filesystems=home"], f"{begin}\n")
    assert directives(capsys, "-o", "-l filesystems=home") == (["#PBS -l filesystems=home"], f"{begin}\n")
    assert directives(capsys, "--on", "slurm", "--mpi", "pmi2")[0] == []


def test_file_systems_that_are_given_replace_those_of_a_default_directive(script_folder, write, capsys):
    file = write("config.toml", FILE_SYSTEMS + 'directive = ["-l filesystems=home", "-m abe"]\n')
    begin = f"choros submit: from {file}: --site polaris --account physics"
    assert directives(capsys) == (["#PBS -l filesystems=home"], f"{begin} -o '-l filesystems=home' -o '-m abe'\n")
    assert directives(capsys, "--filesystems", "eagle") == (["#PBS -l filesystems=eagle"], f"{begin} -o '-m abe'\n")


def test_file_systems_among_other_resources_of_a_site_s_directive_are_refused(script_folder, write, capsys):
    text = 'scheduler = "pbs"\nmpi = "pals"\ndirectives = ["-l place=free,filesystems=home"]\n'
    write("sites/mine.toml", text)
    assert main(["submit", "--site", "mine", "--filesystems", "eagle", "--dry-run", "train.py"]) == 2
    expected = "--filesystems eagle and the directive -l place=free,filesystems=home of the site mine both name"
    assert expected in capsys.readouterr().err


def test_file_systems_that_are_a_default_in_two_ways_are_refused(script_folder, write, capsys):
    write("config.toml", FILE_SYSTEMS + 'filesystems = "eagle"\ndirective = ["-l filesystems=home"]\n')
    assert main(["submit", "--dry-run", "train.py"]) == 2
    assert "--filesystems eagle and -o '-l filesystems=home' both name the job's" in capsys.readouterr().err


def test_a_site_of_the_user(script_folder, write, capsys):
    write("sites/mine.toml", 'scheduler = "pbs"\nmpi = "pals"\ncores = 4\nneeds_account = true\n')
    write("config.toml", '[defaults]\nsite = "mine"\naccount = "physics"\n')
    assert main(["submit", "--dry-run", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert "#PBS -A physics" in out.splitlines()
    assert "--depth 4" in out
    assert "--site mine --account physics" in err
    assert main(["submit", "--on", "slurm", "--mpi", "pmi2", "--dry-run", "train.py"]) == 0
    assert "#SBATCH --account=physics" in capsys.readouterr().out
    assert load_site("mine").name == "mine"


def test_a_site_by_its_path(script_folder, capsys):
    (script_folder / "here.toml").write_text('scheduler = "pbs"\nmpi = "pals"\nselect = "select={nodes}:system=here"\n')
    assert main(["submit", "--site", "./here.toml", "--dry-run", "train.py"]) == 0
    assert "#PBS -l select=1:system=here" in capsys.readouterr().out
    assert main(["submit", "--site", "./gone.toml", "--dry-run", "train.py"]) == 2
    assert "gone.toml cannot be read: No such file" in capsys.readouterr().err


REFUSED = {
    "a =": "config.toml is not TOML: Invalid value (at end of document)",
    "[default]\n": "config.toml: default is unknown: did you mean defaults?",
    "defaults = 3": "config.toml: defaults must be a table, [defaults], got 3",
    '[defaults]\nacount = "a"': "config.toml: [defaults] acount is unknown: did you mean account?",
    "[defaults]\naccount = 3": "config.toml: [defaults] account must be a text in quotes, got 3",
    "[defaults]\nfilesystems = []": "config.toml: [defaults] filesystems must be a text in quotes, got []",
    '[defaults]\nsetup = "a"': "config.toml: [defaults] setup must be a list of texts, got 'a'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_defaults_are_refused_with_file_and_key(script_folder, write, capsys, text):
    write("config.toml", text)
    assert main(["submit", "--on", "slurm", "--dry-run", "train.py"]) == 2
    assert REFUSED[text] in capsys.readouterr().err


WRONG = {
    'shceduler = "pbs"': "mine.toml: shceduler is unknown: did you mean scheduler?",
    'cores = "4"': "mine.toml: cores must be a whole number, got '4'",
    "cores = true": "mine.toml: cores must be a whole number, got True",
    "needs_account = 1": "mine.toml: needs_account must be true or false, got 1",
    "directives = [1]": "mine.toml: directives must be a list of texts, got [1]",
    "environment = {A = 1}": "mine.toml: environment must be a table of texts, got {'A': 1}",
    'scheduler = "cobalt"': "there is no scheduler 'cobalt': known are slurm,",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_site_is_refused_with_file_and_key(script_folder, write, capsys, text):
    write("sites/mine.toml", text)
    assert main(["submit", "--site", "mine", "--dry-run", "train.py"]) == 2
    assert WRONG[text] in capsys.readouterr().err


def test_init_writes_a_site_that_submit_reads(script_folder, config, capsys, monkeypatch):
    (script_folder / "bin").mkdir()
    (script_folder / "bin" / "sbatch").write_text("#!/bin/sh\n")
    (script_folder / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{script_folder}/bin:{os.environ['PATH']}")
    assert main(["site", "init", "mine"]) == 0
    assert capsys.readouterr().out.startswith(f"{config}/sites/mine.toml\n")
    assert (load_site("mine").scheduler, load_site("mine").name) == ("slurm", "mine")
    assert load_site("mine").cores_per_node >= 1
    assert main(["submit", "--site", "mine", "--mpi", "pmi2", "--dry-run", "train.py"]) == 0
    assert main(["site", "list"]) == 0
    assert {"mine         slurm", "polaris      pbs"} <= set(capsys.readouterr().out.splitlines())
    assert main(["site", "init", "mine"]) == 2
    assert "mine.toml exists: edit it, or give another name" in capsys.readouterr().err
    assert main(["site", "init", "../mine"]) == 2
