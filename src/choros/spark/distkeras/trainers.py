"""dist-keras' trainers of both generations. Each uses an algorithm of Choros, which its repr shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from choros import algorithms
from choros.algorithms.legacy import MeanEASGD
from choros.spark.distkeras.base import DistributedTrainer, Trainer

if TYPE_CHECKING:
    import keras

    from choros.algorithms.base import Algorithm
    from choros.spark.distkeras.base import Columns, LossLike, LossWeights, Metrics, OptimizerLike

__all__ = [
    "ADAG",
    "AEASGD",
    "DOWNPOUR",
    "EAMSGD",
    "EASGD",
    "AsynchronousDistributedTrainer",
    "AsynchronousEAMSGD",
    "AsynchronousEASGD",
    "AveragingTrainer",
    "DistributedTrainer",
    "DynSGD",
    "EnsembleTrainer",
    "Experimental",
    "SingleTrainer",
    "SynchronizedDistributedTrainer",
    "Trainer",
]


class SingleTrainer(Trainer):
    """Training with one worker, as in plain Keras.

    Args:
        keras_model, worker_optimizer, loss, metrics, loss_weights: see ``Trainer``.
        features_col: str, or a list of names, one for each input.
        label_col: str, or a list of names, one for each output.
        num_epoch: int.
        batch_size: int.
    """

    def __init__(
        self,
        keras_model: keras.Model,
        worker_optimizer: OptimizerLike,
        loss: LossLike,
        metrics: Metrics = None,
        features_col: Columns = "features",
        label_col: Columns = "label",
        num_epoch: int = 1,
        batch_size: int = 32,
        loss_weights: LossWeights = None,
    ) -> None:
        super().__init__(keras_model, loss, worker_optimizer, metrics, loss_weights)
        self.features_column, self.label_column = features_col, label_col
        self.num_epoch, self.batch_size = num_epoch, batch_size


class AveragingTrainer(SingleTrainer):
    """Training with an average of the workers' models after each epoch.

    Args:
        keras_model, worker_optimizer, loss, metrics, features_col, label_col, num_epoch, batch_size, loss_weights: see
            ``SingleTrainer``.
        num_workers: int.
    """

    def __init__(
        self,
        keras_model: keras.Model,
        worker_optimizer: OptimizerLike,
        loss: LossLike,
        metrics: Metrics = None,
        features_col: Columns = "features",
        label_col: Columns = "label",
        num_epoch: int = 1,
        batch_size: int = 32,
        num_workers: int = 2,
        loss_weights: LossWeights = None,
    ) -> None:
        super().__init__(
            keras_model, worker_optimizer, loss, metrics, features_col, label_col, num_epoch, batch_size, loss_weights
        )
        self.num_workers = num_workers

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm Averaging, which averages after each epoch."""
        return algorithms.Averaging()


class EnsembleTrainer(SingleTrainer):
    """Members that train independently, without exchange; ``train`` returns all of them.

    Args:
        keras_model, worker_optimizer, loss, metrics, features_col, label_col, batch_size, loss_weights: see
            ``SingleTrainer``.
        num_ensembles: int. Number of members. Defaults to 2.
        num_epoch: int. Defaults to 1.
    """

    def __init__(
        self,
        keras_model: keras.Model,
        worker_optimizer: OptimizerLike,
        loss: LossLike,
        metrics: Metrics = None,
        features_col: Columns = "features",
        label_col: Columns = "label",
        batch_size: int = 32,
        num_ensembles: int = 2,
        loss_weights: LossWeights = None,
        num_epoch: int = 1,
    ) -> None:
        super().__init__(
            keras_model, worker_optimizer, loss, metrics, features_col, label_col, num_epoch, batch_size, loss_weights
        )
        self.num_workers = num_ensembles

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm Ensemble, whose members train on disjoint shards."""
        return algorithms.Ensemble()


class AsynchronousDistributedTrainer(DistributedTrainer):
    """The base class of asynchronous trainers, whose workers do not wait for each other."""

    communication_window: int
    rho: float
    learning_rate: float
    momentum: float


class SynchronizedDistributedTrainer(DistributedTrainer):
    """The base class of synchronous trainers, whose workers wait for each other."""

    rho: float
    learning_rate: float


class EASGD(SynchronizedDistributedTrainer):
    """Synchronous elastic averaging after every batch, by dist-keras' rule of the mean with corrected signs.

    Further arguments: rho (5.0) and learning_rate (0.01), whose product is the elastic force.
    """

    own = (("rho", 5.0), ("learning_rate", 0.01))

    @property
    def algorithm(self) -> Algorithm:
        """The rule of the mean with an exchange in every step."""
        return MeanEASGD(window=1, alpha=self.rho * self.learning_rate)


class AEASGD(AsynchronousDistributedTrainer):
    """Asynchronous elastic averaging.

    Further arguments: communication_window (32), rho (5.0) and learning_rate (0.1), whose product is the elastic force.
    """

    own: tuple[tuple[str, Any], ...] = (("communication_window", 32), ("rho", 5.0), ("learning_rate", 0.1))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm AEASGD of Choros."""
        return algorithms.AEASGD(window=self.communication_window, alpha=self.rho * self.learning_rate)


class AsynchronousEASGD(AEASGD):
    """The earlier name of ``AEASGD``. The default of communication_window is 10, that of learning_rate 0.01."""

    own = (("communication_window", 10), ("rho", 5.0), ("learning_rate", 0.01))


class EAMSGD(AEASGD):
    """Asynchronous elastic averaging with Nesterov momentum.

    Further arguments: those of ``AEASGD``, and momentum (0.9).
    """

    own = (*AEASGD.own, ("momentum", 0.9))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm EAMSGD of Choros."""
        force = self.rho * self.learning_rate
        return algorithms.EAMSGD(window=self.communication_window, alpha=force, momentum=self.momentum)


class AsynchronousEAMSGD(EAMSGD):
    """The earlier name of ``EAMSGD``. The default of communication_window is 10, that of learning_rate 0.01."""

    own = (*AsynchronousEASGD.own, ("momentum", 0.9))


class DOWNPOUR(AsynchronousDistributedTrainer):
    """DOWNPOUR: updates are added to the center variable. Further argument: communication_window (5)."""

    own = (("communication_window", 5),)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm DOWNPOUR of Choros."""
        return algorithms.DOWNPOUR(window=self.communication_window)


class ADAG(AsynchronousDistributedTrainer):
    """The rule that dist-keras shipped as ADAG, which is the paper's AGN: updates are divided by the worker's steps.

    Further argument: communication_window (12).
    """

    own = (("communication_window", 12),)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm AGN of Choros."""
        return algorithms.AGN(window=self.communication_window)


class DynSGD(AsynchronousDistributedTrainer):
    """DynSGD: updates are divided according to their staleness. Further argument: communication_window (5)."""

    own = (("communication_window", 5),)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm DynSGD of Choros."""
        return algorithms.DynSGD(window=self.communication_window)


class Experimental(AsynchronousDistributedTrainer):
    """The ADAG of the thesis, which dist-keras shipped under this name.

    Further arguments: communication_window (5), learning_rate (1.0, without effect).
    """

    own = (("communication_window", 5), ("learning_rate", 1.0))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm ADAG of Choros."""
        return algorithms.ADAG(window=self.communication_window)
