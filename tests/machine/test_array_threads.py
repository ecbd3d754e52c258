"""Operations on large arrays on the threads of a rank."""

import threading

import numpy as np
import pytest

from choros.cluster.hardware import array_threads
from choros.comm.dtypes import add_in_order
from choros.comm.shm.group import SharedGroup

LARGE = 5_000_003  # values: 20 MB, of which three threads get 6 MB or more


@pytest.fixture
def threads(monkeypatch):
    """Let operations use three threads, also on a machine with fewer cores."""
    with array_threads.ThreadPoolExecutor(2, "test-arrays") as pool:
        monkeypatch.setattr(array_threads, "array_threads", lambda: 3)
        monkeypatch.setattr(array_threads, "_pool", lambda: pool)
        yield


@pytest.mark.parametrize(
    ("variable", "cores", "expected"),
    [("", 4, 1), ("3", 4, 3), ("16", 4, 4), ("64", 64, 8), ("0", 4, 1), ("2,1", 4, 1)],
)
def test_number_of_threads(variable, cores, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(array_threads, "usable_cores", lambda: tuple(range(cores)))
    assert array_threads.array_threads.__wrapped__() == expected


@pytest.mark.parametrize("count", [1, 1000, LARGE])
@pytest.mark.parametrize("operation", [np.multiply, np.divide])
def test_a_number_and_an_array(operation, count, threads):
    values = np.random.default_rng(0).normal(size=count).astype("float32")
    out = np.zeros(count, "float32")
    array_threads.with_number(operation, values, 3.7, out)
    np.testing.assert_array_equal(out, operation(values, 3.7, dtype="float32"))
    array_threads.with_number(operation, values, 3.7, values)
    np.testing.assert_array_equal(out, values)


def test_only_large_arrays_use_several_threads(threads):
    seen = []
    calls = [(number,) for number in range(6)]
    array_threads.for_each(lambda number: seen.append((number, threading.get_ident())), calls, 1000)
    assert [number for number, _ in seen] == list(range(6))
    assert {thread for _, thread in seen} == {threading.get_ident()}
    seen.clear()
    barrier = threading.Barrier(3, timeout=60)  # three calls run at the same time

    def call(number):
        seen.append((number, threading.get_ident()))
        barrier.wait()

    array_threads.for_each(call, calls, 1 << 30)
    assert sorted(number for number, _ in seen) == list(range(6))
    assert len({thread for _, thread in seen}) == 3


@pytest.mark.parametrize("failing", [0, 1, 5])
def test_an_error_in_a_call_is_raised_when_all_have_ended(failing, threads):
    ended = []

    def call(number):
        if number == failing:
            raise OSError("disk")
        ended.append(number)

    with pytest.raises(OSError, match="disk"):
        array_threads.for_each(call, [(number,) for number in range(6)], 1 << 30)
    assert len(ended) >= 4  # those of the other threads


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_ranks_have_the_same_bits(size, threads):
    segment = SharedGroup.create(size, LARGE * 4)
    vectors = [np.random.default_rng(rank).normal(size=LARGE).astype("float32") for rank in range(size)]
    expected, results = np.zeros(LARGE, "float32"), {}
    add_in_order(vectors, expected)

    def rank_main(rank):
        group = SharedGroup(segment, rank, timeout=60)
        group.slot(LARGE, "float32")[:] = vectors[rank]
        results[rank] = group.sum_slots(LARGE, "float32").copy()
        group.barrier()

    ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert len(results) == size
    for result in results.values():
        np.testing.assert_array_equal(result, expected)
    segment.close()
