"""What the line after training advises."""

import pytest

from choros.training.run_record import RunRecord
from choros.training.spec import WorkerStats


@pytest.mark.parametrize(
    ("facts", "workers", "said"),
    [
        ({"exchanging": 6.0}, 2, "more than half of it exchanging: a larger batch_size or window, or fewer workers"),
        ({"exchanging": 4.0}, 2, None),
        ({"seconds": 0.1}, 2, "with so little to train, one process (model.fit) is faster"),
        ({"seconds": 0.1}, 1, None),
        ({"waiting": 4.0}, 1, "choros.prefetch reads the next batches while a step runs"),
    ],
)
def test_advice(facts, workers, said):
    known = {"steps": 10, "rows": 100, "seconds": 10.0, "startup": 2.0} | facts
    line = RunRecord.of(None, "sync", [WorkerStats(rank, **known) for rank in range(workers)], 0.0, []).line()
    assert line.startswith(f"choros: {workers} worker")
    advice = line.partition("; ")[2]
    assert advice == "" if said is None else said in advice, line
