"""The models and data of the speed table; imports Keras only when asked for a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

UNITS = {"mlp": 600, "wide": 1600, "huge": 5000}  # of each hidden layer


@dataclass(frozen=True)
class Workload:
    """A model, its data and its batch size.

    Attributes:
        model: "mlp" (30-600-600-2, 380,402 values, Horovod's and dist-keras' size), "wide" (30-1600-1600-2, 2,614,402
            values), "huge" (30-5000-5000-2, 25,170,002 values), "cnn" (Keras' own CIFAR-10
            network, 1,250,858 values, with its Dropout) or "lstm" (64 steps of 16 features, LSTM of 128 units, 10
            classes; 75,530 values).
        batch: rows of a worker's batch.
        steps: batches of a worker's epoch.
        optimizer: a Keras optimizer's name; "momentum" is SGD(0.01, momentum=0.9); "own" is ``own_adam``.
        steps_per_execution: as in ``compile``.
        jit_compile: True, or as Keras decides.
    """

    model: str = "mlp"
    batch: int = 128
    steps: int = 200
    optimizer: str = "momentum"
    steps_per_execution: int = 1
    jit_compile: bool = False

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def make(self) -> Any:
        """A compiled model, with one metric beside the loss."""
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        if self.model in UNITS:
            units = UNITS[self.model]
            inner = [keras.Input((30,)), layers.Dense(units, "relu"), layers.Dense(units, "relu")]
            inner.append(layers.Dense(2, "softmax"))
        elif self.model == "lstm":
            inner = [keras.Input((64, 16)), layers.LSTM(128), layers.Dense(10, "softmax")]
        else:
            inner = [keras.Input((32, 32, 3))]
            for filters in (32, 64):
                inner += [layers.Conv2D(filters, 3, padding="same", activation="relu")]
                inner += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D(), layers.Dropout(0.25)]
            inner += [layers.Flatten(), layers.Dense(512, "relu"), layers.Dropout(0.5), layers.Dense(10, "softmax")]
        model = keras.Sequential(inner)
        factories = {"momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9), "own": own_adam}
        optimizer = factories.get(self.optimizer, lambda: self.optimizer)()
        model.compile(
            optimizer,
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=self.steps_per_execution,
            jit_compile=self.jit_compile or "auto",
        )
        return model

    def data(self, workers: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows for ``workers`` workers' epochs, with something to learn."""
        rng = np.random.default_rng(0)
        rows = self.batch * self.steps * workers
        shape, classes = {**dict.fromkeys(UNITS, ((30,), 2)), "lstm": ((64, 16), 10)}.get(self.model, ((32, 32, 3), 10))
        x = rng.standard_normal((rows, *shape), dtype="float32")
        y = (np.abs(x.reshape(rows, -1)[:, :5]).sum(1) * classes / 8).astype("int64") % classes
        return x, y


def own_adam() -> Any:
    """Adam as a user would write it, without bias correction."""
    import keras

    ops = keras.ops

    class OwnAdam(keras.optimizers.Optimizer):
        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self._means = self.add_optimizer_variables(variables, "mean")
                self._squares = self.add_optimizer_variables(variables, "square")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            index = self._get_variable_index(variable)
            mean, square = self._means[index], self._squares[index]
            self.assign(mean, mean * 0.9 + gradient * 0.1)
            self.assign(square, square * 0.999 + ops.square(gradient) * 0.001)
            rate = ops.cast(learning_rate, variable.dtype)
            self.assign_sub(variable, rate * mean / (ops.sqrt(square) + 1e-7))

    return OwnAdam(0.001)
