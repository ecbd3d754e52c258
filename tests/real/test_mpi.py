"""The MPI that is installed here under srun: MPICH by PMI2, Open MPI by PMIx, which needs libpmix2 of the system."""

import re
import sys

SCRIPT = """
import sys
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import json, os
import keras
import numpy as np
import choros
import choros.hvd as hvd

hvd.init()
rank = hvd.rank()
assert np.array_equal(hvd.allreduce(np.arange(100_000.0) * (rank + 1), op=hvd.Sum), np.arange(100_000.0) * 6)
x = np.random.default_rng(0).standard_normal((90, 4)).astype("float32")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
trainer = choros.Trainer(model, choros.AEASGD(window=2))
losses = trainer.fit(x, x[:, 0], batch_size=18, epochs=2, verbose=0).history["loss"]
assert losses[1] < losses[0]
assert len({str(w) for w in hvd.allgather_object([w.tolist() for w in model.get_weights()])}) == 1
print(f"<{rank} of {hvd.size()} on {os.uname().nodename}, MPI {hvd.mpi_enabled()}>", flush=True)
"""


def test_ranks_of_a_step_meet_by_mpi(slurm, mpiexec, failing, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    plugin = "pmix" if mpiexec.open else "pmi2"
    assert plugin in slurm.run("srun", "--mpi=list")
    step = ["srun", f"--mpi={plugin}", "-N3", "-n3", sys.executable]
    output = slurm.run(*step, tmp_path / "script.py")
    matches = re.findall(r"<(\d) of 3 on (n\d), MPI True>", output)
    assert sorted(rank for rank, _ in matches) == ["0", "1", "2"], output
    assert len({node for _, node in matches}) == 3
    failing([*step[:2], "-N2", "-n2", sys.executable], "trainer", **slurm.environment)
