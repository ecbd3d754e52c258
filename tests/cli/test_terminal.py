"""Output on a terminal by rich, and plain text elsewhere."""

import sys

import pytest

from choros.cli import main
from choros.cli.terminal import write_report, write_rows


@pytest.fixture
def screen(capsys, monkeypatch):
    """Return a function that calls another one with stdout as a terminal, and returns the output."""
    pytest.importorskip("rich", reason="rich is not installed")
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            function(*arguments)
        return capsys.readouterr().out

    return call


REPORT = "ranks  2\n\nERROR clock: late [bold]\n    set it\nWARNING threads: 8"


def test_rows_are_wrapped_beside_their_names(screen):
    lines = screen(write_rows, {"launcher": "single", "why": "word " * 12}).splitlines()
    assert len(lines) > 2
    assert all(line.startswith(" " * 10) for line in lines[2:])
    assert "\x1b[1mlauncher" in lines[0]


def test_errors_and_warnings_have_colors(screen):
    output = screen(write_report, REPORT)
    assert "\x1b[1;31mERROR clock: late [bold]\x1b[0m" in output
    assert "\x1b[1;33mWARNING threads: 8\x1b[0m" in output


def test_where_on_a_terminal(screen):
    assert "\x1b[1mlauncher" in screen(main, ["where"])


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colors_where_they_are_not_wanted(screen, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert screen(write_report, REPORT) == REPORT + "\n"


def test_plain_text_elsewhere(capsys):
    write_report(REPORT)
    write_rows({"launcher": "single"})
    assert capsys.readouterr().out == REPORT + "\nlauncher     single\n"


def test_without_rich_the_text_is_plain(screen, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert screen(write_rows, {"launcher": "single"}) == "launcher     single\n"


def test_verdicts_and_failed_trials_have_colors(screen):
    text = "2 workers  equal\nresume  differs\nVerdict: inexact (agrees)\n    1  failed: no memory"
    output = screen(write_report, f"{text}\nunequal, indifferent")
    for colored in ("32mequal", "31mdiffers", "1mVerdict", "33minexact", "31mfailed"):
        assert colored in output
    assert output.endswith("\nunequal, indifferent\n")
