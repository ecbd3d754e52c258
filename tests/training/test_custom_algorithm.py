"""An algorithm of the user's own, whose class is in no package that workers could import."""

import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import choros
from choros.algorithms import Algorithm
from choros.errors import NotSerializableError


@dataclass(frozen=True)
class Mean(Algorithm):
    """Synchronous: ``LocalSGD``, written once more."""

    weighted: ClassVar[bool] = True


@dataclass(frozen=True)
class Part(Algorithm):
    """Asynchronous: the center takes a part of each update."""

    mode: ClassVar[str] = "async"
    window: int = 2
    part: float = 0.5

    def propose(self, local, seen, window):
        return local - seen

    def merge(self, center, message, info, memory):
        return center + self.part * message, memory

    def adopt(self, local, shown):
        return shown


@dataclass(frozen=True)
class Frozen(Part):
    """The center takes nothing."""

    part: float = 0.0


def test_it_trains_as_the_same_algorithm_of_choros(make_model, data, pools, same):
    x, y = data(48)
    ours, expected = make_model(), make_model()
    how = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    choros.Trainer(ours, Mean(window=2), workers=2, pool=pools(2)).fit(x, y, **how)
    choros.Trainer(expected, choros.LocalSGD(window=2), workers=2, pool=pools(2)).fit(x, y, **how)
    same(ours, expected, 0)


def test_its_merge_runs_at_the_center(make_model, data, pools):
    x, y = data(48)
    for rule, moves in ((Part(), True), (Frozen, False)):
        model = make_model("sgd")
        before = model.get_weights()
        history = choros.Trainer(model, rule, workers=2, pool=pools(2)).fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert history.run.exchanges > 0
        changed = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
        assert all(changed) if moves else not any(changed)


def test_a_class_that_cannot_be_sent_is_refused_by_name(make_model, data, pools):
    lock = threading.Lock()

    @dataclass(frozen=True)
    class Holds(Part):
        def adopt(self, local, shown):
            with lock:
                return shown

    with pytest.raises(NotSerializableError, match="Holds"):
        choros.Trainer(make_model(), Holds(), workers=2, pool=pools(2)).fit(*data(48), verbose=0)


SCRIPT = """
    import os, sys
    from dataclasses import dataclass
    from typing import ClassVar
    import keras, numpy as np
    import choros
    from choros.algorithms import Algorithm
    from choros.comm import hierarchical_group
    from choros.training.worker import comm_setup

    if sys.argv[1] == "hosts":  # each rank is as on a host of its own: a server process merges
        here, rank = os.uname().nodename, os.environ.get("CHOROS_RANK", "0")
        hierarchical_group.machine = lambda: here + " " + rank
        comm_setup._MIN_DIVIDED_BYTES = 4  # bytes of a center that is divided

    @dataclass(frozen=True)
    class Part(Algorithm):
        mode: ClassVar[str] = "async"
        window: int = 2

        def propose(self, local, seen, window):
            return local - seen

        def merge(self, center, message, info, memory):
            return center + 0.25 * message, memory

        def adopt(self, local, shown):
            return shown

    if __name__ == "__main__":
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile("sgd", "mse")
        launcher = choros.Ssh("localhost:2") if sys.argv[1] == "ssh" else None
        trainer = choros.Trainer(model, Part(), workers=2 if launcher else None, launcher=launcher)
        history = trainer.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        moved = bool(model.get_weights()[0].any())
        print("trained", moved, history.run.exchanges > 0, history.run.group, flush=True)
"""


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["ranks", "hosts", "ssh"])
def test_a_class_of_a_script_reaches_ranks_and_servers(how, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    start = [] if how == "ssh" else ["-m", "choros", "run", "-n", "2"]
    command = [sys.executable, *start, "script.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained True True") == (1 if how == "ssh" else 2), done.stdout + done.stderr
    if how == "hosts":
        assert "divided among 2 hosts" in done.stdout
