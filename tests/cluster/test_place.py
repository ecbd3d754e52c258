import pytest

from choros.cluster import LauncherEnv, Place, expand_hosts, expand_tasks, launcher_env, rank_info, strange, why
from choros.errors import InvalidInputError

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
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_APID": "1-2",
    "PALS_RANKID": "5",
    "PALS_NODEID": "2",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMIX_RANK": "5",
}
ALPS = {"ALPS_APP_PE": "3", "ALPS_APP_ID": "7", "ALPS_APP_DEPTH": "8", "COBALT_JOBSIZE": "2", "COBALT_JOBID": "1"}
MPI_REPORT = {
    **{"CHOROS_MPI_RANK": "3", "CHOROS_MPI_SIZE": "4", "CHOROS_MPI_LOCAL_RANK": "1", "CHOROS_MPI_LOCAL_SIZE": "2"},
    **{"CHOROS_MPI_NODE": "1", "CHOROS_MPI_NODES": "2"},
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "3",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "LSB_DJOB_NUMPROC": "9",
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
POD = {"JOB_COMPLETION_INDEX": "2", "CHOROS_COMPLETIONS": "4", "CHOROS_COORDINATOR": "train-0.train:29500"}
TF = {
    "TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}, '
    '"task": {"type": "worker", "index": 1}}'
}
SHELLS = {  # of a job, before anything started ranks
    "PBS": {"PBS_JOBID": "1.head", "PBS_NODEFILE": "/nowhere", "NCPUS": "8", "OMP_NUM_THREADS": "8"},
    "LSF": {"LSB_JOBID": "1", "LSB_HOSTS": "a a b b", "LSB_DJOB_NUMPROC": "4"},
    "Grid Engine": {"JOB_ID": "1", "NSLOTS": "8", "NHOSTS": "2", "PE_HOSTFILE": "/nowhere", "SGE_TASK_ID": "undefined"},
    "Flux": {"FLUX_URI": "local:///run/flux/local"},
    "an Indexed Job of its own": {"JOB_COMPLETION_INDEX": "2"},
    "PALS' own": {"PALS_APID": "1-2"},
    "Cobalt": {"COBALT_JOBID": "1", "COBALT_JOBSIZE": "2", "COBALT_NODEFILE": "/nowhere"},
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
        (MVAPICH, Place(3, 4, 1, 2, None, None, (), None, "mvapich")),
        (PALS, Place(5, 6, 1, 2, 2, None, (), None, "pals")),
        ({**ALPS, "PMI_SIZE": "1", "ALPS_APP_PE": "0"}, Place(launcher="alps")),
        ({**ALPS, **MPI_REPORT}, Place(3, 4, 1, 2, 1, 2, (), None, "mpi")),
        (JSRUN, Place(3, 8, 3, 4, None, None, (), None, "jsrun")),
        (FLUX, Place(3, 4, 1, 2, None, 2, (), None, "flux")),
        (POD, Place(2, 4, 0, 1, 2, 4, (), "train-0.train:29500", "kubernetes")),
        (TF, Place(2, 3, 1, 2, 1, 2, ("a", "b"), "a:1", "tf_config")),
        *((shell, Place(0, 1, 0, 1, 0, 1, (), None, "single")) for shell in SHELLS.values()),
    ],
    ids=[
        *(
            "none",
            "choros",
            "torchrun",
            "openmpi",
            "openmpi-two-nodes",
            "mpich",
            "srun",
            "sbatch-shell",
            "mvapich",
            "pals",
        ),
        *("alps of one", "alps that asked MPI", "jsrun", "flux", "kubernetes", "tf_config", *SHELLS),
    ],
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
        ({**SLURM, **FLUX}, "flux"),
        ({**JSRUN, **FLUX}, "jsrun"),
        ({**PALS, **TORCHRUN}, "torchrun"),
        ({**PALS, **OPENMPI}, "openmpi"),
        ({**PALS, **ALPS}, "pals"),  # aprun of PALS says both
        ({**PALS, **MPI_REPORT}, "mpi"),
        ({**MPI_REPORT, **CHOROS}, "choros"),
        ({**JSRUN, **OPENMPI}, "openmpi"),  # Spectrum MPI under jsrun: both say the same
        ({**POD, **MPICH}, "mpich"),
        ({**TF, **POD}, "kubernetes"),
        ({**TF, **TORCHRUN}, "torchrun"),
    ],
)
def test_the_inner_launcher_wins(environ, launcher):
    assert Place.here(environ).launcher == launcher
    assert why(environ).startswith(f"{launcher}: ")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**CHOROS, "CHOROS_RANK": "x"}, "CHOROS_RANK='x' is not a whole number"),
        ({**CHOROS, "CHOROS_RANK": "-1"}, "CHOROS_RANK='-1' is not a whole number"),
        ({**CHOROS, "CHOROS_RANK": "4"}, "rank 4 is not below the size 4"),
        ({"CHOROS_RANK": "1"}, "CHOROS_SIZE is not set"),
        ({"CHOROS_SIZE": "2"}, "CHOROS_RANK is not set"),
        ({"CHOROS_RANK": "0", "CHOROS_SIZE": "2"}, "CHOROS_LOCAL_RANK is not set"),
        ({**CHOROS, "CHOROS_LOCAL_SIZE": "3"}, "local size 3 is not the size 4"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE or WORLD_SIZE / nodes is not set"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "local size 8 is more than the size 4"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node 2 is not below the nodes 2"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "local rank 4 is not below the local size 4"),
        ({**MPICH, "PMI_SIZE": ""}, "PMI_SIZE is not set"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "adds up to 4 ranks but the size is 6"),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "n[1-2]"},
            "SLURM_STEP_NODELIST lists 2 hosts, and this process",
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2"}, "brackets"),
        ({**PALS, "PMI_SIZE": ""}, "PMI_SIZE or PALS_LOCAL_SIZE x hosts of PBS_NODEFILE is not set"),
        (
            ALPS,
            "PMI_SIZE is not set. Start it through alps again, set CHOROS_COMM=mpi on all ranks to get the ranks",
        ),
        ({**FLUX, "FLUX_JOB_SIZE": "5"}, "FLUX_JOB_SIZE / FLUX_JOB_NNODES is not set"),
        ({**POD, "CHOROS_COMPLETIONS": "2"}, "rank 2 is not below the size 2"),
        ({"TF_CONFIG": "no"}, "TF_CONFIG gives no rank (JSONDecodeError"),
        ({"TF_CONFIG": '{"cluster": {}}'}, "TF_CONFIG gives no rank (KeyError: 'task')"),
        (
            {"TF_CONFIG": TF["TF_CONFIG"].replace('"worker", "index"', '"ps", "index"')},
            "this process is ps 1, and ranks",
        ),
    ],
)
def test_contradictions_are_refused(environ, message):
    with pytest.raises(InvalidInputError) as caught:
        Place.here(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "environ", "size", "hosts", "nodes"),
    [
        ("a b c", {}, 6, ("a", "b", "c"), 3),
        ("a b c", {"PMI_SIZE": ""}, 6, ("a", "b", "c"), 3),
        ("a a b b c c", {"PMI_SIZE": ""}, 6, ("a", "b", "c"), 3),
        ("a b c d", {}, 6, (), None),  # mpiexec -n 6 leaves a node idle
    ],
)
def test_pals_reads_hosts_from_the_node_file(tmp_path, lines, environ, size, hosts, nodes):
    (tmp_path / "nodes").write_text("\n".join(lines.split()) + "\n")
    environ = {**PALS, "PBS_NODEFILE": str(tmp_path / "nodes"), **environ}
    assert Place.here(environ) == Place(5, size, 1, 2, 2, nodes, hosts, hosts[0] if hosts else None, "pals")
    (tmp_path / "nodes").write_text("a\na\nb\n")
    with pytest.raises(InvalidInputError, match="PMI_SIZE or PALS_LOCAL_SIZE x hosts of PBS_NODEFILE is not set"):
        Place.here({**environ, "PMI_SIZE": ""})


def test_the_refusal_says_what_to_do():
    with pytest.raises(InvalidInputError, match="Start it through torchrun again, or unset RANK, WORLD_SIZE"):
        Place.here({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("fields", "environ", "message"),
    [
        ({"local_rank": ("TOY_LOCAL",)}, {"TOY_LOCAL": "0"}, "names no variable for the local size (local_size, or"),
        ({"local_size": ("TOY_LOCALS",)}, {"TOY_LOCALS": "2"}, "names no variable for the local rank (local_rank)"),
    ],
)
def test_a_launcher_entry_without_names_is_named(monkeypatch, fields, environ, message):
    entry = LauncherEnv(launcher="toy", detect_any=("TOY_RANK",), rank=("TOY_RANK",), size=("TOY_SIZE",), **fields)
    monkeypatch.setattr(launcher_env, "TABLES", (*launcher_env.TABLES, entry))
    with pytest.raises(InvalidInputError) as caught:
        Place.here({"TOY_RANK": "0", "TOY_SIZE": "2", **environ})
    assert message in str(caught.value)
    assert "is not set" not in str(caught.value)


def test_one_rank_needs_no_local_place():
    assert Place.here({"RANK": "0", "WORLD_SIZE": "1"}) == Place(launcher="torchrun")


@pytest.mark.parametrize(
    ("environ", "signs"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9"}, ("PMI_RANK=1", "PMI_FD=9")),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}, ("PMIX_RANK=1", "PMIX_NAMESPACE=a")),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ()),
        ({"PMI_NO_FORK": "1", "PMIX_MCA_gds": "hash"}, ()),  # settings of a site, outside of any job
        *((one, ()) for one in (MPICH, PALS, SLURM, OPENMPI, MPI_REPORT, {})),
    ],
)
def test_the_signs_of_a_launcher_that_is_not_known(environ, signs):
    assert strange(environ) == signs
    assert ("set CHOROS_COMM=mpi" in why(environ)) == bool(signs)
    if signs:
        assert Place.here(environ) == Place()


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
    with pytest.raises(InvalidInputError, match="host list"):
        expand_hosts(text)


def test_tasks_per_node():
    assert expand_tasks("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(InvalidInputError, match="tasks per node"):
        expand_tasks("2(x3),,1")


def test_tf_config_may_have_addresses_of_ipv6():
    text = '{"cluster": {"worker": ["a:1", "[fd00::1]:2"]}, "task": {"type": "worker", "index": 1}}'
    place = Place.here({"TF_CONFIG": text})
    assert (place.hosts, place.rank, place.node) == (("a", "fd00::1"), 1, 1)


def test_torchruns_names_without_local_ones():
    kubeflow = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert Place.here(kubeflow) == Place(2, 3, 0, 1, 2, 3, (), "job-master-0:23456", "torchrun")
    azure = {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1", "RANK": "5"}
    assert Place.here(azure) == Place(5, 8, 1, 4, 1, None, (), None, "torchrun")
    first = {**azure, "RANK": "1", "NODE_RANK": "0", "AZUREML_NODE_COUNT": "2"}
    assert Place.here(first) == Place(1, 8, 1, 4, 0, None, (), None, "torchrun")
    with pytest.raises(InvalidInputError, match="LOCAL_WORLD_SIZE"):  # nothing tells how many nodes there are
        Place.here({**first, "AZUREML_NODE_COUNT": ""})


def test_a_list_may_name_a_host_for_each_rank_and_have_spaces():
    ranks = {"ZRUN_RANK": "3", "ZRUN_SIZE": "4", "ZRUN_LOCAL_RANK": "1", "ZRUN_LOCAL_SIZE": "2", "ZRUN_NODE": "1"}
    zrun = LauncherEnv(
        "zrun",
        *(("ZRUN_RANK",), ("ZRUN_RANK",), ("ZRUN_SIZE",)),
        local_rank=("ZRUN_LOCAL_RANK",),
        local_size=("ZRUN_LOCAL_SIZE",),
        node=("ZRUN_NODE",),
        hosts=("ZRUN_HOSTS",),
    )
    assert rank_info._read(zrun, {**ranks, "ZRUN_HOSTS": "n1, n1, n2, n2"}).hosts == ("n1", "n2")
    with pytest.raises(InvalidInputError, match="ZRUN_HOSTS lists 1 host, and this process is on node 1"):
        rank_info._read(zrun, {**ranks, "ZRUN_HOSTS": "n1"})
