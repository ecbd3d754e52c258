"""GPUs are counted as the driver lists them and the variables show them, and no framework is loaded for it."""

import json
import os
import subprocess
import sys

import pytest

from choros.cluster.hardware import gpus
from choros.cluster.hardware.gpus import Gpu, count_gpus, visible_gpus

TWO = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb2222-0000)
"""
DIVIDED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-0000)
  MIG 3g.20gb     Device  0: (UUID: MIG-c0ffee00-0001)
  MIG 3g.20gb     Device  1: (UUID: MIG-c0ffee00-0002)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb2222-0000)
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program on PATH that lists GPUs as nvidia-smi does."""

    def lists(text, code=0, seconds=0):
        program = tmp_path / "nvidia-smi"
        delay = f"[ {seconds} = 0 ] || exec sleep {seconds}"
        listing = f"[ \"$1\" = -L ] || exit 3\ncat <<'END'\n{text}END\nexit {code}"
        program.write_text(f"#!/bin/sh\n{delay}\n{listing}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        gpus._nvidia.cache_clear()

    yield lists
    gpus._nvidia.cache_clear()


def names(**environ):
    return [gpu.name for gpu in visible_gpus("nvidia", environ)]


def test_the_variable_shows_some_in_its_own_order(nvidia_smi):
    nvidia_smi(TWO)
    expected = {
        "0": ["0"],
        "1,0": ["1", "0"],
        "": [],
        "-1": [],
        "NoDevFiles": [],
        "0,-1,1": ["0"],  # what follows an invalid one is hidden
        "0,2,1": ["0"],
        "GPU-bbbb2222-0000": ["GPU-bbbb2222-0000"],
        "GPU-bb,0": ["GPU-bb", "0"],  # the beginning is enough
        "GPU-,0": [],  # it is not, where it fits several
        "0,0": [],  # one that is repeated hides all
        "0,GPU-aaaa1111-0000": [],
        "1,0,1": [],
    }
    assert names() == ["0", "1"]
    assert {value: names(CUDA_VISIBLE_DEVICES=value) for value in expected} == expected
    assert visible_gpus("nvidia", {"CUDA_VISIBLE_DEVICES": "1"})[0].identity == "GPU-bbbb2222-0000"
    assert count_gpus() >= 2


def test_parts_of_a_divided_gpu_count_each(nvidia_smi):
    nvidia_smi(DIVIDED)
    assert names() == ["MIG-c0ffee00-0001", "MIG-c0ffee00-0002", "1"]
    assert names(CUDA_VISIBLE_DEVICES="MIG-c0ffee00-0002") == ["MIG-c0ffee00-0002"]
    assert names(CUDA_VISIBLE_DEVICES="MIG-0bad") == []


def test_a_driver_that_does_not_run_has_no_gpus(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", code=9)
    assert names() == []


def test_a_driver_that_does_not_answer_is_told_once(nvidia_smi, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "_QUERY_SECONDS", 0.3)
    nvidia_smi(TWO, seconds=9)
    assert names() == names() == []
    assert capsys.readouterr().err.count("did not answer within 0.3 s on ") == 1


def test_numbers_of_unequal_gpus_have_no_identity_in_cudas_own_order(nvidia_smi):
    nvidia_smi(TWO.replace("H100", "L4", 1))
    number, uuid = visible_gpus("nvidia", {"CUDA_VISIBLE_DEVICES": "1,GPU-bbbb2222-0000"})
    assert (number.identity, uuid.identity) == ("", "GPU-bbbb2222-0000")  # CUDA numbers the fastest one first
    assert [gpu.identity for gpu in visible_gpus("nvidia", {})] == ["", ""]
    ordered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.identity for gpu in visible_gpus("nvidia", ordered)] == ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000"]
    nvidia_smi(TWO)
    assert [gpu.identity for gpu in visible_gpus("nvidia", {})] == ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000"]


def test_without_the_program_proc_tells_them(tmp_path):
    for bus, uuid in (("0000:0f:00.0", "GPU-aaaa1111-0000"), ("0000:e0:00.0", "GPU-bbbb2222-0000")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 16\nGPU UUID: \t {uuid}\n")
    result = gpus._nvidia_of_proc(tmp_path)
    assert result == (((Gpu("0", "GPU-aaaa1111-0000"),), (Gpu("1", "GPU-bbbb2222-0000"),)), True)


def test_gpus_of_amd_and_both_of_its_variables(tmp_path, monkeypatch):
    for node, (lanes, number) in enumerate([(0, 0), (304, 17), (304, 18), (304, 19)]):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {lanes}\nunique_id {number}\n")
    result = gpus._amd(tmp_path)
    assert [gpu.name for gpu in result] == ["0", "1", "2"]
    monkeypatch.setattr(gpus, "_amd", lambda: result)
    shown = {
        (): ["0", "1", "2"],
        (("ROCR_VISIBLE_DEVICES", "2,1"),): ["2", "1"],
        (("ROCR_VISIBLE_DEVICES", "2,1"), ("HIP_VISIBLE_DEVICES", "1")): ["1"],  # counted among those
        (("CUDA_VISIBLE_DEVICES", "0"),): ["0"],
        (("ROCR_VISIBLE_DEVICES", "GPU-0000000000000013"),): ["GPU-0000000000000013"],
    }
    assert {key: [gpu.name for gpu in visible_gpus("amd", dict(key))] for key in shown} == shown


BUILDS = """
import json, os, pathlib, sys
from choros.cluster.hardware.gpu_builds import gpu_vendor

room = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(room))
files = {
    "torch/version.py": ["cuda: Optional[str] = '13.0'\\nhip: Optional[str] = None\\n",
        "cuda: Optional[str] = None\\nhip: Optional[str] = '7.0'\\n", "cuda = None\\nhip = None\\nxpu = '2025'\\n",
        "cuda: Optional[str] = None\\n"],
    "tensorflow/python/platform/build_info.py": ["[('is_cuda_build', True), ('is_rocm_build', False)]",
        "[('is_cuda_build', False), ('is_rocm_build', True)]", "[('is_cuda_build', False), ('is_rocm_build', False)]"],
}
said = {}
for name, texts in files.items():
    package = name.partition("/")[0]
    path = room / name
    path.parent.mkdir(parents=True)
    (room / package / "__init__.py").write_text("raise SystemExit('it was imported')")
    for text in texts:
        path.write_text(text)
        said.setdefault(package, []).append(gpu_vendor(package, {}))
path.write_text("[('is_cuda_build', True)]")
(room / "nvidia/cudnn/lib").mkdir(parents=True)
(room / "nvidia/cudnn/lib/libcudnn.so.9").touch()
said["with libraries"] = gpu_vendor("tensorflow", {})
for plugin in ("xla_cuda13", "xla_rocm7"):
    (room / "jax_plugins" / plugin).mkdir(parents=True)
    values = [{}, {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cuda,cpu"}, {"JAX_PLATFORM_NAME": "gpu"}]
    said[plugin] = [gpu_vendor("jax", environ) for environ in values]
    (room / "jax_plugins" / plugin).rmdir()
said["none"] = gpu_vendor("jax", {})
print(json.dumps([said, sorted({"keras", "jax", "torch", "tensorflow"} & set(sys.modules))]))
"""


def test_what_a_build_is_for_is_read_and_not_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BUILDS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    output, loaded = json.loads(done.stdout)
    assert loaded == []
    assert output["torch"] == ["nvidia", "amd", "intel", ""]
    assert output["tensorflow"][1:] == ["amd", ""]
    assert output["with libraries"] == "nvidia"
    assert output["xla_cuda13"] == ["nvidia", "", "nvidia", "nvidia"]
    assert output["xla_rocm7"] == ["amd", "", "", "amd"]
    assert output["none"] == ""
