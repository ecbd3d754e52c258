"""Reports made of plain numbers."""

import math

import pytest

from choros.tools.demo.report import Report, Result, Run, Setting

NAMES = {
    "plain fit": None,
    "Single": None,
    "AllReduce": "sync",
    "LocalSGD": "sync",
    "AEASGD": "async",
    "DOWNPOUR": "async",
    "Ensemble": None,
}


def make_lane(rank):
    """A step of 0.1 s ten times: it gets data, computes, exchanges, and waits within the exchange."""
    lane = []
    for step in range(10):
        begin = 0.1 * step
        lane += [("data", begin, begin + 0.01), ("compute", begin + 0.01, begin + 0.06)]
        lane += [("exchange", begin + 0.06, begin + 0.1), ("wait", begin + 0.06, begin + 0.07 + 0.01 * rank)]
    return tuple(lane)


def make_run(i, seed):
    seconds = 4.0 / (1 + 0.2 * i) + 0.01 * seed
    exchanges = i > 1 and i < 6
    return Run(
        seed=seed,
        f1=0.93 + 0.005 * i + 0.001 * seed,
        accuracy=0.951 + 0.005 * i,
        seconds=seconds,
        startup=3.25,
        samples_per_second=1000.0 * (i + 1),
        exchanges=20 * i,
        staleness=0.5 * (i == 4),
        exchanging=0.01 * i,
        waiting=0.02 * i,
        losses=tuple((seconds * (e + 1) / 4, e, 2.0 * math.exp(-e - 0.1 * i)) for e in range(4)),
        accuracies=tuple(0.9 + 0.01 * e + 0.004 * i for e in range(4)),
        sent=tuple(100_000 * i * (e + 1) for e in range(4)) if exchanges else (),
        stale=(5, 40, 10, 2) if i in (4, 5) else (),
        lanes=(make_lane(0), make_lane(1)) if exchanges and seed == 0 else (),
        workers=({"rank": 0, "steps": 40, "exchanging": 0.01 * i}, {"rank": 1, "steps": 39, "exchanging": 0.02}),
    )


@pytest.fixture
def make_report():
    """A report: of so many seeds, with these algorithms failed."""

    def make(seeds=1, failed=(), names=NAMES, **more):
        results = [
            Result(name, mode, f"What {name} is.", {"window": "8"}, error="WorkerFailedError: rank 1 died\nits output")
            if name in failed
            else Result(
                name, mode, f"What {name} is.", {"window": "8"}, tuple(make_run(i, seed) for seed in range(seeds))
            )
            for i, (name, mode) in enumerate(names.items())
        ]
        setting = Setting(
            dataset="digits",
            train_rows=1258,
            test_rows=539,
            features=64,
            classes=("0", "1", "2"),
            network="Dense",
            optimizer="Adam",
            epochs=4,
            batch_size=32,
            workers=2,
            seeds=seeds,
            target=0.925,
            backend="jax",
            cores=2,
            machine="Linux x86_64",
            versions={"keras": "3.15.1"},
            date="2026-01-02 03:04 UTC",
            notes=("A note.",),
        )
        return Report(setting, tuple(results), **more)

    return make
