import subprocess
import sys

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
