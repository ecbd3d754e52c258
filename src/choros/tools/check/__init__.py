"""``choros.check``: compare a model trained with 1, 2 and 3 workers, and after a resume, with Keras' ``fit``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from choros import algorithms
from choros.data import StreamSource, make_source
from choros.data.conversion import brings_targets
from choros.errors import InvalidInputError
from choros.tools.check.load import load_model, made_rows
from choros.tools.check.report import CheckReport, Comparison, Difference
from choros.tools.check.runs import Runs, Setting, few_rows
from choros.training.executors.worker_pool import WorkerPool, check_workers
from choros.training.validation import check_model, check_numbers

if TYPE_CHECKING:
    import keras

__all__ = ["CheckReport", "Comparison", "Difference", "check", "load_model", "made_rows"]

_OWN = ("x", "y", "verbose", "callbacks", "shuffle", "steps_per_epoch", "initial_epoch", "checkpoint", "resume")


def check(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    algorithm: Any = "allreduce",
    workers: Sequence[int] = (1, 2, 3),
    resume: bool = True,
    batch_size: int | None = None,
    epochs: int = 2,
    rows: int | None = None,
    seed: int = 1,
    tolerance: float = 1e-5,
    pool: WorkerPool | None = None,
    **options: Any,
) -> CheckReport:
    """Train a model in one process and with several workers, and compare weights, optimizer slots and metrics.

    The reference is ``model.fit`` on the same global batches in the same order. AllReduce must equal it. Other
    algorithms give other results by design; for them, results must be finite, and the synchronous ones must give equal
    results after a resume. Random layers and batch normalization cannot give equal bits with several workers. They are
    switched off in a copy of the model if all of them are Keras' own. Otherwise the results must be within the spread
    of one process with other seeds. The model's state is restored.

    Args:
        model: a compiled ``keras.Model``.
        x: arrays or nested arrays, or a ``keras.utils.PyDataset`` of global batches. Defaults to None: random rows are
            drawn with the shapes of the model's inputs and outputs.
        y: arrays or nested arrays of labels, one for each row. Defaults to None, if ``x`` has them.
        sample_weight: array of the weight of each row. Defaults to None.
        algorithm: as in ``choros.Trainer``. Defaults to "allreduce".
        workers: numbers of workers. Defaults to 1, 2 and 3.
        resume: whether to interrupt a run by a checkpoint and resume it, with the first number of workers above 1.
            Defaults to True.
        batch_size: int. Size of a global batch. Defaults to 16, or half of the rows if there are fewer than 32.
        epochs: int, 2 or more with ``resume``. Defaults to 2.
        rows: int. Number of given rows that are used, spread evenly. Defaults to four batches and two rows.
        seed: int. Seed of the order of rows and of random layers. Defaults to 1.
        tolerance: float. Largest difference that passes, divided by 1 + the size of the reference. Ten times the effect
            of another order of rows in the batches (rounding) also passes. Defaults to 1e-5; 2e-2 for a model that
            computes in 16 bits.
        pool: WorkerPool with the largest number of workers. Defaults to a pool for this check.
        **options: further arguments of ``fit``, such as ``class_weight`` or ``validation_data``, for all runs.

    Returns:
        The report. ``report.passed``, ``report.exit_code`` and ``print(report)`` show the verdict.

    Raises:
        InvalidInputError: an argument is invalid. If a Trainer refuses the model, this is a verdict and no error.
        Exception: an error of ``model.fit``, unchanged.

    Example:
        >>> import choros, keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x = np.random.default_rng(0).normal(size=(50, 4))
        >>> choros.check(model, x, x.sum(1), workers=(1, 2)).verdict  # doctest: +SKIP
        'equal'
    """
    begun = time.perf_counter()
    numbers = [check_workers(number) for number in workers]
    check_model(model)
    check_numbers(seed, 0, None, None, 1)
    method = algorithms.by_name(algorithm)
    if not numbers or (resume and epochs < 2):
        raise InvalidInputError(
            f"workers={workers!r} and epochs={epochs!r}: give one number or more, and 2 epochs or more."
        )
    if refused := [name for name in _OWN if name in options]:
        raise InvalidInputError(f"check() sets {', '.join(refused)} itself: leave that out.")
    notes = []
    if x is None:
        x, y = made_rows(model)
        notes.append("the rows were drawn at random by the shapes of the model's inputs and outputs: give x and y.")
    if not brings_targets(x):
        batch_size, (x, y, sample_weight) = few_rows(x, y, sample_weight, batch_size, rows)
    source = make_source(x, y, sample_weight, options.get("class_weight"))
    if isinstance(source, StreamSource):
        raise InvalidInputError("check() reads its rows several times: give arrays or a PyDataset, not a generator.")
    setting = Setting((x, y, sample_weight), batch_size or 16, epochs, seed, tolerance, method, options)
    lent = pool or WorkerPool(max(numbers), echo=False)
    try:
        runs = Runs(model, source, setting, lent, notes)
        comparisons = runs.compare(numbers, resume)
    finally:
        if pool is None:
            lent.close()
    return CheckReport(
        model.name,
        lent.backend,
        type(method).__name__,
        source.rows or 0,
        0 if brings_targets(x) else setting.batch_size,
        epochs,
        tuple(comparisons),
        tuple(notes),
        time.perf_counter() - begun,
    )
