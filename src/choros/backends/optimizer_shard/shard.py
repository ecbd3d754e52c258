"""A rank's share of the optimizer's update, on weights and slots that the ranks of a host share.

Each rank updates its pieces of the weights, in memory that all ranks of the host read as the weights of their models.
This is ZeRO stage 1 (Rajbhandari et al., SC 2020), without its all-gather: a new weight is written once, to the place
where all ranks read it. Nobody reads or writes a weight between the sum of the gradients and the end of the update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from choros.backends import inner_optimizer
from choros.backends.gradient_presence import left_out
from choros.backends.optimizer_shard.independence import treats_alike
from choros.backends.optimizer_shard.layout import Memory, Piece, SharedLayout
from choros.backends.optimizer_shard.loss_scale import LossScale
from choros.backends.optimizer_shard.obstacles import obstacle
from choros.backends.optimizer_shard.optimizer_copy import optimizer_copy, plain_attributes, variable_like
from choros.backends.rowwise_parts import of_keras
from choros.cluster.hardware.array_threads import for_each, with_number
from choros.types import Array, aligned

if TYPE_CHECKING:
    from choros.backends.base import BaseReplica

_CACHE_LINE = 64  # bytes
_CHUNK = 1 << 16  # values that are summed over all ranks before the next ones


class OptimizerShard(ABC):
    """One rank's share of the optimizer's update.

    The order of calls: ``fill`` on one rank, ``attach`` on all, then ``apply`` in each step; at the end ``detach``.

    Args:
        replica: the replica of this rank; its optimizer can be divided (``obstacle``).
        rank: int. This rank, among those that share the memory.
        size: int. Number of these ranks.
        tries: whether a trial decides about an optimizer of the user (``independent_unit``).

    Attributes:
        layout: SharedLayout.
        pieces: list of Piece.
        groups: list of lists of Piece. The pieces that one call of the optimizer updates; all groups have equal shapes.
        sums: for each piece of a group, the sum of its gradients, a flat array.
        original: the optimizer that updates the weights of the model; with loss scaling, the inner one.
        optimizer: a copy of it for the pieces of a group.
        loss_scale: LossScale, optional.
        global_clipnorm: float, optional. That of the optimizer: the copy for the pieces cannot clip by it.
    """

    block: int | None = None  # most values of a piece that is a range; None: one piece
    needs_first_step = True  # whether a first, whole update must show that steps set no weights (``sets_weights``)

    def __init__(self, replica: BaseReplica, rank: int, size: int, tries: bool = False) -> None:
        self.replica, self.rank, self.size, self.tries = replica, rank, size, tries
        self.original = inner_optimizer(replica.model.optimizer)
        self.loss_scale = None if self.original is replica.model.optimizer else LossScale(replica)
        self.layout = SharedLayout.of(replica.model, replica.trainable, size, self.block, tries)
        self.pieces = self.layout.pieces(replica.slices, rank, size)
        ranges = self.layout.piece is not None
        self.groups = [[piece] for piece in self.pieces] if ranges else [self.pieces] if self.pieces else []
        self.sums = [aligned(math.prod(piece.shape), replica.dtype) for group in self.groups[:1] for piece in group]
        self._build_optimizer()

    @staticmethod
    @abstractmethod
    def on_host(replica: Any) -> bool:
        """Return whether the weights of a replica are in memory of this host, and its steps can use shared memory."""

    @property
    def values(self) -> int:
        """Number of weights that this rank updates."""
        return sum(math.prod(piece.shape) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory: the weights and slots, then two counters and a sum of squares of each rank."""
        return self.layout.nbytes + 3 * _CACHE_LINE * self.size

    def fits(self, rank: int, size: int) -> bool:
        """Return whether this is the share of ``rank`` of ``size`` ranks."""
        return (self.rank, self.size) == (rank, size)

    def fill(self, memory: Memory) -> None:
        """Write this rank's weights and slots to the shared memory."""
        for field in self.layout.fields():
            variables = [variable for variable in field.variables if variable is not None]
            views = field.views(memory)
            for variable, value in zip(variables, self.replica._values(variables), strict=True):
                views[id(variable)][...] = value

    def attach(self, memory: Memory) -> None:
        """Let the replica's weights and slots use the shared memory."""
        words = memory(np.int64, 2 * self.size * _CACHE_LINE // 8, self.layout.nbytes)
        self._counters = words[:: _CACHE_LINE // 8].reshape(self.size, 2)  # updates that each rank has begun, and ended
        end = self.layout.nbytes + words.nbytes
        self._squares = memory(np.float64, self.size * _CACHE_LINE // 8, end)[:: _CACHE_LINE // 8]
        self._attach(memory)
        field = self.layout.slots.get("_accumulated_gradients")
        views = [[piece.view(field, memory) for piece in group] for group in self.groups] if field is not None else []
        self._accumulators = [[view.reshape(-1) for view in group if view is not None] for group in views]
        self.replica.shard = self
        self.watch()

    @abstractmethod
    def _attach(self, memory: Memory) -> None:
        """Let the variables of the model and of the pieces use the shared memory."""

    def detach(self) -> None:
        """Copy weights and slots back to memory of this process."""
        self.replica.shard, self._counters = None, np.zeros((self.size, 2), np.int64)
        self._detach()

    @abstractmethod
    def _detach(self) -> None:
        """Let the variables of the model use memory of this process, with the same values."""

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release what the compiled update holds."""

    def must_detach(self, rank_gradients: list[Array]) -> bool:
        """Return whether the ranks must return to whole updates. The result is equal on all ranks.

        If a variable has no gradient on any rank, Keras leaves it, but still changes its moving average and its
        accumulator. The optimizer of a range cannot do that.

        Args:
            rank_gradients: the vectors ``[n * g ...]`` of all ranks.
        """
        absent = left_out(rank_gradients[0], self.replica.slices)
        for gradients in rank_gradients[1:]:
            absent = absent and absent & left_out(gradients, self.replica.slices)
        return bool(absent)

    def write(self, variable: Any, array: Array) -> bool:
        """Set a variable that is in the shared memory; return False if the backend sets it as any other variable."""
        return False

    @abstractmethod
    def watch(self) -> None:
        """Begin to observe whether steps set weights without the optimizer. Earlier writes no longer count."""

    def sets_weights(self) -> bool:
        """Return whether the step since ``watch``, or any step since ``attach``, has set weights without the optimizer.

        Such a step would set the weights of all ranks, at any time, or this rank's weights would differ from theirs.
        """
        return False

    def has_moved(self) -> bool:
        """Return whether a weight or slot of this rank is no longer in the shared memory (TensorFlow)."""
        return False

    def apply(
        self,
        totals: Array,
        rank_gradients: list[Array],
        add: Callable[[list[Array], Array], None],
        barrier: Callable[[], None],
    ) -> None:
        """Run the optimizer on this rank's pieces.

        Args:
            totals: ``[n * loss, n, ...]``, summed over ranks.
            rank_gradients: the vectors ``[n * g ...]`` of all ranks, of which only this rank's pieces are summed.
            add: sums arrays into another one.
            barrier: the barrier of the ranks.
        """
        divisor = self.replica.count_batch(totals)
        if divisor == 0:
            return
        has_sums, shrink, divisors = False, 1.0, list[float]()

        def sum_group(group: list[Piece]) -> None:
            if not has_sums:
                self._sum(group, rank_gradients, add)
            for number in divisors:
                for total in self.sums:
                    with_number(np.divide, total, number, total)

        clips = self._clips
        if self.loss_scale is not None or clips:
            scale = (self.optimizer.loss_scale_factor or 1.0) if self.loss_scale is None else self.loss_scale.factor
            squares = self._sum_squares(divisor, scale, sum_group, barrier)
            has_sums = len(self.groups) == 1
            if self.loss_scale is not None:
                if math.isnan(squares):
                    self.loss_scale.halve()
                    return
                # In the order of a whole update, for the same bits; also, the product may overflow.
                divisors, divisor = [divisor, scale], 1.0
            shrink = self._shrink(squares) if clips else 1.0
        with self.writing():
            if shrink != 1.0:
                for accumulators in self._accumulators if self._accumulates else []:
                    for values in accumulators:
                        with_number(np.multiply, values, shrink, values)
            if self.groups:
                self._update(divisor / shrink, sum_group)
            else:
                self.replica.skip()
        if self.loss_scale is not None:
            self.loss_scale.count_finite()

    @property
    def _accumulates(self) -> bool:
        return bool(self.optimizer.gradient_accumulation_steps)

    @property
    def _clips(self) -> bool:
        """True if this step clips the gradients by their norm: with accumulation, only a step that changes weights."""
        steps = self.optimizer.gradient_accumulation_steps or 1
        limited = (self.global_clipnorm or 0.0) > 0
        return limited and (steps == 1 or (self.replica.iterations + 1) % steps == 0)

    def _sum_squares(
        self, divisor: float, scale: float, sum_group: Callable[[list[Piece]], None], barrier: Callable[[], None]
    ) -> float:
        """Return the sum of the squares of the mean gradients, with the accumulated ones. Collective.

        It is NaN if a gradient is not finite.

        Args:
            divisor: of the sums.
            scale: of the loss; also a divisor.
            sum_group: writes the gradients of a group to ``sums``.
            barrier: the barrier of the ranks.
        """
        squares = 0.0
        for index, group in enumerate(self.groups):
            sum_group(group)
            for number, (piece, total) in enumerate(zip(group, self.sums, strict=True)):
                for _, place in piece.inputs:  # between variables a range has gaps of any values
                    accumulated = self._accumulators[index][number][place] if self._accumulates else None
                    squares += _square(total[place], divisor, scale, accumulated)
        self._squares[self.rank] = squares
        barrier()
        return float(self._squares.sum())

    def _shrink(self, squares: float) -> float:
        """Return the number by which clipping to ``global_clipnorm`` multiplies new and accumulated gradients.

        Args:
            squares: sum of the squares of the mean gradients.
        """
        limit, steps = float(self.global_clipnorm or 0.0), self.optimizer.gradient_accumulation_steps or 1
        norm = math.sqrt(squares) / steps
        # As in Keras, all gradients are NaN if one is not finite.
        return limit / max(norm, limit) if math.isfinite(norm) else math.nan

    @property
    def keeps_scalars_equal(self) -> bool:
        """True if each rank's update changes the optimizer's scalar variables alike.

        A rank without pieces only increments the step counter. Nadam has another such variable, and an optimizer of the
        user may have one.
        """
        everywhere = all(self.layout.pieces(self.replica.slices, rank, self.size) for rank in range(self.size))
        kind = type(self.original)
        return everywhere or (of_keras(kind) and kind.__name__ != "Nadam")

    def invalidate(self) -> None:
        """Mark the shared weights as incomplete for ``whole_copy``."""
        self._counters[self.rank, 0] += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the time in which this rank writes to the shared weights; every rank must do so equally often."""
        # The order of these stores shows a survivor of a failure whether a rank has died within its update. So an
        # exception must leave the counters unequal.
        self._counters[self.rank, 0] += 1
        yield
        self._counters[self.rank, 1] += 1

    def _sum(self, group: list[Piece], rank_gradients: list[Array], add: Callable[[list[Array], Array], None]) -> None:
        """Sum the gradients of a group's pieces into ``sums``."""
        calls: list[tuple[list[Array], Array]] = []
        for piece, total in zip(group, self.sums, strict=True):
            for where, place in piece.inputs:
                out = total[place]
                for begin in range(0, len(out), _CHUNK):  # the partial sum of several ranks stays in the cache
                    part = slice(where.start + begin, min(where.start + begin + _CHUNK, where.stop))
                    calls.append(([gradients[part] for gradients in rank_gradients], out[begin : begin + _CHUNK]))
        for_each(add, calls, sum(total.nbytes for total in self.sums))

    def whole_copy(self) -> list[Array] | None:
        """Return a copy of ``BaseReplica.view``; None if some ranks have updated their pieces and others have not.

        Other ranks may have failed, or be about to.
        """
        before = self._counters.copy()
        copies = [np.array(value) for value in self.replica.view()]
        whole = (before == before[0, 0]).all() and np.array_equal(before, self._counters)
        return copies if whole else None

    @abstractmethod
    def _update(self, divisor: float, sum_group: Callable[[list[Piece]], None]) -> None:
        """Update each of ``groups``; write the new weights and slots to the memory.

        Args:
            divisor: of the gradients.
            sum_group: writes the gradients of a group to ``sums``.
        """

    def copy_settings(self) -> None:
        """Copy numbers that callbacks may set, such as ``momentum``, to the optimizer of the pieces."""
        vars(self.optimizer).update(plain_attributes(self.original))
        self.global_clipnorm, self.optimizer.global_clipnorm = self.optimizer.global_clipnorm, None

    def take_settings(self) -> None:
        """Take numbers that callbacks have set; ``detach`` if the update cannot be divided this way with them."""
        self.copy_settings()
        alike = treats_alike(self.original, self.replica.trainable, self.tries)
        if obstacle(self.replica.model, self.tries) or alike != (self.layout.piece is not None):
            self.detach()

    def _build_optimizer(self) -> None:
        """Build a copy of the optimizer for the pieces, with the schedule and the exceptions of the original."""
        trainable = self.replica.trainable
        variables: list[Any] = []
        group = self.groups[0] if self.groups else []
        for number, piece in enumerate(group):
            variable = trainable[piece.index]
            if piece.start is None:
                part = variable_like(variable, np.zeros(piece.shape, variable.dtype))
            else:
                part = keras.Variable(
                    np.zeros(piece.shape, variable.dtype), dtype=variable.dtype, name=f"range_{number}"
                )
            variables.append(part)
        self.variables = variables
        self.optimizer = optimizer_copy(self.original, variables, [trainable[piece.index] for piece in group])
        self.copy_settings()


def _square(sums: Array, divisor: float, scale: float, accumulated: Array | None) -> float:
    """Return the square of the norm of ``sums / divisor / scale + accumulated``; NaN if a sum is not finite."""
    square = 0.0
    with np.errstate(all="ignore"):
        if accumulated is None and scale == 1.0:
            square = float(np.dot(sums, sums)) / divisor**2
        else:  # a square of scaled values may overflow
            kind = sums.dtype.type
            for begin in range(0, len(sums), _CHUNK):
                part = slice(begin, begin + _CHUNK)
                mean = sums[part] / kind(scale) / kind(divisor)
                if accumulated is not None:
                    mean += accumulated[part]
                square += float(np.dot(mean, mean))
    if math.isfinite(square):
        return square
    return math.inf if np.isfinite(sums).all() else math.nan
