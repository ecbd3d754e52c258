"""A few of the drills that ``make drills`` makes many of."""

import json
import os
import pathlib
import subprocess
import sys

DRILLS = pathlib.Path(__file__).parents[2] / "drills" / "run.py"
CHOSEN = (1, 5, 7)  # of the seed: DiLoCo loses a worker, one of AllReduce raises, one of DOWNPOUR raises


def test_a_few_drills_come_right():
    command = [sys.executable, str(DRILLS), "--backend", os.environ["KERAS_BACKEND"], "--seed", "1", "--only"]
    done = subprocess.run([*command, *map(str, CHOSEN)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["drills"] == facts["restarts"] == len(CHOSEN)
    assert facts["wrong"] == []
