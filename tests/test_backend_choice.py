"""``import choros`` before Keras: the backend that Keras then loads, where one, several or none is installed.

Where only the choice matters, an empty module takes the place of Keras, which takes seconds to import.
"""

import json
import os

import pytest

from choros import backend_choice
from choros.cli import main
from choros.errors import InvalidInputError, NoBackendError
from choros.launch.local_job import HostShare, LaunchOptions
from choros.launch.ssh.agent_job import agent_job
from choros.spark.doctor import findings

SAID = "choros: KERAS_BACKEND is not set"
WRITTEN_BY_KERAS = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}
STATE = "import os, choros, keras; print(os.environ.get('KERAS_BACKEND', ''))"


def keras_json(folder, backend):
    folder.mkdir(exist_ok=True)
    path = folder / "keras.json"
    path.write_text(json.dumps({**WRITTEN_BY_KERAS, "backend": backend}))
    return path


@pytest.fixture
def empty_keras(tmp_path):
    """An empty module ``keras`` in the directory in which ``user`` runs Python."""
    (tmp_path / "keras.py").touch()


@pytest.mark.usefixtures("empty_keras")
@pytest.mark.parametrize("backend", backend_choice.BACKENDS)
def test_the_only_backend_is_taken_and_said_once(user, backend):
    others = [name for name in backend_choice.BACKENDS if name != backend]
    child = f"{STATE}; import subprocess, sys; subprocess.run([sys.executable, '-c', {STATE!r}], check=True)"
    done = user("-c", child, without=others)
    if backend == "tensorflow":  # which is what Keras loads anyway
        assert (done.stdout.split(), done.stderr) == ([], "")
        return
    assert done.stdout.split() == [backend, backend]
    assert done.stderr == f"{SAID}: Keras runs on {backend}, the only backend that is installed.\n"


@pytest.mark.usefixtures("empty_keras")
@pytest.mark.parametrize("named", ["tensorflow", "torch"])
def test_a_file_that_names_what_is_not_installed_is_no_choice(user, named):
    path = keras_json(user.home / ".keras", named)
    done = user("-c", STATE)
    assert done.stdout.split() == ["jax"]
    assert f"{SAID}, and {path} names {named}, which is not installed: Keras runs on jax" in done.stderr


@pytest.mark.parametrize("where", ["home", "KERAS_HOME", "KERAS_BACKEND"])
def test_an_installed_backend_that_the_user_names_is_kept(user, tmp_path, where):
    environment = {}
    if where == "KERAS_BACKEND":
        keras_json(user.home / ".keras", "tensorflow")
        environment = {"KERAS_BACKEND": "torch"}
    elif where == "KERAS_HOME":
        keras_json(user.home / ".keras", "jax")
        keras_json(tmp_path / "other", "torch")
        environment = {"KERAS_HOME": str(tmp_path / "other")}
    else:
        keras_json(user.home / ".keras", "torch")
    code = "import choros, keras; print(keras.backend.backend())"
    done = user("-c", code, without=["tensorflow"], **environment)
    assert (done.stdout.split(), SAID in done.stderr) == (["torch"], False)


@pytest.mark.usefixtures("empty_keras")
def test_keras_home_is_where_the_file_is_looked_for(user, tmp_path):
    keras_json(user.home / ".keras", "jax")
    path = keras_json(tmp_path / "other", "tensorflow")
    done = user("-c", STATE, KERAS_HOME=str(tmp_path / "other"))
    assert done.stdout.split() == ["jax"]
    assert f"{path} names tensorflow" in done.stderr


def test_the_file_is_looked_for_where_keras_does(user):
    """Keras' own variable holds the folder; a home that cannot be written is replaced by /tmp."""
    code = "import choros, keras; from choros.backend_choice import config_path; "
    code += "import keras.src.backend.config as c; print(config_path() == c._config_path)"
    for environment in ({}, {"KERAS_HOME": "~/elsewhere"}, {"HOME": "/proc"}):
        assert user("-c", code, KERAS_BACKEND="jax", **environment).stdout.split() == ["True"]


REFUSALS = [
    (
        ["torch", "tensorflow"],
        {"KERAS_BACKEND": "torch"},
        "'torch', but torch is not installed in",
        "KERAS_BACKEND=jax",
    ),
    (["torch", "tensorflow"], {"KERAS_BACKEND": "torch"}, "pip install 'choros[torch]'", os.uname().nodename),
    (
        ["torch", "tensorflow"],
        {"KERAS_BACKEND": "tensorflo"},
        "'tensorflo', which is not a backend",
        "jax, torch, tensorflow",
    ),
    (["tensorflow"], {}, "jax and torch are installed", "set KERAS_BACKEND=jax or KERAS_BACKEND=torch"),
    (backend_choice.BACKENDS, {}, "No backend of Keras is installed", "pip install 'choros[jax]'"),
]


@pytest.mark.parametrize(("without", "environment", "reason", "remedy"), REFUSALS)
def test_where_no_backend_can_be_taken_the_error_names_the_remedy(user, without, environment, reason, remedy):
    code = """
import choros, choros.hvd as hvd
uses = [lambda: __import__("keras"), lambda: choros.Trainer(None), lambda: hvd.DistributedOptimizer(None)]
for use in uses:
    try:
        use()
    except choros.errors.NoBackendError as error:
        print(error)
"""
    done = user("-c", code, without=without, **environment)
    errors = done.stdout.splitlines()
    assert len(errors) == 3, done.stdout
    for error in errors:
        assert reason in error
        assert remedy in error
    assert done.stderr == ""


def test_a_backend_that_is_installed_after_choros_was_imported_is_taken(user):
    code = """
import sitecustomize, os, choros
try:
    import keras
except ImportError as error:
    assert "No backend of Keras is installed" in str(error), error
sitecustomize.hidden.discard("jax")
import keras
print(keras.backend.backend(), os.environ["KERAS_BACKEND"])
"""
    done = user("-c", code, without=backend_choice.BACKENDS)
    assert done.stdout.split() == ["jax", "jax"]
    assert done.stderr.count(SAID) == 1


AFTER_KERAS = """
import os
try:
    import keras
except ImportError:
    print("failed")
os.environ.pop("KERAS_BACKEND", None)
import choros
import keras
print(keras.backend.backend())
"""


@pytest.mark.parametrize("environment", [{}, {"KERAS_BACKEND": "torch"}])
def test_keras_that_was_imported_first_and_failed_can_be_imported_after_choros(user, environment):
    """As in a notebook, whose kernel lives on; Keras reads its settings again."""
    done = user("-c", AFTER_KERAS, **environment)
    assert done.stdout.split() == ["failed", "jax"]
    assert done.stderr.count(SAID) == 1


def test_keras_that_was_imported_with_a_backend_that_cannot_train(user):
    code = """
import keras, choros
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    choros.Trainer(model, workers=1).fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)))
except choros.InvalidInputError as error:
    print(error)
"""
    done = user("-c", code, KERAS_BACKEND="numpy")
    assert "Keras was imported with the backend 'numpy'" in done.stdout
    assert "start a new process, and set KERAS_BACKEND to 'jax', 'torch' or 'tensorflow'" in done.stdout


def test_keras_that_was_imported_first_and_runs_is_left_as_it_is(user):
    code = "import os, keras; os.environ.clear(); import choros; print(os.environ.get('KERAS_BACKEND'))"
    done = user("-c", code, KERAS_BACKEND="jax")
    assert (done.stdout.split(), done.stderr) == (["None"], "")


OMPI_LOCAL = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.usefixtures("empty_keras")
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **OMPI_LOCAL}, False),
        ({"CHOROS_RANK": "1", "CHOROS_SIZE": "2"}, True),  # no place, as CHOROS_LOCAL_RANK is missing
    ],
)
def test_of_ranks_only_the_first_says_it(user, environment, message):
    done = user("-c", STATE, **environment)
    assert done.stdout.split() == ["jax"]
    assert done.stderr.count(SAID) == message


@pytest.mark.usefixtures("empty_keras")
def test_a_task_of_spark_says_nothing(user):
    done = user("-c", f"import sys; sys.modules['pyspark.worker'] = sys; {STATE}")
    assert (done.stdout.split(), done.stderr) == (["jax"], "")


def test_choros_run_says_it_once_and_its_ranks_need_not_import_choros(user, tmp_path):
    (tmp_path / "script.py").write_text("import keras; print('on', keras.backend.backend())")
    done = user("-m", "choros", "run", "-n", "2", "script.py")
    assert done.stdout.count("on jax") == 2
    assert done.stderr.count(SAID) == 1


@pytest.mark.usefixtures("empty_keras")
def test_a_function_on_ranks_is_said_once(user, tmp_path):
    (tmp_path / "script.py").write_text("import choros\nchoros.run(lambda: __import__('keras') and None, num_proc=2)")
    assert user("script.py").stderr.count(SAID) == 1


@pytest.mark.parametrize("setup", [(), ("--setup", "module load x")])
def test_a_job_is_said_where_its_script_has_the_choice(user, tmp_path, setup):
    (tmp_path / "train.py").touch()
    done = user("-m", "choros", "submit", "--on", "slurm", *setup, "--dry-run", "train.py")
    assert done.stderr.count(SAID) == done.stdout.count("KERAS_BACKEND=jax") == (not setup)


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "site list", "submit --help", "completion bash", "status --on pbs 1"]
)
def test_a_command_that_needs_no_keras_does_not_say_it(user, arguments):
    keras_json(user.home / ".keras", "tensorflow")
    code = 2 if arguments.startswith("status") else 0
    assert SAID not in user("-m", "choros", *arguments.split(), code=code, PATH="").stderr


def test_choros_where_has_it_in_its_report(user):
    done = user("-m", "choros", "where", "--json")
    assert json.loads(done.stdout)["backend"] == "jax (the only installed backend)"
    assert done.stderr == ""
    assert json.loads(user("-m", "choros", "where", "--json", without=["tensorflow"]).stdout)["backend"].startswith(
        "tens"
    )


def test_choros_demo_names_the_extra_where_nothing_is_installed(user):
    done = user("-m", "choros", "demo", without=backend_choice.BACKENDS, code=1)
    assert "pip install" in done.stderr


@pytest.mark.parametrize(("option", "exported"), [((), True), (("--setup", "module load x"), False)])
def test_a_job_on_the_same_python_is_told_the_choice(tmp_path, monkeypatch, capsys, option, exported):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(backend_choice, "chosen", "jax")
    (tmp_path / "train.py").touch()
    assert main(["submit", "--on", "pbs", "--mpi", "mpich", *option, "--dry-run", "train.py"]) == 0
    assert ("KERAS_BACKEND=jax" in capsys.readouterr().out) is exported
    assert ("KERAS_BACKEND" in os.environ) is exported
    monkeypatch.setattr(backend_choice, "chosen", "")
    assert main(["submit", "--on", "pbs", "--mpi", "mpich", "--dry-run", "train.py"]) == 0
    assert "KERAS_BACKEND" not in capsys.readouterr().out  # the user's own goes by the scheduler's rules


def test_a_directory_of_that_name_is_no_backend(tmp_path, monkeypatch):
    (tmp_path / "somewhere_torch").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not backend_choice.is_installed("somewhere_torch")
    (tmp_path / "somewhere_torch" / "__init__.py").touch()
    assert backend_choice.is_installed("somewhere_torch")


def test_the_choice_imports_no_framework_and_takes_less_than_a_fifth_of_a_second(user):
    code = "import sys; before = set(sys.modules); import choros; print(*sorted(set(sys.modules) - before))"
    imported = {name.partition(".")[0] for name in user("-c", code).stdout.split()}
    assert not imported & {"keras", "numpy", *backend_choice.BACKENDS}

    def seconds(code):
        """Of processor time, which other work on this machine changes little."""
        before = os.times()
        user("-c", code)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds("import choros") for _ in range(5)) - min(seconds("pass") for _ in range(5)) < 0.2


def test_the_error_is_one_of_imports_and_of_bad_input():
    assert issubclass(NoBackendError, ImportError)
    assert issubclass(NoBackendError, InvalidInputError)


def test_sparks_doctor_names_a_backend_that_the_driver_lacks():
    driver = {"host": "d", "python": "3.11.7", "shm": 1 << 30, "backend": "tensorflow", "cores": 4}
    driver["packages"] = {"keras": "3.15.1", "jax": None, "tensorflow": None}
    (finding,) = findings([driver, {**driver, "backend": ""}])
    assert "The driver has no tensorflow" in finding
    assert "pip install 'choros[spark,tensorflow]'" in finding
    driver["packages"]["tensorflow"] = "2.20"
    (finding,) = findings([driver, {**driver, "host": "a", "packages": {**driver["packages"], "tensorflow": None}}])
    assert "The executors on a have no tensorflow (the driver has 2.20)" in finding


def test_an_agent_on_another_host_has_the_choice_before_it_imports_choros(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    start = agent_job("elsewhere.invalid", "ssh -x", LaunchOptions(1), HostShare(1), ["true"]).start
    assert start[:3] == ["ssh", "-x", "elsewhere.invalid"]
    assert start[3].startswith("env ")
    assert " KERAS_BACKEND=jax " in start[3].partition("choros.launch.ssh.agent")[0]
