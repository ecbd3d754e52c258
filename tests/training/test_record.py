"""What the line after training advises."""

import pytest

from choros.training.run_record import RunRecord
from choros.training.spec import WorkerStats


@pytest.mark.parametrize(
    ("facts", "workers", "said"),
    [
        ({"exchanging": 6.0}, 2, "60% of training for exchange: a larger batch_size or window, or fewer workers"),
        ({"exchanging": 4.0}, 2, None),
        ({"seconds": 0.1}, 2, "with so little to train, one process (model.fit) is faster"),
        ({"seconds": 0.1}, 1, None),
        ({"waiting": 4.0}, 1, "40% of training for decode: choros.prefetch reads the next batches while a step runs"),
    ],
)
def test_advice(facts, workers, said):
    known = {"steps": 10, "rows": 100, "seconds": 10.0, "startup": 2.0} | facts
    line = RunRecord.of(None, "sync", [WorkerStats(rank, **known) for rank in range(workers)], 0.0, []).summary()
    assert line.startswith(f"choros: {workers} worker")
    advice = line.partition("; ")[2]
    assert advice == "" if said is None else said in advice, line


BUSY = {"steps": 100, "rows": 1000, "seconds": 10.0}


@pytest.mark.parametrize(
    ("mode", "facts", "expected"),
    [
        ("sync", [{}, {}], []),
        ("sync", [{"waiting": 6.0, "reading": 6.0}] * 2, [("decode", 0.6, None, "choros.prefetch reads")]),
        ("sync", [{"copying": 3.0}] * 2, [("copy", 0.3, None, "choros.prefetch copies")]),
        (
            "sync",
            [{"waiting": 8.0, "reading": 6.0, "copying": 2.0, "ahead": 2}] * 2,
            [("decode", 0.6, None, "choros.files"), ("copy", 0.2, None, "32 bits")],
        ),
        ("sync", [{"exchanging": 4.0}] * 2, [("exchange", 0.4, None, "larger batch_size or window")]),
        (
            "sync",  # rank 1 works for 9 s, rank 0 for 3 s: 6 of the 7 s in rank 0's exchanges are for rank 1
            [{"exchanging": 7.0}, {"exchanging": 1.0}],
            [("slow rank", 0.3, 1, "'aeasgd' does not wait"), ("exchange", 0.1, None, "window")],
        ),
        (
            "sync",
            [{"exchanging": 6.0}, {"waiting": 6.0, "reading": 6.0}],
            [("decode", 0.3, None, "choros.prefetch"), ("slow rank", 0.3, 1, "waits for data: choros.prefetch reads")],
        ),
        ("async", [{}, {"seconds": 5.0}], [("slow rank", 0.25, 0, "end other programs on node0")]),
    ],
)
def test_the_cause_of_waiting_and_the_setting_to_change(mode, facts, expected):
    tallies = [WorkerStats(rank, host=f"node{rank}", **BUSY | fact) for rank, fact in enumerate(facts)]
    bottlenecks = RunRecord.of(None, mode, tallies, 0.0, []).bottlenecks()
    assert [(b.cause, pytest.approx(b.share), b.rank) for b in bottlenecks] == [row[:3] for row in expected]
    assert all(row[3] in b.remedy for b, row in zip(bottlenecks, expected, strict=True)), bottlenecks
