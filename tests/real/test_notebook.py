"""The tutorial on a cluster job: every cell runs on a real SLURM, and prints what the notebook has stored.

STORE_OUTPUTS=1 pytest -m slurm tests/real/test_notebook.py     # replaces the stored outputs
"""

import json
import os
import pathlib
import re
import sys

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "docs" / "tutorials" / "cluster-job.ipynb"
CELLS = pathlib.Path(__file__).parent / "notebook_cells.py"


def shape(text):
    """Return a text without what differs between two runs: digests, nodes, numbers, repeats, lines of SLURM itself."""
    text = re.sub(r"\b[0-9a-f]{16}\b", "DIGEST", text)
    text = re.sub(r"\bn\[[\d,-]+\]", "NODES", text)  # which nodes are free is up to SLURM
    text = re.sub(r"\d+", "N", text)
    # SLURM may report its own requeue in the job's log, or end before it does.
    return sorted({line for line in text.splitlines() if not line.startswith(("slurmstepd-", "srun: "))})


@pytest.mark.timeout(1200)
def test_every_cell_of_the_tutorial_runs_as_stored(slurm, tmp_path):
    notebook = json.loads(NOTEBOOK.read_text())
    command = tmp_path / "bin" / "choros"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m choros "$@"\n')
    command.chmod(0o755)
    environment = {"PATH": f"{command.parent}:{os.environ['PATH']}", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    environment |= {"IPYTHONDIR": str(tmp_path / "ipython"), "NO_COLOR": "1"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}  # else TensorFlow prints lines
    out = slurm.run(sys.executable, CELLS, NOTEBOOK, cwd=tmp_path, timeout=1100, **environment)
    printed = json.loads(out.splitlines()[-1])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    *_, stopped, complete = printed
    digests = re.findall(r"(\d+) epochs in this run; weights ([0-9a-f]{16})", stopped + complete)
    assert len(digests) == 2, printed
    assert digests[0][1] == digests[1][1], printed
    assert int(digests[0][0]) < int(digests[1][0]) == 300

    if os.environ.get("STORE_OUTPUTS"):
        for cell, text in zip(cells, printed, strict=True):
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for cell, text in zip(cells, printed, strict=True):
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert shape(text) == shape(stored), "".join(cell["source"])
