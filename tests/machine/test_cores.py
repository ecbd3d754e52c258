import os
import subprocess
import sys

import pytest

from choros.cluster.hardware import Binding, physical_cores, plan, usable_cores
from choros.errors import InvalidInputError


def topology(folder, cores):
    """A /sys tree: {logical: (siblings, socket)}."""
    for logical, (siblings, socket) in cores.items():
        first = folder / f"cpu{logical}" / "topology"
        first.mkdir(parents=True)
        (first / "thread_siblings_list").write_text(siblings + "\n")
        (first / "physical_package_id").write_text(f"{socket}\n")
    return folder


def test_hyperthreads_are_grouped_and_sockets_kept_together(tmp_path):
    sys_tree = topology(
        tmp_path,
        {
            0: ("0,4", 0),
            1: ("1,5", 1),
            2: ("2,6", 0),
            3: ("3,7", 1),
            4: ("0,4", 0),
            5: ("1,5", 1),
            6: ("2,6", 0),
            7: ("3,7", 1),
        },
    )
    assert physical_cores(range(8), sys_tree) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert physical_cores([0, 2, 6], sys_tree) == [(0,), (2, 6)]


def test_neighbouring_siblings_written_as_a_range(tmp_path):
    sys_tree = topology(tmp_path, {0: ("0-1", 0), 1: ("0-1", 0), 2: ("2-3", 0), 3: ("2-3", 0)})
    assert physical_cores(range(4), sys_tree) == [(0, 1), (2, 3)]


def test_without_a_description_each_logical_core_counts(tmp_path):
    assert physical_cores([3, 1, 2], tmp_path) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("ranks", "threads", "bind", "cores", "expected"),
    [
        (1, None, True, [(0,), (1,)], [Binding((0, 1), 2)]),
        (2, None, True, [(0,), (1,)], [Binding((0,), 1), Binding((1,), 1)]),
        (2, None, True, [(0,), (1,), (2,)], [Binding((0,), 1), Binding((1,), 1)]),
        (2, 3, True, [(0,), (1,)], [Binding((0,), 3), Binding((1,), 3)]),
        (2, None, False, [(0,), (1,), (2,), (3,)], [Binding((), 2)] * 2),
        (2, None, True, [(0, 1)], [Binding((0,), 1), Binding((1,), 1)]),
        (3, None, True, [(0,), (1,)], [Binding((), 1)] * 3),
        (3, 2, True, [(0,), (1,)], [Binding((), 2)] * 3),
    ],
)
def test_plan(ranks, threads, bind, cores, expected):
    assert plan(ranks, threads, bind, cores=cores) == expected


def test_plan_of_this_machine_is_disjoint_and_usable():
    usable = set(usable_cores())
    bindings = plan(len(usable))
    shared = [core for binding in bindings for core in binding.cores]
    assert len(shared) == len(set(shared)) == len(usable)
    assert set(shared) <= usable


@pytest.mark.parametrize(("ranks", "threads"), [(0, None), (-1, None), (1, 0)])
def test_plan_refuses(ranks, threads):
    with pytest.raises(InvalidInputError, match="1 or more"):
        plan(ranks, threads)


def test_usable_cores_follow_the_affinity_mask():
    first = usable_cores()[0]
    code = (
        f"import os; os.sched_setaffinity(0, {{{first}}}); from choros.cluster.hardware import *; "
        "print(usable_cores(), plan(1))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out == f"({first},) [Binding(cores=({first},), threads=1)]\n"
    assert os.sched_getaffinity(0) == set(usable_cores())
