"""Checkpoints of a center that is divided among hosts: the pause of the other ranks."""

import logging
import types

import numpy as np
import pytest

from choros.errors import CheckpointError
from choros.param_server.shared_memory import SharedMemoryParameterServer
from choros.training.async_control.control_block import DONE, ControlBlock
from choros.training.async_control.pause import ShardedCheckpointer


@pytest.fixture
def checkpointer():
    """Rank 0's checkpointer of three ranks whose job has a time limit of a fifth of a second."""
    control_block, none = ControlBlock.create(3, 1, 1), np.zeros(0)
    with SharedMemoryParameterServer.create(np.zeros(1), none, (), 3) as segment:
        job = types.SimpleNamespace(workers=3, epochs=1, initial_epoch=0, initial_batch=0, timeout=0.2)
        checkpoints = types.SimpleNamespace(checkpoint=object(), latest=None, busy=0.0, store_state=lambda *_: None)
        callbacks = types.SimpleNamespace(epoch=0)
        yield ShardedCheckpointer(SharedMemoryParameterServer(segment), control_block, checkpoints, job, callbacks)
    control_block.close()


@pytest.mark.parametrize("requested", [False, True])
def test_a_checkpoint_that_fails_ends_the_pause_of_the_other_ranks(checkpointer, requested):
    def fail(state, requested):
        raise CheckpointError("the disk is full")

    checkpointer.checkpoints.store_state = fail
    for rank in (1, 2):
        checkpointer.control_block.join_pause(rank, DONE)
    with pytest.raises(CheckpointError):
        checkpointer.save(requested)
    assert checkpointer.control_block.requested_pause == 0


def test_ranks_that_do_not_pause_in_time_are_named(checkpointer, caplog):
    control_block = checkpointer.control_block
    with caplog.at_level(logging.WARNING, "choros"):
        checkpointer.save()
        checkpointer.save()
        control_block.join_pause(1, DONE)
        assert control_block.requested_pause == 0
        checkpointer.save(end_requested=True)
    assert control_block.requested_pause == 3  # until the ranks end
    assert [record.getMessage() for record in caplog.records] == [
        "ranks 1, 2 did not pause in time (still in a step or a validation): this checkpoint is skipped",
        "rank 2 did not pause in time: this state is not saved, and training resumes from the checkpoint before",
    ]
