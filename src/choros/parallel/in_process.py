"""A fit in this very process: the Trainer's data, callbacks and loop, on a replica that spans several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from choros.algorithms import Single
from choros.backends.base import blind
from choros.backends.devices import place_of
from choros.backends.driver_model import build_model
from choros.backends.loss_exactness import check_exact
from choros.backends.metric_additivity import not_additive
from choros.cluster import Place
from choros.errors import InvalidInputError
from choros.trainer import Trainer
from choros.training.executors import in_job
from choros.training.model_io.serialization import PackedModel, pack_model
from choros.training.run_record import RunRecord
from choros.training.spec import FitRequest
from choros.training.worker.setup import build_replica, several_models
from choros.types import Batch


class InProcessTrainer(Trainer):
    """Trains a model over devices of this process, and keeps what was compiled for it.

    Args:
        model: compiled.
        devices: two or more, as Keras names them.
    """

    def __init__(self, model: Any, devices: list[str]) -> None:
        self.devices = devices
        self.replica: Any = None
        super().__init__(model, Single(), workers=1)

    def _where(self, *_: Any) -> Place:
        return Place()

    def _write(self) -> PackedModel:
        return PackedModel()

    def _bind(self, sample: Batch, wide: Callable[[], Batch]) -> tuple[Any, str | None]:
        bound = super()._bind(sample, wide)
        self.ready(sample)
        return bound

    def _train(self, plan: FitRequest) -> RunRecord:
        try:
            return in_job.fit(plan, 0, self.replica)
        except BaseException:
            self.replica.sync()  # as Keras leaves a model: as it was when training stopped
            raise

    def ready(self, sample: Batch) -> Any:
        """Return the replica, made with the first batch, with the weights that the model has now.

        Raises:
            InvalidInputError: the model lies on none of the devices.
        """
        if self.replica is not None and self.replica.blind and sample.y is not None:
            self.replica.sync()
            self.forget()
        if self.replica is not None:
            self.replica.refresh()
            return self.replica
        with blind(self.model, sample):
            build_model(self.model, sample)
        averaged, clone = [], None
        if several_models(len(self.devices)):
            where = place_of(self.model)
            if where not in (None, self.devices[0]) and not self.devices[0].startswith("cpu"):
                raise InvalidInputError(f"The model lies on {where}: give devices that begin with it.")
            if sample.y is not None:
                check_exact(self.model, len(self.devices), sample, repeats=False)
                averaged = not_additive(self.model, sample)
            clone = pack_model(self.model).unpack

        self.replica = build_replica(self.model, sample, 1, averaged, self.devices, None, clone)
        return self.replica

    def forget(self) -> None:
        """Let the replica go: the model was compiled anew."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.close()
