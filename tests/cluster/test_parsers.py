"""keras_experiments' parsers say what Place says."""

import os

import pytest

from choros.cluster import ClusterParser, SlurmClusterParser
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
        InvalidInputError, match="this is no job of SLURM: neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST"
    ):
        _ = SlurmClusterParser(environ={}).hostnames
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(InvalidInputError, match="mpich does not report the names of the hosts"):
        _ = ClusterParser(environ=mpi).hostnames


def test_a_rank_that_is_no_number_is_told():
    job = {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2", "SLURM_PROCID": "zz"}
    with pytest.raises(InvalidInputError, match="SLURM_PROCID=zz is no rank"):
        _ = SlurmClusterParser(environ=job).my_proc_id
