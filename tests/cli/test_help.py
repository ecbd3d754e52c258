"""Help pages, usage errors and exit codes of all commands."""

import importlib
import os
import pty
import select
import subprocess
import time

import pytest

from choros.cli import ALIASES, COMMANDS, command_parser, completion, main, make_parser
from choros.errors import CommTimeoutError, InvalidInputError, SchedulerError, WorkerFailedError


@pytest.fixture(params=COMMANDS)
def command(request):
    return request.param


def test_a_help_page_has_examples_and_exit_codes(command, capsys):
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert f"\nexamples:\n  choros {command}" in page
    assert "\nExit codes: 0" in page
    assert "2 " in page.rpartition("Exit codes: ")[2]


def test_each_option_has_a_help_text(command):
    options = command_parser(command).visible_options()
    terse = [option.option_strings for option in options if len((option.help or "").split()) < 3]
    assert terse == []


def test_no_argument_prints_the_commands(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(f"    {name}" in err for name in COMMANDS)


def test_an_unknown_option_shows_the_usage_of_its_command(command, capsys):
    assert main([command, "--jso", "--nonsense"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: choros {command}")
    assert f"choros {command}: error: " in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("no"), 2),
        (SchedulerError("no"), 1),
        (CommTimeoutError("no"), 1),
        (WorkerFailedError("no", rank=1), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error, code, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(importlib.import_module("choros.cli.where"), "main", fail)
    assert main(["where"]) == code
    assert capsys.readouterr().err == ("choros where: error: no\n" if code != 130 else "")


@pytest.mark.parametrize("command", ["run", "doctor", "check", "tune", "demo"])
def test_the_number_of_ranks_has_the_same_options(command):
    for name in ("-n", "--workers"):
        args = make_parser(command).parse_args([command, name, "2", *(["x.py"] if command == "check" else [])])
        assert getattr(args, "ranks" if command == "tune" else "workers") in (2, "2", [2])


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_command(alias, capsys):
    assert main([alias, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: choros {ALIASES[alias]} ")


COMPLETED = {
    "choros ru": "run",
    "choros logs --fo": "--follow",
    "choros submit --dry": "--dry-run",
    "choros submit --on slu": "slurm",
    "choros spark pa": "pack",
    "choros completion z": "zsh",
    "choros run tra": "",  # a file, by the shell's own completion
}


@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes(line):
    """bash calls the function as it does after a tab."""
    words = line.split(" ")
    call = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _choros; echo ${{COMPREPLY[@]}}"
    shell = f"{completion.script('bash')}\ncomplete -p choros >&2\n{call}"
    done = subprocess.run(["bash", "--norc", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, COMPLETED[line]), done.stderr
    assert done.stderr == "complete -o bashdefault -o default -F _choros choros\n"


def test_a_terminal_completes_at_a_tab(tmp_path):
    """An interactive bash in a terminal of its own reads the keys."""
    (tmp_path / "rc").write_text(f"PS1='ready> '\n{completion.script('bash')}")
    terminal, other = pty.openpty()
    command = ["bash", "--rcfile", str(tmp_path / "rc"), "-i"]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), other)
    shell = subprocess.Popen(command, **ends, env={**os.environ, "TERM": "dumb"}, start_new_session=True)
    os.close(other)
    seen = ""

    def read_until(text):
        nonlocal seen
        limit = time.monotonic() + 20
        while text not in seen and time.monotonic() < limit:
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096).decode()
        assert text in seen, seen

    try:
        read_until("ready> ")
        seen = ""
        os.write(terminal, b"choros ru\t")
        read_until("choros run ")
        os.write(terminal, b"\x15exit\n")
        assert shell.wait(20) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_fish_has_a_line_for_each_command_and_option():
    lines = completion.script("fish").splitlines()
    assert [line.split(" -a ")[1].split()[0] for line in lines if "__fish_use_subcommand" in line] == list(COMMANDS)
    assert any("from submit' -l on -r -a " in line for line in lines)


def test_zsh_loads_the_completion_of_bash():
    assert completion.script("zsh").endswith(completion.script("bash"))


def test_spark_without_pyspark_names_a_backend(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["spark", "doctor"]) == 2
    assert "pip install 'choros[spark,jax]'" in capsys.readouterr().err


def test_what_cannot_be_packed(tmp_path, capsys):
    assert main(["spark", "pack", str(tmp_path / "a.zip"), "--prefix", str(tmp_path)]) == 2
    assert "choros spark: error: " in capsys.readouterr().err
    assert main(["spark"]) == 2
    assert "usage: choros spark" in capsys.readouterr().err
