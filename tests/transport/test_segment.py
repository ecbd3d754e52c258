"""Segments and waiting, inside one process."""

import contextlib
import gc
import os
import runpy
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import choros.comm.group
from choros.comm.shm.futex import Waiter
from choros.comm.shm.segment import Segment, align
from choros.errors import InvalidInputError, PeerLostError


def test_align_rounds_up():
    assert [align(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert align(4097, 4096) == 8192


def test_two_mappings_show_the_same_bytes_and_arrays_outlive_close():
    segment = Segment.create(8192, "two")
    peer = Segment.open_peer(os.getpid(), segment.fd)
    actual, expected = segment.array("float64", 10, 64), peer.array("float64", 10, 64)
    actual[:] = np.arange(10)
    segment.close()
    peer.close()
    segment.close()  # twice is once
    actual += 1
    assert expected.tolist() == list(range(1, 11))


@pytest.mark.parametrize("kind", ["float32", "bool", "bfloat16", "int4", "datetime64[s]"])
def test_arrays_of_any_type_and_order_are_written_to_the_file(kind):
    import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 and int4 by name

    values = np.arange(24).reshape(4, 6).astype(np.dtype(kind))
    with Segment.create(4096) as segment:
        for offset, array in enumerate([values, values.T, values[::2], values[:0], values[1, 1]]):
            segment.write(array, 256 * offset)
            there = np.ndarray(array.shape, array.dtype, segment._memory, 256 * offset)
            assert np.array_equal(there.astype("float64"), array.astype("float64"))


def test_a_private_mapping_tells_what_was_written_and_hides_it_from_others():
    with Segment.create(1 << 20) as segment:
        segment.write(np.arange(1 << 18, dtype="float32"))
        with Segment.attach(os.dup(segment.fd), private=True) as private:
            values = private.array("float32", 1 << 18)
            assert float(values[-1]) == (1 << 18) - 1
            assert not private.written(0, private.nbytes)
            values[5] = -1
            assert private.written(0, 64)
            assert not private.written(1 << 19, 1 << 19)
        assert float(segment.array("float32", 6)[5]) == 5


def test_memory_goes_with_its_last_array():
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("choros-lifetime" in line for line in maps)

    segment = Segment.create(1 << 20, "choros-lifetime")
    values = segment.array("float32", 100)
    text = segment.words
    segment.close()
    assert mapped() == 1
    assert float(values.sum()) + text[0] == 0.0
    del values, text
    gc.collect()
    assert mapped() == 0


def memfds():
    """Return the number of descriptors of this process that refer to anonymous memory."""
    result = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            result += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return result


def test_no_descriptor_is_left():
    gc.collect()
    before = memfds()
    for _ in range(5):
        with Segment.create(4096) as segment, Segment.open_peer(os.getpid(), segment.fd) as peer:
            peer.array("int8", 3)
    assert memfds() == before


def test_closing_a_second_mapping_keeps_the_locks_of_the_first():
    """POSIX locks vanish when any descriptor of the file closes: the last user closes them all."""
    from choros.comm.shm.group_header import holder

    with Segment.create(4096) as segment:
        import fcntl

        fcntl.lockf(segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 5)
        with Segment.open_peer(os.getpid(), segment.fd):
            pass
        script = (
            "import sys; from choros.comm.shm.group_header import holder; from choros.comm.shm.segment import Segment\n"
            "print(holder(Segment.attach(int(sys.argv[1])).fd, 5))"
        )
        command = [sys.executable, "-c", script, str(segment.fd)]
        seen = subprocess.run(command, pass_fds=[segment.fd], capture_output=True, text=True, timeout=60, check=True)
        assert int(seen.stdout) == os.getpid()
        assert holder(segment.fd, 6) == 0


def test_what_is_not_a_segment_is_refused():
    with pytest.raises(InvalidInputError, match="pass_fds"):
        Segment.attach(99999)
    with open(os.devnull, "rb") as null, pytest.raises(InvalidInputError, match="not a segment"):
        Segment.attach(null.fileno())
    with pytest.raises(InvalidInputError, match="1 or more"):
        Segment.create(0)
    with pytest.raises(PeerLostError, match="alive"):
        Segment.open_peer(2**22 + 5, 3)
    with Segment.create(4096) as segment:
        for count, offset in ((1025, 0), (1, 4), (1, -64), (-1, 0), (1, 4096)):
            with pytest.raises(InvalidInputError, match="do not fit"):
                segment.array("float32", count, offset)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, 0)
    with pytest.raises(InvalidInputError, match="closed"):
        segment.array("float32", 1)


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InvalidInputError, match="WSL"):
        runpy.run_path(choros.comm.group.__file__)


def test_without_memfd_a_file_without_a_name_is_used(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("fcntl.F_ADD_SEALS", None, raising=False)
    monkeypatch.delattr("fcntl.F_ADD_SEALS")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Segment.create(64) as segment:
        assert list(tmp_path.iterdir()) == []
        segment.array("int64", 1)[0] = 3
        assert segment.words[0] == 3


@pytest.mark.parametrize("spin", [0.0, 1e-3])
@pytest.mark.parametrize("futex", [True, False])
def test_a_waiter_is_woken_long_before_its_slice_ends(spin, futex):
    with Segment.create(4096) as segment:
        waiter = Waiter(segment.words, segment.address, spin)
        if not futex:
            waiter._syscall = None
        delays = []
        for turn in range(1, 6):
            stored = []

            def store(turn=turn, stored=stored):
                time.sleep(0.01)
                stored.append(time.perf_counter())
                waiter.publish(9, turn)

            thread = threading.Thread(target=store)
            thread.start()
            waiter.wait(9, turn, 10.0, lambda waited: None)
            delays.append(time.perf_counter() - stored[0])
            thread.join()
        assert min(delays) < 0.02


def test_a_wait_ends_by_its_check():
    def check(waited):
        if waited > 0.12:
            raise TimeoutError(f"{waited:.2f}")

    with Segment.create(4096) as segment:
        waiter = Waiter(segment.words, segment.address)
        begin = time.perf_counter()
        with pytest.raises(TimeoutError):
            waiter.wait(9, 1, 0.13, check)
        assert 0.12 <= time.perf_counter() - begin < 5
