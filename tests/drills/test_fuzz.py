"""A few thousand of the inputs that ``drills/fuzz.py`` draws by the million."""

import json
import pathlib
import subprocess
import sys

DRILLS = pathlib.Path(__file__).parents[2] / "drills"


def test_every_parser_takes_or_refuses_what_comes():
    done = subprocess.run(
        [sys.executable, DRILLS / "fuzz.py", "--inputs", "3000"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["inputs"] >= 2900
    assert {
        "frames",
        "guests",
        "doors",
        "messages",
        "objects",
        "hostfile",
        "nodelists",
        "csv",
        "commands",
        "checkpoint",
    } <= set(output["parsers"])
    for name, result in output["parsers"].items():
        assert name in ("guests", "messages") or result["refused"], f"{name} took everything"


BAD = """
import sys
sys.path.insert(0, sys.argv[1])
from fuzz import fuzz
from targets import Target

fuzz("bad", Target(lambda data: 1 // (b"q" not in data), (b"abcq",)), 500, 0)
"""


def test_an_error_without_a_name_is_found():
    done = subprocess.run([sys.executable, "-c", BAD, DRILLS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
