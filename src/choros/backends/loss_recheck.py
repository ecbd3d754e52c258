"""A check during training that the loss is a mean over rows. Rows of another kind may appear late in the data.

A test computes the gradients of four batches that have the shape of the step, so nothing is compiled for it. Let ``a``
and ``b`` be halves of a batch, and ``n`` the divisors. For a mean of one value for each row,

    n L(a, b) + n L(b, a) = n L(a, a) + n L(b, b)

holds exactly. It holds also with random layers, which draw the same numbers for the same position in a batch. It does
not hold if each half divides by another quantity, such as its valid entries, or if rows are compared. There are three
tests:

- ``rows``: ``a`` and ``b`` are rows of the batch. This test is for models without moving statistics.
- ``labels``: ``a`` and ``b`` are labels and sample weights of the rows; the inputs keep their positions. Layers that
  couple inputs, such as BatchNormalization in training, then behave alike in all four batches.
- ``parts``: the check before training (``choros.backends.loss_trial``), on the rows of the step.

The first two tests only give rise to a suspicion, and ``parts`` decides. So a refusal during training has the same
reasons as one before training.

The ranks take turns: one rank checks in each epoch. It spends at most ``SHARE`` of the training time of its epochs.
In addition, all ranks check once at the end of the first epoch, without a limit of time. For a stream they also check
at the end of the last epoch.

A check shuffles the rows of a step, since both halves may by chance have equally many valid entries. Every second check
takes half of the rows from the first batch instead. Otherwise a rank whose rows are all of one kind would not see the
rows of another kind.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from choros.backends.loss_trial import WAYS, cut, tolerance, try_parts
from choros.backends.number_attributes import NumberAttributes
from choros.backends.replica import Replica
from choros.backends.rowwise_parts import plain
from choros.data.encoded_rows import form
from choros.types import Array, Batch

SHARE = 0.01  # most fraction of the training time that checks may take
GRADIENTS = 4.5  # assumed cost of ``rows`` and ``labels`` in steps, until it is measured
TRIAL = 1.0  # assumed cost of ``parts`` in seconds, until it is measured
MARGIN = 1.2  # factor by which a check may take longer than the last one
PAIRS = 2  # checks of each kind at the end of an epoch
LEAST = 2  # least rows of a batch that can be checked


class Recheck:
    """The check of batches during training: one in each epoch of this rank that is long enough, more in a long epoch.

    Args:
        replica: a built replica, whose gradients are reduced.
        rank: int. This rank.
        workers: int. Number of ranks. Rank r checks in each epoch whose index modulo ``workers`` is r.
        length: int, optional. Steps of an epoch. By default it is measured in the first epoch.
        clock: returns the time in seconds.
        parts: int, optional. Number of models among which a batch is divided. Defaults to ``workers``.
    """

    def __init__(
        self,
        replica: Replica,
        rank: int,
        workers: int,
        length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        parts: int | None = None,
    ) -> None:
        self.all_devices: Any = replica
        self.replica = self.all_devices.lead
        self.rank, self.workers, self.length, self.clock = rank, workers, length, clock
        self.parts = workers if parts is None else parts
        apt = self.parts > 1 and not plain(self.replica.model) and self.replica.weigher.refusal is None
        self.tests: dict[str, Callable[[Batch], float | None]] = {}
        if apt and replica.statistics_size:
            self.tests = {"labels": self.look_at_labels, "parts": self.look_at_parts}
        elif apt:
            self.tests = {"rows": self.look_at_rows}
        self.costs: dict[str, float] = {}  # the last measured cost of each test
        self.counts = dict.fromkeys(self.tests, 0)
        self.epoch, self.step, self.first = -1, 0, 0
        self.checked = False  # whether a check has run in this epoch
        self.seconds, self.steps, self.spent = 0.0, 0, 0.0  # in the epochs that this rank checks
        self.shapes: set[int] = set()
        self.begun: float | None = None
        self.early: Batch | None = None  # rows of the first batch
        self.latest: Batch | None = None  # the last batch, until the check at the end of an epoch
        self.drawn = np.random.default_rng(rank)
        self.made = 0

    def __call__(self, batch: Batch, epoch: int) -> None:
        """Count a step, and check its batch if a check is due.

        Raises:
            InexactLossError: the loss is not exact. The message names the source of the loss and a remedy.
        """
        if not self.tests:
            return
        if batch.rows:
            self.latest = batch
            # ``on_lead`` passes the first device's share of the batch, as the tests get it.
            if self.early is None:
                self.all_devices.on_lead(self._remember, batch)
        if epoch != self.epoch:
            self._begin(epoch)
        elif epoch % self.workers == self.rank and self.begun is not None:
            self.seconds += self.clock() - self.begun
            self.steps += 1
        self.step += 1
        if (
            epoch % self.workers == self.rank
            and self.step > self.first
            and batch.rows >= LEAST
            and batch.rows in self.shapes
        ):
            self._check(batch)
        self.begun = self.clock() if batch.rows in self.shapes else None  # the first step of a shape also compiles
        self.shapes.add(batch.rows)

    def end(self) -> None:
        """Check the last batch of an epoch without a limit of time. A rank may call this independently of others.

        Raises:
            InexactLossError: the loss is not exact. The message names the source of the loss and a remedy.
        """
        batch, self.latest = self.latest, None
        if batch is None:
            return
        for _ in range(PAIRS):
            for name in [each for each in self.tests if each != "parts"]:
                self.all_devices.on_lead(lambda part, name=name: self._test(name, part), batch)
        self.begun = None

    def finish(self) -> None:
        """Check the last batch of a stream as ``end`` does. With moving statistics, also run the test ``parts`` twice.

        Raises:
            InexactLossError: the loss is not exact. The message names the source of the loss and a remedy.
        """
        batch = self.latest
        self.end()
        if batch is not None and "parts" in self.tests:
            for _ in range(2):
                self.all_devices.on_lead(lambda part: self._test("parts", part), batch)

    def _remember(self, batch: Batch) -> None:
        if batch.rows:
            self.early = _taken(batch, *[np.arange(max(batch.rows // 2, 1))] * 2)

    def _arranged(self, batch: Batch) -> Batch:
        """Return the shuffled rows of a batch; every second time, take half of them from the first batch instead."""
        half = max(batch.rows // 2, 1)
        order = self.drawn.permutation(batch.rows)
        self.made += 1
        if self.early is not None and (self.made % 2 == 0 or batch.rows == 1):
            first = np.resize(self.drawn.permutation(self.early.rows), half)
            rest = order[: max(batch.rows - half, 1)]
            mixed = _joined(_taken(self.early, first, first), _taken(batch, rest, rest))
            if mixed is not None:
                return mixed
        return _taken(batch, order, order)

    def _begin(self, epoch: int) -> None:
        """Choose the first step of an epoch at which a check may run. It differs from epoch to epoch."""
        self.length = self.step if self.epoch >= 0 and self.length is None else self.length
        self.epoch, self.step, self.checked, self.begun = epoch, 0, False, None
        # Drawn from the epoch alone. The last tenth is left out, so that enough steps remain for a check.
        self.first = int(np.random.default_rng(epoch).random() * 0.9 * (self.length or 0))

    def _check(self, batch: Batch) -> None:
        """Run one test that fits in the remaining time: the one that has run least often."""
        ahead = 0.0
        if not self.checked and self.steps and self.length:  # the first check may use the budget of the whole epoch
            ahead = max(self.length - self.step, 0) * self.seconds / self.steps
        budget = SHARE * (self.seconds + ahead) - self.spent
        allowed = [name for name in self.tests if self.steps and MARGIN * self.cost(name) <= budget]
        if not allowed:
            return
        name = min(allowed, key=self.counts.__getitem__)
        begun = self.clock()
        try:
            self.all_devices.on_lead(lambda part: self._test(name, part), batch)
        finally:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.costs[name] = self.clock() - begun
            self.spent += self.costs[name]
            self.checked = True

    def _test(self, name: str, batch: Batch) -> None:
        """Run a test. If it fails, ``parts`` decides.

        If ``parts`` raises no error, the model couples rows in a permitted way, such as the balancing loss of a mixture
        of experts. The failed test is then removed.
        """
        if not batch.rows or name not in self.tests:
            return
        batch = self._arranged(batch)
        if batch.rows < LEAST or self.tests[name](batch) is None:
            return
        self.decide(batch)
        del self.tests[name]
        if name == "rows" and batch.y is not None:
            self.tests["labels"] = self.look_at_labels
            self.counts.setdefault("labels", 0)

    def cost(self, name: str) -> float:
        """Return the expected duration of a test in seconds."""
        guess = TRIAL if name == "parts" else GRADIENTS * self.seconds / max(self.steps, 1)
        return self.costs.get(name, guess)

    def look_at_rows(self, batch: Batch) -> float | None:
        """Return the difference of the sums over halves of the rows, relative to the gradient; None if they agree."""
        return self._look(batch, lambda rows: _taken(batch, rows, rows))

    def look_at_labels(self, batch: Batch) -> float | None:
        """Return the same for halves of the labels; None also if labels change the moving statistics."""
        if batch.y is None:
            return None
        return self._look(batch, lambda rows: _taken(batch, None, rows))

    def look_at_parts(self, batch: Batch) -> None:
        """Run the check of ``decide`` with two ways to halve the batch."""
        self.decide(batch, 2)

    def decide(self, batch: Batch, count: int = WAYS) -> None:
        """Run the check before training on this batch, and restore the state.

        Raises:
            InexactLossError: the gradients of its parts do not add up.
        """
        replica = self.replica
        if batch.rows < 4:  # halves need two rows: a model may squeeze the axis of a single row
            batch = cut(batch, np.repeat(np.arange(batch.rows // 2 * 2), 2))
        # ``try_parts`` makes another replica of the Keras model, whose variables may be old until now.
        replica.sync()
        variables, before, generators = self._state()
        logs = replica._logs
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the driver gave this warning at the start
                try_parts(replica.model, lambda: batch, self.parts, count)
        finally:
            replica._assign(variables, before)
            replica.set_generators(generators)
            replica._logs = logs

    def _state(self) -> tuple[list[Any], list[Array], list[Array]]:
        replica = self.replica
        variables = replica.left_in()
        if keras.backend.backend() == "jax":  # on JAX a step returns new weights, which are not used here
            variables = variables[len(replica.trainable) :]
        before = [np.array(value) for value in replica._values(variables)]
        return variables, before, [np.array(state) for state in replica.generators()]

    def _look(self, batch: Batch, arranged: Callable[[Array], Batch]) -> float | None:
        replica, half = self.replica, batch.rows // 2
        a, b = np.arange(half), np.arange(half, 2 * half)
        rest = np.arange(2 * half, batch.rows)
        variables, before, generators = self._state()
        logs, couples, numbers = replica._logs, replica.statistics_size, NumberAttributes(replica.model)
        statistics: list[Array] = []
        apart, scale = np.zeros(replica.size), 0.0
        for rows, sign in (((a, b), 1), ((b, a), 1), ((a, a), -1), ((b, b), -1)):
            data = replica.pack(arranged(np.concatenate([*rows, rest])))
            arrays, _, n = replica._gradients(data, batch.rows)
            if couples:
                statistics.append(np.empty(couples, replica.dtype))
                replica.get_statistics(statistics[-1])
            # Each of the four batches must start from the same state.
            replica._assign(variables, before)
            replica.set_generators(generators)
            numbers.restore()
            for where, array in zip(replica.slices, arrays, strict=True):
                if array is not None:
                    apart[where] += sign * n * np.asarray(array, np.float64).reshape(-1)
                    scale += float(np.square(n * np.asarray(array, np.float64)).sum())
        replica._logs = logs
        if any(not np.allclose(each, statistics[0], 1e-4, 1e-6) for each in statistics):
            return None
        off = float(np.linalg.norm(apart)) / max(np.sqrt(scale), 1e-12)
        return off if np.isfinite(off) and off > tolerance(replica.model) else None


def _joined(first: Batch, second: Batch) -> Batch | None:
    """Return the rows of both batches; None if their shapes or dtypes differ, such as sequences of unequal length."""
    parts = [(batch.x, batch.y, batch.sample_weight) for batch in (first, second)]
    forms = [[None if a is None else form(a) for a in keras.tree.flatten(part)] for part in parts]
    if forms[0] != forms[1]:
        return None
    x, y, weight = keras.tree.map_structure(lambda a, b: None if a is None else np.concatenate([a, b]), *parts)
    rows = first.rows + second.rows
    return Batch(x, y, weight, rows=rows, total=rows)


def _taken(batch: Batch, inputs: Array | None, labels: Array) -> Batch:
    """Return a batch with the given rows of its inputs and of its labels; ``inputs=None`` keeps all inputs."""

    def taken(part: Any, rows: Array | None) -> Any:
        if rows is None:
            return part
        return keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf)[rows], part)

    x, y, weight = taken(batch.x, inputs), taken(batch.y, labels), taken(batch.sample_weight, labels)
    return Batch(x, y, weight, rows=batch.rows if inputs is None else len(inputs), total=batch.total)
