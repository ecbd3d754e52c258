"""Arrays of mapped files stay in their file: workers get the file's name and the array's offset."""

import json

import numpy as np
import pytest

from choros.data import ArraySource, make_source
from choros.data.memmap import open_place, place_in_file
from choros.data.serialization import pack, unpack
from choros.data.validation import split


@pytest.fixture
def files(tmp_path):
    """The same rows as arrays, and as files mapped in two ways: floats of 8 bytes, labels behind a header."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 8)), rng.integers(0, 3, 60)
    x[:, 0] += y
    np.save(tmp_path / "y.npy", y)
    (tmp_path / "x.bin").write_bytes(b"header" + x.tobytes())
    return (x, y), (
        np.memmap(tmp_path / "x.bin", "float64", "r", 6, x.shape),
        np.load(tmp_path / "y.npy", mmap_mode="r"),
    )


def test_a_place_is_found_and_opened(files):
    _, (x, y) = files
    for array in (x, y, x[7:50], np.asarray(x)[7:50][3:], y[5:], x[3]):
        place = json.loads(json.dumps(place_in_file(array)))
        np.testing.assert_array_equal(open_place(place), array)
    assert not open_place(place_in_file(x)).flags.writeable


def test_what_is_not_as_its_file_is(files, tmp_path):
    _, (x, _) = files
    private = np.load(tmp_path / "y.npy", mmap_mode="c")
    for array in (np.ones(3), x[::2], x[:, 1:], x[:0], x + 1, private):
        assert place_in_file(array) is None
    path = tmp_path / "gone.npy"
    np.save(path, np.ones(3))
    gone = np.load(path, mmap_mode="r")
    path.unlink()
    assert place_in_file(gone) is None


def test_nothing_of_a_file_is_packed_and_batches_are_those_of_arrays(files):
    arrays, mapped = files
    spec, packed, _ = pack(make_source(*mapped))
    assert packed == []
    source = unpack(json.loads(json.dumps(spec)), [], [])
    how = {"rank": 1, "size": 2, "synchronous": True, "batch_size": 7, "seed": 3, "epoch": 1}
    for shuffle in (False, True):
        ours, plain = (s.epoch(**how, shuffle=shuffle) for s in (source, ArraySource(*arrays)))
        for value, other in zip(ours, plain, strict=True):
            assert value.x.dtype == other.x.dtype == np.float32
            np.testing.assert_array_equal(value.x, other.x)
            np.testing.assert_array_equal(value.y, other.y)
    train, valid = split(*mapped, None, 0.25)
    assert all(place_in_file(array) for array in (*train[:2], *valid[:2]))


def test_what_is_larger_than_memory_is_read_a_stretch_at_a_time(files, monkeypatch):
    """Every row once, in an order of its own in each epoch, from a stretch of 64 blocks at a time; for any ranks."""
    import choros.data.memmap as mapped
    from choros.data.block_shuffle import POOL_BLOCKS

    plain, (x, y) = files
    assert make_source(x, y).block == 0
    monkeypatch.setattr(mapped, "_memory", lambda: x.nbytes)
    monkeypatch.setattr(mapped, "_BLOCK", x.nbytes // 60)
    assert ArraySource(*plain).block == 0
    spec, *_ = pack(make_source(x, y))
    monkeypatch.undo()
    source = unpack(json.loads(json.dumps(spec)), [], [])
    assert source.block == 1 == ArraySource(x, y, block=1).block
    long = ArraySource(np.arange(1000), block=2)
    how = {"synchronous": True, "batch_size": 10, "seed": 3, "shuffle": True}
    for epochs in (0, 1):
        complete = [batch.x for batch in long.epoch(rank=0, size=1, epoch=epochs, **how)]
        parts = [[batch.x for batch in long.epoch(rank=rank, size=2, epoch=epochs, **how)] for rank in range(2)]
        for value, *halves in zip(complete, *parts, strict=True):
            np.testing.assert_array_equal(value, np.concatenate(halves))
        rows = np.concatenate(complete)
        assert sorted(rows) == list(range(1000))
        pool = rows[: 2 * POOL_BLOCKS]
        assert len(np.unique(pool // 2)) == POOL_BLOCKS
        assert np.abs(np.diff(pool)).mean() > 100
    assert not np.array_equal(rows, np.concatenate([b.x for b in long.epoch(rank=0, size=1, epoch=0, **how)]))
