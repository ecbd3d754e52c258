"""keras_experiments' parsers return what Place, the scheduler's files or MPI give."""

import json
import os
import sys

import pytest

from choros.cluster import ClusterParser, MpiClusterParser, PbsClusterParser, SlurmClusterParser, UgeClusterParser
from choros.errors import InvalidInputError

STEP = {
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def test_a_step_of_slurm():
    parser = SlurmClusterParser(network="ib.cluster", environ=STEP)
    assert parser.hostnames == ["n1.ib.cluster", "n2.ib.cluster", "n3.ib.cluster"]
    assert parser.num_tasks_per_host == [1, 2, 2]
    assert (parser.num_parameter_servers, parser.my_proc_id, parser.starting_port) == (3, 3, 2300)
    assert (parser.place.rank, parser.place.size) == (3, 5)
    assert SlurmClusterParser(1, 4000, environ=STEP).num_parameter_servers == 1
    assert ClusterParser(environ=STEP).num_tasks_per_host == [1, 2, 2]
    uneven = '{"cluster": {"worker": ["a:1", "a:2", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    with pytest.raises(InvalidInputError, match="tf_config does not report how the 3 ranks are placed on the 2 hosts"):
        _ = ClusterParser(environ={"TF_CONFIG": uneven}).num_tasks_per_host


def test_one_machine_and_none_of_slurm():
    run = {"CHOROS_RANK": "1", "CHOROS_SIZE": "2", "CHOROS_LOCAL_RANK": "1", "CHOROS_LOCAL_SIZE": "2"}
    parser = ClusterParser(environ=run)
    assert (parser.hostnames, parser.num_tasks_per_host, parser.my_proc_id) == ([os.uname().nodename], [2], 1)
    with pytest.raises(
        InvalidInputError, match="this is not a job of SLURM: neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST"
    ):
        _ = SlurmClusterParser(environ={}).hostnames
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(InvalidInputError, match="mpich does not report the names of the hosts"):
        _ = ClusterParser(environ=mpi).hostnames


def test_a_rank_that_is_no_number_is_told():
    job = {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2", "SLURM_PROCID": "zz"}
    with pytest.raises(InvalidInputError, match="SLURM_PROCID=zz is not a rank"):
        _ = SlurmClusterParser(environ=job).my_proc_id


FILES = {
    "PBS": (PbsClusterParser, "PBS_NODEFILE", "n2\nn2\n\nn10\n"),
    "Grid Engine": (
        UgeClusterParser,
        "PE_HOSTFILE",
        "n2 1 all.q@n2 UNDEFINED\nn10 1 all.q@n10 0,1\nn2 1 gpu.q@n2 <NULL>\n",
    ),
}


@pytest.fixture(params=FILES)
def job(request, tmp_path):
    """The parser of a job with two slots on n2 and one on n10, and the environment of its shell."""
    kind, variable, text = FILES[request.param]
    (tmp_path / "hosts").write_text(text)
    return kind, {variable: str(tmp_path / "hosts")}


def hydra(rank, size, local_rank, local_size):
    """The variables that MPICH's launcher gives a rank."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


def test_the_hosts_of_a_file_in_its_order_with_their_slots(job):
    kind, shell = job
    parser = kind(network="ib", environ=shell)
    assert parser.hostnames == ["n2.ib", "n10.ib"]
    assert parser.num_tasks_per_host == [2, 1]
    assert (parser.num_parameter_servers, parser.my_proc_id, parser.starting_port) == (2, 0, 2300)
    assert kind(5, 4000, environ=shell).num_parameter_servers == 5
    assert kind(5, 4000, environ=shell).starting_port == 4000


def test_ranks_of_a_launcher_on_the_hosts_of_a_file(job):
    kind, shell = job
    filled = kind(environ=shell | hydra(2, 3, 0, 1))
    assert (filled.my_proc_id, filled.num_tasks_per_host) == (2, [2, 1])
    more = kind(environ=shell | hydra(7, 8, 3, 4))  # slots are cores, or the job has one line for each host
    assert (more.my_proc_id, more.num_tasks_per_host) == (7, [4, 4])
    for rank in (hydra(0, 4, 0, 3), hydra(2, 3, 2, 3)):  # on hosts that do not have equal numbers; all on this host
        with pytest.raises(
            InvalidInputError, match="mpich started . ranks, 3 of them on this host, and .* lists 3 slots on 2 hosts"
        ):
            _ = kind(environ=shell | rank).num_tasks_per_host


def test_a_file_that_gives_no_hosts_is_refused(job, tmp_path):
    kind, shell = job
    ((variable, _),) = shell.items()
    with pytest.raises(InvalidInputError, match=f"this is not a job of .*: {variable} is not set"):
        _ = kind(environ={}).hostnames
    with pytest.raises(
        InvalidInputError, match=r"cannot be read \(No such file or directory\).*copy it to a directory"
    ):
        _ = kind(environ={variable: str(tmp_path / "missing")}).hostnames
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidInputError, match="empty lists no host: set it to the file that"):
        _ = kind(environ={variable: str(tmp_path / "empty")}).num_tasks_per_host


@pytest.mark.parametrize(
    ("kind", "variable", "line"),
    [
        (PbsClusterParser, "PBS_NODEFILE", "n2 4"),
        (UgeClusterParser, "PE_HOSTFILE", "n2"),
        (UgeClusterParser, "PE_HOSTFILE", "n2 many all.q@n2 UNDEFINED"),
        (UgeClusterParser, "PE_HOSTFILE", "n2 0 all.q@n2 UNDEFINED"),
    ],
)
def test_a_line_of_another_form_is_refused(kind, variable, line, tmp_path):
    (tmp_path / "hosts").write_text(f"\n{line}\n")
    with pytest.raises(InvalidInputError, match=f"line 2 of {variable}=.*hosts is '{line}', not .*: .*{variable}"):
        _ = kind(environ={variable: str(tmp_path / "hosts")}).hostnames


MPI = """
import json, os, sys

class Elsewhere:
    nodename = "last"

if sys.argv[1:] == ["two hosts"] and os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.uname = lambda: Elsewhere
from choros.cluster import MpiClusterParser

parser = MpiClusterParser(network="ib", timeout=60)
place = parser.place
assert "keras" not in sys.modules and "numpy" not in sys.modules
placed = [place.rank, place.size, place.local_rank, place.local_size, place.node, place.nodes, place.coordinator]
result = [parser.hostnames, parser.num_tasks_per_host, parser.num_parameter_servers, parser.my_proc_id, placed]
print("result", json.dumps(result), flush=True)
"""


@pytest.mark.parametrize("hosts", ["one host", "two hosts"])
def test_all_ranks_of_an_mpi_gather_their_hosts(hosts, mpiexec):
    lines = mpiexec(3, sys.executable, "-c", MPI, hosts).splitlines()
    ranks = sorted(
        (json.loads(line.partition("result ")[2]) for line in lines if "result " in line), key=lambda r: r[3]
    )
    here = os.uname().nodename
    if hosts == "one host":
        assert ranks == [[[f"{here}.ib"], [3], 1, rank, [rank, 3, rank, 3, 0, 1, here]] for rank in range(3)]
        return
    each = [[0, 3, 0, 2, 0, 2, here], [1, 3, 0, 1, 1, 2, here], [2, 3, 1, 2, 0, 2, here]]
    assert ranks == [[[f"{here}.ib", "last.ib"], [2, 1], 2, rank, placed] for rank, placed in enumerate(each)]


def test_an_mpi_whose_ranks_are_alone_is_refused(mpiexec):
    """A launcher of another MPI starts three processes, each of which MPI takes for the only one."""
    script = "from choros.cluster import MpiClusterParser; MpiClusterParser(timeout=60)"
    other = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    if mpiexec.open:
        pytest.skip("these are the variables of Open MPI itself")
    printed = mpiexec(1, sys.executable, "-c", script, code=None, **other, **local)
    assert "MPI reports a size of 1, but openmpi started 3 ranks. Start the ranks with" in printed


def test_ranks_that_were_started_without_mpi_are_refused(mpiexec):
    """MPI takes each rank of such a launcher for the only one."""
    script = "from choros.cluster import MpiClusterParser; MpiClusterParser(timeout=60)"
    ranks = {"CHOROS_RANK": "1", "CHOROS_SIZE": "2", "CHOROS_LOCAL_RANK": "1", "CHOROS_LOCAL_SIZE": "2"}
    printed = mpiexec(1, sys.executable, "-c", script, code=None, **ranks)
    assert "choros started 2 ranks without MPI, which reports a size of 1: use ClusterParser" in printed


@pytest.mark.parametrize(("transport", "offers_tcp"), [("", True), ("mpi", False)])
def test_mpi_without_mpi4py_names_what_to_install_and_the_way_without_it(monkeypatch, transport, offers_tcp):
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("CHOROS_COMM", transport)
    wanted = r"mpi4py with an MPI library is missing.*pip install 'choros\[mpi\]'"
    with pytest.raises(InvalidInputError, match=wanted) as refused:
        MpiClusterParser()
    assert ("set CHOROS_SECRET" in str(refused.value)) is offers_tcp
