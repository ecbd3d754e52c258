"""Files of every format as a source: each row once, the same on every number of ranks, decoded once for all."""

import gzip
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from choros.data import make_source, serialization
from choros.data.block_shuffle import BlockOrder, pools
from choros.data.files import decode_cache, files
from choros.errors import CommTimeoutError, InvalidDataError

ROWS, WIDTH = 5003, 4
NAMES = list("abcd")


def numbers():
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows in every format; TFRecord by TensorFlow itself."""
    room = tmp_path_factory.mktemp("files")
    x, y = numbers()
    table = pa.table({**{name: x[:, i] for i, name in enumerate(NAMES)}, "label": y})
    pa.parquet.write_table(table, room / "whole.parquet", row_group_size=300)
    for part in range(3):
        pa.parquet.write_table(table.slice(part * 2000, 2000), room / f"part-{part}.parquet", row_group_size=300)
    with pa.ipc.new_file(room / "whole.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    pa.csv.write_csv(table, room / "whole.csv")
    (room / "whole.csv.gz").write_bytes(gzip.compress((room / "whole.csv").read_bytes()))
    with h5py.File(room / "whole.h5", "w") as file:
        file["train/x"], file["label"] = x, y
        file["names"] = np.arange(3)
    np.savez(room / "arrays.npz", x=x, y=y)
    script = """
        import sys
        import numpy as np, tensorflow as tf
        room = sys.argv[1]
        data = np.load(room + "/arrays.npz")
        def example(x, y):
            feature = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
                       "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
                       "raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.tobytes()]))}
            return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
        rows = [example(x, int(y)) for x, y in zip(data["x"], data["y"])]
        for name, options, part in (("whole.tfrecord", None, rows), ("whole.tfrecord.gz", "GZIP", rows),
                                    ("one.tfrecord-00000-of-00002", None, rows[:2500]),
                                    ("one.tfrecord-00001-of-00002", None, rows[2500:])):
            with tf.io.TFRecordWriter(room + "/" + name, options) as writer:
                for row in part:
                    writer.write(row)
    """
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(room)], check=True, timeout=120, env=env)
    return room


FORMATS = {
    "whole.parquet": {"x": NAMES},
    "part-*.parquet": {},
    "whole.arrow": {},
    "whole.csv": {},
    "whole.csv.gz": {},
    "whole.h5": {"x": "train/x"},
    "whole.tfrecord": {"x": "x"},
    "whole.tfrecord.gz": {"x": "x"},
    "one.tfrecord-*": {"x": "x", "format": "tfrecord"},
}


def epoch(source, size, *, synchronous=True, batch_size=64, number=0, shuffle=True):
    """All rows of an epoch as ranks get them, put together again, and the batches' sizes."""
    requested = dict(synchronous=synchronous, batch_size=batch_size, seed=1, epoch=number, shuffle=shuffle)
    ranks = [list(source.epoch(rank=rank, size=size, **requested)) for rank in range(size)]
    batches = list(zip(*ranks, strict=True))
    for batch in batches:
        assert sum(part.rows for part in batch) == batch[0].total
    parts = [part for batch in batches for part in batch if part.rows]
    return np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])


def in_order(x, y):
    order = np.lexsort(x.T)
    return x[order], y[order]


@pytest.mark.parametrize("name", FORMATS)
def test_every_row_once_and_the_same_order_for_any_number_of_ranks(folder, name):
    source = files(folder / name, y="label", **FORMATS[name])
    assert source.rows == ROWS
    x, y = epoch(source, 1)
    for size in (2, 3):
        repeated = epoch(source, size)
        np.testing.assert_array_equal(repeated[0], x)
        np.testing.assert_array_equal(repeated[1], y)
    inputs = in_order(*numbers())
    for got, wanted in zip(in_order(x, y), inputs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    other, _ = epoch(source, 1, number=1)
    assert not np.array_equal(other, x)
    straight, _ = epoch(source, 2, shuffle=False)
    np.testing.assert_allclose(straight, numbers()[0], rtol=1e-6)
    np.testing.assert_array_equal(epoch(source, 2, synchronous=False)[0], x)


def test_a_few_rows_make_the_sample_to_build_a_model_from(folder):
    sample = files(folder / "whole.csv", y="label").sample(64)
    assert sample.rows == 32
    np.testing.assert_allclose(sample.x, numbers()[0][:32], rtol=1e-6)


def test_several_inputs_and_weights_are_columns_too(folder):
    x, _ = numbers()
    source = files(folder / "whole.parquet", x={"wide": ["b", "a"], "deep": "c"}, y="label", sample_weight="d")
    batch = next(source.epoch(rank=0, size=1, synchronous=True, batch_size=8, seed=0, epoch=0, shuffle=False))
    np.testing.assert_array_equal(batch.x["wide"], x[:8, [1, 0]])
    np.testing.assert_array_equal(batch.x["deep"], x[:8, 2])
    np.testing.assert_array_equal(batch.sample_weight, x[:8, 3])


def test_bytes_are_decoded_by_a_function_of_the_user(folder):
    def decode(columns):
        rows = np.stack([np.frombuffer(raw, np.float32) for raw in columns["raw"]])
        return {"twice": rows * 2, "label": columns["label"]}

    source = files(folder / "whole.tfrecord", x="twice", y="label", decode=decode)
    x, y = in_order(*epoch(source, 2))
    wanted = in_order(*numbers())
    np.testing.assert_array_equal(x, wanted[0] * 2)
    np.testing.assert_array_equal(y, wanted[1])


def test_class_weights_become_weights_of_rows(folder):
    source = files(folder / "whole.parquet", y="label").with_class_weight({1: 3.0})
    batch = next(source.epoch(rank=0, size=1, synchronous=True, batch_size=50, seed=0, epoch=0, shuffle=True))
    np.testing.assert_array_equal(batch.sample_weight, np.where(batch.y == 1, 3.0, 1.0))


def test_members_of_an_ensemble_have_row_groups_of_their_own(folder):
    source = files(folder / "whole.parquet", y="label")
    parts = [epoch(source.part(rank, 3, seed=2), 1) for rank in range(3)]
    x, y = (np.concatenate([part[i] for part in parts]) for i in range(2))
    for got, wanted in zip(in_order(x, y), in_order(*numbers()), strict=True):
        np.testing.assert_array_equal(got, wanted)
    with pytest.raises(InvalidDataError, match=r" 1 block \(row groups, files\), too few for 2 members"):
        files(folder / "whole.csv.gz", y="label").part(0, 2, seed=0)


def decodes(packed, queue):
    source = serialization.unpack(*packed)
    decoded = []
    fill = source.fill
    source.fill = lambda block: (decoded.append(block), fill(block))
    for number in range(2):
        x, _ = epoch(source, 1, number=number)
    queue.put((decoded, float(x.sum())))


def test_two_workers_decode_each_block_once_between_them(folder):
    source = files(folder / "whole.parquet", y="label")
    packed = serialization.pack(source)
    assert [len(array) for array in packed[1]] == [32, 32]  # what a model is built from; the rest is read by workers
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=decodes, args=(packed, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    output = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(120)
    assert sorted(output[0][0] + output[1][0]) == list(range(len(source.table.rows)))
    assert output[0][1] == output[1][1]


def dies(packed):
    serialization.unpack(*packed).spill.fill([0], lambda block: os._exit(7))


def test_a_worker_that_dies_while_it_decodes_leaves_the_block_to_another(folder):
    source = files(folder / "whole.parquet", y="label")
    worker = multiprocessing.get_context("spawn").Process(target=dies, args=(serialization.pack(source),))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 7
    source.spill.fill([0], source.fill)
    np.testing.assert_array_equal(source.spill.arrays[0][:300], numbers()[0][:300])


def test_a_process_that_stops_while_it_decodes_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(decode_cache, "_LOCK_SECONDS", 0.2)
    begun, stopped = threading.Event(), threading.Event()
    first = decode_cache.DecodeCache.create(2, 4, [("float32", ())])
    second = decode_cache.DecodeCache(first.path, 2, 4, [("float32", ())])

    def decode(block):
        begun.set()
        stopped.wait(60)

    stuck = threading.Thread(target=first.fill, args=([1], decode))
    stuck.start()
    try:
        assert begun.wait(10)
        second.fill([0], lambda block: None)
        with pytest.raises(CommTimeoutError, match="decoding block 1 for 0.2 s"):
            second.fill([1], decode)
    finally:
        stopped.set()
        stuck.join()
        second.fill([1], lambda block: None)
        second.close()
        first.close()


def test_what_is_decoded_lies_in_a_file_without_a_name(folder):
    source = files(folder / "whole.parquet", y="label")
    room = os.stat(source.spill.path)
    assert room.st_nlink == 0  # no name: a killed run leaves nothing
    assert room.st_size > ROWS * WIDTH * 4
    assert source.spill.path.startswith("/proc/")


def test_the_order_is_one_of_blocks_and_of_rows_within_a_pool_of_them():
    starts = np.arange(0, 100 * 7 + 1, 7)
    entered = []
    order = BlockOrder(starts, seed=3, turn=0, enter=lambda now, after: entered.append((now, after)))
    rows = np.concatenate([order[i : i + 50] for i in range(0, 700, 50)])
    assert sorted(rows) == list(range(700))
    assert [len(now) for now, _ in entered] == [64, 36]
    np.testing.assert_array_equal(entered[0][1], entered[1][0])
    first = set(np.unique(rows[: 64 * 7] // 7))
    assert first == set(entered[0][0].tolist())
    assert pools([10] * 10, blocks=64, rows=25) == [slice(i, i + 2) for i in range(0, 10, 2)]


BAD = {
    "nothing": (lambda d: files([]), "No files were named"),
    "rows left out": (
        lambda d: files(d / "whole.csv", x="a", decode=lambda c: {"a": c["a"][1:]}),
        "decode gave 31 rows for 32: it must give one for each",
    ),
    "object store": (lambda d: files("s3://bucket/rows.csv"), "s3://bucket/rows.csv is in an object store"),
    "no file": (lambda d: files(d / "nothing.csv"), "There is no file at .*nothing.csv"),
    "no format": (lambda d: files(d / "arrays.npz"), "has a name that tells no format: give format="),
    "wrong format": (lambda d: files(d / "whole.csv", format="xml"), "format='xml': give one of 'parquet'"),
    "several": (lambda d: files([d / "whole.csv", d / "whole.h5"]), "files of several formats"),
    "no column": (lambda d: files(d / "whole.csv", x="e"), "There is no column 'e' in .*whole.csv: there are 'a', 'b'"),
    "no names": (lambda d: files(d / "whole.csv", x=3), "x=3: give the name of a column"),
    "not parquet": (lambda d: files(d / "whole.csv", format="parquet"), "whole.csv cannot be read"),
    "not hdf5": (lambda d: files(d / "whole.csv", format="hdf5"), "whole.csv cannot be read as HDF5"),
    "not records": (lambda d: files(d / "whole.csv", format="tfrecord"), "whole.csv is not a TFRecord file"),
    "bytes": (lambda d: files(d / "whole.tfrecord", x="raw", y="label"), "'raw' .*not numbers.*`decode`"),
    "no room": (lambda d: files(d / "whole.csv", spill_dir="/nowhere").spill, "/nowhere cannot hold them .*spill_dir"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_refused_in_a_sentence(folder, case):
    make, message = BAD[case]
    with pytest.raises(InvalidDataError, match=message):
        make(folder)


def test_damage_is_found(folder, tmp_path):
    complete = (folder / "whole.tfrecord").read_bytes()
    (tmp_path / "cut.tfrecord").write_bytes(complete[:-9])
    with pytest.raises(InvalidDataError, match="ends in the middle of a record"):
        epoch(files(tmp_path / "cut.tfrecord", "x", "label"), 1)
    hurt = bytearray(complete)
    hurt[5000] ^= 1
    (tmp_path / "hurt.tfrecord").write_bytes(hurt)
    with pytest.raises(InvalidDataError, match="damaged: the checksum"):
        epoch(files(tmp_path / "hurt.tfrecord", "x", "label"), 1)


def test_text_that_changes_its_type_is_told_with_the_remedy(tmp_path):
    lines = ["a,b"] + ["1,2"] * 1_200_000 + ["1.5,2"]
    (tmp_path / "long.csv").write_text("\n".join(lines))
    with pytest.raises(InvalidDataError, match=r"types=\{'a': 'double'\}"):
        epoch(files(tmp_path / "long.csv", y="b"), 1, batch_size=100_000)
    source = files(tmp_path / "long.csv", y="b", types={"a": "double"})
    x, _ = epoch(source, 1, batch_size=100_000)
    assert (len(x), float(x.max())) == (1_200_001, 1.5)


def test_missing_values_lists_and_empty_lines(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\r\n1,\r\n\r\n,4\r\n\r\n")
    source = files(tmp_path / "a.csv")
    assert source.rows == 2
    np.testing.assert_array_equal(source.sample(2).x, [[1, np.nan], [np.nan, 4]])
    table = pa.table({"x": pa.array([[1.0, 2.0], [3.0, 4.0]]), "y": pa.array([1, None])})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    batch = files(tmp_path / "a.parquet", x="x", y="y").sample(2)
    np.testing.assert_array_equal(batch.x, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(batch.y, [1, np.nan])
    ragged = pa.table({"x": pa.array([[1.0], [3.0, 4.0]])})
    pa.parquet.write_table(ragged, tmp_path / "b.parquet")
    with pytest.raises(InvalidDataError, match="rows of different shapes"):
        files(tmp_path / "b.parquet", x="x")


def test_what_is_decoded_is_there_for_the_next_fit_and_goes_with_the_source(folder):
    source = files(folder / "whole.parquet", y="label")
    epoch(source, 1)
    seen = []
    source.table.read = lambda *_: seen.append(1)
    epoch(source, 1, number=1)
    assert not seen
    path = source.spill.path
    del source
    assert not os.path.exists(path)


def test_missing_values_that_come_late_make_fractions_of_whole_numbers_from_the_first_row(tmp_path):
    complete, gap = pa.table({"a": [1] * 40, "b": [2] * 40}), pa.table({"a": [3, None], "b": [5, 6]})
    for kind in ("parquet", "arrow"):
        for name, table in (("1", complete), ("2", gap)):
            path = tmp_path / f"{name}.{kind}"
            if kind == "parquet":
                pa.parquet.write_table(table, path)
            else:
                with pa.ipc.new_file(path, table.schema) as writer:
                    writer.write_table(table)
        source = files(str(tmp_path / f"*.{kind}"), x="a", y="b")
        x, y = epoch(source, 2, shuffle=False)
        assert (x.dtype, y.dtype) == (np.float32, np.int64)
        np.testing.assert_array_equal(x, [1] * 40 + [3, np.nan])
    pa.csv.write_csv(complete, tmp_path / "1.csv")
    (tmp_path / "2.csv").write_text("a,b\n3,\n")
    with pytest.raises(
        InvalidDataError, match=r"2.csv from byte 4: 'b' has fractions or missing values, and whole numbers in"
    ):
        epoch(files(str(tmp_path / "*.csv"), x="a", y="b"), 1)


def test_files_that_differ_or_are_written_anew_are_refused(folder, tmp_path):
    first, second = tmp_path / "1.parquet", tmp_path / "2.parquet"
    pa.parquet.write_table(pa.table({"a": [1.0], "b": [1]}), first)
    pa.parquet.write_table(pa.table({"a": [1.0]}), second)
    with pytest.raises(InvalidDataError, match=r"no column 'b' in .*2.parquet: there are 'a'"):
        files([first, second], y="b")
    source = files(first, y="b")
    make_source(source)
    pa.parquet.write_table(pa.table({"a": [2.0], "b": [1]}), first)
    with pytest.raises(InvalidDataError, match=r"1.parquet has changed since choros.files read it"):
        make_source(source)
    first.unlink()
    with pytest.raises(InvalidDataError, match=r"1.parquet cannot be read any more: No such file"):
        make_source(source)
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    with pytest.raises(InvalidDataError, match="two columns 'a'"):
        files(tmp_path / "twice.csv")
    (tmp_path / "quoted.csv").write_text('a,b\n1,"x\ny"\n2,z\n')
    with pytest.raises(InvalidDataError, match="2 rows in 3 lines: a quoted field may not hold the end of a line"):
        files(tmp_path / "quoted.csv", x="a")


def test_only_the_caller_decodes_the_first_rows_besides(folder):
    decoded = []

    def decode(columns):
        decoded.append(len(columns["a"]))
        return columns

    source = files(folder / "whole.parquet", y="label", decode=decode)
    assert decoded == [32]
    reloaded = serialization.unpack(*serialization.pack(source))
    epoch(reloaded, 1)
    assert decoded == [32]  # the worker's is a function of its own
    epoch(source, 1)
    assert decoded == [32]  # what one has decoded is there for all
