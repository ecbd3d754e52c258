"""The command lines of keras_experiments' README and scripts run as they stand, by scripts of the same names.

Their list is the table of docs/from-keras-experiments.md. tests/real/test_old_commands.py runs it on SLURM.
"""

import argparse
import importlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tarfile

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
HEADERS = re.findall(
    r"^    ((?:\w+=\S+ )*(?:srun |mpiexec -n \d+ |choros run -n \d+ )?(?:python )?)examples/(\S+\.py)(.*)$",
    "".join(path.read_text() for path in [*EXAMPLES.glob("cifar10*.py"), EXAMPLES / "mnist_tfrecord_mgpu.py"]),
    re.MULTILINE,
)
# What the network may not do in a test: fetch the archive. Each call is noted, and leaves the files.
DOWNLOAD = """
import os, pathlib, runpy, shutil, sys, time
sys.path.insert(0, "{examples}")
import cifar, keras

def noted(place, read=cifar.read):
    with open("reads", "a") as file:
        file.write(os.environ["CHOROS_RANK"])
    return read(place)

def load_data():
    time.sleep(1)  # the other ranks would call it too, if they did not wait
    datasets = pathlib.Path(os.environ["KERAS_HOME"], "datasets")
    with open("calls", "a") as file:
        file.write(os.environ["CHOROS_RANK"])
    shutil.move("origin", datasets / "cifar-10-batches-py-target")

keras.datasets.cifar10.load_data, cifar.read = load_data, noted
sys.argv = ["cifar10_cnn_distrib_v2_slurm.py", *sys.argv[1:]]
runpy.run_path("{examples}/cifar10_cnn_distrib_v2_slurm.py", run_name="__main__")
"""


def shell(line, folder, code=0, **environment):
    """Run a line of shell in a folder; return what it printed."""
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        env={**os.environ, "KERAS_HOME": str(folder / "home"), "KERAS_BACKEND": "torch", **environment},
    )
    assert done.returncode == code, f"{line} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture
def cifar(monkeypatch, tmp_path):
    """The module that the CIFAR-10 examples share, with a KERAS_HOME that is empty."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["cifar10_cnn_mgpu.py"])
    yield importlib.import_module("cifar")
    sys.modules.pop("cifar")


def options_of(cifar, *arguments, workers=False):
    """Return the options of a command line."""
    parser = cifar.parser("An example.")
    if workers:
        cifar.add_workers(parser)
    sys.argv[1:] = arguments
    return cifar.parse(parser)


@pytest.mark.long
def test_each_command_line_runs_as_three_ranks(old_command, old_scripts, old_launched):
    """On PyTorch, which does not compile. A second run of --checkpt loads the weights that the first saved."""
    line = old_launched(old_command, f"{sys.executable} -m choros run -n 3 --threads 1")
    printed = shell(line, old_scripts)
    assert re.search(r"accuracy [\d.]+(, loss [\d.]+)? on \d+ images", printed), printed
    if "--checkpt" in line:
        assert "are loaded" not in printed
        assert shell(line, old_scripts).count("[0] the weights of cifar10") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "script", ["cifar10_cnn_mgpu.py --mgpu 2 --aug", "cifar10_cnn_mgpu_tfqueue_var.py --workers 2"]
)
def test_a_process_alone_trains_too(script, old_scripts):
    assert "on 12 images" in shell(f"{sys.executable} {script}", old_scripts)


def test_the_download_is_one_ranks_and_each_rank_reads_its_rows(old_scripts):
    """60 rows, three ranks: 20 for each in an epoch, out of files that rank 0 wrote; no rank holds all."""
    (old_scripts / "home" / "datasets" / "cifar-10-batches-py-target").rename(old_scripts / "origin")
    (old_scripts / "patched.py").write_text(DOWNLOAD.format(examples=EXAMPLES))
    line = f"{sys.executable} -m choros run -n 3 --threads 1 patched.py --download --epochs=2 --rdma"
    printed = shell(line, old_scripts)
    assert (old_scripts / "calls").read_text() == (old_scripts / "reads").read_text() == "0"
    for rank in range(3):
        assert re.search(rf"worker {rank} on \S+: read 20 of 60 rows an epoch", printed), printed
    assert "--rdma: " in printed
    (file,) = (old_scripts / "home" / "datasets" / "cifar10-maps").glob("*/x_train.npy")
    assert np.load(file, mmap_mode="r").shape == (60, 32, 32, 3)


def test_options_without_effect_are_named(cifar, capsys):
    options_of(cifar, "--nccl", "--enqueue")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("--enqueue, --nccl: no effect, as batches are always read ahead")
    options_of(cifar)
    assert capsys.readouterr().out == ""


def test_the_folder_of_keras_is_read(cifar, old_scripts):
    (x, y), (x_test, y_test) = cifar.load(options_of(cifar))
    assert (x.shape, y.shape, x_test.shape, y_test.shape) == ((60, 32, 32, 3), (60,), (12, 32, 32, 3), (12,))
    assert (x.dtype, x.min(), x.max()) == ("float32", 0, 1)
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, (12, 3072), "uint8")
    np.testing.assert_allclose(x[3, 1, 2], first[3].reshape(3, 32, 32)[:, 1, 2] / 255, rtol=1e-6)
    np.testing.assert_array_equal(y[:12], rng.integers(0, 10, 12))


def test_an_archive_is_read_without_unpacking(cifar, old_scripts):
    datasets = old_scripts / "home" / "datasets"
    complete = cifar.load(options_of(cifar))
    with tarfile.open(datasets / "cifar-10-batches-py-target_archive", "w:gz") as archive:
        archive.add(datasets / "cifar-10-batches-py-target" / "cifar-10-batches-py", "cifar-10-batches-py")
    (datasets / "cifar-10-batches-py-target" / "cifar-10-batches-py" / "test_batch").unlink()  # not all unpacked
    for (x, y), (x_same, y_same) in zip(complete, cifar.load(options_of(cifar)), strict=True):
        np.testing.assert_array_equal(x, x_same)
        np.testing.assert_array_equal(y, y_same)


def test_an_archive_that_was_cut_short_is_named(cifar, old_scripts):
    datasets = old_scripts / "home" / "datasets"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(datasets / "cifar-10-batches-py-target", "cifar-10-batches-py")
    other = old_scripts / "other"
    other.mkdir()
    (other / "cifar-10-python.tar.gz").write_bytes(stream.getvalue()[:1000])
    with pytest.raises(SystemExit, match="cifar-10-python.tar.gz cannot be read .*: remove it and give --download"):
        cifar.load(options_of(cifar, "--datadir", str(other)))


def test_without_data_the_error_tells_what_to_do(cifar, tmp_path):
    with pytest.raises(SystemExit) as error:
        cifar.load(options_of(cifar))
    text = str(error.value)
    assert text.startswith(f"CIFAR-10 is not in {tmp_path / 'home' / 'datasets'}. Give --download")
    assert all(name in text for name in ("--data FILE.npz", "--datadir FOLDER", "--synthetic"))


def test_pictures_are_made_up_only_when_asked(cifar, capsys):
    (x, _), (x_test, _) = cifar.load(options_of(cifar, "--synthetic"))
    assert (len(x), len(x_test)) == (1024, 256)
    assert "made-up pictures" in capsys.readouterr().out


def test_a_download_that_fails_tells_what_to_do(cifar, monkeypatch):
    def offline():
        raise Exception("URL fetch failure")

    monkeypatch.setattr("keras.datasets.cifar10.load_data", offline)
    with pytest.raises(SystemExit, match="could not be downloaded: URL fetch failure. Download it on a machine with"):
        cifar.load(options_of(cifar, "--download"))


def test_data_that_are_there_are_not_downloaded_again(cifar, old_scripts, monkeypatch):
    monkeypatch.setattr("keras.datasets.cifar10.load_data", lambda: pytest.fail("downloaded"))
    assert len(cifar.load(options_of(cifar, "--download"))[0][0]) == 60


def test_mapped_files_follow_their_source(cifar, old_scripts):
    """Written once; again where the data are newer, and for other data; no data is the usual error."""
    parser = cifar.parser("An example.")
    parser.add_argument("--maps")
    sys.argv[1:] = []
    options = cifar.parse(parser)
    (x, _), _ = cifar.mapped(options)
    assert isinstance(x, np.memmap)
    np.testing.assert_array_equal(x, cifar.load(options)[0][0])
    file = pathlib.Path(x.filename)
    before = file.stat().st_mtime_ns
    cifar.mapped(options)
    assert file.stat().st_mtime_ns == before
    source = cifar.find(cifar.keras_folder())
    os.utime(source, (file.stat().st_mtime + 10,) * 2)
    cifar.mapped(options)
    assert file.stat().st_mtime_ns > before
    options.datadir = str(old_scripts / "nothing")
    with pytest.raises(SystemExit, match="CIFAR-10 is not in "):
        cifar.mapped(options)
    options.synthetic = True
    assert len(cifar.mapped(options)[0][0]) == 1024


def test_checkpt_has_a_name_of_its_own(cifar, capsys):
    assert options_of(cifar, "--checkpt").checkpt == "cifar10_cnn_mgpu.keras"
    assert options_of(cifar).checkpt is None
    with pytest.raises(SystemExit):
        options_of(cifar, "--checkpt", "best.hdf5")
    assert "--checkpt best.hdf5: Keras 3 saves models as NAME.keras" in capsys.readouterr().err


def test_weights_are_loaded_where_the_file_exists(cifar, tmp_path, capsys):
    """Also from a model with the random layers of --aug in front."""
    import keras

    def small(units=10):
        return keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(units)])

    options = argparse.Namespace(checkpt=str(tmp_path / "c.keras"))
    saved, loaded = small(), small()
    assert not cifar.load_weights(options, loaded)
    keras.Sequential([keras.Input((32, 32, 3)), *cifar.changes(), saved]).save(options.checkpt)
    assert cifar.load_weights(options, loaded)
    for ours, expected in zip(saved.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert "c.keras are loaded" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is of another network: remove it, or give --checkpt another name"):
        cifar.load_weights(options, small(3))


def test_rdma_takes_an_interface_that_is_up(cifar, tmp_path, monkeypatch, capsys):
    for name, state in {"eth0": "up", "ib0": "down", "ib1": "up"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
    assert cifar.infiniband(tmp_path) == "ib1"
    assert cifar.infiniband(tmp_path / "eth0") is None
    monkeypatch.setattr(cifar, "infiniband", lambda: None)
    assert options_of(cifar, "--rdma", workers=True).network is None
    assert "--rdma: there is no interface of InfiniBand; --network names another" in capsys.readouterr().out
    monkeypatch.setattr(cifar, "infiniband", lambda: "ib1")
    assert options_of(cifar, "--rdma", "gdr", workers=True).network == "ib1"
    assert options_of(cifar, "--rdma", "--network", "lo", workers=True).network == "lo"


def test_the_table_has_each_old_script():
    text = (pathlib.Path(__file__).parents[1] / "docs" / "from-keras-experiments.md").read_text()
    lines = re.findall(r"^\| `([^`|]+\.py[^`|]*)` \| runs", text, re.MULTILINE)
    scripts = {re.search(r"\S+\.py", line)[0] for line in lines}
    old = {"mgpu", "mgpu_tfqueue", "mgpu_tfqueue_var", "horovod", "horovod_tfqueue", "distrib_slurm"}
    assert scripts == {"mnist_tfrecord_mgpu.py", *(f"cifar10_cnn_{name}.py" for name in old | {"distrib_v2_slurm"})}
    assert all((EXAMPLES / script).exists() for script in scripts)


def test_headers_name_scripts_and_options_that_exist():
    """Each line of a docstring names a script that is there, and options that its parser or cifar.py adds."""
    assert len(HEADERS) > 15
    shared = (EXAMPLES / "cifar.py").read_text()
    for _, script, arguments in HEADERS:
        text = shared + (EXAMPLES / script).read_text()
        for option in re.findall(r"--[\w-]+", arguments):
            assert f'"{option}"' in text, f"{script}: {option}"
