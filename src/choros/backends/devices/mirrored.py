"""One worker with several devices on PyTorch or TensorFlow: one replica for each device.

Each device has a thread and a model. The thread computes the gradients for a share of the rows. The gradients are
summed on the host, and each replica applies the sum, so all replicas keep equal weights. Gradients are weighted as
between workers (``choros.backends.loss_weighting``), so uneven and empty shares are exact. Within an epoch each device
has separate moving statistics. When they are read, they are replaced by their mean, weighted by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from choros.backends import backend_name, make_replica
from choros.backends.devices import device_of, place_of, scope
from choros.backends.devices.device_threads import DeviceThreads
from choros.backends.devices.placement import Placement, RowShard, VariablePlacement
from choros.backends.host_values import to_host
from choros.backends.optimizers import model_variables
from choros.backends.step_windows import SingleSteps
from choros.data.batch_format import cut
from choros.data.sharding import share
from choros.types import Array, Batch, aligned


def _of_all(name: str) -> Any:
    """Return a property that sets an attribute of all replicas and reads the attribute of the first one."""

    def set_all(self: MirroredReplica, value: bool) -> None:
        for replica in self.replicas:
            setattr(replica, name, value)

    return property(lambda self: getattr(self.lead, name), set_all)


class MirroredReplica(SingleSteps):
    """The replicas of all devices of a worker as one; ``choros.backends.replica.Replica`` documents the methods.

    Args:
        model: a compiled ``keras.Model``. The first device uses it if its weights are on that device. Otherwise each
            device has a copy, and ``sync`` and ``finish`` copy the weights back.
        workers: number of workers that train.
        devices: names in Keras' form (``"cpu:0"``, ``"gpu:1"``).
        clone: creates a copy of the model on the device in whose scope it is called.
    """

    shard = None  # each device has a model with the whole update

    def __init__(self, model: keras.Model, workers: int, devices: Sequence[str], clone: Callable[[], Any]) -> None:
        self.user_model, self.threads = model, DeviceThreads(devices)
        self._make: Callable[[Any], Any] = lambda own: make_replica(own or clone(), workers * len(devices))
        self.model_elsewhere = place_of(model) not in (None, devices[0])
        self.replicas: list[Any] = self.threads.each(
            lambda number: self._make(None if number or self.model_elsewhere else model)
        )

    @property
    def lead(self) -> Any:
        """The replica of the first device."""
        return self.replicas[0]

    def on_lead(self, function: Callable[[Batch], Any], batch: Batch) -> Any:
        """Call a function with the first device's share of the batch, in the thread of that device."""
        part = self._cut(replace(batch, packed=None))[0]
        return self.threads.first(lambda: function(part))

    @property
    def model(self) -> keras.Model:
        """The model of the first device."""
        return self.lead.model

    @property
    def packing(self) -> float:
        """Seconds in which steps of the first device converted batches and copied them to it."""
        seconds: float = self.lead.packing
        return seconds

    @property
    def averaged(self) -> Sequence[int]:
        """Indices of metric variables that do not add over ranks."""
        indices: Sequence[int] = self.lead.averaged
        return indices

    @averaged.setter
    def averaged(self, indices: Sequence[int]) -> None:
        for replica in self.replicas:
            replica.averaged = indices

    @property
    def learning_rate(self) -> float:
        """The optimizer's current learning rate."""
        rate: float = self.lead.learning_rate
        return rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.threads.each(lambda number: setattr(self.replicas[number], "learning_rate", value))

    def build(self, batch: Batch) -> None:
        """Create on every device the variables that the first ``fit`` creates."""
        self.threads.each(lambda number: self.replicas[number].build(batch))
        lead = self.lead
        self.size, self.statistics_size, self.dtype, self.seeds = (
            lead.size,
            lead.statistics_size,
            lead.dtype,
            lead.seeds,
        )
        self.blind = lead.blind
        self.slots = [aligned(self.size + 2, self.dtype) for _ in self.replicas]
        self.summed = aligned(self.size + 2, self.dtype)
        self.rows = np.zeros(len(self.replicas))  # trained by each device since the moving statistics were equal
        self.summary: Array | None = None  # a sum of metric states that was set to be read
        self.local_step = False  # the last step was local: its loss is not yet in the metric state
        self.restore(
            self.threads.first(
                lambda: to_host(model_variables(self.user_model)) if self.model_elsewhere else lead.snapshot()
            )
        )

    def ready(self, batch: Batch) -> Batch:
        """Return the batch with each share placed on its device."""
        parts = []
        for name, replica, part in zip(self.threads.devices, self.replicas, self._cut(batch), strict=True):
            with scope(name):
                parts.append(replica.ready(part))
        return replace(batch, packed=parts)

    def placement(self, batch: Batch) -> Placement:
        """Return the devices of the variables and of a batch's rows. The batch is placed for it."""
        replicas, names, count = self.replicas, self.threads.devices, len(self.replicas)

        def device_names(number: int) -> list[str]:
            return [self._seen(names[number], variable.value) for variable in model_variables(replicas[number].model)]

        devices = self.threads.each(device_names)
        variables = [
            VariablePlacement(variable.path, tuple(variable.shape), tuple(by_device[index] for by_device in devices))
            for index, variable in enumerate(model_variables(self.model))
        ]
        shards = []
        for number, part in enumerate(self.ready(batch).packed):
            rows = share(batch.rows, number, count)
            leaves = (
                [] if part.packed is None else [leaf for leaf in keras.tree.flatten(part.packed) if leaf is not None]
            )
            device = self._seen(names[number], leaves[0]) if leaves else names[number]
            shards.append(RowShard(rows.start, rows.stop, device))
        return Placement(tuple(variables), tuple(shards))

    @staticmethod
    def _seen(name: str, value: Any) -> str:
        """Return the device of a tensor. Devices that share PyTorch's one CPU have the name that they were given."""
        device = device_of(value)
        return name if device == "cpu:0" and name.startswith("cpu") and backend_name() == "torch" else device

    def seed_generators(self, rank: int, seed: int) -> None:
        """Seed the generators, which all models of this process share."""
        self.lead.seed_generators(rank, seed)

    def fold_seeds(self, first: int, seed: int | None) -> None:
        """Give the random layers of each device a different seed state.

        ``first`` is the index of this worker's first device among the devices of all workers.
        """
        states = self.threads.first(lambda: [np.array(state) for state in self.lead._values(self.lead.seeds)])

        def fold(number: int) -> None:
            replica = self.replicas[number]
            replica._assign(replica.seeds, states)
            replica.fold_seeds(first + number, seed)

        self.threads.each(fold)

    # Training.

    def step(self, batch: Batch) -> None:
        """Run one local training step; a batch without rows is skipped."""
        if batch.rows:
            self.gradients(replace(batch, total=batch.rows), self.summed)
            self.apply(self.summed)
            # A single process counts the loss of a local step in Keras' metric. ``metric_state`` does that later.
            self.local_step = True

    def gradients(self, batch: Batch, out: Array) -> None:
        """Write ``[n * g ..., n * loss, n]``, summed over the devices, into ``out``."""
        self.summary, self.local_step = None, False
        parts = self._cut(batch)

        def calculate(number: int) -> None:
            self.replicas[number].gradients(parts[number], self.slots[number])

        def add(number: int) -> None:
            # Each thread sums one share of the vector over all slots, in the order of the devices. So all threads work,
            # and the result does not depend on which one is faster.
            bounds = share(len(out), number, len(self.slots))
            np.copyto(out[bounds], self.slots[0][bounds])
            for slot in self.slots[1:]:
                out[bounds] += slot[bounds]

        self.threads.each(calculate)
        self.threads.each(add)
        self.rows += [part.rows for part in parts]

    def apply(self, summed: Array) -> None:
        """Run the optimizer on every device."""
        self.threads.each(lambda number: self.replicas[number].apply(summed))

    revocable = _of_all("revocable")
    repeats = _of_all("repeats")
    watches = _of_all("watches")

    def mark(self) -> Any:
        """Return the state that ``gradients`` changes on every device."""
        marks = self.threads.each(lambda number: self.replicas[number].mark())
        return marks, self.rows.copy(), self.summary, self.local_step

    def swap(self, mark: Any) -> Any:
        """Restore the state of a mark; return a mark of the state that it replaces."""
        marks, rows, summary, local_step = mark
        previous = self.threads.each(lambda number: self.replicas[number].swap(marks[number]))
        before = previous, self.rows, self.summary, self.local_step
        self.rows, self.summary, self.local_step = rows.copy(), summary, local_step
        return before

    def look_ahead(self, momentum: float) -> None:
        """Apply Nesterov momentum after a step, on every device."""
        self.threads.each(lambda number: self.replicas[number].look_ahead(momentum))

    def evaluate(self, batch: Batch) -> None:
        """Run one test step on every device with its share of the rows."""
        self._agree()
        self.summary = None
        parts = self._cut(batch)
        self.threads.each(lambda number: self.replicas[number].evaluate(parts[number]))

    def predict(self, batch: Batch) -> list[Any]:
        """Return the outputs for each device's share in order; shares without rows are left out."""
        self._agree()
        parts = self._cut(batch)
        outputs = self.threads.each(lambda number: self.replicas[number].predict(parts[number]))
        return [piece for pieces in outputs for piece in pieces]

    def _cut(self, batch: Batch) -> list[Batch]:
        if batch.packed is not None:
            parts: list[Batch] = batch.packed
            return parts
        count = len(self.replicas)
        shares = [share(batch.rows, number, count) for number in range(count)]
        return [cut(batch.x, batch.y, batch.sample_weight, batch.total, bounds) for bounds in shares]

    # Metrics: they add over devices as they do over ranks.

    def reset_metrics(self) -> None:
        """Reset the metrics."""
        self.summary = None
        self.threads.each(lambda number: self.replicas[number].reset_metrics())

    def metric_state(self) -> Array:
        """Return the sum of the metric states of all devices."""
        if self.summary is not None:
            return np.array(self.summary)
        if self.local_step:
            self.threads.first(self.lead.loss_to_metric)
        state: Array = np.sum(self.threads.each(lambda number: self.replicas[number].metric_state()), axis=0)
        return state

    def state_after_gradients(self) -> Array:
        """Return ``metric_state``, right after ``gradients``."""
        state: Array = np.sum(self.threads.each(lambda number: self.replicas[number].state_after_gradients()), axis=0)
        return state

    def set_metric_state(self, state: Array) -> None:
        """Store a sum of metric states, to be read by ``metrics``."""
        self.summary = np.array(state)

    def metrics(self) -> dict[str, Any]:
        """Return the logs of Keras at this point."""
        state, lead_state = self.metric_state(), self.threads.first(self.lead.metric_state)

        def read() -> dict[str, Any]:
            self.lead.set_metric_state(state)
            logs: dict[str, Any] = self.lead.metrics()
            # The first device's own metrics continue to count, so they get their values back.
            self.lead.set_metric_state(lead_state)
            return logs

        logs: dict[str, Any] = self.threads.first(read)
        return logs

    def metric_values(self, state: Array) -> list[float]:
        """Return the values of the metric variables in one process."""
        values: list[float] = self.threads.first(lambda: self.lead.metric_values(state))
        return values

    def peek(self, state: Array) -> dict[str, Any]:
        """Return the logs of Keras for a sum of metric states."""
        logs: dict[str, Any] = self.threads.first(lambda: self.lead.peek(state))
        return logs

    def own_logs(self) -> dict[str, tuple[float, bool]] | None:
        """Return the scalars that a user-defined step last logged on the first device."""
        logs: dict[str, tuple[float, bool]] | None = self.lead.own_logs()
        return logs

    # Vectors and state.

    def get(self, out: Array) -> None:
        """Copy the trainable variables into ``out``."""
        self.threads.first(lambda: self.lead.get(out))

    def set(self, vector: Array) -> None:
        """Set the trainable variables."""
        self.threads.each(lambda number: self.replicas[number].set(vector))

    def get_statistics(self, out: Array) -> None:
        """Copy the moving statistics into ``out``."""
        self._agree()
        self.threads.first(lambda: self.lead.get_statistics(out))

    def set_statistics(self, vector: Array) -> None:
        """Set the moving statistics."""
        self.rows[:] = 0
        self.threads.each(lambda number: self.replicas[number].set_statistics(vector))

    @property
    def averages(self) -> bool:
        """True if the optimizer keeps moving averages of the weights."""
        return bool(self.lead.averages)

    def get_average(self, out: Array) -> None:
        """Copy the moving averages into ``out``."""
        self.threads.first(lambda: self.lead.get_average(out))

    def set_average(self, vector: Array) -> None:
        """Set the moving averages."""
        self.threads.each(lambda number: self.replicas[number].set_average(vector))

    def optimizer_state(self) -> list[Array]:
        """Return copies of the variables of the optimizers."""
        arrays: list[Array] = self.threads.first(self.lead.optimizer_state)
        return arrays

    def set_optimizer_state(self, arrays: list[Array]) -> None:
        """Set the values that ``optimizer_state`` returned, on every device."""
        self.threads.each(lambda number: self.replicas[number].set_optimizer_state(arrays))

    def take_settings(self, values: dict[str, Any]) -> None:
        """Set values that ``Settings.changed`` returned, on every device."""
        self.threads.each(lambda number: self.replicas[number].take_settings(values))

    @property
    def iterations(self) -> int:
        """The optimizer's step counter."""
        count: int = self.threads.first(lambda: self.lead.iterations)
        return count

    @iterations.setter
    def iterations(self, count: int) -> None:
        self.threads.each(lambda number: setattr(self.replicas[number], "iterations", count))

    def snapshot(self) -> list[Array]:
        """Return copies of the variables of the model and its optimizers."""
        return [np.array(value) for value in self.view()]

    def view(self) -> list[Array]:
        """Return the values of ``snapshot`` without a copy if possible."""
        self._agree()
        arrays: list[Array] = self.threads.first(self.lead.view)
        return arrays

    def restore(self, arrays: list[Array]) -> None:
        """Set the values that ``snapshot`` returned. Devices other than the first keep their seed states."""
        self.rows[:] = 0

        def restore_device(number: int) -> None:
            replica = self.replicas[number]
            # ``restore`` sets all variables. Random layers of different devices must keep different seeds.
            states = [np.array(state) for state in replica._values(replica.seeds)] if number else []
            replica.restore(arrays)
            if number:
                replica._assign(replica.seeds, states)

        self.threads.each(restore_device)

    def ahead(self) -> list[Array]:
        """Return copies of the trainable variables as the next step reads them."""
        arrays: list[Array] = self.threads.first(self.lead.ahead)
        return arrays

    def set_ahead(self, arrays: list[Array]) -> None:
        """Set the values that ``ahead`` returned, on every device."""
        self.threads.each(lambda number: self.replicas[number].set_ahead(arrays))

    def sync(self) -> None:
        """Copy all state into the Keras model."""
        self._agree()
        self.threads.first(self.lead.sync)
        self._bring_home()

    def refresh(self) -> None:
        """Set the replica of every device from the Keras model."""
        self.restore(self.threads.first(lambda: to_host(model_variables(self.user_model))))

    def _bring_home(self) -> None:
        if self.model_elsewhere:
            arrays = self.threads.first(self.lead.snapshot)
            for variable, array in zip(model_variables(self.user_model), arrays, strict=True):
                variable.assign(array)

    def finish(self) -> None:
        """Copy all state into the Keras model, and finalize the weights as ``fit`` does."""
        self._agree()
        self.threads.each(lambda number: self.replicas[number].finish())
        self._bring_home()

    @property
    def reusable(self) -> bool:
        """False: the threads end with the fit."""
        return False

    def renew(self, arrays: list[Array]) -> None:
        """Do nothing: the replica is not reusable."""

    def close(self) -> None:
        """End the devices' threads."""
        self.threads.close()

    def _agree(self) -> None:
        """Set the moving statistics of all devices to their mean, weighted by the rows that each device trained."""
        if not self.statistics_size or not self.rows.any():
            return
        stacked = np.empty((len(self.replicas), self.statistics_size), np.float64)
        self.threads.each(lambda number: self.replicas[number].get_statistics(stacked[number]))
        self.set_statistics((self.rows @ stacked / self.rows.sum()).astype(self.dtype))
