"""Batches made ready in a thread."""

import threading
import time

import keras
import numpy as np
import pytest

from choros.data import FeedTimes, PrefetchSource, feed, make_source, make_validation, prefetch, serialization
from choros.data.prefetch import ahead
from choros.errors import InvalidDataError


def test_batches_are_read_while_others_are_used_and_no_more_than_the_depth():
    read = []

    def batches():
        for number in range(10):
            read.append(number)
            yield number

    seen = ahead(batches(), depth=2)
    assert next(seen) == 0
    deadline = time.monotonic() + 30
    while len(read) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(read) == 4  # the one that is used, two that are ready, and one that waits for room
    assert list(seen) == list(range(1, 10))


def test_an_error_comes_in_its_turn_and_a_loop_that_is_left_ends_the_thread():
    def batches():
        yield 1
        raise ZeroDivisionError

    seen = ahead(batches(), depth=2)
    assert next(seen) == 1
    with pytest.raises(ZeroDivisionError):
        next(seen)
    endless = ahead(iter(int, 1), depth=2)
    next(endless)
    endless.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "choros-ahead"]


def test_only_what_is_prefetched_is_made_ready_ahead():
    x, made = np.arange(10.0), []

    def ready(batch):
        made.append((threading.current_thread().name, batch.x.tolist()))
        return batch

    how = dict(rank=0, size=1, synchronous=True, batch_size=4, seed=0, epoch=0, shuffle=False)
    for source in (make_source(prefetch(x)), make_source(prefetch(iter([(x[:4],), (x[4:8],), (x[8:],)])))):
        assert [batch.x.tolist() for batch in feed(source, ready, 1, **how)] == [[4, 5, 6, 7], [8, 9]]
    assert made == [("choros-ahead", [4, 5, 6, 7]), ("choros-ahead", [8, 9])] * 2
    assert len(list(feed(make_source(x), ready, **how))) == 3
    assert len(made) == 4


def test_the_times_of_reading_and_copying_are_counted_apart():
    """In the thread of prefetch both; without it the step copies, so only reading is counted here."""

    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(0.03)
            return np.zeros((2, 1), "float32"), np.zeros(2, "float32")

    def ready(batch):
        time.sleep(0.01)
        return batch

    how = dict(rank=0, size=1, synchronous=True, batch_size=2, seed=0, epoch=0, shuffle=False)
    for data, copying in ((Slow(), 0.0), (prefetch(Slow()), 0.04)):
        times = FeedTimes()
        assert len(list(feed(make_source(data), ready, 0, times, **how))) == 4
        assert times.reading >= 0.12
        assert times.copying >= copying
        assert bool(times.copying) == bool(copying)


def test_prefetch_changes_x_alone_and_travels():
    x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    source = make_source(prefetch((x, y), depth=np.int64(3), augment=lambda x: -x))
    assert isinstance(source, PrefetchSource)
    assert (source.rows, source.steps(2), source.depth) == (5, 3, 3)
    source = serialization.unpack(*serialization.pack(source))
    how = dict(rank=0, size=1, synchronous=True, batch_size=2, seed=0, epoch=0, shuffle=False)
    results = list(source.epoch(**how))
    np.testing.assert_array_equal(np.concatenate([batch.x for batch in results]), -x)
    np.testing.assert_array_equal(np.concatenate([batch.y for batch in results]), y)
    np.testing.assert_array_equal(source.sample(2).x, -x[:2])


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda x: x[1:], r"augment gave arrays of \[1\] rows for a batch of 2"),
        (lambda x: None, "augment gave nothing for a batch of 2"),
        (lambda x: x.sum(), "augmented x is a single number"),
    ],
)
def test_what_augment_must_give(augment, message):
    for data in (np.ones((4, 2)), iter([(np.ones((2, 2)),)])):
        with pytest.raises(InvalidDataError, match=message):
            make_source(prefetch(data, augment=augment)).sample(2)


def test_validation_is_not_augmented():
    x = np.arange(10.0).reshape(5, 2)
    source = make_validation(prefetch((x, np.arange(5)), augment=lambda x: -x))
    np.testing.assert_array_equal(source.sample(5).x, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prefetch(np.ones(3), depth=0), "depth=0: give a whole number"),
        (lambda: prefetch(np.ones(3), augment=3), "augment is of type int: give a function"),
        (lambda: prefetch((1, 2, 3, 4)), "4 parts were given"),
    ],
)
def test_what_cannot_be_read_ahead(call, message):
    with pytest.raises(InvalidDataError, match=message):
        call()
