"""The bytes between two machines (network namespaces of this one) while ranks train on data that they read.

No byte of the data does: what crosses is parameters and messages, the same for ten times as many rows.
"""

import json
import os
import re
import subprocess
import sys

COLUMNS, ROWS = 400, (1_920, 19_200)
DATA = """
import sys
import numpy as np, pyarrow as pa, pyarrow.parquet as pq

for rows in map(int, sys.argv[3:]):
    x = np.random.default_rng(0).standard_normal((rows, int(sys.argv[2])), "float32")
    np.save(f"{sys.argv[1]}/{rows}.npy", x)
    table = {"x": pa.FixedSizeListArray.from_arrays(x.ravel(), x.shape[1]), "y": x[:, 0]}
    pq.write_table(pa.table(table), f"{sys.argv[1]}/{rows}.parquet", row_group_size=500)
"""
SCRIPT = """
import sys
sys.modules["tensorflow"] = sys.modules["sklearn"] = sys.modules["matplotlib"] = None
import json, os, pathlib
import keras
import numpy as np
import choros
import choros.hvd as hvd

hvd.init()
room = pathlib.Path(sys.argv[1])

def crossed():
    hvd.barrier()
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
    cable = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0"))
    hvd.barrier()
    return int(cable[0]) + int(cable[8])  # received and sent

def data(kind, rows):
    if kind == "files":
        return [choros.files(str(room / f"{rows}.parquet"), x="x", y="y")]
    x = np.load(room / f"{rows}.npy", mmap_mode="r" if kind == "mapped" else None)
    return [x, x[:, 0].copy()]

found = []
for kind in ("arrays", "mapped", "files"):
    for rows in map(int, sys.argv[2:]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((400,)), keras.layers.Dense(600, "tanh"), keras.layers.Dense(600, "tanh"),
                                  keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        trainer = choros.Trainer(model, choros.AEASGD(window=5))
        given, before = data(kind, rows), crossed()
        run = trainer.fit(*given, batch_size=96, steps_per_epoch=15, epochs=2, verbose=0, seed=3).run
        size = sum(w.nbytes for w in model.get_weights())
        found.append([kind, rows, crossed() - before, run.exchanges, run.rows, size])
if hvd.rank() == hvd.size() - 1:
    print("found " + json.dumps(found), flush=True)
"""


def test_what_crosses_the_cable_is_parameters_and_does_not_grow_with_the_rows(network, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    sizes = [str(rows) for rows in ROWS]
    subprocess.run([sys.executable, "-c", DATA, tmp_path, str(COLUMNS), *sizes], check=True, timeout=120)
    message = f"-m choros run -n 3 -H one:1,two:2 --ssh {network.ssh} --network 10.79.7.0/24 script.py {tmp_path}"
    job = subprocess.run(
        [*network.head, sys.executable, *message.split(), *sizes],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    match = json.loads(re.search(r"found (.*)", job.stdout)[1])
    by_kind = {}
    for kind, rows, crossed, exchanges, trained, model in match:
        assert trained == 2 * 15 * 96
        messages = crossed - exchanges * model  # each way half of the parameters, for each host has half of the center
        print(f"{kind}, {rows} rows: {crossed / model:.2f} models crossed in {exchanges} exchanges of one each")
        assert 0 < messages < 6 * model, (kind, rows, crossed / model, exchanges)
        by_kind.setdefault(kind, []).append((rows, crossed))
    for kind, ((few, less), (many, more)) in by_kind.items():
        assert abs(more - less) < (many - few) * COLUMNS * 4 / 20, kind
        assert abs(more - less) < 0.05 * less, kind
