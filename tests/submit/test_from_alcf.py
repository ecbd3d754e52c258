"""docs/from-alcf.md: its commands print what it says, the tests that it names exist, and its Polaris script runs."""

import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys
import zipfile

import pytest

from choros.cli import main

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-alcf.md").read_text()
SCRIPT = ROOT / "examples" / "jobs" / "hvd_mnist.polaris.pbs.sh"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONSOLE = [text for language, text in BLOCKS if language == "console"]
RETIRED = [text for text in CONSOLE if "--launcher aprun" in text or "--on cobalt" in text]  # these start nothing


@pytest.mark.parametrize("block", RETIRED, ids=lambda text: text[:32])
def test_a_command_of_the_page_prints_what_follows_it(script_folder, capsys, block):
    command, _, expected = block.removeprefix("$ choros ").partition("\n")
    assert main(shlex.split(command)) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", expected)


def test_both_retired_commands_are_on_the_page():
    assert len(RETIRED) == 2


def test_the_job_of_the_page_is_the_example():
    [line] = [
        line for language, text in BLOCKS if not language for line in text.splitlines() if line.startswith("choros ")
    ]
    assert SCRIPT.read_text().splitlines()[1] == f"# Written by: {line}"


def test_the_options_of_the_page_are_options(capsys):
    """Of each command whose help lists them; those of other programs are on the list."""
    listed = ""
    for command in ("run", "submit", "doctor", "log", "tune"):
        assert main([command, "--help"]) == 0
        listed += capsys.readouterr().out
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    elsewhere = {"--ppn", "--depth", "--cpu-bind", "--attrs", "--mode", "--jobname", "--dependencies"}  # PALS, Cobalt
    elsewhere |= {"--data", "--epochs", "--batch-size", "--out", "--target", "--logdir", "--port"}  # scripts, pip ...
    assert elsewhere <= options
    assert {name for name in options - elsewhere if not re.search(rf"{name}\b", listed)} == set()


def test_the_tests_of_the_page_are_there():
    files = set(re.findall(r"`(tests/[\w/.-]+)`", PAGE))
    assert len(files) > 10
    assert [name for name in files if not (ROOT / name).exists()] == []
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 15
    assert named - there == set()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Run a script of PBS with an ``mpiexec`` that starts one rank as PALS would; return what it prints."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python").symlink_to(sys.executable)
    options = 'while [ "${1#-}" != "$1" ]; do echo "$1 $2"; shift 2; done\n'
    (bin / "mpiexec").write_text(f'#!/bin/bash\n{options}PALS_RANKID=5 PALS_LOCAL_RANKID=1 exec "$@"\n')
    (bin / "mpiexec").chmod(0o755)

    def run(text, before=""):
        environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PBS_O_WORKDIR": str(tmp_path)}
        environment |= {"PBS_JOBID": "7.here", "PBS_NODEFILE": "/nodes"}
        command = ["bash", "-c", f"{before}\n{text}"]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


LOOK = """
import os, sys
print("argv", sys.argv[1:])
for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KERAS_BACKEND", "NCCL_CROSS_NIC", "VENV"):
    print(name, os.environ[name])
"""


def test_the_script_for_polaris_starts_its_ranks(started, tmp_path):
    """With what stands in for modules, conda, a venv and PALS: the order of set-up, a rank's GPU, threads and words."""
    (tmp_path / "hvd_mnist.py").write_text(LOOK)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("export VENV=$CONDA; echo venv\n")
    before = 'module() { echo "module $*"; }; conda() { echo "conda $*"; export CONDA=$2; }'
    assert started(SCRIPT.read_text(), before) == [
        "module use /soft/modulefiles",
        "module load conda",
        "conda activate base",
        "venv",
        "-n 8",
        "--ppn 4",
        "--depth 8",
        "--cpu-bind depth",
        "argv ['--data', 'mnist.npz', '--epochs', '12', '--batch-size', '128', '--out', 'checkpoints']",
        "CUDA_VISIBLE_DEVICES 2",
        "OMP_NUM_THREADS 8",
        "KERAS_BACKEND jax",
        "NCCL_CROSS_NIC 1",
        "VENV base",
        "choros: the ranks ended with code 0",
    ]


def test_packages_of_pip_s_target_reach_the_ranks(started, script_folder, capsys):
    """The package is installed by pip itself, from a wheel that is made here."""
    pytest.importorskip("pip")
    wheel = script_folder / "mine_of_theta-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("mine_of_theta.py", "HERE = __file__\n")
        file.writestr(
            "mine_of_theta-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine_of_theta\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr("mine_of_theta-1.0.dist-info/WHEEL", tags)
        file.writestr("mine_of_theta-1.0.dist-info/RECORD", "")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target=packages"]
    subprocess.run([*install, str(wheel)], check=True, timeout=60)
    wheel.unlink()
    (script_folder / "train.py").write_text("import mine_of_theta; print(mine_of_theta.HERE)")
    setup = f"export PYTHONPATH={script_folder}/packages:$PYTHONPATH"
    assert main(["submit", "--on", "pbs", "--mpi", "pals", "--setup", setup, "--dry-run", "train.py"]) == 0
    assert str(script_folder / "packages" / "mine_of_theta.py") in started(capsys.readouterr().out)


def test_the_shell_reads_the_scripts_of_the_examples():
    for file in sorted(SCRIPT.parent.glob("*.sh")):
        done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), file
