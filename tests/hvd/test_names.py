"""Horovod's names: those that are there, those that one rank can call, and advice for those that are not."""

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


def test_a_part_of_the_ranks_is_a_process_set():
    with pytest.raises(InvalidInputError, match="ProcessSet|process set"):
        hvd.init(comm=[1])
    assert not hvd.is_initialized()
