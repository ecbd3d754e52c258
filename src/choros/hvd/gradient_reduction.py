"""The reduction of one optimizer's gradients over ranks, as one flat vector."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.gradient_presence import keep, leave_out
from choros.backends.loss_exactness import check_scales
from choros.cluster.hardware.array_threads import with_number
from choros.comm.call_signature import SUM_SLOTS
from choros.comm.collectives import AVERAGE, Op
from choros.comm.dtypes import dtype_code
from choros.comm.tracing import TracedOperation
from choros.consistency.nonfinite import NonFiniteDetector
from choros.errors import CallsDifferError, RankMismatchError
from choros.hvd.compression import Compression, Compressor, checked, warn_of_bytes
from choros.hvd.context import collectives
from choros.hvd.elastic_client import is_elastic
from choros.types import Array, aligned

if TYPE_CHECKING:
    from choros.hvd.context import ProcessSet

_FLAG = np.dtype(np.int64)  # dtype of the sum at an epoch's end: a rank adds 1 if its model must stop
_END = (SUM_SLOTS, 1, *dtype_code(_FLAG))
_BATCH, _ENDED, _STOPPED = b"batch", b"ended", b"stopped"  # a rank's state, gathered if not all end the epoch at once


class ReductionConfig:
    """The settings of a ``DistributedOptimizer``, and its count of reductions.

    Args:
        op: Average or Sum.
        compression: Compressor. The type to which gradients are rounded before they are summed in a wider type.
        process_set: ProcessSet. Defaults to None, all ranks.
        every: int. Backward passes whose gradients are added before one reduction. Defaults to 1.
        average_passes: bool. Whether to divide their sum by ``every``. Defaults to False.
        scale_local: bool. Whether to divide the gradients of local variables by the number of ranks. Defaults to True.

    Attributes:
        local: list of variables that are not reduced. local_layers: list of layers with such variables.
        fitting: bool. True during ``fit``, which checks that the ranks' epochs have equal length.
        taken: int. Number of sets of gradients added so far; each is one step of the optimizer.
        made: int. Number of reductions so far.
        finite: NonFiniteDetector that checks the values before they are summed, or None.
        epoch_start: (epoch, ``taken`` at its begin), from which ``finite`` gets its epoch and step.
        passing: bool. True while gradients that are already reduced pass through the optimizer.
    """

    def __init__(
        self,
        op: Op = AVERAGE,
        compression: Compressor = Compression.none,
        process_set: ProcessSet | int | None = None,
        every: int = 1,
        average_passes: bool = False,
        scale_local: bool = True,
    ) -> None:
        self.op, self.compression, self.process_set = op, checked(compression), process_set
        self.every, self.average_passes, self.scale_local = every, average_passes, scale_local
        self.local: list[Any] = []
        self.local_layers: list[Any] = []
        self.taken = self.made = 0
        self.finite: NonFiniteDetector | None = None
        self.epoch_start: tuple[int, int] = (0, 0)
        self.passing = self.fitting = False

    @property
    def size(self) -> int:
        """The number of ranks that reduce."""
        return collectives(self.process_set).size

    def __str__(self) -> str:
        passes = f", {'averaged' if self.average_passes else 'summed'} over {self.every} passes" * (self.every > 1)
        return f"{self.op.name.capitalize()}, {self.compression}{passes}"

    @property
    def idle(self) -> bool:
        """True if nothing is ever reduced: one rank, not elastic, and an update in each step."""
        return self.every == 1 and self.size == 1 and not is_elastic()

    def are_local(self, variables: Sequence[Any]) -> list[bool]:
        """Return for each variable whether it is local, that is, not reduced."""
        local = [*self.local, *(v for layer in self.local_layers for v in layer.trainable_variables)]
        local_ids = {
            id(tensor) for v in local for tensor in (v, getattr(v, "value", v))
        }  # also the inner TensorFlow variable
        return [id(v) in local_ids for v in variables]

    def refuse_scales(self, variables: Sequence[Any], local: Sequence[bool]) -> None:
        """Refuse variables of float8 scales if several ranks would average them.

        Args:
            variables: the trained variables.
            local: bools. For each variable, whether it is not reduced.

        Raises:
            InexactLossError: a variable is such a scale; names it.
        """
        if self.size > 1:
            check_scales(v for v, is_local in zip(variables, local, strict=True) if not is_local)

    @contextmanager
    def through(self) -> Iterator[None]:
        """Let gradients pass unchanged within the context, because they are reduced already."""
        before, self.passing = self.passing, True
        try:
            yield
        finally:
            self.passing = before


class GradientBuffer:
    """The gradients of one list of variables as one vector of the group's segment.

    A rank's slot holds ``[n g ..., n]``, where ``n`` is the number by which its loss divided. The sum of the gradients
    over the sum of the weights is therefore exact, also with unequal batches; a rank may have no rows.

    At the end of an epoch the ranks sum one 8-byte flag. If a rank ends its epoch while others reduce a batch, the
    calls differ, so the group refuses both. Every rank then gathers the state of all ranks, and all stop or all raise.

    Args:
        config: ReductionConfig.
        slices: the slice of the vector for each variable.
        local: bools. For each variable, whether it is not reduced.
        name: str. The name that the ranks compare before the first reduction, and that warnings and the timeline show.
        dtype: dtype of the vector.
    """

    def __init__(
        self,
        config: ReductionConfig,
        slices: Sequence[slice],
        local: Sequence[bool],
        name: str,
        dtype: np.typing.DTypeLike,
    ) -> None:
        self.config, self.slices, self.dtype = config, list(slices), np.dtype(dtype)
        self.size = slices[-1].stop if slices else 0
        self.name, self._description, self._ending = name, f"{name} by {config}", f"end of an epoch ({name})"
        self._calls = calls = collectives(config.process_set)
        self.group, self.rank, self.ranks = calls.group, calls.rank, calls.size
        warn_of_bytes(config.compression, self.rank, self.ranks)
        self._local = [where for where, is_local in zip(self.slices, local, strict=True) if is_local]
        self._step = (SUM_SLOTS, self.size + 1, *dtype_code(self.dtype))
        self._accumulated = aligned(self.size, self.dtype) if config.every > 1 or self._local else None
        self._result = aligned(self.size, self.dtype) if self._local else None
        self._weight, self._passes, self._fresh = 0.0, 0, True
        if config.fitting:
            self._compare()

    def _compare(self) -> None:
        """Check that all ranks reduce the same variables with the same settings."""
        reports = self._calls.allgather_object([self._description, platform.node()], name="gradients")
        for number, (description, host) in zip(self._calls.ranks, reports, strict=True):
            if description != reports[0][0]:
                raise RankMismatchError(
                    f"The ranks train different models, or were given different settings: rank {number} on {host} is "
                    f"about to reduce {description}, and rank {self._calls.ranks[0]} on {reports[0][1]} "
                    f"{reports[0][0]}. Build the same model on every rank, with rows of the same shape, and give "
                    "hvd.DistributedOptimizer the same settings."
                )

    @property
    def current(self) -> bool:
        """True if the process set still has this group; ``shutdown`` and ``init`` make another one."""
        return collectives(self.config.process_set).group is self.group

    def add(self, arrays: Sequence[Array | None] | None, n: float) -> bool:
        """Add one set of gradients; None, for a batch without rows, adds nothing.

        Args:
            arrays: one array for each variable; None is zero.
            n: float. The number by which the loss divided; without effect for ``Sum``.

        Returns:
            Whether ``reduce`` is due.
        """
        n = 0.0 if arrays is None else n if self.config.op == AVERAGE else 1.0
        target = kept_sum = self._accumulated
        if target is None:
            self._announce()  # before gradients are in the slot: announcements use the slot too
            target = self.group.slot(self.size + 1, self.dtype)
        for where, array in zip(self.slices, [None] * len(self.slices) if arrays is None else arrays, strict=True):
            if array is not None:
                array = self._rounded(array.reshape(-1))
            if kept_sum is None and array is not None:
                with_number(np.multiply, array, n, target[where])
                keep(target, where)
            elif kept_sum is None or (self._fresh and array is None):
                leave_out(target, where)
            elif self._fresh:
                target[where] = array
                keep(target, where)
            elif array is not None:
                target[where] += array
        self._fresh = False
        self._weight += n
        self._passes += 1
        self.config.taken += 1
        return self._passes >= self.config.every

    def _announce(self) -> None:
        """Announce the reduction in a custom loop: a rank that has joined must contribute zeros to it."""
        if not self.config.fitting:
            self._calls.announce(self._description, self.size + 1, self.dtype)

    def _rounded(self, array: Array) -> Array:
        small, kind = self.config.compression.compress(array)
        return self.config.compression.decompress(small, kind)

    def reduce(self) -> tuple[Array, float] | None:
        """Sum the gradients of all ranks.

        Returns:
            The summed vector, valid until the next call, and the divisor to apply to it. None if a rank ended its epoch
            because its model must stop; nothing was summed then.

        Raises:
            RankMismatchError: a rank has no more batches in this epoch.
            InvalidInputError: a rank makes another call.
        """
        weight, self._weight, self._passes, self._fresh = self._weight, 0.0, 0, True
        slot = self.group.slot(self.size + 1, self.dtype)
        if self._accumulated is not None:
            self._announce()
            np.multiply(self._accumulated, weight if self.config.op == AVERAGE else 1.0, out=slot[:-1])
        slot[-1] = weight
        if self.config.finite is not None:
            epoch, taken = self.config.epoch_start
            self.config.finite.gradient(slot[:-1], weight, epoch, self.config.taken - taken - 1)
        try:
            with TracedOperation(self.group, "step", self.name, slot.nbytes):
                summed = self.group.sum_slots(self.size + 1, self.dtype)
        except CallsDifferError as error:
            self._handle_mixed_states(_BATCH, error)
            return None
        divisor = float(summed[-1]) if self.config.op == AVERAGE else 1.0
        divisor *= self.config.every if self.config.average_passes else 1
        self.config.made += 1
        if self._result is None or self._accumulated is None:
            return summed[:-1], divisor
        # A copy, because the group's result is memory of all ranks, and the local variables' gradients differ by rank.
        np.copyto(self._result, summed[:-1])
        share = self.ranks if self.config.scale_local else 1
        passes = self.config.every if self.config.average_passes else 1
        for where in self._local:
            np.multiply(self._accumulated[where], divisor / share / passes, out=self._result[where])
        return self._result, divisor

    def end(self, stopping: bool) -> bool:
        """End the epoch on all ranks, by a sum of 8 bytes.

        Args:
            stopping: bool. Whether this rank's model must stop.

        Returns:
            Whether the model of any rank must stop.

        Raises:
            RankMismatchError: another rank has more batches, and no model must stop.
            InvalidInputError: a rank makes another call.
        """
        slot = self.group.slot(1, _FLAG)
        slot[0] = stopping
        try:
            with TracedOperation(self.group, "call", self._ending, slot.nbytes):
                return bool(self.group.sum_slots(1, _FLAG)[0])
        except CallsDifferError as error:
            self._handle_mixed_states(_STOPPED if stopping else _ENDED, error)
            return True

    def _handle_mixed_states(self, state: bytes, error: CallsDifferError) -> None:
        """Handle ranks of which some end their epoch and others do not; return if any rank's model must stop.

        Raises:
            RankMismatchError: no model must stop.
            CallsDifferError: ``error`` itself, if a rank is neither in a step nor at the end of its epoch.
        """
        if not self.config.fitting or any(call not in (self._step, _END) for call in error.posted):
            raise error
        with TracedOperation(self.group, "call", self._ending):
            states = self.group.gather(state)
        if _STOPPED in states:
            return
        ended = states.count(_ENDED)
        if state == _BATCH:
            problem = f"has another batch in this epoch, but {ended} of {self.ranks} ranks have none left"
        else:
            problem = (
                f"has no batch left in this epoch, but {self.ranks - ended} of {self.ranks} ranks have another one"
            )
        raise RankMismatchError(f"Rank {self.rank} {problem}: {_ADVICE}") from None


_ADVICE = (
    "give every rank the same number of batches (steps_per_epoch=, or hvd.shard(x, y, per_rank_batch_size=), which "
    "divides rows exactly)."
)
