"""Help pages, usage errors and exit codes of all commands."""

import importlib

import pytest

from choros.cli import COMMANDS, main, make_parser
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


def test_each_option_has_a_help_text(command, monkeypatch, capsys):
    """``refuse`` is called with the parser of the command."""
    parsers = []
    monkeypatch.setattr("choros.cli.parser.Parser.refuse", lambda self, _: parsers.append(self) or self.error("no"))
    assert main([command, "--nonsense", *({"check": ["x.py"]}.get(command, ["7"]) if command != "where" else [])]) == 2
    [parser] = parsers or [make_parser(command)]
    terse = [option.option_strings for option in parser.visible_options() if len((option.help or "").split()) < 3]
    assert terse == []


def test_no_argument_prints_the_commands(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(f"    {name} " in err for name in COMMANDS)


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
