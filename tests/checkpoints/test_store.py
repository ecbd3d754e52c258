"""The files of a checkpoint: whole or absent, whatever happens to the process, the disk or the file."""

import errno
import hashlib
import os
import platform
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from choros.errors import CheckpointError, InvalidInputError
from choros.training.checkpoint import Checkpoint, CheckpointStore

KINDS = ("float32", "float64", "float16", "int64", "uint8", "bool")


def arrays(number, rows=5):
    return [np.full((rows, 3), number).astype(kind) for kind in KINDS] + [np.array(number), np.zeros((0, 4))]


def test_what_was_saved_comes_back(tmp_path):
    store = CheckpointStore(tmp_path / "new" / "room")
    facts = {"epoch": 3, "names": ["a", "ü"], "loss": 0.1 + 0.2}
    path = store.save(facts, arrays(7))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    result = store.latest()
    assert result.path == path
    assert result.facts == facts
    for value, other in zip(result.arrays, arrays(7), strict=True):
        assert value.dtype == other.dtype
        assert value.shape == other.shape
        np.testing.assert_array_equal(value, other)
    assert CheckpointStore(tmp_path / "none").latest() is None


def test_only_the_last_ones_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "notes.txt").write_text("mine")
    for number in range(5):
        store.save({"number": number}, [])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000004.choros", "checkpoint-00000005.choros", "notes.txt"]
    assert store.latest().facts == {"number": 4}


@pytest.mark.parametrize("keep", [1, 3, 4, 10])
def test_as_many_are_kept_as_were_asked_for(keep, tmp_path):
    store = CheckpointStore(tmp_path, keep)
    for number in range(1, keep + 3):
        store.save({"number": number}, [])
        assert len(store.paths()) == min(number, keep)
    assert store.latest().facts == {"number": keep + 2}


def test_arrays_of_another_byte_order_keep_their_values(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({}, [np.array([1.5, -2.0], ">f4"), np.array(258, ">i2"), np.array([1, 2], "<i8")])
    result = store.latest().arrays
    assert [array.tolist() for array in result] == [[1.5, -2.0], 258, [1, 2]]
    assert [array.dtype for array in result] == ["float32", "int16", "int64"]


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
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        path = store.save({"number": number}, arrays(number))
    spoilt(path, how)
    assert store.latest().facts == {"number": 1}
    assert f"choros: {path} is left out" in capsys.readouterr().err
    assert store.save({"number": 3}, []).name == "checkpoint-00000003.choros"  # no number is used twice


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "more than fits into memory", "a link to nothing"])
def test_what_has_the_name_of_one_but_is_none_does_no_harm(kind, tmp_path, capsys):
    store = CheckpointStore(tmp_path, keep=2)
    store.save({"number": 1}, arrays(1))
    newest, oldest = tmp_path / "checkpoint-00000002.choros", tmp_path / "checkpoint-00000000.choros"
    if kind == "a directory":
        oldest.mkdir()
        newest.mkdir()
    elif kind == "a pipe":
        os.mkfifo(newest)
    elif kind == "a link to nothing":
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
    path = CheckpointStore(tmp_path).save({}, [])
    header = b'{"facts": {}, "arrays": [["int8", [64], -64]]}'
    content = b"choros checkpoint 3\n" + len(header).to_bytes(8, "little") + header + bytes(100)
    path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    with pytest.raises(CheckpointError, match=r"has no usable checkpoint \(1 damaged\)"):
        CheckpointStore(tmp_path).latest()
    assert "an array begins at -64" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1}, arrays(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(CheckpointError, match=r"File too large.*last good one is .*checkpoint-00000001\.choros"):
            store.save({"number": 2}, [np.zeros(1 << 16)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["checkpoint-00000001.choros"]
    assert store.latest().facts == {"number": 1}


def fail(code):
    """Return a function that raises the error of this number."""

    def raises(*_, **__):
        raise OSError(code, os.strerror(code))

    return raises


def test_a_directory_that_cannot_be_synced_is_no_failure(tmp_path, monkeypatch):
    fsync, code = os.fsync, errno.EINVAL

    def of_files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            fail(code)()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    store = CheckpointStore(tmp_path)
    for code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        store.save({"code": code}, [])
        assert store.latest().facts == {"code": code}
    code = errno.EIO
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.save({}, [])


@pytest.mark.parametrize("action", ["save", "latest"])
def test_a_directory_that_cannot_be_listed_is_told(action, tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save({}, [])
    monkeypatch.setattr(Path, "iterdir", fail(errno.EACCES))
    with pytest.raises(CheckpointError, match=f"{tmp_path} .*on .*Permission denied"):
        store.save({}, []) if action == "save" else store.latest()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(code, tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1}, arrays(1))
    newest = store.save({"number": 2}, arrays(2))
    opened = open

    def refused(path, *args, **kwargs):
        return fail(code)() if path == newest else opened(path, *args, **kwargs)

    for module in ("builtins", "io"):
        monkeypatch.setattr(f"{module}.open", refused)
    monkeypatch.setattr(np, "fromfile", fail(code))
    with pytest.raises(CheckpointError, match=rf"{newest} could not be read on .*{os.strerror(code)}"):
        store.latest()


def test_a_checkpoint_that_another_process_removes_is_left_out(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    first = store.save({"number": 1}, [])
    monkeypatch.setattr(store, "paths", lambda: [first, tmp_path / "checkpoint-00000002.choros"])
    assert store.latest().facts == {"number": 1}


def test_temporary_files_of_other_live_processes_stay(tmp_path):
    host, gone = platform.node(), subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stay = [f".checkpoint-00000001.{host}.{os.getppid()}.new", ".checkpoint-00000001.another.host.1.new"]
    old = [".checkpoint-00000001.old.host.1.new", ".checkpoint-00000002.77.new"]
    stale = [f".checkpoint-00000001.{host}.{gone.pid}.new", f".checkpoint-00000001.{host}.{os.getpid()}.new"]
    for name in (*stay, *old, *stale):
        (tmp_path / name).touch()
    for name in old:
        os.utime(tmp_path / name, (0, time.time() - 90_000))
    path = CheckpointStore(tmp_path).save({}, [])
    assert sorted(os.listdir(tmp_path)) == sorted([*stay, path.name])


@pytest.mark.parametrize("links", [True, False])
def test_two_writers_never_replace_each_others_file(links, tmp_path, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", fail(errno.EPERM))
    store, other = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    store.save({"by": "this"}, [])
    with monkeypatch.context() as patch:  # both have listed the directory before either writes
        patch.setattr(other, "paths", lambda: [])
        path = other.save({"by": "other"}, [])
    assert path.name == "checkpoint-00000002.choros"
    assert store.latest().facts == {"by": "other"}
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000001.choros", "checkpoint-00000002.choros"]
    assert {os.stat(each).st_nlink for each in store.paths()} == {1}


def test_a_disk_that_is_full_is_found_before_training(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        with pytest.raises(CheckpointError, match="File too large.*nothing was trained"):
            CheckpointStore(tmp_path).try_out()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == []
    CheckpointStore(tmp_path).try_out()
    assert os.listdir(tmp_path) == []


WRITER = """
import sys, itertools, numpy as np
from choros.training.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1])
for number in itertools.count(1):
    store.save({"number": number}, [np.full(1 << 17, number)])
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_one(tmp_path):
    rng = np.random.default_rng(11)
    output = 0
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            rest = process.stdout.read().split()
        output = int(rest[-1]) if rest else 1
        result = CheckpointStore(tmp_path).latest()
        assert result.facts["number"] in (output, output + 1)  # what it said was there; it may have done one more
        assert (result.arrays[0] == result.facts["number"]).all()
    CheckpointStore(tmp_path).save({}, [])
    assert len(os.listdir(tmp_path)) == 3  # what was half written is gone too


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "hour"}, "every='hour'"),
        ({"keep": 0}, "keep=0"),
        ({"signals": ["SIGFOO"]}, "SIGFOO is not a signal"),
        ({"signals": ["SIGTERM", "SIGKILL", "SIGSTOP"]}, "SIGKILL, SIGSTOP cannot be caught"),
    ],
)
def test_settings_without_a_meaning_are_refused(how, message, tmp_path):
    with pytest.raises(InvalidInputError, match=message):
        Checkpoint(tmp_path, **how)


def test_numbers_may_be_of_numpy(tmp_path):
    assert Checkpoint(tmp_path, every=np.int64(5), keep=np.int64(2)).schedule == {"batches": 5}
    assert type(Checkpoint(tmp_path, every=np.int64(5)).schedule["batches"]) is int  # JSON takes no other


def test_a_time_that_is_no_number_is_refused_with_its_variable(tmp_path, monkeypatch):
    for value in ("abc", "nan"):
        monkeypatch.setenv("CHOROS_STOP_AT", value)
        with pytest.raises(InvalidInputError, match=f"CHOROS_STOP_AT={value}"):
            Checkpoint(tmp_path)


def test_handlers_of_before_are_installed_again(tmp_path, monkeypatch):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        checkpoint = Checkpoint(tmp_path, signals=["SIGUSR1", "SIGUSR1"])
        with checkpoint.listening():
            signal.raise_signal(signal.SIGUSR1)
        assert checkpoint.asked
        assert signal.getsignal(signal.SIGUSR1) is mine

        real, checkpoint = signal.signal, Checkpoint(tmp_path, signals=["SIGUSR1", "SIGUSR2"])

        def fails_at_the_second(number, handler):
            return real(number, handler) if number == signal.SIGUSR1 else fail(errno.EINVAL)()

        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", fails_at_the_second)
            with pytest.raises(OSError, match="Invalid argument"), checkpoint.listening():
                pass
        assert signal.getsignal(signal.SIGUSR1) is mine

        with monkeypatch.context() as patch:  # as Python tells a handler that a library has installed
            patch.setattr(signal, "signal", lambda number, handler: real(number, handler) and None)
            patch.setattr(signal, "getsignal", lambda number: None)
            with Checkpoint(tmp_path, signals=["SIGUSR1"]).listening():
                pass
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_marker_that_cannot_be_written_does_not_hide_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CHOROS_REQUEUE", str(tmp_path / "none" / "marker"))
    assert Checkpoint(tmp_path).code() == 75
    assert "No such file or directory" in capsys.readouterr().err
    monkeypatch.setenv("CHOROS_REQUEUE", str(tmp_path / "marker"))
    assert Checkpoint(tmp_path).code() == 0
    assert (tmp_path / "marker").exists()


def test_a_file_of_another_version_is_refused_and_stays(tmp_path):
    """Training from the beginning would remove it in the end."""
    store = CheckpointStore(tmp_path)
    path = store.save({"epoch": 1}, [np.zeros(3)])
    path.write_bytes(path.read_bytes().replace(b"choros checkpoint 3", b"choros checkpoint 2"))
    with pytest.raises(CheckpointError, match=f"{path}: it was written by another version of Choros. Resume with that"):
        store.latest()
    assert store.paths() == [path]


def test_the_page_of_file_formats_reads_a_checkpoint_with_numpy_alone(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "reference" / "file-formats.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    path = CheckpointStore(tmp_path).save({"epoch": 3}, arrays(7))
    facts, values = names["read_checkpoint"](path)
    assert facts == {"epoch": 3}
    for value, expected in zip(values, arrays(7), strict=True):
        np.testing.assert_array_equal(value, expected)
