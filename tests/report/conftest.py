"""Reports made of plain numbers."""

import math

import pytest

from choros.tools.demo.report import Report, Result, Run, Setting

NAMES = {
    "Single": None,
    "AllReduce": "sync",
    "LocalSGD": "sync",
    "AEASGD": "async",
    "DOWNPOUR": "async",
    "Ensemble": None,
}


def make_run(i, seed):
    seconds = 4.0 / (1 + 0.2 * i) + 0.1 * seed
    return Run(
        seed=seed,
        f1=0.93 + 0.005 * i + 0.001 * seed,
        accuracy=0.951 + 0.005 * i,
        seconds=seconds,
        startup=3.25,
        samples_per_second=1000.0 * (i + 1),
        exchanges=20 * i,
        staleness=0.5 * (i == 3),
        exchanging=0.01 * i,
        waiting=0.02 * i,
        losses=tuple((seconds * (e + 1) / 4, e, 2.0 * math.exp(-e - 0.1 * i)) for e in range(4)),
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
            backend="jax",
            cores=2,
            machine="Linux x86_64",
            versions={"keras": "3.15.1"},
            date="2026-01-02 03:04 UTC",
            notes=("A note.",),
        )
        return Report(setting, tuple(results), **more)

    return make
