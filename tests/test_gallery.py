"""Each script of the gallery runs, draws a picture that is not empty, and leaves no file."""

import os
import pathlib
import subprocess
import sys

import pytest

GALLERY = pathlib.Path(__file__).parents[1] / "examples" / "gallery"
SCRIPTS = sorted(GALLERY.glob("plot_*.py"))
PICTURES = """

for number in plt.get_fignums():
    for axes in plt.figure(number).axes:
        print("drawn:", len(axes.lines) + len(axes.patches) + len(axes.collections))
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_draws_its_picture(script, tmp_path):
    pytest.importorskip("matplotlib", reason="the gallery needs matplotlib: pip install 'choros[demo]'")
    pytest.importorskip("sklearn", reason="the gallery trains on scikit-learn's digits: pip install 'choros[demo]'")
    copy = tmp_path / script.name
    copy.write_text(script.read_text() + PICTURES)
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, copy.name],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = [int(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("drawn:")]
    assert drawn
    assert min(drawn) > 0
    assert [path.name for path in tmp_path.iterdir()] == [script.name]


def test_the_index_lists_each_script():
    index = (GALLERY.parent / "README.md").read_text()
    assert [path.name for path in SCRIPTS if f"](gallery/{path.name})" not in index] == []
    assert len(SCRIPTS) >= 4
