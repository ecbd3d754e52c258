"""The notebook of the examples as it is stored: its chapters, their order, and outputs of one whole run.

tests/spark/test_notebook.py runs it.
"""

import base64
import json
import pathlib
import re

import pytest

NOTEBOOK = json.loads((pathlib.Path(__file__).parents[1] / "examples" / "spark_higgs.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
TEXT = "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
OUTPUTS = [output for cell in CODE for output in cell["outputs"]]
PRINTED = "".join("".join(output.get("text", "")) for output in OUTPUTS)


def test_the_chapters_are_in_the_order_of_the_workflow():
    assert re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE) == [
        "Introduction",
        "Settings",
        "Spark session",
        "Preparation of the events",
        "Model",
        "Worker optimizer and loss",
        "Training",
        "Evaluation",
        "SingleTrainer",
        "EASGD",
        "Asynchronous EASGD",
        "Asynchronous EAMSGD",
        "DOWNPOUR",
        "Results",
        "Conclusion",
        "References",
    ]
    links = re.findall(r"^- \[(.*)\]\(#(.*)\)$", TEXT, re.MULTILINE)
    assert [target.replace("-", " ") for _, target in links] == [title for title, _ in links]
    assert all(f"\n## {title}\n" in TEXT for title, _ in links)


def test_it_was_executed_once_from_the_first_cell_to_the_last_without_errors():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    assert not [output for output in OUTPUTS if output["output_type"] == "error"]
    assert "|-- DER_mass_MMC: double" in PRINTED
    assert not re.search(r"/(tmp|home|root|work)/", json.dumps(NOTEBOOK))


def test_the_stored_results_are_whole():
    names = ["SingleTrainer", "EASGD", "AEASGD", "EAMSGD", "DOWNPOUR"]
    times = dict(re.findall(r"Time spent \((\w+)\): ([\d.]+) seconds", PRINTED))
    assert list(times) == names
    assert [name for name, _ in re.findall(r"F1 \((\w+)\): (0\.\d+)", PRINTED)] == names
    assert "Number of parallel workers: 2" in PRINTED
    improvement = float(re.search(r"Improvement using AEASGD: ([\d.]+) %", PRINTED)[1])
    assert improvement == pytest.approx(100 * float(times["SingleTrainer"]) / float(times["AEASGD"]), abs=1)
    images = [output["data"]["image/png"] for output in OUTPUTS if "image/png" in output.get("data", {})]
    assert [base64.b64decode(image)[:4] for image in images] == [b"\x89PNG"] * 2
