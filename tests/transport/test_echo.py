"""The last words of a rank: in full of a failure of its own, one line of the loss of another."""

import subprocess
import sys

import pytest

ENDING = """
from choros.errors import PeerLostError
from choros.comm.bootstrap.exit_hooks import let_root_cause_exit_first, delay_secondary_failure

{hook}
raise {error}
"""


def end(hook, error):
    """Return the output of a process that ends in this way, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(hook=hook, error=error)], capture_output=True, text=True, timeout=60
    )
    return done.stderr, done.returncode


@pytest.mark.parametrize("hook", ["delay_secondary_failure()", "let_root_cause_exit_first('rank 0 of 2')"])
def test_the_loss_of_another_rank_is_one_line(hook):
    output, code = end(hook, "PeerLostError('rank 1 on n2 has gone')")
    assert output == "choros.errors.PeerLostError: rank 1 on n2 has gone\n"
    assert code == 1


def test_a_failure_of_its_own_is_told_in_full():
    output, code = end("let_root_cause_exit_first('rank 0 of 2')", "ValueError('the cause')")
    assert output.startswith("Traceback (most recent call last):")
    assert output.endswith("ValueError: the cause\nchoros: rank 0 of 2 failed (ValueError), which ends the job\n")
    assert code == 1
