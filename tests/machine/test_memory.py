import json
import os
import pathlib
import platform
import subprocess
import sys
import textwrap

import pytest

from choros.cluster.hardware import peak_memory

SIZE = 200_000_000


def test_peak_of_another_process_stays_after_it_has_freed():
    code = f"x = bytearray({SIZE}); del x; print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert SIZE < peak_memory(process.pid) < SIZE + 100_000_000
        process.communicate(b"\n")
    assert peak_memory(process.pid) == 0


def test_a_small_child_of_a_large_parent_has_a_small_peak():
    large = bytearray(b"x") * SIZE
    code = "from choros.cluster.hardware import peak_memory; print(peak_memory())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert peak_memory() > len(large)
    assert 1_000_000 < int(out) < SIZE // 2


COUNT = """
import json, resource, threading
import choros, numpy
from choros.cluster.hardware.freed_memory import keep_freed_memory, return_freed_memory

size = 40_000_000
def work():
    b"x" * size

def pages(thread=False):
    target = threading.Thread(target=work)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    target.start() if thread else work()
    target.join() if thread else None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def twice(thread=False):
    pages(thread)
    return pages(thread)
"""
RANK = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
RANK |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
LARGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
small_pages = pytest.mark.skipif(
    LARGE_PAGES.exists() and "[always]" in LARGE_PAGES.read_text(), reason="this kernel gives pages of 2 MB"
)
MANY = 36_000_000 // os.sysconf("SC_PAGE_SIZE")  # pages of most of 40 MB
FEW = MANY // 9


def counted(script, **environ):
    """Run a script in a process without settings of the allocator; return what it printed."""
    names = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")  # none of the allocator, none of a launcher
    clean = {name: os.environ[name] for name in names if name in os.environ}
    command = [sys.executable, "-c", COUNT + textwrap.dedent(script)]
    done = subprocess.run(command, env=clean | environ, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


@glibc
@small_pages
def test_memory_that_a_rank_frees_is_used_again_without_new_pages():
    before, is_set, after, returned = counted(
        """
        before = twice()
        is_set = keep_freed_memory(one_arena=False)
        after = twice()
        return_freed_memory()
        print(json.dumps([before, is_set, after, pages()]))
        """
    )
    assert before > MANY
    assert is_set
    assert after < FEW
    assert returned > MANY


@glibc
@small_pages
@pytest.mark.parametrize(("backend", "thread"), [("jax", True), ("torch", False)])
def test_a_rank_of_a_job_keeps_memory_when_choros_is_imported(backend, thread):
    """JAX runs steps in other threads, whose heaps have no room for blocks above 64 MB."""
    script = f"""
        size = 100_000_000
        print(json.dumps(twice({thread})))
        """
    assert counted(script, KERAS_BACKEND=backend, **RANK) < FEW
    assert counted(script, KERAS_BACKEND=backend) > MANY


@glibc
@pytest.mark.parametrize(
    ("name", "value", "is_set"),
    [
        ("MALLOC_ARENA_MAX", "4", True),  # as Hadoop sets it
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536", False),
        ("MALLOC_TOP_PAD_", "1", False),
    ],
)
def test_settings_of_the_allocator_by_the_user_stay(name, value, is_set):
    assert counted("print(json.dumps(keep_freed_memory(one_arena=True)))", **{name: value}) == is_set


@glibc
@small_pages
def test_an_old_glibc_which_refuses_a_high_limit_takes_no_block_from_the_kernel():
    before, is_set, after = counted(
        """
        import ctypes
        from choros.cluster.hardware import freed_memory
        mallopt = ctypes.CDLL(None).mallopt
        old = lambda option, value: int(option != -3 or value <= 32 << 20) and mallopt(option, value)
        freed_memory._function = lambda name: old
        before = twice()
        is_set = keep_freed_memory(one_arena=False)
        print(json.dumps([before, is_set, twice()]))
        """
    )
    assert before > MANY
    assert is_set
    assert after < FEW
