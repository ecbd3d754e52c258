"""Horovod's names: those that are there, those that one rank can call, and advice for those that are not."""

import keras
import numpy as np
import pytest

import choros.hvd as hvd
from choros.errors import InvalidInputError

ELASTIC = """run KerasState TensorFlowKerasState ObjectState CommitStateCallback UpdateBatchStateCallback
    UpdateEpochStateCallback HorovodInternalError HostsUpdatedInterrupt"""
CALLBACKS = """BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateWarmupCallback
    LearningRateScheduleCallback BestModelCheckpoint"""
GONE = """BroadcastGlobalVariablesHook rank_op size_op local_rank_op local_size_op process_set_included_op broadcast_
    broadcast_object_fn gpu_available check_num_rank_power_of_2 broadcast_parameters broadcast_optimizer_state
    tf_data_service send_to_data_service TfDataServiceConfig synchronize poll allreduce_async"""


@pytest.fixture
def alone():
    """One rank without a launcher."""
    hvd.init(comm=[0])
    yield
    hvd.shutdown()


def test_the_names_of_each_module_are_there():
    for module, names in ((hvd.elastic, ELASTIC), (hvd.callbacks, CALLBACKS), (hvd, " ".join(hvd.__all__))):
        assert [name for name in names.split() if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", GONE.split())
def test_a_name_that_is_gone_is_an_error_with_advice(name):
    with pytest.raises(AttributeError, match=f"has no {name}: use |has no {name}: "):
        getattr(hvd, name)


def test_probes_say_no(alone):
    for name in ("gloo_built", "gloo_enabled", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"):
        assert not getattr(hvd, name)()


def test_grouped_calls_of_one_rank_return_what_they_were_given(alone):
    x = np.arange(4.0, dtype="float32")
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        first, second = call([x, x + 1])
        assert first.tolist() == x.tolist()
        assert second.tolist() == (x + 1).tolist()
    for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        assert hvd.allreduce(x, op=op).tolist() == x.tolist()


KERAS = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
KERAS.compile("sgd", "mse")
WITHOUT_EFFECT = {
    "allreduce": (lambda **given: hvd.allreduce(1.0, **given), {"device_dense": "/gpu:0", "device_sparse": "/cpu:0"}),
    "DistributedOptimizer": (
        lambda **given: hvd.DistributedOptimizer(keras.optimizers.SGD(), **given),
        {
            "name": "mine",
            "device_dense": "/gpu:0",
            "device_sparse": "/gpu:0",
            "sparse_as_dense": True,
            "gradient_predivide_factor": 2.0,
            "num_groups": 2,
            "groups": 1,
        },
    ),
    "callbacks.BroadcastGlobalVariablesCallback": (
        lambda **given: hvd.callbacks.BroadcastGlobalVariablesCallback(0, **given),
        {"device": "/gpu:0"},
    ),
    "callbacks.MetricAverageCallback": (hvd.callbacks.MetricAverageCallback, {"device": "/gpu:0"}),
    "elastic.ObjectState": (hvd.elastic.ObjectState, {"bcast_object": print, "get_rank": print}),
    "elastic.KerasState": (lambda **given: hvd.elastic.KerasState(KERAS, **given), {"backend": "tensorflow"}),
    "SyncBatchNormalization": (hvd.SyncBatchNormalization, {"fused": True}),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_argument_without_effect_is_warned_of_once(name, alone, monkeypatch):
    monkeypatch.setattr("choros.errors._warned_arguments", set())
    call, arguments = WITHOUT_EFFECT[name]
    call()
    for argument, value in arguments.items():
        with pytest.warns(UserWarning, match=rf"^{argument} has no effect on hvd\.{name}: "):
            call(**{argument: value})
        call(**{argument: value})  # a second warning would be an error


def test_other_ranks_than_0_do_not_warn(alone, monkeypatch):
    monkeypatch.setattr("choros.errors._warned_arguments", set())
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(f"CHOROS_{name}", "1")
    for name in ("SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(f"CHOROS_{name}", "2")
    hvd.callbacks.MetricAverageCallback("/gpu:0")


def test_a_part_of_the_ranks_is_a_process_set():
    with pytest.raises(InvalidInputError, match="ProcessSet|process set"):
        hvd.init(comm=[1])
    assert not hvd.is_initialized()
