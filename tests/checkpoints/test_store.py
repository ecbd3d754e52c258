"""The files of a checkpoint: whole or absent, whatever happens to the process, the disk or the file."""

import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from choros.checkpoints import Checkpoint, Store
from choros.errors import BadInput, CheckpointFailed

KINDS = ("float32", "float64", "float16", "int64", "uint8", "bool")


def arrays(number, rows=5):
    return [np.full((rows, 3), number).astype(kind) for kind in KINDS] + [np.array(number), np.zeros((0, 4))]


def test_what_was_saved_comes_back(tmp_path):
    store = Store(tmp_path / "new" / "room")
    facts = {"epoch": 3, "names": ["a", "ü"], "loss": 0.1 + 0.2}
    path = store.save(facts, arrays(7))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = store.latest()
    assert found.path == path
    assert found.facts == facts
    for one, other in zip(found.arrays, arrays(7), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)
    assert Store(tmp_path / "none").latest() is None


def test_only_the_last_ones_are_kept(tmp_path):
    store = Store(tmp_path, keep=2)
    (tmp_path / "notes.txt").write_text("mine")
    for number in range(5):
        store.save({"number": number}, [])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000004.choros", "checkpoint-00000005.choros", "notes.txt"]
    assert store.latest().facts == {"number": 4}


def spoilt(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut off":
        data = data[: len(data) // 2]
    elif how == "longer":
        data += b"x"
    elif how == "empty":
        data = bytearray()
    elif how == "another file":
        data = bytearray(b"PK\x03\x04" + bytes(500))
    else:
        data[{"head": 24, "array": len(data) // 2, "digest": -1}[how]] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut off", "longer", "empty", "another file", "head", "array", "digest"])
def test_one_that_is_not_whole_is_left_out_and_the_one_before_is_used(how, tmp_path, capsys):
    store = Store(tmp_path)
    for number in (1, 2):
        path = store.save({"number": number}, arrays(number))
    spoilt(path, how)
    assert store.latest().facts == {"number": 1}
    assert f"choros: {path} is left out" in capsys.readouterr().err
    assert store.save({"number": 3}, []).name == "checkpoint-00000003.choros"  # no number is used twice


@pytest.mark.parametrize("what", ["a directory", "a pipe", "more than fits into memory", "a link to nothing"])
def test_what_has_the_name_of_one_but_is_none_does_no_harm(what, tmp_path, capsys):
    store = Store(tmp_path, keep=2)
    store.save({"number": 1}, arrays(1))
    newest, oldest = tmp_path / "checkpoint-00000002.choros", tmp_path / "checkpoint-00000000.choros"
    if what == "a directory":
        oldest.mkdir()
        newest.mkdir()
    elif what == "a pipe":
        os.mkfifo(newest)
    elif what == "a link to nothing":
        newest.symlink_to("nothing")
    else:
        newest.touch()
        os.truncate(newest, 1 << 43)
    assert store.latest().facts == {"number": 1}
    assert f"choros: {newest} is left out" in capsys.readouterr().err
    for number in (3, 4):
        store.save({"number": number}, [])
    assert store.latest().facts == {"number": 4}


def test_arrays_before_the_file_are_refused(tmp_path, capsys):
    path = Store(tmp_path).save({}, [])
    header = b'{"facts": {}, "arrays": [["int8", [64], -64]]}'
    content = b"choros checkpoint 1\n" + len(header).to_bytes(8, "little") + header + bytes(100)
    path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    assert Store(tmp_path).latest() is None
    assert "an array begins at -64" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    store = Store(tmp_path)
    store.save({"number": 1}, arrays(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(CheckpointFailed, match=r"File too large.*last good one is .*checkpoint-00000001\.choros"):
            store.save({"number": 2}, [np.zeros(1 << 16)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["checkpoint-00000001.choros"]
    assert store.latest().facts == {"number": 1}


WRITER = """
import sys, itertools, numpy as np
from choros.checkpoints import Store
store = Store(sys.argv[1])
for number in itertools.count(1):
    store.save({"number": number}, [np.full(1 << 17, number)])
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_one(tmp_path):
    rng = np.random.default_rng(11)
    said = 0
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            rest = process.stdout.read().split()
        said = int(rest[-1]) if rest else 1
        found = Store(tmp_path).latest()
        assert found.facts["number"] in (said, said + 1)  # what it said was there; it may have done one more
        assert (found.arrays[0] == found.facts["number"]).all()
    Store(tmp_path).save({}, [])
    assert len(os.listdir(tmp_path)) == 3  # what was half written is gone too


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "hour"}, "every='hour'"),
        ({"keep": 0}, "keep=0"),
        ({"signals": ["SIGFOO"]}, "SIGFOO is no signal"),
    ],
)
def test_settings_without_a_meaning_are_refused(how, words, tmp_path):
    with pytest.raises(BadInput, match=words):
        Checkpoint(tmp_path, **how)
