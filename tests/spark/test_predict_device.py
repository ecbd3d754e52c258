"""The device on which a task of Spark predicts."""

import os

import pytest

from choros.spark.process import on_cpu_unless_given


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
