"""The end of an epoch under choros.hvd: one flag of 8 bytes, for any number of ranks."""

import numpy as np
import pytest

from choros.comm.call_signature import BARRIER, SUM_SLOTS
from choros.comm.collectives import Collectives
from choros.comm.dtypes import dtype_code
from choros.errors import CallsDifferError, InvalidInputError, RankMismatchError
from choros.hvd import compression, gradient_reduction
from choros.hvd.compression import Compression
from choros.hvd.gradient_reduction import GradientBuffer, ReductionConfig

VALUES = 6
STEP = (SUM_SLOTS, VALUES + 1, *dtype_code(np.dtype("float32")))
END = (SUM_SLOTS, 1, *dtype_code(np.dtype("int64")))


class ManyRanks:
    """Rank 0 of a group of any size, whose other ranks are a list: (the call, the values of the slot, the state)."""

    def __init__(self, others):
        self.rank, self.size, self.timeout, self.doing, self.trace = 0, 1 + len(others), 1.0, "", None
        self.others, self.calls, self.memory = others, [], np.zeros(64, np.uint8)

    def slot(self, count, dtype):
        return self.memory[: count * np.dtype(dtype).itemsize].view(dtype)

    def sum_slots(self, count, dtype):
        actual = (SUM_SLOTS, count, *dtype_code(np.dtype(dtype)))
        self.calls.append((actual, count * np.dtype(dtype).itemsize))
        posted = [actual, *(call for call, _, _ in self.others)]
        if any(call != actual for call in posted):
            raise CallsDifferError("the calls differ", posted)
        return self.slot(count, dtype) + np.sum([values for _, values, _ in self.others], 0).astype(dtype)

    def gather(self, x):
        self.calls.append(("gather", len(x)))
        return [x, *(state for _, _, state in self.others)]


@pytest.fixture
def flat(monkeypatch):
    """Make the gradients of two variables among rank 0 and the given others, in a fit."""

    def make(others, fitting=True):
        group = ManyRanks(others)
        monkeypatch.setattr(gradient_reduction, "collectives", lambda _: Collectives(group))
        how = ReductionConfig()
        made = GradientBuffer(how, [slice(0, 2), slice(2, VALUES)], [False, False], "gradients", np.float32)
        how.fitting = fitting
        return made, group

    return make


@pytest.mark.parametrize("size", [2, 1023, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("stops", [0, 1, 2])
def test_any_number_of_ranks_end_an_epoch(flat, size, stops):
    others = [(END, [int(rank < stops)], None) for rank in range(size - 1)]
    made, group = flat(others)
    assert made.end(False) is bool(stops)
    assert made.end(True) is True
    assert group.calls == [(END, 8), (END, 8)]


@pytest.mark.parametrize("size", [2, 1024, 5000])
def test_a_step_of_any_number_of_ranks_is_a_mean(flat, size):
    arrays = [np.ones(2, "float32"), np.ones(4, "float32")]
    made, _ = flat([(STEP, [3.0] * VALUES + [1.0], None)] * (size - 1))
    assert made.add(arrays, 3.0)
    summed, divisor = made.reduce()
    assert divisor == 3 + size - 1
    assert summed.tolist() == [3.0 * size] * VALUES


@pytest.mark.parametrize("size", [2, 1024, 1025, 5000])
def test_a_rank_that_stops_in_an_epoch_ends_the_steps_of_all(flat, size):
    arrays = [np.ones(2, "float32"), np.ones(4, "float32")]
    made, _ = flat([(STEP, None, b"batch")] * (size - 2) + [(END, None, b"stopped")])
    made.add(arrays, 3.0)
    assert made.reduce() is None
    made, _ = flat([(STEP, None, b"batch")] * (size - 1))
    assert made.end(True) is True


def test_what_a_stopped_step_weighed_does_not_count_in_the_next(flat):
    arrays = [np.ones(2, "float32"), np.ones(4, "float32")]
    made, group = flat([(END, None, b"stopped")])
    made.add(arrays, 3.0)
    assert made.reduce() is None
    group.others = [(STEP, [3.0] * VALUES + [1.0], None)]
    made.add(arrays, 3.0)
    assert made.reduce()[1] == 4.0


@pytest.mark.parametrize("size", [2, 1024, 1025, 5000])
def test_epochs_of_unequal_length_are_an_error(flat, size):
    made, _ = flat([(STEP, None, b"batch")] * (size - 2) + [(END, None, b"ended")])
    made.add([None, None], 1.0)
    with pytest.raises(
        RankMismatchError, match=f"Rank 0 has another batch in this epoch, but 1 of {size} ranks have none"
    ):
        made.reduce()
    made, _ = flat([(STEP, None, b"batch")] * (size - 1))
    with pytest.raises(RankMismatchError, match=f"has no batch left in this epoch, but {size - 1} of {size} ranks"):
        made.end(False)


def test_other_calls_are_told_as_the_group_tells_them(flat):
    made, group = flat([((BARRIER, 0, 0, 0), None, None)])
    with pytest.raises(InvalidInputError, match="the calls differ"):
        made.end(False)
    made.add([None, None], 1.0)
    with pytest.raises(InvalidInputError, match="the calls differ"):
        made.reduce()
    assert "gather" not in [call[0] for call in group.calls]


def test_a_compression_warns_once_that_it_saves_no_bytes(monkeypatch):
    monkeypatch.setattr(compression, "_warned", [])
    monkeypatch.setattr(gradient_reduction, "collectives", lambda _: Collectives(ManyRanks([(STEP, None, None)])))
    GradientBuffer(ReductionConfig(), [slice(0, 2)], [False], "gradients", np.float32)
    with pytest.warns(UserWarning, match=r"Compression\.fp16 rounds what is summed and saves no bytes"):
        GradientBuffer(ReductionConfig(compression=Compression.fp16), [slice(0, 2)], [False], "gradients", np.float32)
    GradientBuffer(
        ReductionConfig(compression=Compression.fp16), [slice(0, 2)], [False], "gradients", np.float32
    )  # warnings are errors


SCRIPT = """
    from choros.hvd.context import collectives
    group, calls = collectives().group, []
    plain = group.sum_slots

    def sum_slots(count, dtype):
        calls.append([count, np.dtype(dtype).name])
        return plain(count, dtype)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == 1 and self.stops:
                self.model.stop_training = True

    def batches(steps):
        return ((np.ones((2, 1), "float32"), -1000 * np.ones((2, 1), "float32")) for _ in range(steps))

    def problem(call):
        try:
            call()
        except RankMismatchError as error:
            return str(error)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mean_absolute_error")
    weight = lambda: float(numbers(model.get_weights()[0])[0][0])
    model.set_weights([np.full((1, 1), 100.0, "float32")])
    fit = lambda steps, *callbacks, epochs=1: model.fit(
        batches(steps * epochs), epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks))
    group.sum_slots = sum_slots
    fit(3, epochs=2)
    said["calls"], said["weight"] = list(calls), weight()
    said["uneven"] = problem(lambda: model.fit(batches(4 - (rank == 1)), verbose=0))
    after = weight()
    calls.clear()
    stop = Stop()
    stop.stops = True
    said["epochs"] = len(fit(4, stop, epochs=3).epoch)
    said["calls at a stop"], said["steps at a stop"] = list(calls), after - weight()
    after, stop.stops = weight(), False
    fit(2, stop)  # the same compiled step: the batch that was dropped does not count
    said["steps after"] = after - weight()
    del group.sum_slots
"""


@pytest.mark.parametrize(("size", "launcher"), [(2, "mpiexec"), (3, "choros run")])
def test_ranks_end_their_epochs_by_eight_bytes(run, size, launcher):
    for rank, result in enumerate(run(size, SCRIPT)):
        step, end = [2, "float32"], [1, "int64"]
        assert result["calls"] == 2 * [step, step, step, end]
        assert result["weight"] == 94
        text = "has no batch left" if rank == 1 else f"has another batch in this epoch, but 1 of {size}"
        assert text in result["uneven"]
        assert result["epochs"] == 1
        assert result["calls at a stop"] == [step, step, end if rank == 1 else step]
        assert result["steps at a stop"] == 2
        assert result["steps after"] == 2


HAZARDS = """
    def problem(call):
        try:
            call()
        except ValueError as error:
            return str(error)

    def made(kind):
        out = keras.layers.Dense(1)(inputs := keras.Input((1,)))
        model = kind(inputs, out)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.set_weights([np.ones((1, 1), "float32"), np.ones(1, "float32")])
        return model

    class Own(keras.Model):
        def make_train_function(self, force=False):
            self.train_function = lambda *data: {}
            return self.train_function

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            said["nested"] = problem(lambda: self.model.fit(x, x, verbose=0))

    x = np.ones((8, 1), "float32")
    said["own"] = problem(lambda: made(Own).fit(x, x, verbose=0))
    model = made(keras.Model)
    model.fit(x, x, verbose=0, callbacks=[Nested()])
    wrapped = keras.Model.fit
    try:
        keras.Model.fit = lambda self, *args, **kwargs: wrapped(self, *args, **kwargs)
        other = made(keras.Model)
        other.fit(x, x, verbose=0)
    finally:
        keras.Model.fit = wrapped
    said["equal"] = [numbers(v) for v in model.get_weights()] == [numbers(v) for v in other.get_weights()]

    class Early(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            vars(self.model).pop("_get_metrics_result_or_logs", None)  # as if Keras did not call it

    said["order"] = problem(lambda: made(keras.Model).fit(x, x, verbose=0, callbacks=[Early()]))
"""


def test_what_would_skip_the_reduction_or_hang_is_an_error(run):
    for result in run(2, HAZARDS):
        assert "Own makes a train function of its own" in result["own"]
        assert "was called while fit trains with its optimizer" in result["nested"]
        assert result["equal"] is True
        assert "did not ask for the logs between an epoch's batches" in result["order"]
