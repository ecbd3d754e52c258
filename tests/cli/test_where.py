import json
import os
import subprocess
import sys

from choros.cli import main
from choros.cluster.hardware import usable_cores


def test_the_place_alone(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert main(["where"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert rows["place"] == "rank 0 of 1, local rank 0 of 1, node 0 of 1"
    assert rows["launcher"] == "single"
    assert rows["group"] == "none needed: one rank"
    assert rows["cores"].startswith(f"{len(usable_cores())} usable (")
    assert "OMP_NUM_THREADS=3" in rows["threads"]
    assert rows["backend"] == "torch (KERAS_BACKEND)"
    assert rows["libraries"].startswith("keras 3.")


def test_the_place_of_a_slurm_rank(capsys, monkeypatch):
    for name, value in {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["where", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["place"]["hosts"] == ["n1", "n2"]
    assert output["place"]["launcher"] == "slurm"
    assert "SLURM_PROCID=3" in output["why"]
    assert output["group"].startswith("MPI, as slurm started the ranks; mpi4py ")
    monkeypatch.setenv("CHOROS_COMM", "nowhere")
    assert main(["where", "--json"]) == 0
    assert "CHOROS_COMM='nowhere' is none of: shared, mpi" in json.loads(capsys.readouterr().out)["group"]


def test_a_launcher_that_is_not_known_is_said(capsys, monkeypatch):
    monkeypatch.setenv("PMI_FD", "9")
    assert main(["where", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["place"]["launcher"], output["group"]) == ("single", "none needed: one rank")
    assert "but PMI_FD=9: an unknown MPI launcher; set CHOROS_COMM=mpi to get the rank from MPI" in output["why"]
    monkeypatch.setenv("CHOROS_COMM", "mpi")
    assert main(["where", "--json"]) == 0
    assert "which also gives the ranks their numbers" in json.loads(capsys.readouterr().out)["group"]


def test_a_contradiction_is_said(capsys, monkeypatch):
    monkeypatch.setenv("CHOROS_RANK", "9")
    monkeypatch.setenv("CHOROS_SIZE", "2")
    assert main(["where"]) == 2
    assert capsys.readouterr().err.startswith("choros where: error: ")


def test_keras_configuration_is_read_as_keras_reads_it(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert main(["where", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "tensorflow (Keras' default)"
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert main(["where", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == f"jax ({tmp_path / 'keras.json'})"


def test_no_framework_is_imported():
    code = (
        "import sys; from choros.cli import main; main(['where']); "
        "print([name for name in ('keras', 'jax', 'torch', 'tensorflow', 'numpy') if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    ).stdout
    assert out.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m choros where | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "141"
    assert done.stderr == ""


def test_a_backend_that_is_not_installed_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "mxnet")
    assert main(["where"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("problem      KERAS_BACKEND is 'mxnet', which is not a backend of Keras: set it to ")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert main(["where"]) == 0
    assert "problem" not in capsys.readouterr().out
