"""A rank computes on the GPU of its local rank, chosen before its backend starts; Horovod's own idioms still work.

Lists of devices are faked: those of the driver by a program on PATH, those of PyTorch and TensorFlow in their modules.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from choros.comm.bootstrap.device_check import check_gpus_apart
from choros.errors import InvalidInputError

# What stands for a framework's GPUs, where this machine has none.
FAKES = """
import json, os, sys
calls = []
if os.environ["KERAS_BACKEND"] == "torch":
    import torch
    now = [0]
    torch.cuda.device_count = lambda: int(os.environ["FAKE_GPUS"])
    torch.cuda.current_device = lambda: now[0]
    torch.cuda.set_device = lambda number: (calls.append(number), now.__setitem__(0, number))
    def reset():
        import choros.device_choice
        now[0] = 0
        choros.device_choice._slot_in_torch.clear()
    chosen = lambda: now[0]
elif os.environ["KERAS_BACKEND"] == "tensorflow":
    import tensorflow as tf
    there = [f"/physical_device:GPU:{number}" for number in range(int(os.environ["FAKE_GPUS"]))]
    visible = [there]
    mine = lambda old, fake: lambda kind=None: fake() if kind == "GPU" else old(kind)
    tf.config.list_physical_devices = mine(tf.config.list_physical_devices, lambda: there)
    tf.config.get_visible_devices = mine(tf.config.get_visible_devices, lambda: visible[0])
    def set_visible(gpus, kind):
        gpus = gpus if isinstance(gpus, list) else [gpus]
        calls.append(there.index(gpus[0]))
        visible[0] = gpus
    tf.config.set_visible_devices = set_visible
    chosen = lambda: there.index(visible[0][0]) if len(visible[0]) == 1 else "all"
    reset = lambda: visible.__setitem__(0, there)
else:
    reset = lambda: jax.config.update("jax_cuda_visible_devices", "all")
    def chosen():
        import jax
        said = jax.config.read("jax_cuda_visible_devices")
        return int(said) if said.isdecimal() else said
"""


@pytest.fixture
def host(tmp_path):
    """Return the environment of a host with so many GPUs, or parts of one (MIG), and a build of JAX for them."""

    def has(count, parts=0):
        divided = [f"echo '  MIG 1g.10gb Device {part}: (UUID: MIG-{part}000)'\n" for part in range(parts)]
        lines = [f"echo 'GPU {number}: NVIDIA H100 (UUID: GPU-{number}000)'\n" for number in range(count)]
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(lines + divided))
        (tmp_path / "nvidia-smi").chmod(0o755)
        (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True, exist_ok=True)
        saved_environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return {
            **saved_environment,
            "PATH": f"{tmp_path}{os.pathsep}{saved_environment['PATH']}",
            "PYTHONPATH": path,
            "FAKE_GPUS": str(count),
        }

    return has


@pytest.fixture
def rank(host):
    """Run a script as a rank that meets nobody; return what it printed last."""

    def run(script, gpus=4, rank=2, size=4, parts=0, **environment):
        place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        environ = host(gpus, parts) | {f"CHOROS_{name}": str(value) for name, value in place.items()} | environment
        done = subprocess.run(
            [sys.executable, "-c", FAKES + textwrap.dedent(script)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_rank_chooses_before_or_where_keras_imports_its_backend_and_once(rank):
    script = """
    import choros
    loaded = os.environ["KERAS_BACKEND"] == "jax" and "jax" in sys.modules
    import keras
    first = chosen()
    from choros.device_choice import choose_device
    choose_device()
    backend = sys.modules[os.environ["KERAS_BACKEND"]]
    print(json.dumps([loaded, first, len(calls) <= 1, backend.__spec__.loader is backend.__loader__]))
    """
    assert rank(script) == [False, 2, True, True]


STUBS = {
    "torch": """
class cuda:
    device_count = staticmethod(lambda: 4)
    chosen = []
    set_device = staticmethod(chosen.append)
""",
    "tensorflow": """
class config:
    chosen = []
    gpus = ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
    list_physical_devices = get_visible_devices = staticmethod(lambda kind: config.gpus)
    set_visible_devices = staticmethod(lambda gpu, kind: config.chosen.append(config.gpus.index(gpu)))
""",
}


@pytest.mark.parametrize("name", STUBS)
def test_a_framework_is_told_as_soon_as_it_has_been_imported(name, host, tmp_path):
    (tmp_path / f"{name}.py").write_text(f"__version__ = '1'\n{STUBS[name]}")
    script = (
        f"import choros, {name} as module\nprint((module.cuda if module.__name__ == 'torch' else module.config).chosen)"
    )
    place = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "2", "LOCAL_SIZE": "4"}
    environ = host(4) | {f"CHOROS_{key}": value for key, value in place.items()} | {"KERAS_BACKEND": name}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[2]\n"


BODIES = {
    "the device cannot be set": f"""__version__ = '1'
{STUBS["torch"]}
def refuse(number):
    raise RuntimeError("CUDA error: all devices are busy")
cuda.set_device = refuse
""",
    "it imports choros": f"__version__ = '1'\nimport choros\n{STUBS['torch']}",
    "a finder without find_spec": f"__version__ = '1'\n{STUBS['torch']}",
}


@pytest.mark.parametrize("case", BODIES)
def test_the_import_of_a_framework_never_fails_for_its_device(case, host, tmp_path):
    (tmp_path / "torch.py").write_text(BODIES[case])
    script = f"""
import sys
class Finder:
    find_module = staticmethod(lambda name, path=None: None)  # all that a finder had before Python 3.4
{"sys.meta_path.insert(0, Finder)" if "finder" in case else ""}
{"" if "imports" in case else "import choros"}
import torch
from choros.device_choice import choose_device
try:
    choose_device()
except RuntimeError as error:
    print(error)
else:
    print(torch.cuda.chosen)
"""
    place = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "2", "LOCAL_SIZE": "4"}
    environ = host(4) | {f"CHOROS_{key}": value for key, value in place.items()} | {"KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    expected = "CUDA error: all devices are busy\n" if "cannot" in case else "[2]\n"
    assert (done.stdout, done.stderr) == (expected, "")


def test_a_rank_that_was_kept_on_the_cpu_uses_no_gpu(rank):
    script = """
    import choros.cluster.hardware.gpus
    choros.cluster.hardware.gpus.gpu_vendor = lambda backend, environ=None: "nvidia"
    from choros.device_choice import own_gpu
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax
        hide = lambda: jax.config.update("jax_platforms", "cpu")
    elif os.environ["KERAS_BACKEND"] == "torch":
        torch.cuda.is_available = lambda: True
        hide = lambda: os.environ.__setitem__("KERAS_TORCH_DEVICE", "cpu")
    else:
        visible[0] = [type("Device", (), {"name": there[0]})]
        hide = visible[0].clear
    before = own_gpu()
    hide()
    print(json.dumps([before, own_gpu()]))
    """
    assert rank(script, gpus=1) == ["GPU-0000", ""]


def test_a_part_of_a_gpu_is_chosen_by_its_uuid(rank, backend):
    if backend != "jax":
        pytest.skip("PyTorch and TensorFlow see one part, so that their ranks are refused")
    script = """
    import choros, jax
    from choros.device_choice import choose_device, own_gpu
    choose_device()
    print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), chosen(), own_gpu()]))
    """
    assert rank(script, gpus=1, parts=4) == ["MIG-2000", "all", "MIG-2000"]


class Gathered:
    """A group whose other ranks have sent their GPUs."""

    def __init__(self, *gpus):
        self._gpus = gpus

    def gather(self, data):
        where, _, host = json.loads(data)
        return [json.dumps([where, gpu, host]).encode() for gpu in self._gpus]


def test_ranks_on_the_cpu_are_not_counted_among_those_that_share_a_gpu(monkeypatch):
    for module in ("gpus", "gpu_builds"):
        monkeypatch.setattr(f"choros.cluster.hardware.{module}.gpu_vendor", lambda backend, environ=None: "amd")
    with pytest.raises(InvalidInputError, match="2 ranks run there on 1 GPU, .* set ROCR_VISIBLE_DEVICES to nothing"):
        check_gpus_apart(Gathered("GPU-a", "", "GPU-a", ""))
    check_gpus_apart(Gathered("GPU-a", "", "GPU-b", ""))


def test_the_gpu_is_that_of_the_local_rank_unless_the_launcher_has_chosen(rank, backend):
    first = 0 if backend == "torch" else "all"
    cases = [
        ({}, 2),
        ({"CHOROS_LOCAL_RANK": "3", "CHOROS_RANK": "3"}, 3),
        ({"CHOROS_LOCAL_RANK": "5", "CHOROS_LOCAL_SIZE": "6", "CHOROS_RANK": "5", "CHOROS_SIZE": "6"}, 1),  # it shares
        ({"CHOROS_SLOT": "1"}, 1),  # of an elastic job, where the local rank may change
        ({"SLURM_GPUS_PER_TASK": "2"}, first),
        ({"CHOROS_OWN_GPUS": "1"}, first),
        ({"CHOROS_LOCAL_SIZE": "1", "CHOROS_LOCAL_RANK": "0"}, first),  # alone on its host, it may use all
        ({"CHOROS_WORKER": "1"}, first),
    ]
    script = f"""
    import choros
    from choros.device_choice import choose_device
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax
    found = []
    for environment in {[environment for environment, _ in cases]}:
        before = dict(os.environ)
        os.environ |= environment
        reset()
        choose_device()
        found.append(chosen())
        os.environ.clear()
        os.environ |= before
    print(json.dumps(found))
    """
    assert rank(script) == [expected for _, expected in cases]


def test_a_framework_that_started_first_is_told_with_the_remedy(rank, backend):
    start = {
        "jax": "import jax; jax.config.update('jax_platforms', 'cpu'); jax.numpy.zeros(1)",
        "tensorflow": """
        def set_visible(gpus, kind):
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        tf.config.set_visible_devices = set_visible
        """,
    }
    if backend == "torch":
        pytest.skip("PyTorch takes another current device at any time")
    script = f"""
{textwrap.dedent(start[backend])}
from choros.errors import InvalidInputError
from choros.device_choice import choose_device
try:
    choose_device()
except InvalidInputError as error:
    print(json.dumps(str(error)))
"""
    output = rank(script)
    assert "had started" in output
    assert "not on GPU 2. Import choros before Keras" in output


IDIOMS = """
import choros.hvd as hvd
hvd.init()
if os.environ["KERAS_BACKEND"] == "torch":
    torch.cuda.set_device(hvd.local_rank())
elif os.environ["KERAS_BACKEND"] == "tensorflow":
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
else:
    import keras
print("chosen", hvd.local_rank(), chosen(), os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
"""


def job(script, environ, *options, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "choros", "run", "-n", "2", *options, sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_horovods_idioms_work_and_all_gpus_stay_visible(host):
    output = job(FAKES + IDIOMS, host(2))
    assert {"chosen 0 0 None", "chosen 1 1 None"} <= {line.partition("] ")[2] or line for line in output.splitlines()}


SHARED = "import choros.hvd as hvd\nhvd.init()\nprint('met')"


def test_ranks_on_one_gpu_are_refused_unless_that_was_asked_for(host, backend):
    if backend != "jax":
        pytest.skip("which build there is, is faked for JAX: once is enough")
    output = job(SHARED, host(1), code=1)
    assert "Ranks 0, 1 on " in output
    assert "compute on the same GPU (GPU-0000): 2 ranks run there on 1 GPU" in output
    assert "choros run --share-gpus" in output
    assert job(SHARED, host(1), "--share-gpus").count("met") == 2
    assert job(SHARED, host(1) | {"CUDA_VISIBLE_DEVICES": ""}).count("met") == 2
    user_environment = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['CHOROS_LOCAL_RANK']\n"
    assert job(user_environment + SHARED, host(2)).count("met") == 2
