"""Measure the processor time of reading one block of a file, against the number of blocks that there are.

python benchmarks/stored_blocks.py                    # a minute: 10,000 and 40,000 blocks of one row

A reader whose cost grows with the number of blocks takes the square of it for a pass: its ratio is near 4, not 1.
"""

import argparse
import json
import os
import tempfile
import time
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from choros.data.files import reopen

READS = 2000  # blocks, drawn at random, as in an epoch of permuted blocks
FILES = 4


def columns(rows: int) -> dict[str, Any]:
    """Two columns of a row each."""
    return {"x": np.zeros(rows, "float32"), "y": np.zeros(rows, "int64")}


def hdf5(path: str, rows: int) -> list[list[int]]:
    """A file whose blocks are given, as those of 4 MB would take 160 GB."""
    with h5py.File(path, "w") as file:
        for name, column in columns(rows).items():
            file[name] = column
    return [[i, 1] for i in range(rows)]


def arrow(path: str, rows: int) -> None:
    """A file of record batches of one row."""
    table = pa.table(columns(rows))
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=1)


def parquet(path: str, rows: int) -> None:
    """A file of row groups of one row."""
    pa.parquet.write_table(pa.table(columns(rows)), path, row_group_size=1)


def seconds_a_block(kind: str, blocks: int, folder: str) -> float:
    """Return the processor time of reading a block of ``blocks`` that lie in several files."""
    files, inputs = [], []
    for number in range(FILES):
        files.append(os.path.join(folder, f"{blocks}-{number}.{kind}"))
        parts = {"hdf5": hdf5, "arrow": arrow, "parquet": parquet}[kind](files[-1], blocks // FILES)
        inputs += [[number, *part] for part in parts or ()]
    table = reopen({"kind": kind, "files": files, **({"blocks": inputs} if inputs else {})})
    chosen = np.random.default_rng(0).permutation(len(table.rows))[:READS].tolist()
    for number in range(FILES):  # the first read of a file opens it
        list(table.read(number * blocks // FILES, ["x", "y"]))
    begun = time.process_time()
    for block in chosen:
        list(table.read(block, ["x", "y"]))
    return (time.process_time() - begun) / len(chosen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs=2, default=(10_000, 40_000))
    counts = parser.parse_args().blocks
    found = {}
    for kind in ("hdf5", "arrow", "parquet"):
        with tempfile.TemporaryDirectory() as folder:
            few, many = (1e6 * seconds_a_block(kind, count, folder) for count in counts)
        found[kind] = {"us_a_block": [round(few), round(many)], "ratio": round(many / few, 2)}
    print(json.dumps({"blocks": counts, **found}, indent=2))
