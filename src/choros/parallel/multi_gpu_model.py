"""``ModelMGPU``: a Keras model whose batches are divided among the devices of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from choros.backends.devices import Devices, choose_devices
from choros.backends.devices.placement import Placement
from choros.console import write_line
from choros.data import Source, feed, make_source, make_validation, prefetch, without_augment
from choros.errors import InvalidInputError, counted, warn_without_effect
from choros.parallel.in_process import InProcessExecutor
from choros.trainer import Trainer
from choros.training.validation import check_model
from choros.training.worker.setup import several_models
from choros.types import Batch

if TYPE_CHECKING:
    import keras

    from choros.training.history import History

_WRAPPER_ATTRIBUTES = (
    "serial",
    "devices",
    "enqueue",
    "_executor",
)  # attributes of this object; all others belong to the serial model
_FEED_ARGUMENTS: dict[str, Any] = {"rank": 0, "size": 1, "synchronous": True, "seed": 0, "epoch": 0, "shuffle": False}


class ModelMGPU:
    """A model over several devices, with ``fit``, ``evaluate`` and ``predict`` of Keras; each batch is divided.

    There is one set of weights, those of the serial model. All other attributes are the serial model's too (``save``,
    ``load_weights``, ``layers``, ``optimizer``, ...), so a saved model loads in plain Keras. Batches of any size are
    exact, also with fewer rows than devices: gradients, losses and metrics equal those of one process.

    On JAX one program spans the devices, and BatchNormalization sees the whole batch. On PyTorch and TensorFlow each
    device has a separate model: BatchNormalization sees the device's share, and its moving averages are the mean of the
    shares, weighted by rows. PyTorch's Dropout without a seed draws from one generator, in the order in which the
    devices call it. For reproducible runs give these layers a seed.

    Args:
        serial_model: a ``keras.Model``.
        gdev_list: the devices, or their number, as in ``make_parallel``. Defaults to all devices.
        ps_device: without effect; batches are cut and outputs are joined on the host.
        usenccl, initsync, syncopt: without effect. Gradients are always added, by the means of the backend (NCCL on
            GPUs under JAX), and all devices begin with the same weights. Another value than the default gives a
            warning.
        enqueue: bool. Whether ``fit`` reads ahead, as ``choros.prefetch`` does. Defaults to False.
        devices: another name of ``gdev_list``.

    Raises:
        InvalidInputError: ``serial_model`` is not a model, there are fewer than two devices, or a device does not
            exist.

    Example:
        >>> import keras, numpy as np
        >>> from choros.parallel import ModelMGPU
        >>> serial = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model = ModelMGPU(serial, devices=2)  # doctest: +SKIP
        >>> model.compile("sgd", "mse")  # doctest: +SKIP
        >>> history = model.fit(np.ones((7, 4)), np.ones(7), batch_size=4)  # doctest: +SKIP
    """

    def __init__(
        self,
        serial_model: keras.Model | None = None,
        gdev_list: Devices | None = None,
        ps_device: str = "/cpu:0",
        usenccl: bool = False,
        initsync: bool = True,
        syncopt: bool = False,
        enqueue: bool = False,
        *,
        devices: Devices | None = None,
    ) -> None:
        self.serial = check_serial_model(serial_model)
        warn_of_unused(ps_device, usenccl, initsync, syncopt)
        self.devices = chosen(gdev_list, devices)
        if len(self.devices) < 2:
            raise InvalidInputError(f"devices={self.devices}: give two or more, or train the serial model itself.")
        self.enqueue = enqueue
        self._executor: InProcessExecutor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "serial":  # not set yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.serial, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WRAPPER_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            setattr(self.serial, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the serial model."""
        return self.serial(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.serial.name} over {counted(len(self.devices), 'device')} ({', '.join(self.devices)})"

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the serial model."""
        self._close_executor()
        self.serial.compile(*args, **kwargs)

    def fit(
        self, x: object = None, y: object = None, batch_size: int | None = None, *args: Any, **kwargs: Any
    ) -> History:
        """Train, as ``keras.Model.fit``.

        Args:
            x: the data, of any type that ``choros.Trainer.fit`` takes.
            y: the labels, if ``x`` does not have them.
            batch_size: int. Rows of a whole batch, which is divided among the devices. Defaults to 32.
            *args: as in ``choros.Trainer.fit``.
            **kwargs: as in ``choros.Trainer.fit``.

        Returns:
            ``keras.callbacks.History``, with ``run`` (``choros.RunRecord``).
        """
        trainer = Trainer(self.serial, "single", workers=1, executor=self._in_process())
        if kwargs.get("verbose", 1):
            layout = "a model on each" if several_models(len(self.devices)) else "one program, rows divided"
            write_line(f"{self!r}: {layout}")
        if self.enqueue:
            x, y, kwargs["sample_weight"] = prefetch((x, y, kwargs.get("sample_weight"))), None, None
        return trainer.fit(x, y, 32 if batch_size is None else batch_size, *args, **kwargs)

    def evaluate(
        self,
        x: object,
        y: object = None,
        batch_size: int | None = None,
        verbose: int | str = 0,
        sample_weight: object = None,
        steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        return_dict: bool = False,
    ) -> float | list[float] | dict[str, float]:
        """Evaluate, as ``keras.Model.evaluate``: loss and metrics equal those of one device.

        Returns:
            The loss, or a list of the loss and the metrics; with ``return_dict`` a dict.

        Raises:
            InvalidInputError: callbacks are given, or there are no rows.
        """
        if callbacks:
            raise InvalidInputError(
                "evaluate over several devices runs no callbacks: evaluate the serial model with them."
            )
        replica: Any = None
        for batch in self._batches(
            make_validation((x, y, sample_weight) if y is not None else x, steps), batch_size, steps
        ):
            if replica is None:
                replica = self._in_process().ready(batch)
                replica.reset_metrics()
            replica.evaluate(batch)
        if replica is None:
            raise InvalidInputError("There are no rows to evaluate.")
        logs: dict[str, Any] = replica.metrics()
        replica.sync()
        if verbose:
            write_line(" - ".join(f"{name}: {value:.4f}" for name, value in logs.items()))
        return _formatted_logs(logs, return_dict)

    def predict(
        self,
        x: object,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
    ) -> Any:
        """Predict, as ``keras.Model.predict``; the devices' outputs are concatenated.

        Raises:
            InvalidInputError: callbacks are given, or there are no rows.
        """
        import keras

        if callbacks:
            raise InvalidInputError("predict over several devices runs no callbacks: use the serial model with them.")
        if not self.serial.compiled:
            # Keras annotates verbose by its default, "auto".
            return self.serial.predict(x, batch_size, verbose, steps)  # pyright: ignore[reportArgumentType]
        pieces: list[Any] = []
        replica: Any = None
        for batch in self._batches(make_source(without_augment(x)), batch_size, steps):
            replica = replica or self._in_process().ready(batch)
            pieces += replica.predict(batch)
        if not pieces:
            raise InvalidInputError("There are no rows to predict from.")
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *pieces)

    def train_on_batch(
        self,
        x: object,
        y: object = None,
        sample_weight: object = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> float | list[float] | dict[str, float]:
        """Make one step on one batch; return logs as ``keras.Model.train_on_batch`` does."""
        batch = _single_batch(make_source(x, y, sample_weight, class_weight))
        replica = self._in_process().ready(batch, trains=True)
        replica.reset_metrics()
        replica.step(batch)
        logs: dict[str, Any] = replica.metrics()
        replica.sync()
        return _formatted_logs(logs, return_dict)

    def test_on_batch(
        self, x: object, y: object = None, sample_weight: object = None, return_dict: bool = False
    ) -> float | list[float] | dict[str, float]:
        """Evaluate one batch; return logs as ``keras.Model.test_on_batch`` does."""
        return self.evaluate(x, y, len(_first_leaf(x)), sample_weight=sample_weight, return_dict=return_dict)

    def predict_on_batch(self, x: object) -> Any:
        """Predict one batch."""
        return self.predict(x, len(_first_leaf(x)))

    def placement(self, x: object, y: object = None, sample_weight: object = None) -> Placement:
        """Return the devices of each variable and of each share of a batch's rows, as they are. Nothing is trained.

        Args:
            x: one batch, as for ``train_on_batch``.
            y: its labels.
            sample_weight: the weights of its rows.

        Returns:
            ``Placement``, which prints as a line for each variable and for each device's rows.

        Raises:
            InvalidInputError: the model is not compiled.
        """
        batch = _single_batch(make_source(x, y, sample_weight))
        placement: Placement = self._in_process().ready(batch).placement(batch)
        return placement

    def _in_process(self) -> InProcessExecutor:
        if self._executor is None:
            check_model(self.serial)
            self._executor = InProcessExecutor(self.serial, self.devices)
        return self._executor

    def _batches(self, source: Source, batch_size: int | None, steps: int | None) -> Iterator[Batch]:
        yield from feed(source, lambda batch: batch, **_FEED_ARGUMENTS, batch_size=batch_size or 32, steps=steps)

    def _close_executor(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None


def warn_of_unused(ps_device: str, usenccl: bool, initsync: bool, syncopt: bool) -> None:
    """Warn once of arguments of ``make_parallel`` that have no effect."""
    warn_without_effect(
        "make_parallel",
        "gradients are always added, by the means of the backend, and all devices begin with the same weights",
        ps_device=ps_device != "/cpu:0",
        usenccl=usenccl,
        initsync=not initsync,
        syncopt=syncopt,
    )


def check_serial_model(model: object) -> keras.Model:
    """Return the model, which must be a Keras model.

    Raises:
        InvalidInputError: it is something else.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise InvalidInputError(f"serial_model is of type {type(model).__name__}: give a keras.Model.")
    return model


def chosen(gdev_list: Devices | None, devices: Devices | None) -> list[str]:
    """Return the names of the devices given by either argument.

    Raises:
        InvalidInputError: both arguments are given, or a device does not exist.
    """
    if gdev_list is not None and devices is not None:
        raise InvalidInputError("gdev_list and devices are the same: give one of them.")
    return choose_devices(gdev_list if devices is None else devices)


def _single_batch(source: Any) -> Batch:
    batch: Batch = next(iter(source.epoch(**_FEED_ARGUMENTS, batch_size=source.rows, steps=None)))
    return batch


def _first_leaf(x: object) -> Any:
    import keras

    return keras.tree.flatten(x)[0]


def _formatted_logs(logs: dict[str, Any], as_dict: bool) -> float | list[float] | dict[str, float]:
    if as_dict:
        return dict(sorted(logs.items()))
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
