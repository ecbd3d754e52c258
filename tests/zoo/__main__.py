"""Write docs/zoo.md from the table: ``python -m tests.zoo``."""

import os
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = """# The zoo: models that are compared with plain Keras

`tests/zoo` trains each of these models with plain `model.fit` and with AllReduce on 1, 2 and 3 workers, and compares
them with `choros.check`. The data are {rows} rows in global batches of {batch}: no batch divides by 3, and in the last
one a worker has no row. Most models have sample weights. They are small examples of the model families on keras.io.
`python -m tests.zoo` writes this page. One test compares it with the table, and another one the table with the results.

- **equal**: weights, optimizer slots and metrics differ by at most 1e-5 (2e-2 in 16 bits), or by ten times what another
  order of the rows inside each batch changes. Dropout has rate 0 and batch normalization is frozen: neither can be
  equal with several workers.
- **inexact**: random numbers that cannot be switched off. Differences are within the spread of one process over seeds.
- **refused**: an error names the reason before a worker starts.
- **library**: the backend's library fails on such a batch, or on a share of one row, in plain `fit` too.
- **-**: the example is not for that backend.

Check your own model: `choros check model.py`, or `choros.check(model, x, y)`.

| model | family | JAX | PyTorch | TensorFlow | description |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page's text."""
    from tests.zoo import models  # noqa: F401 - they enter themselves
    from tests.zoo.table import BACKENDS, BATCH, ROWS, TABLE

    lines = []
    for entry in sorted(TABLE.values(), key=lambda entry: (entry.family, entry.name)):
        cells = [entry.expected[b] for b in BACKENDS]
        about = entry.about.splitlines()[0].rstrip(".")
        lines.append(" | ".join(["| " + entry.name, entry.family, *cells, about + " |"]))
    return HEAD.format(rows=ROWS, batch=BATCH) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    PAGE.write_text(page())
