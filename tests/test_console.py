"""The log handler of Choros: its prefixes and its stream, and how a user silences or redirects it."""

import io
import logging
import subprocess
import sys

import choros  # noqa: F401 - adds the handler
from choros.console import LAUNCHER, add_handler, write_line


def test_messages_go_to_the_current_stderr_with_a_prefix(capsys):
    logging.getLogger("choros.training").info("resuming")
    logging.getLogger(LAUNCHER).warning("rank 1 failed")
    assert capsys.readouterr().err == "choros: resuming\nchoros run: rank 1 failed\n"


def test_a_level_silences_messages(capsys):
    logger = logging.getLogger("choros")
    logger.setLevel(logging.ERROR)
    try:
        logging.getLogger("choros.comm").warning("waiting")
    finally:
        logger.setLevel(logging.INFO)
    assert capsys.readouterr().err == ""


def test_a_closed_or_missing_stderr_does_not_raise(monkeypatch, capsys):
    stream = io.StringIO()
    stream.close()
    for stderr in (stream, None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            logging.getLogger("choros").warning("waiting")
    assert capsys.readouterr().out == ""


def test_the_handler_is_added_once():
    logger = logging.getLogger("choros")
    before = list(logger.handlers)
    add_handler()
    assert logger.handlers == before


def test_messages_can_be_left_to_the_root_logger():
    script = (
        "import logging, sys, choros; logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')\n"
        "logger = logging.getLogger('choros'); logger.handlers.clear(); logger.propagate = True\n"
        "logging.getLogger('choros.comm').warning('waiting')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("choros.comm waiting\n", "")


def test_a_line_goes_to_the_given_stream(capsys):
    stream = io.StringIO()
    write_line("a", stream)
    write_line("b")
    assert (stream.getvalue(), capsys.readouterr().out) == ("a\n", "b\n")
