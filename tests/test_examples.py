"""Each example runs as its own words say."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import keras
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NO_EXAMPLE = {"arguments.py", "cifar.py", "images.py"}  # what several of them share


def test_the_index_lists_each_example():
    links = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} - NO_EXAMPLE
    assert scripts - links == set()
    assert [link for link in links if not (EXAMPLES / link).exists()] == []


def run(*command, backend=None):
    pytest.importorskip("sklearn", reason="the examples train on scikit-learn's digits: pip install 'choros[demo]'")
    environment = {**os.environ, **({"KERAS_BACKEND": backend} if backend else {})}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranks(name, *arguments, backend=None):
    return run("-m", "choros", "run", "-n", "2", "--threads", "1", EXAMPLES / name, *arguments, backend=backend)


@pytest.fixture
def mnist(tmp_path):
    """A file in the way of keras.datasets.mnist, of scikit-learn's digits; nothing in it is left over by 2 x 32."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = np.pad(np.kron(digits.images, np.ones((3, 3))) * 15, ((0, 0), (2, 2), (2, 2))).astype("uint8")
    y, path = digits.target, tmp_path / "mnist.npz"
    np.savez(path, x_train=x[:1024], y_train=y[:1024], x_test=x[1024:1280], y_test=y[1024:1280])
    return path


def test_digits(tmp_path):
    output = run(EXAMPLES / "digits.py", tmp_path)
    assert float(re.search(r"accuracy ([\d.]+)", output)[1]) > 0.9
    assert (tmp_path / "digits.keras").stat().st_size > 10_000


@pytest.mark.long
def test_cifar10_cnn_mgpu(tmp_path):
    """On PyTorch, which does not compile; the example asserts that the loss falls.

    Which of two replicas draws first from PyTorch's one generator is chance: it was 0.81 to 1.0, guessing is 0.1.
    """
    options = ["--synthetic", "--mgpu", 2, "--epochs", 3, "--aug", "--checkpt", tmp_path / "c.keras", "--logdevp"]
    output = run(EXAMPLES / "cifar10_cnn_mgpu.py", *options, backend="torch")
    lines = output.splitlines()
    assert "variable sequential/conv2d/kernel, shape (3, 3, 3, 32): cpu:0, cpu:1" in lines
    assert {"devices: cpu:0, cpu:1", "rows 0 to 31 of 64: cpu:0", "rows 32 to 63 of 64: cpu:1"} <= set(lines)
    assert "over 2 devices (cpu:0, cpu:1): a model on each" in output
    assert float(re.search(r"accuracy ([\d.]+)", output)[1]) > 0.5
    assert "choros" not in keras.models.load_model(tmp_path / "c.keras").to_json()


def test_mnist_tfrecord_mgpu(mnist):
    output = run(EXAMPLES / "mnist_tfrecord_mgpu.py", "--data", mnist, "--mgpu", 2, "--epochs", 2, backend="torch")
    assert "over 2 devices" in output
    assert float(re.search(r"accuracy ([\d.]+) on 256 images", output)[1]) > 0.5


@pytest.mark.parametrize(
    ("sizes", "averaged", "normalized"),
    [
        ((), "not equal", "not equal"),
        ((8, 4), "equal", "not equal"),  # of equal parts the average is right
        ((20000, 1), "not equal", None),  # statistics of 19,999 of 20,000 rows are nearly those of all
    ],
)
def test_concatenated_outputs(sizes, averaged, normalized):
    """The example ends with an error where gradients that must be equal are not, whatever the sizes of the parts."""
    output = run(EXAMPLES / "concatenated_outputs.py", *sizes, backend="torch")
    matches = re.findall(r"^.*: largest difference [\d.e+-]+, (equal|not equal)$", output, re.MULTILINE)
    assert matches[:4] == ["equal"] * 3 + [averaged], output
    assert matches[4] == normalized or normalized is None, output


@pytest.mark.long
def test_cifar10_cnn_distrib_slurm():
    """The order of commits is random. The accuracy was 0.67 to 1.0 with batches of 64, 0.84 to 1.0 with 32."""
    options = ["--synthetic", "--algorithm", "adag", "--aug", "--batch_size", 32]
    output = run(EXAMPLES / "cifar10_cnn_distrib_slurm.py", *options, backend="torch")
    assert float(re.search(r"accuracy ([\d.]+)", output)[1]) > 0.5


@pytest.mark.long
def test_cifar10_cnn_distrib_v2_slurm(tmp_path):
    options = ["--synthetic", "--maps", tmp_path, "--batch_size", 32]
    output = run(EXAMPLES / "cifar10_cnn_distrib_v2_slurm.py", *options, backend="torch")
    assert output.count("of 1024 rows an epoch") == 2
    assert float(re.search(r"accuracy ([\d.]+)", output)[1]) > 0.5


@pytest.mark.long
def test_cifar10_cnn_mgpu_tfqueue():
    output = run(EXAMPLES / "cifar10_cnn_mgpu_tfqueue.py", "--synthetic", "--epochs", 2, backend="torch")
    assert re.search(r"waiting for data \d+% of the time", output)


@pytest.mark.long
def test_cifar10_cnn_mgpu_tfqueue_var():
    output = run(EXAMPLES / "cifar10_cnn_mgpu_tfqueue_var.py", "--synthetic", "--workers", 2, backend="torch")
    assert re.search(r"accuracy [\d.]+, loss [\d.]+ on 256 images", output)


@pytest.mark.long
def test_cifar10_cnn_horovod(tmp_path):
    output = ranks("cifar10_cnn_horovod.py", "--synthetic", "--checkpt", tmp_path / "c.keras", backend="torch")
    assert len(re.findall(r"rank \d of 2: (accuracy .*)", output)) == 2
    assert isinstance(keras.models.load_model(tmp_path / "c.keras").optimizer, keras.optimizers.Adam)


@pytest.mark.long
def test_cifar10_cnn_horovod_tfqueue(tmp_path):
    options = ["--synthetic", "--aug", "--timeline", tmp_path / "t.json"]
    output = ranks("cifar10_cnn_horovod_tfqueue.py", *options, backend="torch")
    lines = dict(re.findall(r"rank (\d) of 2: (accuracy .*)", output))
    assert lines["0"] == lines["1"]
    assert "data_us" in (tmp_path / "t.json").read_text()


@pytest.mark.long
def test_benchmark_inception3_resnet50():
    """One of its two networks; the other is that of hvd_resnet50.py."""
    options = [
        "-a",
        "inception3",
        "-g",
        2,
        "-b",
        4,
        "-e",
        2,
        "--steps",
        1,
    ]  # fewer rows are too few for BatchNormalization
    output = run(EXAMPLES / "benchmark_inception3_resnet50.py", *options, backend="torch")
    assert float(re.search(r"([\d.]+) images/s \(median of 1 epochs\)", output)[1]) > 0


@pytest.mark.long
def test_uncertainty():
    """The example asserts accuracies and calibration errors."""
    output = run(EXAMPLES / "uncertainty.py", "--epochs", 10, backend="torch")
    matches = re.findall(r"^(.*): accuracy .* entropy ([\d.]+), of noise ([\d.]+)$", output, re.MULTILINE)
    assert [name for name, *_ in matches] == ["variational", "MC dropout", "ensemble"]
    assert all(float(noise) > 2 * float(digits) for _, digits, noise in matches)


@pytest.mark.long
def test_vgg_two_devices():
    """On JAX, whose programs span devices; the example asserts that the loss falls."""
    output = run(EXAMPLES / "vgg_two_devices.py", "--synthetic", backend="jax")
    assert "2 workers" in output


def test_ranks():
    output = ranks("ranks.py")
    sums = re.findall(r"rank (\d) of 2: the weights sum to (\S+)", output)
    assert {rank for rank, _ in sums} == {"0", "1"}
    assert len({total for _, total in sums}) == 1


def test_hvd_linear_regression():
    output = ranks("hvd_linear_regression.py")
    lines = dict(re.findall(r"rank (\d) of 2: (y = .*)", output))
    assert lines["0"] == lines["1"]
    slope, offset = map(float, re.findall(r"[\d.]+", lines["0"]))
    assert slope == pytest.approx(3, abs=0.02)
    assert offset == pytest.approx(2, abs=0.02)


def test_hvd_mnist(mnist, tmp_path):
    out = tmp_path / "out"
    output = ranks("hvd_mnist.py", "--data", mnist, "--filters", 4, "--epochs", 3, "--out", out)
    assert float(re.search(r"accuracy ([\d.]+) on the 256 images", output)[1]) > 0.5
    assert sorted(path.name for path in out.iterdir()) == [f"checkpoint-{epoch}.keras" for epoch in (1, 2, 3)]
    assert type(keras.models.load_model(out / "checkpoint-3.keras").optimizer) is keras.optimizers.Adam


@pytest.mark.long
def test_hvd_mnist_advanced(mnist):
    output = ranks("hvd_mnist_advanced.py", "--data", mnist, "--filters", 4, "--epochs", 3)
    lines = dict(re.findall(r"rank (\d) of 2: rates (.*)", output))
    assert lines["0"] == lines["1"]
    assert lines["0"].startswith("0.0300, 0.0400, 0.0040; accuracy")


@pytest.mark.long
def test_hvd_resnet50(tmp_path):
    """The smallest network of keras.applications, on PyTorch, which does not compile; two ranks go on from one's."""
    small = ["--model", "MobileNet", "--steps", 2, "--out", tmp_path / "out"]
    output = run(EXAMPLES / "hvd_resnet50.py", *small, "--epochs", 1, backend="torch")
    assert "epochs 1 to 1, 2 steps in all" in output
    for name in ("one", "two"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(8):
            keras.utils.save_img(tmp_path / "images" / name / f"{i}.png", np.full((40, 36, 3), 8.0 * i), scale=False)
    real = ["--train-dir", tmp_path / "images", "--val-dir", tmp_path / "images"]
    output = ranks("hvd_resnet50.py", *small, "--epochs", 2, *real, backend="torch")
    assert "Epoch 2/2" in output
    assert "val_accuracy" in output
    assert "epochs 2 to 2, 4 steps in all" in output
    assert sorted(result.name for result in (tmp_path / "out").iterdir()) == [
        "checkpoint-1.keras",
        "checkpoint-2.keras",
    ]


@pytest.mark.long
def test_hvd_synthetic_benchmark():
    output = ranks("hvd_synthetic_benchmark.py", "--model", "MobileNet", "--iterations", 2, backend="torch")
    matches = [float(rate) for rate in re.findall(r"(?:rank \d|all 2 ranks): ([\d.]+) \+- [\d.]+ images/s", output)]
    assert len(matches) == 3
    assert min(matches) > 0
    assert matches[2] == pytest.approx(matches[0] + matches[1], abs=0.11)


def test_hvd_elastic_mnist():
    """Interrupted in batch 30, which is the eighth of its epoch of 22, it goes back to the fifth and loses three."""
    output = ranks("hvd_elastic_mnist.py", "--interrupt", 30)
    for rank in "01":
        assert f"rank {rank}: back to batch 5" in output
    assert "epoch 2 from batch 5 of 22" in output
    assert "88 steps in the model, 91 made" in output


@pytest.mark.parametrize(
    "backend", ["jax", *(pytest.param(name, marks=pytest.mark.long) for name in ("torch", "tensorflow"))]
)
def test_hvd_custom_loop(backend, mnist):
    """Also: a file with all digits in one array."""
    with np.load(mnist) as file:
        np.savez(mnist, x=file["x_train"], y=file["y_train"])
    output = ranks("hvd_custom_loop.py", "--data", mnist, "--epochs", 6, backend=backend)
    lines = dict(re.findall(r"rank (\d) of 2: (accuracy .*)", output))
    assert lines["0"] == lines["1"]
    assert float(re.search(r"accuracy ([\d.]+)", lines["0"])[1]) > 0.9


COUNT = "must be a whole number of 1 or more, got"
REFUSED = [
    ("benchmark_inception3_resnet50.py", "-g/--gpus", "0", f"{COUNT} 0"),
    ("benchmark_inception3_resnet50.py", "-b/--batch_size", "-1", f"{COUNT} -1"),
    ("benchmark_inception3_resnet50.py", "--side", "8", "must be a whole number of 32 or more for resnet50, got 8"),
    ("cifar10_cnn_distrib_slurm.py", "--workers", "0", f"{COUNT} 0"),
    ("cifar10_cnn_distrib_slurm.py", "--devices_per_worker", "two", f"{COUNT} two"),
    ("cifar10_cnn_distrib_slurm.py", "--algorithm", "sgd", "must be one of single, allreduce, "),
    ("cifar10_cnn_distrib_v2_slurm.py", "--batch_size", "0", f"{COUNT} 0"),
    ("cifar10_cnn_horovod.py", "--rate", "0", "must be a number greater than 0, got 0"),
    ("cifar10_cnn_horovod.py", "--warmup", "nan", "must be a number of 0 or more, got nan"),
    ("cifar10_cnn_horovod_tfqueue.py", "--nranks_per_gpu", "-2", f"{COUNT} -2"),
    ("cifar10_cnn_mgpu.py", "--epochs", "0", f"{COUNT} 0"),
    ("cifar10_cnn_mgpu.py", "--mgpu", "0", "must be a whole number of 1 or more, or -1 for all, got 0"),
    ("cifar10_cnn_mgpu.py", "--data", "none.npz", "there is no file none.npz"),
    ("cifar10_cnn_mgpu.py", "--datadir", "none", "there is no folder none"),
    ("cifar10_cnn_mgpu_tfqueue.py", "--mgpu", "-2", "must be a whole number of 1 or more, or -1 for all, got -2"),
    ("cifar10_cnn_mgpu_tfqueue_var.py", "--depth", "0", f"{COUNT} 0"),
    ("hvd_custom_loop.py", "--epochs", "-1", f"{COUNT} -1"),
    ("hvd_elastic_mnist.py", "--interrupt", "-1", "must be a whole number of 0 or more, got -1"),
    ("hvd_linear_regression.py", "--points", "0", f"{COUNT} 0"),
    ("hvd_mnist.py", "--batch-size", "1.5", f"{COUNT} 1.5"),
    ("hvd_mnist_advanced.py", "--warmup-epochs", "-1", "must be a whole number of 0 or more, got -1"),
    ("hvd_resnet50.py", "--model", "LeNet", "there is no keras.applications.LeNet"),
    ("hvd_resnet50.py", "--side", "31", "must be a whole number of 32 or more, got 31"),
    ("hvd_synthetic_benchmark.py", "--warmup", "0", f"{COUNT} 0"),
    ("mnist_tfrecord_mgpu.py", "--mgpu", "0", "must be a whole number of 1 or more, or -1 for all, got 0"),
    ("uncertainty.py", "--samples", "0", f"{COUNT} 0"),
    ("vgg_two_devices.py", "--devices", "0", f"{COUNT} 0"),
]


@pytest.fixture
def ended(monkeypatch, capsys):
    """The last line that an example prints as it ends with code 2, in this process."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(EXAMPLES)

    def run_here(name, *options):
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit) as ending:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert ending.value.code == 2, ending.value
        return capsys.readouterr().err.splitlines()[-1]

    yield run_here
    for module in {"arguments", "cifar", "images"} - modules:
        sys.modules.pop(module, None)


@pytest.mark.parametrize(("name", "option", "value", "message"), REFUSED)
def test_a_value_out_of_range_is_refused_with_the_range(ended, name, option, value, message):
    line = ended(name, f"{option.split('/')[-1]}={value}")
    assert line.startswith(f"{name}: error: argument {option}: {message}")


def test_every_number_of_an_example_has_a_range():
    for path in EXAMPLES.glob("*.py"):
        assert not re.search(r"type=(int|float)\b", path.read_text()), path.name
        if path.name not in NO_EXAMPLE and "add_argument" in path.read_text():
            assert any(name == path.name for name, *_ in REFUSED), f"{path.name}: give a value that is out of range"


def test_every_example_is_run_here():
    text = pathlib.Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in NO_EXAMPLE or f'"{path.name}"' in text, f"{path.name} has no test"
