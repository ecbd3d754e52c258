"""The script of each rank of a drill's job (``drills/jobs.py``): as on a separate host, reached through the proxy."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]

import run as local
from proxy import go_through
from run import ASYNCHRONOUS, EPOCHS, SYNCHRONOUS, TIMEOUT, data_of, model_of

BATCHES = 24  # an epoch's


def main(name: str, room: Path, worker: int) -> None:
    """Train, and leave what came of it.

    Args:
        name: of the algorithm.
        room: where states are kept, and where it is said which process this is.
        worker: the rank that raises where there is a file called "flag".
    """
    import keras

    import choros
    from choros.comm import hierarchical_group

    rank, here = int(os.environ["CHOROS_RANK"]), hierarchical_group.machine()
    (room / f"pid-{rank}").write_text(str(os.getpid()))
    hierarchical_group.machine = lambda: f"{here} {rank}"
    go_through(int(os.environ["DRILL_PROXY"]))
    together, local.BATCHES = name in SYNCHRONOUS, BATCHES

    class Say(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print(f"batch {self.epoch} {batch}", flush=True)

    model = model_of(together)
    algorithm = getattr(choros, name)(**{**SYNCHRONOUS, **ASYNCHRONOUS}[name])
    trainer = choros.Trainer(model, algorithm, timeout=TIMEOUT, first_timeout=60.0)
    saved = choros.Checkpoint(room / "states", every=7, keep=2)
    source = data_of(together, str(room / "flag"), worker)
    how = {"epochs": EPOCHS, "seed": 3, "verbose": 0, "callbacks": [Say()]}
    done = trainer.fit(source, **how, checkpoint=saved, resume=True).run
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    weight = float(model.get_weights()[0].reshape(-1)[0])
    report = {"digest": digest, "weight": weight, "rows": done.rows, "group": done.group}
    (room / f"end-{rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
