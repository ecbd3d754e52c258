"""The control block of asynchronous workers: copies while workers write."""

import fcntl
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from choros.comm.shm.segment import Segment
from choros.training.async_control.control_block import ControlBlock

VALUES = 20_000  # of a rank's metric state, so that a copy takes long enough to meet a write


def saves_until_asked(fd):
    control_block, count = ControlBlock(Segment.open_peer(os.getppid(), fd), 1, 1, VALUES), 0
    state = np.empty(VALUES)
    while not control_block.end_requested:
        count += 1
        state[:] = count
        control_block.save_position(0, (0, count), count, [], state)
        control_block.count_step(0)


def test_a_checkpoint_copies_no_half_written_state_of_a_rank():
    control_block, restored = (ControlBlock.create(1, 1, VALUES) for _ in range(2))
    process = multiprocessing.get_context("spawn").Process(target=saves_until_asked, args=(control_block.segment.fd,))
    process.start()
    try:
        while not control_block.step_counts()[0]:
            assert process.is_alive()
        for _ in range(300):
            restored.import_state([*control_block.export_positions(), *control_block.export_metrics(0)])
            (_, batch), iterations, _, state = restored.saved_position(0)
            assert batch == iterations == state[0]
            assert np.ptp(state) == 0
            if batch > 1:
                (_, earlier), iterations, _, state = restored.saved_position(0, (0, batch - 1))
                assert earlier == iterations == state[0] == batch - 1
                assert np.ptp(state) == 0
    finally:
        control_block.request_end()
        process.join(10)
        control_block.close()
        restored.close()
    assert process.exitcode == 0


def test_an_interrupt_right_after_the_lock_was_taken_releases_it(monkeypatch):
    control_block, lockf = ControlBlock.create(1, 1, 1), fcntl.lockf

    def interrupted(fd, operation, *where):
        lockf(fd, operation, *where)
        if operation & fcntl.LOCK_EX:
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "lockf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        control_block.add(0, 0, np.zeros(1), np.zeros(1))
    fd = control_block.segment.fd
    held = f"import fcntl; fcntl.lockf({fd}, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)"
    subprocess.run([sys.executable, "-c", held], pass_fds=[fd], check=True)
    control_block.close()
