"""An executor that runs ``fit`` in this process, on a replica that spans several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from choros.backends.batch_parts import blind
from choros.backends.driver_model import build_model, check_target
from choros.backends.loss_exactness import check_exact
from choros.backends.metric_additivity import not_additive
from choros.training.executors import in_job
from choros.training.executors.executor import FitResult
from choros.training.model_io.serialization import pack_model
from choros.training.spec import FitRequest
from choros.training.validation import sample_rows
from choros.training.worker.setup import build_replica, several_models
from choros.types import Batch

if TYPE_CHECKING:
    import keras


class InProcessExecutor:
    """Executor that trains a model over devices of this process, and keeps the compiled replica between calls.

    Args:
        model: keras.Model, compiled.
        devices: two or more names of devices, as Keras names them.

    Attributes:
        replica: the replica on the devices; None before the first batch.
    """

    packs_model, remote_members = False, False

    def __init__(self, model: keras.Model, devices: list[str]) -> None:
        self.model, self.devices = model, devices
        self.replica: Any = None

    def run(self, request: FitRequest) -> FitResult:
        """Run a fit; see ``choros.training.executors.executor.Executor``."""
        self.ready(request.source.sample(sample_rows(self.model, request.job.batch_size)))
        try:
            return in_job.fit(request, 0, self.replica)
        except BaseException:
            self.replica.sync()  # the model gets the weights of the last step, as with Keras' fit
            raise

    def close(self) -> None:
        """Release the replica; needed when the model is compiled again."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.close()

    def ready(self, sample: Batch, trains: bool = False) -> Any:
        """Return the replica, with the current weights of the model; the first call builds it.

        Args:
            sample: a batch.
            trains: whether the batch is to be trained, so that its y is needed. Defaults to False.
        """
        if trains:
            check_target(self.model, sample)
        # A replica that was built from a batch without labels cannot train.
        if self.replica is not None and self.replica.blind and sample.y is not None:
            self.replica.sync()
            self.close()
        if self.replica is not None:
            self.replica.refresh()
            return self.replica
        with blind(self.model, sample):
            build_model(self.model, sample)
        averaged, clone = [], None
        if several_models(len(self.devices)):
            if sample.y is not None:
                check_exact(self.model, len(self.devices), sample, repeats=False)
                averaged = not_additive(self.model, sample)
            clone = pack_model(self.model).unpack

        self.replica = build_replica(self.model, sample, 1, averaged, self.devices, None, clone)
        return self.replica
