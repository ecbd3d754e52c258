import pytest

from choros.cluster import Place, expand_hosts, expand_tasks, why
from choros.errors import BadInput

CHOROS = {"CHOROS_RANK": "2", "CHOROS_SIZE": "4", "CHOROS_LOCAL_RANK": "2", "CHOROS_LOCAL_SIZE": "4"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "vn1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",  # as version 5 numbers them when it oversubscribes
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_HOSTNAME": "n3"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-2,4]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_NODELIST": "n[1-2,4]",
}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "n[1-2,4]", "SLURM_TASKS_PER_NODE": "2(x3)"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Place(0, 1, 0, 1, 0, 1, (), None, "single")),
        (CHOROS, Place(2, 4, 2, 4, 0, 1, (), None, "choros")),
        (TORCHRUN, Place(3, 4, 1, 2, 1, 2, (), "vn1:29500", "torchrun")),
        (OPENMPI, Place(1, 4, 2, 4, 0, 1, (), None, "openmpi")),
        (
            {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            Place(1, 4, 0, 2, None, None, (), None, "openmpi"),
        ),
        (MPICH, Place(4, 5, 0, 1, None, None, (), None, "mpich")),
        (SLURM, Place(5, 6, 1, 2, 2, 3, ("n1", "n2", "n4"), "n1", "slurm")),
        (SBATCH, Place(0, 1, 0, 1, 0, 1, (), None, "single")),
    ],
    ids=["none", "choros", "torchrun", "openmpi", "openmpi-two-nodes", "mpich", "srun", "sbatch-shell"],
)
def test_each_launcher(environ, expected):
    assert Place.here(environ) == expected


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SLURM, **MPICH}, "mpich"),
        ({**SLURM, **OPENMPI}, "openmpi"),
        ({**SLURM, **TORCHRUN}, "torchrun"),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"}, "slurm"),  # srun --mpi=pmi2
        ({**SLURM, "PMIX_RANK": "5"}, "slurm"),
        ({**SLURM, **OPENMPI, **TORCHRUN, **CHOROS}, "choros"),
    ],
)
def test_the_inner_launcher_wins(environ, launcher):
    assert Place.here(environ).launcher == launcher
    assert why(environ).startswith(f"{launcher}: ")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**CHOROS, "CHOROS_RANK": "x"}, "CHOROS_RANK='x' is not a whole number"),
        ({**CHOROS, "CHOROS_RANK": "-1"}, "CHOROS_RANK='-1' is not a whole number"),
        ({**CHOROS, "CHOROS_RANK": "4"}, "rank 4 is not below the size 4"),
        ({"CHOROS_RANK": "1"}, "CHOROS_SIZE is not set"),
        ({"CHOROS_SIZE": "2"}, "CHOROS_RANK is not set"),
        ({"CHOROS_RANK": "0", "CHOROS_SIZE": "2"}, "CHOROS_LOCAL_RANK is not set"),
        ({**CHOROS, "CHOROS_LOCAL_SIZE": "3"}, "local size 3 is not the size 4"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "local size 8 is more than the size 4"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node 2 is not below the nodes 2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "local rank 4 is not below the local size 4"),
        ({**MPICH, "PMI_SIZE": ""}, "PMI_SIZE is not set"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "adds up to 4 ranks but the size is 6"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2]"}, "2 hosts are listed but there are 3 nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2"}, "brackets"),
    ],
)
def test_contradictions_are_refused(environ, words):
    with pytest.raises(BadInput) as caught:
        Place.here(environ)
    assert words in str(caught.value)


def test_the_refusal_says_what_to_do():
    with pytest.raises(BadInput, match="Start it through torchrun again, or unset RANK, WORLD_SIZE"):
        Place.here({"RANK": "1", "WORLD_SIZE": "2"})


def test_one_rank_needs_no_local_place():
    assert Place.here({"RANK": "0", "WORLD_SIZE": "1"}) == Place(launcher="torchrun")


def test_this_process_by_default(monkeypatch):
    for name, value in CHOROS.items():
        monkeypatch.setenv(name, value)
    assert Place.here().rank == 2
    assert why() == "choros: CHOROS_RANK=2, CHOROS_SIZE=4, CHOROS_LOCAL_RANK=2, CHOROS_LOCAL_SIZE=4"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("login1", ("login1",)),
        ("n[1-2,4]", ("n1", "n2", "n4")),
        (
            "nid[00001-00003,00007],login1,gpu-a[1-2]-b[3-4]",
            (
                *("nid00001", "nid00002", "nid00003", "nid00007", "login1"),
                *("gpu-a1-b3", "gpu-a1-b4", "gpu-a2-b3", "gpu-a2-b4"),
            ),
        ),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
    ],
)
def test_host_lists_as_scontrol_expands_them(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n]1[", "n[2-1]", "n[a-b]", "n[]", "n[1-99999999]"])
def test_wrong_host_lists_are_refused(text):
    with pytest.raises(BadInput, match="host list"):
        expand_hosts(text)


def test_tasks_per_node():
    assert expand_tasks("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(BadInput, match="tasks per node"):
        expand_tasks("2(x3),,1")
