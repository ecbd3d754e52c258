"""Help pages, usage errors and exit codes of all commands."""

import ast
import importlib
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from argparse import SUPPRESS

import pytest

from choros.cli import ALIASES, COMMANDS, GROUPS, command_parser, completion, main, make_parser, parser
from choros.errors import (
    CommTimeoutError,
    InvalidInputError,
    MissingPackageError,
    NoBackendError,
    SchedulerError,
    WorkerFailedError,
)


@pytest.fixture(params=COMMANDS)
def command(request):
    return request.param


ACTIONS = [f"{command} {action}" for command in COMMANDS for action in command_parser(command).actions()]


@pytest.mark.parametrize("typed", [*COMMANDS, *ACTIONS])
def test_a_help_page_has_examples_and_exit_codes(typed, capsys):
    assert main([*typed.split(), "--help"]) == 0
    page = capsys.readouterr().out
    assert f"\nexamples:\n  choros {typed}" in page
    assert "\nExit codes: 0" in page
    assert " 2 " in " ".join(page.rpartition("Exit codes: ")[2].split())


def test_each_action_has_a_page_of_its_own():
    parsers = [command_parser(command) for command in COMMANDS]
    pages = [each.epilog for parser in parsers for each in (parser, *parser.actions().values())]
    assert len(set(pages)) == len(pages) == len(COMMANDS) + len(ACTIONS)


@pytest.mark.parametrize("command", ["run", "submit", "demo", "tune", "check", "doctor"])
def test_many_options_are_in_groups(command):
    parser = command_parser(command)
    other = next(group for group in parser._action_groups if group.title == "options")
    assert {option.option_strings[0] for option in other._group_actions if option.help != SUPPRESS} <= {"-h", "-m"}


def test_each_option_has_a_help_text(command):
    options = command_parser(command).visible_options()
    terse = [option.option_strings for option in options if len((option.help or "").split()) < 3]
    assert terse == []


def test_no_argument_prints_the_commands(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(f"\n  {name} " in err for name in COMMANDS)
    assert all(f"\n{title}:\n" in err for title in (*GROUPS, "examples"))
    assert "Aliases: logs = log, env = where." in err
    assert " 75 the ranks saved their state" in " ".join(err.split())


def wrong_usage(err, prog):
    """Check the one style of errors, and return the message."""
    line, see = err.splitlines()
    assert see == f"See '{prog} --help'"
    assert line.startswith(f"{prog}: error: ")
    message = line.removeprefix(f"{prog}: error: ")
    assert not re.match(r"[A-Z][a-z]", message), "capital"
    assert not message.endswith("."), "full stop"
    return message


@pytest.mark.parametrize("typed", [*COMMANDS, *ALIASES, *ACTIONS])
def test_an_unknown_option_is_an_error_in_one_style(typed, capsys):
    assert main([*typed.split(), "--jso", "--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    wrong_usage(err, f"choros {typed}")


@pytest.mark.parametrize(
    ("typed", "rest", "message"),
    [
        ("run", "-n 2", "nothing to run: give"),
        ("submit", "--on slurm absent.py", "the script absent.py does not exist"),
        ("demo", "--algorithms zzz", "no algorithm is called 'zzz': there are Single, AllReduce"),
        ("demo", "--batch-size 1", "--batch-size 1 for 2 workers: give one row a worker or more"),
        ("status", "--on slurm !", "'!' is not a job's id: give"),
        ("logs", "--on slurm !", "'!' is not a job's id: give"),
        ("cancel", "", "the following arguments are required: job"),
        ("doctor", "--backends jx", "argument --backends: jx is none of jax, torch, tensorflow"),
        ("check", "absent.py", "there is no file absent.py: give"),
        ("check", "/etc", "/etc is a folder: give a Python file"),
        ("check", "{script} --algorithm aesgd", "argument --algorithm: no algorithm is called 'aesgd': did you mean"),
        ("check", "{script} --workers 0", "argument -n/--workers: must be a whole number of 1 or more, got 0"),
        ("check", "{script} --epochs 1", "--epochs 1: the run that resumes needs 2 or more; --no-resume leaves it out"),
        ("submit", "--queue a --partition b a.py", "argument --queue/--partition: given by two of its names"),
        ("run", "-n 2 -np 4 a.py", "argument -n/-np/--num-proc/--workers: given by two of its names, -n and -np: give"),
        ("tune", "--threads 99 {script}", "no trial of --threads 99 fits on "),
        ("env", "here", "unrecognized arguments: here"),
        ("site", "", "the following arguments are required: ACTION"),
        ("site init", "../x", "'../x' is not a valid name of a site"),
        ("spark", "lst", "argument ACTION: invalid choice: 'lst' (choose from doctor, pack)"),
        ("spark pack", "a.rar", "a.rar: Spark unpacks .tar.gz, .tgz and .zip"),
        ("spark pack", "--level 10", "argument --level: must be a whole number from 0 to 9, got 10"),
        ("completion", "bsh", "argument shell: invalid choice: 'bsh' (did you mean bash?)"),
    ],
)
def test_wrong_values_are_errors_in_one_style(typed, rest, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("raise AssertionError('this file was run')")
    assert main([*typed.split(), *rest.format(script="a.py").split()]) == 2
    assert wrong_usage(capsys.readouterr().err, f"choros {typed}").startswith(message)


@pytest.mark.parametrize("file", ["absent.py", "/etc"])
def test_check_refuses_a_missing_file_before_a_framework_is_imported(file):
    script = (
        "import sys; from choros.cli import main; assert main(['check', sys.argv[1]]) == 2;"
        "sys.exit(any(name in sys.modules for name in ('keras', 'jax', 'torch', 'tensorflow')))"
    )
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(("given", "level"), [(None, "2"), ("0", "0")])
def test_check_hides_the_log_of_tensorflow_unless_the_user_set_a_level(given, level, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if given is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", given)
    file = tmp_path / "model.py"
    file.write_text("import os\nmodel = None\nraise ValueError('level ' + os.environ['TF_CPP_MIN_LOG_LEVEL'])")
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().err.endswith(f"ValueError: level {level}\n")


@pytest.mark.parametrize("line", ["-n 2 -n 4", "-n 2 -np 2"])
def test_an_option_that_is_repeated_holds_as_it_was_given_last(line):
    assert make_parser("run").parse_args(["run", *line.split(), "a.py"]).workers == int(line[-1])


NAMES = {"Choros", "Keras", "Kubernetes", "Parquet", "Spark"}


@pytest.mark.parametrize(
    "text", ["Spark needs Java", "PBS is down", "Dense.call failed", "A2 is a name", "'A' is a name", "nothing in ."]
)
def test_a_name_keeps_its_capital(text):
    assert parser.plain(text) == text
    assert parser.plain("Certain words: no") == "certain words: no"


def first_words():
    """Yield the first word of each constant message of an error in the package, if it is capitalized."""
    for path in pathlib.Path(parser.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error") and node.args:
                message = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                text = message.value if isinstance(message, ast.Constant) else None
                if isinstance(text, str) and (word := re.match(r"[A-Z][a-z]*(?= )", text)):
                    yield word[0]


def test_messages_of_the_package_begin_with_a_lower_case_letter_or_a_name():
    text = set(first_words())
    assert len(text) > 20
    assert {word for word in text if parser.plain(f"{word} x")[0].isupper()} <= NAMES


def test_no_text_of_the_package_says_that_something_is_no_thing():
    found = set()
    for path in pathlib.Path(parser.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"(?<![Tt]here )\b(?:is|are) no (?!longer)\S+", " ".join(node.value.split())))
    assert found == set()


@pytest.mark.parametrize(
    ("line", "near"),
    [("submit --on slurmm a.py", "slurm"), ("spark doctr", "doctor"), ("status --on pbss 1", "pbs"), ("rnu", "run")],
)
def test_an_unknown_value_has_a_hint(line, near, capsys):
    assert main(line.split()) == 2
    assert f"(did you mean {near}?)" in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("no"), 2),
        (MissingPackageError("no"), 1),
        (NoBackendError("no"), 1),
        (PermissionError(13, "no"), 1),
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
    see = "See 'choros where --help'\n" if code == 2 else ""
    assert capsys.readouterr().err == (f"choros where: error: no\n{see}" if code != 130 else "")


@pytest.mark.parametrize(("end", "code"), [("| true", 141), (">/dev/full", 1), (">&-", 0)])
@pytest.mark.parametrize("rest", ["--help", "where", "site list", "completion bash"])
def test_a_stdout_that_takes_nothing(rest, end, code):
    command = f"{sys.executable} -m choros {rest} {end}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    if end == "| true":  # the output may fit into the pipe before its reader ends
        assert (done.returncode in (0, code), done.stderr) == (True, "")
    else:
        assert done.returncode == code
        assert done.stderr.count("\n") == (1 if code else done.stderr.count("\n"))
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", "doctor", "check", "tune", "demo"])
def test_the_number_of_ranks_has_the_same_options(command):
    for name in ("-n", "--workers"):
        args = make_parser(command).parse_args([command, name, "2", *(["x.py"] if command == "check" else [])])
        assert getattr(args, "ranks" if command == "tune" else "workers") in (2, "2", [2])


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_command(alias, capsys):
    assert main([alias, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: choros {alias} ")


COMPLETED = {
    "choros ru": "run",
    "choros logs --fo": "--follow",
    "choros submit --dry": "--dry-run",
    "choros submit --on slu": "slurm",
    "choros logs --on slu": "slurm",
    "choros submit --site po": "polaris",
    "choros submit --site mi": "mine",
    "choros submit --site = mi": "mine",  # as bash divides --site=mi
    "choros submit --site we": "",  # a name with a blank
    "choros submit --mpi pmi": "pmi2 pmix pmix_v2 pmix_v3 pmix_v4 pmix_v5",
    "choros submit --filesystems fl": "flare",
    "choros submit --filesystems home,ea": "home,eagle",
    "choros run --launcher sr": "srun",
    "choros run -n ": "",
    "choros tune --bind y": "yes",
    "choros check --algorithm aea": "aeasgd",
    "choros demo --algorithms single,allr": "single,allreduce",
    "choros demo --backend to": "torch",
    "choros doctor --backends jax,tor": "jax,torch",
    "choros spark pa": "pack",
    "choros completion z": "zsh",
    "choros run tra": "",  # a file, by the shell's own completion
    "choros run -n 2 --laun": "--launcher",
    "choros run train.py --": "",  # an option of the script
    "choros run -n 2 train.py --": "",
    "choros run --blacklist-cooldown-range 1 2 --laun": "--launcher",
    "choros run --gloo --mpi-args x --laun": "--launcher",  # options of horovodrun
    "choros run -m train --": "",
    "choros run -- sh --": "",
    "choros run train.py --launcher sr": "",
    "choros submit --site = mine train.py --": "",
    "choros submit --site = mine --dry": "--dry-run",
    "choros tune train.py --": "",
    "choros status --on slurm 7 --": "--help --on",
    "choros spark doctor --": "--help",
    "choros spark doctor --pre": "",
    "choros spark pack --pre": "--prefix",
    "choros spark pack a.tar.gz --lev": "--level",
    "choros spark doctor pack --": "--help",  # a file
    "choros spark --pre": "",
    "choros site init --": "--help",
}


@pytest.fixture
def sites(tmp_path):
    """Return the environment of a user who has written two sites after the script of the completion."""
    folder = tmp_path / "choros" / "sites"
    folder.mkdir(parents=True)
    (folder / "mine.toml").touch()
    (folder / "we ird.toml").touch()
    return {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}


@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes(line, sites):
    """bash calls the function as it does after a tab."""
    arguments = line.split(" ")
    call = f"COMP_WORDS=({line}); COMP_CWORD={len(arguments) - 1}; _choros; echo ${{COMPREPLY[@]}}"
    shell = f"{completion.script('bash')}\ncomplete -p choros >&2\n{call}"
    done = subprocess.run(["bash", "--norc", "-c", shell], capture_output=True, text=True, timeout=60, env=sites)
    assert (done.returncode, done.stdout.strip()) == (0, COMPLETED[line]), done.stderr
    assert done.stderr == "complete -o bashdefault -o default -F _choros choros\n"


def require(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


@pytest.mark.parametrize("shell_name", ["bash", "zsh"])
def test_a_terminal_completes_at_a_tab(tmp_path, sites, shell_name):
    """An interactive shell in a terminal of its own reads the keys."""
    require(shell_name)
    rc = tmp_path / ".zshrc"
    rc.write_text(f"PS1='ready> '\n{completion.script(shell_name)}")
    terminal, other = pty.openpty()
    command = ["bash", "--rcfile", str(rc), "-i"] if shell_name == "bash" else ["zsh", "-i"]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), other)
    shell = subprocess.Popen(
        command, **ends, env={**sites, "TERM": "dumb", "ZDOTDIR": str(tmp_path)}, start_new_session=True
    )
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
        for typed, completed in {"ru": "run ", "submit --site=mi": "submit --site=mine "}.items():
            os.write(terminal, f"choros {typed}\t".encode())
            read_until(f"choros {completed}")
            os.write(terminal, b"\x15")
        os.write(terminal, b"\x15exit\n")
        assert shell.wait(20) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_fish_has_a_line_for_each_command_and_option():
    lines = completion.script("fish").splitlines()
    assert [line.split(" -a ")[1].split()[0] for line in lines if "__fish_use_subcommand" in line] == list(COMMANDS)
    assert any('"__choros_at submit" -l on -x -a ' in line for line in lines)
    assert any("\"__choros_at 'spark pack'\" -l prefix" in line for line in lines)


def test_fish_completes(tmp_path, sites):
    require("fish")
    (tmp_path / "choros.fish").write_text(completion.script("fish"))
    for line in (
        "choros ru",
        "choros submit --site mi",
        "choros demo --algorithms single,allr",
        "choros logs --on slu",
        "choros spark pack --pre",
        "choros run -n 2 --laun",
    ):
        command = f"source {tmp_path}/choros.fish; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", command], capture_output=True, text=True, timeout=60, env=sites
        )
        assert [result.partition("\t")[0] for result in done.stdout.splitlines()] == [COMPLETED[line]], done.stderr
    for line in ("choros run train.py --", "choros spark doctor --pre", "choros submit --site=mine train.py --dry"):
        command = f"source {tmp_path}/choros.fish; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("", "")


def test_no_variable_of_the_script_is_special_in_zsh():
    """``path`` is PATH there: a function that sets it finds no program."""
    assert not re.search(r"\b(path|status|argv|options|commands)=", completion.script("zsh"))


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_options_of_actions_are_completed(shell):
    assert "python-prefix" in completion.script(shell)


def test_zsh_loads_the_completion_of_bash():
    assert completion.script("zsh").endswith(completion.script("bash"))


def test_spark_without_pyspark_names_a_backend(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["spark", "doctor"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("choros spark doctor: error: pyspark is not installed: pip install 'choros[spark,jax]'")


def test_other_commands_without_a_package(monkeypatch, capsys, tmp_path):
    (tmp_path / "pyvenv.cfg").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["spark", "pack", "--prefix", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("is packed by venv-pack2: pip install venv-pack2\n")
    assert main(["demo", "--backend", "torch"]) == 1
    assert 'pip install "choros[torch,demo]"' in capsys.readouterr().err


def test_what_cannot_be_packed(tmp_path, capsys):
    assert main(["spark", "pack", str(tmp_path / "a.zip"), "--prefix", str(tmp_path)]) == 2
    assert "is neither a venv nor conda's" in wrong_usage(capsys.readouterr().err, "choros spark pack")


@pytest.mark.parametrize(
    ("text", "message"), [("x = (", "SyntaxError"), ("model = None\nraise OSError(2, 'no', 'data.csv')", "data.csv")]
)
def test_a_file_that_fails_is_a_failure_with_its_own_lines_only(text, message, tmp_path, capsys):
    (tmp_path / "model.py").write_text(text)
    assert main(["check", str(tmp_path / "model.py")]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(f"choros check: error: {tmp_path}/model.py failed: ")
    assert message in err
    assert "load.py" not in err
