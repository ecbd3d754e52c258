"""The notebook of the examples: every cell, on the real events where they are there."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HIGGS = ROOT.parent / "shared/data/atlas_higgs.csv.gz"
PLOTS = """
for number in plt.get_fignums():
    (axes,) = plt.figure(number).axes
    print("plot:", axes.get_title(), [round(float(bar.get_height()), 4) for bar in axes.patches])
"""


@pytest.mark.timeout(600)
def test_every_cell_of_the_notebook_runs(spark_is_there, tmp_path):
    """On the real events where they are there, else on those that it makes up."""
    cells = json.loads((ROOT / "examples/spark_higgs.ipynb").read_text())["cells"]
    script = tmp_path / "notebook.py"
    assert not any("matplotlib.use(" in line for cell in cells for line in cell["source"])  # figures show in Jupyter
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code") + PLOTS)
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    environ |= {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT / "src"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environ |= {"HIGGS": str(HIGGS)} if HIGGS.exists() else {}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-4000:]
    scores = {name: float(score) for name, score in re.findall(r"^F1 \((\w+)\): (0\.\d+)$", done.stdout, re.M)}
    times = {
        name: float(time) for name, time in re.findall(r"^Time spent \((\w+)\): ([\d.]+) seconds$", done.stdout, re.M)
    }
    assert list(scores) == list(times) == ["SingleTrainer", "EASGD", "AEASGD", "EAMSGD", "DOWNPOUR"]
    assert min(scores.values()) > 0.6, scores  # always the larger class: 0.53
    assert done.stderr.count("learning_rate has no effect on DOWNPOUR") == 1
    plots = re.findall(r"^plot: (.*) (\[.*\])$", done.stdout, re.M)
    assert [title for title, _ in plots] == [
        "F1 score with different trainers (higher is better)",
        "Training time (lower is better)",
    ]
    assert json.loads(plots[0][1]) == list(scores.values())
    assert "Number of parallel workers: 2\n" in done.stdout
    improvement = float(re.search(r"^Improvement using AEASGD: ([\d.]+) %$", done.stdout, re.M)[1])
    assert abs(improvement - 100 * times["SingleTrainer"] / times["AEASGD"]) < 1
