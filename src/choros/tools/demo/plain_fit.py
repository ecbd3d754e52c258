"""Plain ``model.fit`` in a process without Choros: the baseline of the demo.

``choros.tools.demo.baseline`` runs this file by its path. It reads one JSON object from each line of standard input and
writes JSON objects, one a line: ``{"ready": true}``, ``{"epoch": .., "loss": ..}`` and ``{"startup": .., ...}``. Keras
chooses the number of threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    """Train a model for each line of input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the backend must not mix with the answers
    import keras
    import numpy as np

    with np.load(sys.argv[1]) as file:
        data = {name: file[name] for name in file.files}
    _write(out, {"ready": True})
    model, initial = None, []
    for line in sys.stdin:
        task = json.loads(line)
        begun = time.perf_counter()
        keras.utils.set_random_seed(task["seed"])
        given = keras.saving.load_model(task["model"])
        if model is None:
            model = given
            model.optimizer.build(model.trainable_variables)
            initial = [variable.numpy() for variable in model.optimizer.variables]
        else:  # the compiled steps of the first model serve the others
            model.set_weights(given.get_weights())
            for variable, value in zip(model.optimizer.variables, initial, strict=True):
                variable.assign(value)
        begin: list[float] = []
        times: list[float] = []

        class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: Any = None) -> None:
                begin.append(time.perf_counter())  # noqa: B023 - the class lives as long as this turn of the loop

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                times.append(time.perf_counter() - begin[0])  # noqa: B023
                _write(out, {"epoch": epoch, "loss": logs["loss"]})

        history = model.fit(
            data["x_train"],
            data["y_train"],
            batch_size=task["batch_size"],
            epochs=task["epochs"],
            validation_data=(data["x_test"], data["y_test"]),
            validation_batch_size=task["validation_batch_size"],
            verbose=0,  # pyright: ignore[reportArgumentType] - annotated by its default
            callbacks=[Epochs()],
        ).history
        # Keras annotates verbose by its default.
        predictions = model.predict(data["x_test"], 1024, verbose=0)  # pyright: ignore[reportArgumentType]
        np.save(task["predictions"], predictions)
        answer = {"startup": begin[0] - begun, "times": times}
        _write(out, answer | {"losses": history["loss"], "accuracies": history["val_accuracy"]})


def _write(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
