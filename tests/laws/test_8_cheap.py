"""Law 8: cheap. Ratios are measured by ``benchmarks/``, never here; here: each line of the table can be measured."""

import ast
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))
TABLE = ("one_worker", "allreduce_mlp", "allreduce_cnn", "aeasgd_mlp", "allreduce_shm", "center_shm", "against_fit")


def run(name, *arguments):
    command = [sys.executable, FOLDER / f"{name}.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ratios(node, name=""):
    """Every number of a result that is called a ratio, or a multiple of one memcpy."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from ratios(value, name if name in ("ratio", "ratios", "memcpys") else key)
    elif isinstance(node, list):
        for value in node:
            yield from ratios(value, name)
    elif name in ("ratio", "ratios", "memcpys") and isinstance(node, (int, float)):
        yield node


@pytest.mark.parametrize("name", TABLE)
def test_each_line_of_the_table_has_a_script_that_explains_itself(name):
    assert "usage" in run(name, "--help")


@pytest.mark.parametrize("name", ["allreduce_shm", "center_shm"])
def test_the_engine_prints_multiples_of_a_memcpy(name):
    results = list(ratios(json.loads(run(name, "--sizes", "2560", "--rounds", "20"))))
    assert results
    assert all(ratio > 0 for ratio in results)


@pytest.mark.long
def test_training_prints_ratios_against_plain_fit(backend):
    if backend != "jax":
        pytest.skip("a smoke run takes half a minute, and takes the same way on every backend: done on JAX")
    text = run("aeasgd_mlp", "--quick", "--backend", backend)
    results = list(ratios(json.loads(text[text.index("{") :])))
    assert results
    assert all(ratio > 0 for ratio in results)


@pytest.mark.long
def test_training_is_compared_with_plain_fit_on_all_cores(backend):
    if backend != "jax":
        pytest.skip("a smoke run takes a minute, and takes the same way on every backend: done on JAX")
    text = run("against_fit", "--quick", "--backend", backend, "--model", "mlp", "--algorithm", "allreduce,aeasgd")
    result = json.loads(text[text.index("{\n") :])["results"]
    assert [(each["model"], each["algorithm"]) for each in result] == [("MLP", "allreduce"), ("MLP", "aeasgd")]
    for each in result:
        assert each["rows_per_s"] / each["plain_rows_per_s"] == pytest.approx(each["ratio"], rel=0.01)
        assert each["ratio_with_startup"] > 0
        assert min(each["startup_s"], each["plain_startup_s"]) >= 0


@pytest.fixture
def against_fit(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("against_fit")


def test_the_table_against_plain_fit_replaces_the_one_in_a_page(against_fit):
    result = {"model": "CNN", "algorithm": "aeasgd", "backend": "torch", "ratio": 1.456, "ratio_with_startup": 0.9}
    result["ratios"] = [1.456]
    facts = {"date": "2026-11-26", "cores": 2, "processor": "AMD EPYC"}
    table = against_fit.table({"results": [result], "machine": facts})
    assert "| model, algorithm | PyTorch |\n|---|---|\n| CNN, AEASGD | 1.46 (0.90) |\n" in table
    notes = " ".join(table.splitlines()[4:])
    assert "CNN: Keras' network for CIFAR-10 (1,250,858 weights), global batch 64." in notes
    assert "MLP" not in notes  # it was not measured
    assert "A ratio above" not in notes
    assert notes.endswith("Measured in one round on 2026-11-26, 2 cores (AMD EPYC), no GPU.")
    many = {**result, "ratio": 2.5, "ratios": [2.4, 2.6], "rows_per_s": 3000, "plain_rows_per_s": 1200}
    table_of_many = against_fit.table({"results": [many], "machine": {**facts, "date": "2026-11-29"}})
    notes = " ".join(table_of_many.splitlines()[4:])
    assert "on PyTorch it trains 1,200 rows of the CNN a second, and one worker on one core 1,500." in notes
    assert "in 2 rounds on 2026-11-29, 2 cores (AMD EPYC), no GPU. The rounds of a ratio differ by 8% (median)" in notes
    page = f"before\n{against_fit.BEGIN}old\n{against_fit.END}after\n"
    changed = against_fit.with_table(page, table)
    assert changed == f"before\n{against_fit.BEGIN}{table}{against_fit.END}after\n"
    assert against_fit.with_table(changed, table) == changed
    with pytest.raises(SystemExit, match="begin: against_fit"):
        against_fit.with_table("no table", table)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_says_what_it_measures_and_asserts_no_time(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
