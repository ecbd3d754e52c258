"""Behavior of MPI groups alone: limits, deaths, exceptions, unsuitable launchers, and waits that use no core."""

import os
import re
import subprocess
import sys

import pytest

from choros.cluster import TABLES

HEAD = """
import os, signal, sys, time
import numpy as np
from choros.errors import ChorosError
from choros.comm.group import Group
from choros.comm.p2p.mpi_group import MpiGroup

group = MpiGroup(timeout=60)
rank, size = group.rank, group.size

def trying(call):
    begun = time.perf_counter()
    try:
        call()
    except ChorosError as error:
        print(f"<{rank} {type(error).__name__} {time.perf_counter() - begun:.2f} s: {error}>", flush=True)
"""


@pytest.fixture
def run(mpiexec, tmp_path):
    def start(size, text, head=HEAD, before=(), **more):
        (tmp_path / "script.py").write_text(head + text)
        return mpiexec(size, *before, sys.executable, tmp_path / "script.py", **more)

    return start


def texts_of(out, rank):
    """Return the texts that a rank has printed between angle brackets, wherever the launcher has mixed them in."""
    return re.findall(rf"<{rank} ([^<>]*)>", out)


def test_waiting_takes_no_core_and_a_limit_names_who_is_missing(run):
    text = """
assert isinstance(group, Group)
if rank == 2:
    time.sleep(1.5)
group.warn_after, group.doing, traced = 0.5, "the first call", []
group.trace = traced.append
before, begun = time.process_time(), time.perf_counter()
group.barrier()
group.warn_after, group.doing = 60, ""
if rank != 2:
    waited = time.perf_counter() - begun
    assert waited > 0.7, waited
    print(f"<{rank} share {(time.process_time() - before) / waited:.3f}>", flush=True)
group.sum(np.ones(100_000))
assert [(kind, nbytes) for kind, _, _, _, nbytes in traced] == [("wait", -1), ("wait", -1), ("reduce", 800_000)]
assert all(begin < end for _, _, begin, end, _ in traced)
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
group.timeout = 0.7
trying(lambda: group.sum_slots(10, "float32"))
trying(group.barrier)
"""  # and MPI cannot be ended, so what started it ends the process
    out = run(3, text, head=HEAD.replace("MpiGroup(timeout=60)", "MpiGroup(timeout=3)"), code=None, timeout=60)
    assert "in waiting_for_all_ranks_inside_mpi" in out
    for rank in (0, 1):
        assert re.search(rf"choros: rank {rank} on {os.uname().nodename} has waited \d+\.\d s", out), out
        assert "s at the first call for rank 2 of 3. It waits for up to 3 s in all." in out
        share, limit, broken = texts_of(out, rank)
        assert float(share.split()[1]) < 0.5, out  # of a core; a rank that spins uses a whole one
        kind, seconds, _ = limit.split(maxsplit=2)
        assert kind == "CommTimeoutError"
        assert 0.7 <= float(seconds) < 3
        assert f"rank {rank} on {os.uname().nodename} waited" in limit
        assert "at sum_slots of 10 float32 for rank 2 of 3" in limit
        assert "PeerLostError" in broken
        assert "failed before" in broken


def test_an_exception_ends_the_job_and_its_traceback_comes_first(run):
    text = """
if rank == 1:
    raise ValueError("the cause")
group.barrier()
print("<0 went on>")
"""
    out = run(2, text, code=1, timeout=30)
    assert "ValueError: the cause" in out
    assert "script.py" in out
    assert "went on" not in out


def test_a_rank_that_ends_early_is_named(run):
    """By sys.exit, where the others are told; by os._exit, where MPICH goes on and Open MPI ends the job."""
    text = """
if rank == 1:
    sys.exit(0)
trying(group.barrier)
"""
    assert "PeerLostError" in texts_of(run(2, text, code=None, timeout=30), 0)[0]  # both end MPI, which waits for both
    text = text.replace("sys.exit(0)", "os._exit(0)") + "os._exit(0)"
    out = run(2, text, code=None, timeout=30)
    assert not texts_of(out, 0) or "rank 1 (process" in texts_of(out, 0)[0]


def test_a_rank_that_is_done_waits_asleep_for_the_others(run):
    text = """
if rank:
    time.sleep(1.5)
begun = time.process_time(), time.perf_counter()
import atexit
atexit._run_exitfuncs()
if rank == 0:
    print(f"<0 {time.process_time() - begun[0]:.3f} {time.perf_counter() - begun[1]:.3f}>", flush=True)
"""
    cpu, waited = map(float, texts_of(run(2, text), 0)[0].rstrip(">").split())
    assert waited > 0.7
    assert cpu < 0.2 * waited


def test_ranks_of_which_some_never_start_mpi(run):
    text = """
import sys, time, os
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank:
    time.sleep(4)
    os._exit(0)
from choros.comm.p2p.mpi_group import MpiGroup
MpiGroup(timeout=1)
"""
    out = run(2, text, head="", code=None, timeout=30)
    assert "Timeout (0:00:01)!" in out
    assert "in waiting_for_all_ranks_inside_mpi" in out


NO_TABLE = """
import keras, numpy as np
import choros
import choros.hvd as hvd

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
choros.Trainer(model).fit(x, x[:, 0], batch_size=12, verbose=0)
hvd.init()
place = choros.cluster.Place.here()
weights = hvd.allgather_object([w.tolist() for w in model.get_weights()])
assert weights == weights[:1] * 3
print(f"<{place.rank} {place.size} {place.local_rank} {place.local_size} {place.node} {place.launcher}>", flush=True)
"""


def test_ranks_whose_launcher_is_in_no_table_ask_mpi_if_they_are_told_to(run):
    removed = [word for table in TABLES for name in table.detect_any for word in ("-u", name)]
    out = run(3, NO_TABLE, head="", before=["env", *removed], CHOROS_COMM="mpi")
    assert sorted(re.findall(r"<(.*?)>", out)) == [f"{rank} 3 {rank} 3 0 mpi" for rank in range(3)]
    out = run(2, "import choros.hvd as hvd\nhvd.init()\n", head="", before=["env", *removed], code=None)
    assert "An MPI launcher started this process (PMI" in out
    assert "Set CHOROS_COMM=mpi on all ranks" in out


# -- what is refused, without a job
LAUNCHERS = {
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "openmpi": {
        f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
    },
}


def alone(text, **environment):
    """Return the output of a process that no launcher has started, whatever its environment contains."""
    there = {**{k: v for k, v in os.environ.items() if k != "CHOROS_COMM"}, **environment}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, env=there)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_of_another_mpi_is_refused_with_the_remedy(mpiexec, launcher):
    """Each rank has then a communicator of its own, of 1."""
    output = alone("import choros.hvd as hvd; hvd.init()", **LAUNCHERS[launcher])
    assert "InvalidInputError: Rank 1 is one of 2, says the launcher, but in its group it is rank 0 of 1" in output
    assert f"{mpiexec.path}, which belongs to {'Open MPI' if mpiexec.open else 'MPICH'} " in output


def test_mpich_under_a_launcher_that_speaks_pmix_is_refused_before_it_would_abort(mpiexec):
    if mpiexec.open:
        pytest.skip("this MPI is Open MPI")
    output = alone("import choros.hvd as hvd; hvd.init()", **LAUNCHERS["openmpi"], PMIX_RANK="1")
    assert "the launcher uses PMIx, which mpi4py's MPICH" in output


def test_mpi_that_was_asked_for_a_place_and_says_one_of_one_is_refused_where_a_launcher_left_signs(mpiexec):
    output = alone("import choros.hvd as hvd; hvd.init()", CHOROS_COMM="mpi", PMI_ID="1")
    assert (
        "MPI reports rank 0 of 1 for this process, though PMI_ID=1 shows a launcher: the ranks would train separate "
        "models" in output
    )
    output = alone("import choros.hvd as hvd; hvd.init(); raise ValueError(hvd.size())", CHOROS_COMM="mpi")
    assert "choros: CHOROS_COMM=mpi is set, and MPI reports a single process: there are no ranks" in output
    assert (
        "the workers of a Trainer on this machine exchange by shared memory. Start this script with mpiexec" in output
    )
    assert "ValueError: 1" in output
    output = alone("import choros.hvd as hvd; hvd.init()", CHOROS_COMM="mpi", ALPS_APP_PE="1")
    assert "as alps reports it, is inconsistent: PMI_SIZE is not set" in output


def test_a_missing_import_names_what_to_install():
    text = "import sys; sys.modules['mpi4py'] = None; from choros.comm.p2p.mpi_group import MpiGroup; MpiGroup()"
    output = alone(text)
    assert "choros[mpi]" in output
    assert "choros[mpi-wheel]" in output


def test_mpi_that_was_ended_or_started_for_one_thread_is_refused(mpiexec):
    text = "from mpi4py import MPI; MPI.Finalize(); from choros.comm.p2p.mpi_group import MpiGroup; MpiGroup()"
    assert "cannot be started again" in alone(text)
    text = """
import threading
import mpi4py
mpi4py.rc.thread_level = "single"
from mpi4py import MPI
from choros.comm.p2p.mpi_group import MpiGroup
group = MpiGroup()
group.barrier()
failed = []
threading.excepthook = lambda what: failed.append(what.exc_value)
thread = threading.Thread(target=group.barrier)
thread.start()
thread.join(30)
raise failed[0]
"""
    assert "barrier cannot be called here: MPI was started for one thread" in alone(text)


def test_one_rank_and_the_script_s_own_communicator(mpiexec):
    text = """
import numpy as np
from mpi4py import MPI
from choros.comm.p2p.mpi_group import MpiGroup
with MpiGroup(MPI.COMM_SELF) as group:
    group.slot(3000, "float32")[:] = 2
    assert group.sum_slots(3000, "float32").sum() == 6000
    assert group.gather(b"x" * 5000) == [b"x" * 5000]
    assert group.broadcast(np.ones(1000)).sum() == 1000
group.close()
raise ValueError("and there is no job to end")
"""
    assert "and there is no job to end" in alone(text)
