"""The client of the baseline process, which trains by plain ``model.fit`` on all cores."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from choros.tools.demo.datasets.common import Dataset
from choros.types import Array

_SCRIPT = Path(__file__).with_name("plain_fit.py")
_END = 60.0  # seconds that the process has to end


class PlainFit:
    """A process with plain Keras, which trains once for each call of ``train``.

    Args:
        data: Dataset.
        environment: the environment variables of the process, without limits of threads.

    Attributes:
        startup: float. Seconds from the start of the process until Keras was imported and the data were loaded.
    """

    def __init__(self, data: Dataset, environment: Mapping[str, str]) -> None:
        self._room = tempfile.TemporaryDirectory(prefix="choros-demo-")
        folder = Path(self._room.name)
        arrays = {name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
        np.savez(folder / "data.npz", **arrays)
        self._model, self._predictions = folder / "model.keras", folder / "predictions.npy"
        begun = time.perf_counter()
        self._errors: IO[str] = (folder / "errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), str(folder / "data.npz")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(environment),
        )
        try:
            self._receive()
        except BaseException:
            self.close()
            raise
        self.startup = time.perf_counter() - begun

    def train(
        self,
        model: Any,
        seed: int,
        epochs: int,
        batch_size: int,
        validation_rows: int,
        progress: Callable[[int, float], None],
    ) -> tuple[dict[str, Any], Array]:
        """Train a copy of the model.

        Args:
            model: a compiled ``keras.Model`` with the metric accuracy.
            seed: int. Seed of the order of rows and of random layers.
            epochs: int. Number of epochs.
            batch_size: int. Rows of a batch.
            validation_rows: int. Rows of a batch of the validation after each epoch.
            progress: receives each epoch and its loss.

        Returns:
            A dict with ``startup``, and ``times``, ``losses`` and ``accuracies`` of the epochs; and the predictions for
            the test rows.

        Raises:
            RuntimeError: the process ended. The message has the end of its output.
        """
        model.save(self._model)
        task = {"model": str(self._model), "predictions": str(self._predictions), "seed": seed, "epochs": epochs}
        task |= {"batch_size": batch_size, "validation_batch_size": validation_rows}
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended: receiving raises the error with its output
        while "times" not in (answer := self._receive()):
            progress(answer["epoch"], answer["loss"])
        return answer, np.load(self._predictions)

    def _receive(self) -> dict[str, Any]:
        """Return the next message of the process."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END)
            self._process.kill()  # it has closed its output, and may hang in its exit
            code = self._process.wait(_END)
            self._errors.seek(0)
            text = self._errors.read()[-2000:].strip()
            raise RuntimeError(f"The process of plain fit ended with code {code}.\n{text}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End the process and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_END)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._room.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
