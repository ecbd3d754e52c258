"""Which tracebacks of interrupted ranks are shown: those of a chain together, by its last exception."""

import pytest

from choros.launch.process.interrupt_filter import InterruptFilter

BEGIN = "Traceback (most recent call last):"
HANDLING = "During handling of the above exception, another exception occurred:"
INTERRUPT = [BEGIN, '  File "a.py", line 1', "KeyboardInterrupt"]
ERROR = [BEGIN, '  File "a.py", line 2', "RuntimeError: of this rank"]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([*INTERRUPT, "end"], ["end"]),
        (INTERRUPT, []),
        ([*ERROR, "end"], [*ERROR, "end"]),
        (ERROR, ERROR),
        ([*INTERRUPT, "", HANDLING, "", *ERROR, "end"], [*INTERRUPT, "", HANDLING, "", *ERROR, "end"]),
        ([*ERROR, "", HANDLING, "", *INTERRUPT, "end"], ["end"]),
        (["before", *INTERRUPT, *ERROR], ["before", *INTERRUPT, *ERROR]),
        (INTERRUPT[:2], INTERRUPT[:2]),  # the rank has ended in the middle
    ],
)
def test_a_chain_is_shown_by_its_last_exception(lines, shown):
    interrupts = InterruptFilter()
    assert [text for line in lines for text in interrupts.feed(1, line, line)] + interrupts.rest() == shown
    assert interrupts.left_out == ({1} if shown in ([], ["end"]) else set())


def test_rank_0_shows_its_interrupt():
    interrupts = InterruptFilter()
    assert [text for line in INTERRUPT for text in interrupts.feed(0, line, line)] == INTERRUPT
