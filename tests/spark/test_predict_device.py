"""The device on which a task of Spark predicts."""

import os

import pytest

from choros.spark import task_process
from choros.spark.task_process import hold_back, on_cpu_unless_given


@pytest.mark.parametrize(
    ("resources", "set_before", "expected"),
    [({}, None, "cpu"), ({"gpu": object()}, None, None), ({}, "cuda", "cuda"), ({"fpga": object()}, None, "cpu")],
)
def test_a_task_without_a_gpu_predicts_on_the_cpu(monkeypatch, resources, set_before, expected):
    monkeypatch.setenv("JAX_PLATFORMS", set_before or "")
    if set_before is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    on_cpu_unless_given(resources)
    assert os.environ.get("JAX_PLATFORMS") == expected


@pytest.mark.parametrize(("amd", "name"), [((), "CUDA_VISIBLE_DEVICES"), (("a GPU",), "ROCR_VISIBLE_DEVICES")])
def test_a_task_sees_the_gpus_that_spark_gave_it(monkeypatch, amd, name):
    class Task:
        def cpus(self):
            return 1

        def resources(self):
            return {"gpu": type("Gpus", (), {"addresses": ["3", "1"]})}

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(task_process, "BACKENDS", ())
    monkeypatch.setattr(task_process, "visible_gpus", lambda vendor, environ: amd)
    assert hold_back(Task()) == (1, ["3", "1"])
    assert os.environ[name] == "3,1"
