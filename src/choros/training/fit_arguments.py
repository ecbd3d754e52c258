"""The arguments of ``Trainer.fit``: checks, defaults, and conversion of data to sources."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from choros.data import StreamSource, make_source, make_validation
from choros.data import validation as checks
from choros.training.validation import check_callbacks, check_epochs, check_numbers, check_rest, resume_point

if TYPE_CHECKING:
    import os

    from choros.data import Source
    from choros.training.checkpoint import Checkpoint
    from choros.types import Callbacks

# By ``verbose``, the seconds between two reports of a step. A line for each epoch needs only the report of the first
# step, with which its clock begins: 3600 s is practically never.
_REPORT_SECONDS: dict[object, float] = {1: 0.2, 2: 3600.0}


@dataclass(frozen=True)
class FitArguments:
    """The arguments of one ``Trainer.fit``, in the order of its signature."""

    x: Any
    y: Any
    batch_size: int
    epochs: int
    verbose: Literal["auto", 0, 1, 2] | bool
    callbacks: Callbacks
    validation_split: float
    validation_data: Any
    shuffle: bool | Literal["batch"]
    class_weight: dict[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | list[int]
    seed: int | None
    initial_batch: int
    checkpoint: Checkpoint | str | os.PathLike[str] | None
    resume: bool

    def checked(self, synchronous: bool) -> FitArguments:
        """Return the checked arguments, with the position at which a callback resumes and ``validation_split`` applied.

        Args:
            synchronous: bool. Whether ranks train synchronously. If not, or without a seed, a ``BeforeTimeLimit``
                resumes at the first batch of its epoch, so batches are repeated. ``checkpoint=`` is not affected.

        Raises:
            InvalidInputError: an argument that cannot work.
        """
        checks.check(
            self.x,
            self.y,
            self.sample_weight,
            batch_size=self.batch_size,
            steps=self.steps_per_epoch,
            validation_split=self.validation_split,
        )
        check_callbacks(self.callbacks)
        check_epochs(self.epochs, self.initial_epoch, self.initial_batch)
        seed = self.seed if synchronous else None
        epoch, batch = resume_point(self.callbacks, self.initial_epoch, self.initial_batch, seed)
        check_epochs(self.epochs, epoch, batch)
        check_numbers(self.seed, self.verbose, self.validation_steps, self.validation_batch_size, self.validation_freq)
        checked = replace(self, initial_epoch=epoch, initial_batch=batch)
        if not self.validation_split or self.validation_data is not None:
            return checked
        (x, y, weight), held_out = checks.split(self.x, self.y, self.sample_weight, self.validation_split)
        return replace(checked, x=x, y=y, sample_weight=weight, validation_data=held_out)

    def sources(self) -> tuple[Any, Any]:
        """Return the source of training batches and that of validation batches; the second is None without validation.

        Raises:
            InvalidInputError: the data are of no supported kind, or have too few batches.
        """
        import keras

        floatx = keras.config.floatx()
        source = make_source(self.x, self.y, self.sample_weight, self.class_weight, floatx)
        validation = None
        if self.validation_data is not None:
            validation = make_validation(self.validation_data, self.validation_steps, floatx)
        if isinstance(source, StreamSource):
            source.check(self.epochs - self.initial_epoch, self.steps_per_epoch)
        check_rest(self.initial_batch, self.steps(source))
        return source, validation

    def steps(self, source: Source) -> int | None:
        """Return the number of global batches in an epoch; None if it is unknown until the data end."""
        steps: int | None = self.steps_per_epoch or source.steps(self.batch_size)
        return steps

    def config(self, source: Source) -> dict[str, Any]:
        """Return the fields of a FitConfig that the arguments give, as JSON has them.

        Args:
            source: what ``sources`` returned first.
        """
        frequency = self.validation_freq
        return {
            "batch_size": int(self.batch_size),
            "epochs": int(self.epochs),
            "initial_epoch": int(self.initial_epoch),
            "initial_batch": int(self.initial_batch),
            "steps": _int(self.steps_per_epoch),
            "shuffle": checks.check_shuffle(self.shuffle, source),
            "seed": random.getrandbits(31) if self.seed is None else int(self.seed),
            "fold_seed": _int(self.seed),
            "validation_batch_size": _int(self.validation_batch_size),
            "validation_steps": _int(self.validation_steps),
            "validation_freq": [*map(int, frequency)] if isinstance(frequency, Iterable) else int(frequency),
            "progress": _REPORT_SECONDS.get(self.verbose, 0.0),
        }


def _int(value: Any) -> int | None:
    return None if value is None else int(value)
