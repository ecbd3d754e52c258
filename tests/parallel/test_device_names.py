"""Names of devices, as frameworks and TensorFlow's clusters write them, in Keras' form."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from choros.backends import devices
from choros.backends.devices.device_names import device_names
from choros.errors import InvalidInputError

NAMES = {
    "gpu:3": "gpu:3",
    "gpu": "gpu:0",
    "GPU:1": "gpu:1",
    "/gpu:1": "gpu:1",
    "cuda:2": "gpu:2",
    "/device:GPU:12": "gpu:12",
    "/physical_device:GPU:1": "gpu:1",
    "/device:CPU:*": "cpu:0",
    "/replica:0/task:0/device:GPU:1": "gpu:1",
    "/job:localhost/replica:0/task:0/device:CPU:1": "cpu:1",
    "/job:worker/task:1/device:GPU:0": "gpu:0",
    "/job:worker/replica:0/task:1/gpu:2": "gpu:2",
    "/job:chief/device:TPU:7": "tpu:7",
    "cpu:00": "cpu:0",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name(name):
    assert device_names(name) == device_names([name]) == [NAMES[name]]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (SimpleNamespace(to_string=lambda: "/job:worker/task:1/device:GPU:1", device_type="TPU"), "gpu:1"),
        (SimpleNamespace(device_type="GPU", device_index=3), "gpu:3"),
        (SimpleNamespace(device_type="GPU", device_index=None), "gpu:0"),
        (SimpleNamespace(device_type="GPU", name="/device:GPU:2"), "gpu:2"),
        (SimpleNamespace(platform="gpu", id=5), "gpu:5"),
        (SimpleNamespace(type="cuda", index=1), "gpu:1"),
        (SimpleNamespace(type="cuda", index=None), "gpu:0"),
    ],
)
def test_an_object(device, name):
    assert device_names(device) == device_names(each for each in [device]) == [name]


@pytest.mark.parametrize(
    "name", ["", "gpu:x", "gpu:-1", "/gpu:0/cpu:0", "0", "job:", "/device:*:0", "/task:1/job:a", "/device", "cpu0"]
)
def test_what_is_no_name_is_refused(name):
    with pytest.raises(InvalidInputError, match="is not a name of a device of this process: give one such as 'gpu:0'"):
        device_names([name])


@pytest.mark.parametrize(
    "name", ["/job:worker", "/job:worker/task:1", "/job:worker/replica:0/task:1/", "task:1", "/replica:0"]
)
@pytest.mark.parametrize("make", [str, lambda name: SimpleNamespace(to_string=lambda: name)])
def test_the_name_of_a_process_is_refused_with_a_device_of_it(name, make):
    complete = f"'{name.rstrip('/')}/device:GPU:0'"
    with pytest.raises(InvalidInputError, match=f"^'{name}' names a process, and no device of it: .* {complete}, or"):
        device_names([make(name)])


def test_a_device_of_another_replica_is_of_another_process():
    with pytest.raises(InvalidInputError, match=r"device /replica:1/gpu:0 is of another process; this one is rank 0"):
        device_names("/replica:1/gpu:0")
    with pytest.raises(InvalidInputError, match=r"cpu:0, /job:a/replica:1/task:0/cpu:1 are of several processes"):
        device_names(["/job:a/task:0/cpu:0", "/job:a/replica:1/task:0/cpu:1"])


def test_a_number_may_be_of_numpy_and_not_text(monkeypatch):
    monkeypatch.setattr(devices, "list_devices", lambda kind=None: ["cpu:0", "cpu:1", "cpu:2"])
    assert devices.choose_devices(np.int64(2)) == ["cpu:0", "cpu:1"]
    assert devices.choose_devices(np.array(["cpu:2", "cpu:1"])) == ["cpu:2", "cpu:1"]
    with pytest.raises(InvalidInputError, match="devices=True: there are 3"):
        devices.choose_devices(True)
    with pytest.raises(InvalidInputError, match="'2' is not a name of a device .*: give 2 without quotes for so many"):
        devices.choose_devices("2")


def test_what_is_no_device_is_refused():
    with pytest.raises(InvalidInputError, match="None of type NoneType is not a device: give a name such as 'gpu:0'"):
        device_names([None])


@pytest.fixture
def rank(monkeypatch):
    """Make this process rank 1 of 2."""
    variables = {"CHOROS_RANK": 1, "CHOROS_SIZE": 2, "CHOROS_LOCAL_RANK": 1, "CHOROS_LOCAL_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("rank")
def test_the_task_of_a_rank_is_its_number():
    assert device_names(["/job:worker/task:1/device:GPU:0", "/job:localhost/task:0/gpu:1"]) == ["gpu:0", "gpu:1"]
    for name in ("/job:worker/task:0/device:GPU:0", "/task:0/gpu:0", "/job:ps/task:1/cpu:0"):
        with pytest.raises(InvalidInputError, match=f"device {name} is of another process; this one is rank 1"):
            device_names(name)


@pytest.mark.parametrize(("job", "index"), [("chief", 0), ("worker", 1)])
def test_the_task_of_a_cluster_of_tensorflow_is_that_of_tf_config(job, index, monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
    assert device_names(f"/job:{job}/task:{index}/device:GPU:1") == ["gpu:1"]
    for other in ("/job:worker/task:0/gpu:1", "/job:worker/task:2/gpu:1"):
        with pytest.raises(InvalidInputError, match=f"{other} is of another process; this one is {job} {index}"):
            device_names(other)


def test_a_device_that_does_not_exist_is_refused_with_the_number_that_is_needed(monkeypatch):
    monkeypatch.setattr(devices, "list_devices", lambda kind=None: ["cpu:0", "cpu:1", "cpu:2"])
    with pytest.raises(InvalidInputError, match=r"no device 'cpu:7'. .* Call choros.parallel.logical_devices\(8\)"):
        devices.choose_devices(["cpu:1", "cpu:7"])
    with pytest.raises(InvalidInputError, match=r"devices=-2: there are 3 \(cpu:0, cpu:1, cpu:2\)\.$"):
        devices.choose_devices(-2)


def test_a_device_that_does_not_exist_is_refused_with_those_that_do(monkeypatch):
    there = {None: [f"gpu:{number}" for number in range(20)], "cpu": ["cpu:0"]}
    monkeypatch.setattr(devices, "list_devices", lambda kind=None: there.get(kind, []))
    listed = ", ".join(there[None][:16]) + " and 5 more"
    for name in ("tpu:0", "gpu:20", "xpu:1"):
        with pytest.raises(InvalidInputError, match=rf"^There is no device '{name}'. This process has {listed}\.$"):
            devices.choose_devices([name])
    with pytest.raises(InvalidInputError, match=r"devices=21: there are 20 \(gpu:0, .*, gpu:15 and 4 more\)\.$"):
        devices.choose_devices(21)
    there[None] = ["cpu:0"]
    with pytest.raises(InvalidInputError, match=r"^There is no device 'gpu:0'. This process has cpu:0\.$"):
        devices.choose_devices("gpu:0")
