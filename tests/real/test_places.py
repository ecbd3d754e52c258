"""The place of a process on a real SLURM: steps, the batch shell, arrays, allocations, MPI's own launcher, GPUs."""

import json
import os
import pathlib
import pty
import subprocess
import sys

import pytest

from choros.cluster import expand_hosts

WHERE = [sys.executable, "-m", "choros", "where", "--json"]
PLACE = """
import json, os, sys
from choros.cluster import Place
place = Place.here()
said = [place.rank, place.size, place.local_rank, place.local_size, place.node, place.nodes, place.launcher,
        os.environ.get("CUDA_VISIBLE_DEVICES")]
name = f"{os.environ.get('SLURM_ARRAY_TASK_ID', '')}-{place.rank}.json"
open(os.path.join(sys.argv[1], name), "w").write(json.dumps(said))
"""


@pytest.fixture
def places(slurm, tmp_path):
    """Run a script of shell as a job, in which $PLACE writes a place down; return the places by the files' names."""
    script = tmp_path / "place.py"
    script.write_text(PLACE)

    def run(text, *options):
        out = tmp_path / "out"
        out.mkdir()
        file = tmp_path / "job.sh"
        file.write_text(f"#!/bin/bash\nPLACE='{sys.executable} {script} {out}'\n{text}\n")
        slurm.run("sbatch", "--wait", "--output", tmp_path / "log", *options, file)
        return {path.stem: json.loads(path.read_text()) for path in sorted(out.iterdir())}

    return run


def test_a_step_on_two_nodes(slurm):
    output = slurm.run("srun", "--nodelist=n1,n2", "-n3", "--distribution=block", "--label", *WHERE)
    results = {}
    for rank in range(3):
        lines = [line.partition(":")[2] for line in output.splitlines() if line.startswith(f"{rank}:")]
        results[rank] = json.loads("\n".join(lines))
    places = [results[rank]["place"] for rank in range(3)]
    assert [place["rank"] for place in places] == [0, 1, 2]
    assert {place["launcher"] for place in places} == {"slurm"}
    assert [place["size"] for place in places] == [3] * 3
    assert [place["node"] for place in places] == [0, 0, 1]
    assert [place["local_rank"] for place in places] == [0, 1, 0]
    assert [place["local_size"] for place in places] == [2, 2, 1]
    assert places[0]["hosts"] == ["n1", "n2"]
    assert places[0]["coordinator"] == "n1"
    assert [results[rank]["host"] for rank in range(3)] == ["n1", "n1", "n2"]


def test_the_shell_of_a_job_is_one_process_and_its_step_is_not(places):
    places_ = places("$PLACE", "-N2", "-n4")
    assert places_ == {"-0": [0, 1, 0, 1, 0, 1, "single", None]}


def test_jobs_of_an_array_are_each_alone(places):
    places_ = places("$PLACE", "--array=0-2")
    assert {name: place[:2] for name, place in places_.items()} == {f"{i}-0": [0, 1] for i in range(3)}


def test_mpiexec_inside_of_slurm_wins(places):
    mpiexec = pathlib.Path(sys.executable).parent / "mpiexec"
    places_ = places(f"{mpiexec} -launcher fork -hosts localhost -n 3 $PLACE", "-N2", "-n4")
    assert {name: (place[:4], place[6]) for name, place in places_.items()} == {
        f"-{rank}": ([rank, 3, rank, 3], "mpich") for rank in range(3)
    }


def test_an_allocation_and_its_step(slurm):
    shell = slurm.run("salloc", "-N2", "-n2", *WHERE)
    assert '"launcher": "single"' in shell
    step = slurm.run("salloc", "-N2", "-n2", "srun", *WHERE)
    assert step.count('"launcher": "slurm"') == 2
    assert step.count('"size": 2') == 2


def test_a_step_with_a_terminal(slurm):
    """srun --pty, from a terminal: one rank, as an interactive session has it."""
    master, terminal = pty.openpty()
    environment = {**os.environ, **slurm.environment}
    with subprocess.Popen(
        ["srun", "--nodelist=n1", "--pty", *WHERE], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    ) as p:
        os.close(terminal)
        output = b""
        try:
            while data := os.read(master, 4096):
                output += data
        except OSError:  # the other side is closed
            pass
        assert p.wait(60) == 0, output
    os.close(master)
    text = output.decode()
    place = json.loads(text[text.index("{") : text.rindex("}") + 1])["place"]
    assert (place["launcher"], place["rank"], place["size"], place["hosts"]) == ("slurm", 0, 1, ["n1"])


def test_each_rank_sees_a_gpu_of_its_own(places):
    places_ = places("srun -N2 -n4 --gpus-per-task=1 $PLACE", "-N2", "-n4", "--gpus-per-task=1")
    assert [place[7] for place in places_.values()] == ["0", "1", "0", "1"]
    assert [place[2] for place in places_.values()] == [0, 1, 0, 1]


LISTS = [
    "n1",
    "n[1-4]",
    "n[1-2,4]",
    "n1,n3",
    "nid[00001-00003,00007],login1",
    "gpu-a[1-2]-b[3-4]",
    "a[09-11]",
    "a[009-011]-ib[0]",
    "x[1-2]y[01-02],z",
    "a,b[1],c[2-3]d[4]",
    "rack[0-1]node[98-101]",
    "n[5,3,4]",
    "cn-1-[1-3],cn-2-[1-2]",
]


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_hosts_are_read_as_slurm_reads_them(slurm, text):
    assert list(expand_hosts(text)) == slurm.run("scontrol", "show", "hostnames", text).split()
