"""A check, while training, that the loss is a mean over rows: rows of another kind may come late.

A test costs the gradients of four batches of the shape of the step, so that nothing is compiled for it. For a mean of
what each row gives by itself, from halves ``a`` and ``b`` and with divisors ``n``,

    n L(a, b) + n L(b, a) = n L(a, a) + n L(b, b)

holds exactly, also with random layers, which draw the same for the same place of a row. It does not hold where each
half divides by something else, as by its valid entries, or where rows are compared. There are three tests:

- ``rows``: ``a`` and ``b`` are rows of the batch. For models without moving statistics.
- ``labels``: ``a`` and ``b`` are labels and sample weights of the rows; the inputs stay in their places. What couples
  inputs, as BatchNormalization in training does, then is the same in all four batches.
- ``parts``: the check from before training (``choros.backends.loss_trial``), on the rows of the step.

The first two only raise a suspicion: ``parts`` decides, so that a late refusal and an early one have the same reasons.

In each epoch one rank checks, in turn. It spends at most ``SHARE`` of the time of the epochs in its turn. Besides, all
ranks check once at the end of the first epoch, whatever that takes, and those of a stream at the end of the last one.

The rows of a check are those of a step in an order drawn anew, since both halves may happen to have equally many valid
entries. Every second check takes half of the rows from the first batch instead: a rank's rows of a step may all be of
one kind, where those of another rank, or of another step, are not.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from choros.backends.loss_trial import WAYS, cut, tolerance, try_parts
from choros.backends.replica import Replica
from choros.backends.rowwise_parts import plain
from choros.types import Array, Batch

SHARE = 0.01  # of the training time
GRADIENTS = 4.5  # steps that ``rows`` and ``labels`` are taken to cost until they are measured
TRIAL = 1.0  # seconds that ``parts`` is taken to cost until it is measured
MARGIN = 1.2  # a check may take so many times as long as the last one did
PAIRS = 2  # checks of each kind at the end of an epoch
LEAST = 2  # rows of a batch that can be checked


class Recheck:
    """Checks one batch in each epoch that is long enough, and more batches in a long epoch.

    Args:
        replica: built, which reduces gradients.
        rank: int. This rank.
        workers: int. How many ranks there are; each takes the epochs in its turn.
        length: int, optional. Steps of an epoch; None where that is not known.
        clock: gives seconds.
        parts: int, optional. How many models a batch is divided among. Defaults to ``workers``.
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
        self.whole: Any = replica
        self.replica = self.whole.lead
        self.rank, self.workers, self.length, self.clock = rank, workers, length, clock
        self.parts = workers if parts is None else parts
        apt = self.parts > 1 and not plain(self.replica.model) and self.replica.weigher.refusal is None
        self.tests: dict[str, Callable[[Batch], float | None]] = {}
        if apt and replica.others:
            self.tests = {"labels": self.look_at_labels, "parts": self.look_at_parts}
        elif apt:
            self.tests = {"rows": self.look_at_rows}
        self.costs: dict[str, float] = {}  # the last measured cost of each test
        self.counts = dict.fromkeys(self.tests, 0)
        self.epoch, self.step, self.first = -1, 0, 0
        self.checked = False  # in this epoch
        self.seconds, self.steps, self.spent = 0.0, 0, 0.0  # of the epochs in this rank's turn
        self.shapes: set[int] = set()
        self.begun: float | None = None
        self.early: Batch | None = None  # rows of the first batch
        self.latest: Batch | None = None  # the last batch, until the check at an epoch's end is done
        self.drawn = np.random.default_rng(rank)
        self.made = 0

    def __call__(self, batch: Batch, epoch: int) -> None:
        """Count a step, and check its batch where that is due.

        Raises:
            InexactLossError: names where the loss comes from, and what to do.
        """
        if not self.tests:
            return
        if batch.rows:
            self.latest = batch
            if self.early is None:
                self.whole.on_lead(self._remember, batch)
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
        self.begun = self.clock() if batch.rows in self.shapes else None  # the first step of a shape compiles
        self.shapes.add(batch.rows)

    def end(self) -> None:
        """Check the last batch of an epoch, whatever that takes; every rank may call it when it likes.

        Raises:
            InexactLossError: names where the loss comes from, and what to do.
        """
        batch, self.latest = self.latest, None
        if batch is None:
            return
        for _ in range(PAIRS):
            for name in [each for each in self.tests if each != "parts"]:
                self.whole.on_lead(lambda part, name=name: self._test(name, part), batch)
        self.begun = None

    def finish(self) -> None:
        """Check the last batch of a stream: as ``end``, and as before training where moving statistics are kept.

        Raises:
            InexactLossError: names where the loss comes from, and what to do.
        """
        batch = self.latest
        self.end()
        if batch is not None and "parts" in self.tests:
            for _ in range(2):
                self.whole.on_lead(lambda part: self._test("parts", part), batch)

    def _remember(self, batch: Batch) -> None:
        if batch.rows:
            self.early = _taken(batch, *[np.arange(max(batch.rows // 2, 1))] * 2)

    def _arranged(self, batch: Batch) -> Batch:
        """Return as many rows as a batch has, of it alone or, every second time, half of them from the first batch."""
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
        """Choose the step of an epoch from which on a check may come; another in each epoch."""
        self.length = self.step if self.epoch >= 0 and self.length is None else self.length
        self.epoch, self.step, self.checked, self.begun = epoch, 0, False, None
        self.first = int(np.random.default_rng(epoch).random() * 0.9 * (self.length or 0))

    def _check(self, batch: Batch) -> None:
        """Make the test that was made least often among those that the time allows."""
        ahead = 0.0
        if not self.checked and self.steps and self.length:  # the first check may use what the epoch will have earned
            ahead = max(self.length - self.step, 0) * self.seconds / self.steps
        budget = SHARE * (self.seconds + ahead) - self.spent
        allowed = [name for name in self.tests if self.steps and MARGIN * self.cost(name) <= budget]
        if not allowed:
            return
        name = min(allowed, key=self.counts.__getitem__)
        begun = self.clock()
        try:
            self.whole.on_lead(lambda part: self._test(name, part), batch)
        finally:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.costs[name] = self.clock() - begun
            self.spent += self.costs[name]
            self.checked = True

    def _test(self, name: str, batch: Batch) -> None:
        """Make a test and let ``parts`` decide on what it suspects.

        Where ``parts`` has no objection, the rows of this model are coupled in a way that is allowed, as by the
        balancing loss of a mixture of experts.
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
        """Return the seconds that a test will take."""
        guess = TRIAL if name == "parts" else GRADIENTS * self.seconds / max(self.steps, 1)
        return self.costs.get(name, guess)

    def look_at_rows(self, batch: Batch) -> float | None:
        """Return how far the sums over rows are apart, relative to the gradient; None where they agree."""
        return self._look(batch, lambda rows: _taken(batch, rows, rows))

    def look_at_labels(self, batch: Batch) -> float | None:
        """Return the same for the sums over labels; None also where labels change what BatchNormalization keeps."""
        if batch.y is None:
            return None
        return self._look(batch, lambda rows: _taken(batch, None, rows))

    def look_at_parts(self, batch: Batch) -> None:
        """Check two ways of halving the batch."""
        self.decide(batch, 2)

    def decide(self, batch: Batch, count: int = WAYS) -> None:
        """Check the batch as before training.

        Raises:
            InexactLossError: its parts do not add up.
        """
        replica = self.replica
        if batch.rows < 4:  # half of a half: a model may take the axis of a single row for none
            batch = cut(batch, np.repeat(np.arange(batch.rows // 2 * 2), 2))
        replica.sync()
        held, before, generators = self._state()
        logs = replica._logs
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the caller's process has said it at the start
                try_parts(replica.model, lambda: batch, self.parts, count)
        finally:
            replica._assign(held, before)
            replica.set_generators(generators)
            replica._logs = logs

    def _state(self) -> tuple[list[Any], list[Array], list[Array]]:
        replica = self.replica
        held = replica.left_in()
        if keras.backend.backend() == "jax":  # there a step returns the weights that it sets, and this one is dropped
            held = held[len(replica.trainable) :]
        before = [np.array(value) for value in replica._values(held)]
        return held, before, [np.array(state) for state in replica.generators()]

    def _look(self, batch: Batch, arranged: Callable[[Array], Batch]) -> float | None:
        replica, half = self.replica, batch.rows // 2
        a, b = np.arange(half), np.arange(half, 2 * half)
        rest = np.arange(2 * half, batch.rows)
        held, before, generators = self._state()
        logs, couples = replica._logs, replica.others
        statistics: list[Array] = []
        apart, scale = np.zeros(replica.size), 0.0
        for rows, sign in (((a, b), 1), ((b, a), 1), ((a, a), -1), ((b, b), -1)):
            data = replica.pack(arranged(np.concatenate([*rows, rest])))
            arrays, _, n = replica._gradients(data, batch.rows)
            if couples:
                statistics.append(np.empty(couples, replica.dtype))
                replica.get_others(statistics[-1])
            replica._assign(held, before)
            replica.set_generators(generators)
            for where, array in zip(replica.slices, arrays, strict=True):
                if array is not None:
                    apart[where] += sign * n * np.asarray(array, np.float64).reshape(-1)
                    scale += float(np.square(n * np.asarray(array, np.float64)).sum())
        replica._logs = logs
        if any(not np.allclose(each, statistics[0], 1e-4, 1e-6) for each in statistics):
            return None
        off = float(np.linalg.norm(apart)) / max(np.sqrt(scale), 1e-12)
        return off if np.isfinite(off) and off > tolerance(replica.model) else None


def _joined(one: Batch, other: Batch) -> Batch | None:
    """Return the rows of both; None where they have other shapes, as sequences of another length."""
    parts = [(batch.x, batch.y, batch.sample_weight) for batch in (one, other)]
    forms = [[None if a is None else (a.shape[1:], a.dtype) for a in keras.tree.flatten(part)] for part in parts]
    if forms[0] != forms[1]:
        return None
    x, y, weight = keras.tree.map_structure(lambda a, b: None if a is None else np.concatenate([a, b]), *parts)
    rows = one.rows + other.rows
    return Batch(x, y, weight, rows=rows, total=rows)


def _taken(batch: Batch, inputs: Array | None, labels: Array) -> Batch:
    """Return the batch with its inputs and its labels in other orders; None leaves them as they are."""

    def taken(part: Any, rows: Array | None) -> Any:
        if rows is None:
            return part
        return keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf)[rows], part)

    x, y, weight = taken(batch.x, inputs), taken(batch.y, labels), taken(batch.sample_weight, labels)
    return Batch(x, y, weight, rows=batch.rows if inputs is None else len(inputs), total=batch.total)
