"""Blocks of Python in the documentation run as they stand, those of a page one after the other.

A comment before a block that cannot run here gives the reason: ``<!-- not run: needs Spark -->``. The first block of
README runs by tests/test_docs.py. Notebooks (with ``code-cell``) run when the site is built.
"""

import importlib.util
import pathlib
import re

import keras
import numpy as np
import pytest

import choros

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): blocks
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if (blocks := [match for match in BLOCK.finditer(path.read_text()) if not match[1]])
}


def make_model(units=8):
    """Return a compiled model; the blocks call it too."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def pools():
    """One pool for each number of workers, for all blocks."""
    made = {}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def names(pools, monkeypatch, tmp_path):
    """Return the names that blocks use: data, a model, and a Trainer with the workers of a shared pool."""
    trainer = choros.Trainer

    def shared(model, algorithm="allreduce", workers=None, **options):
        if workers is None or options.get("pool"):
            return trainer(model, algorithm, workers, **options)
        pool = pools.setdefault(workers, choros.WorkerPool(workers, echo=False))
        return trainer(model, algorithm, pool=pool, **options)

    monkeypatch.setattr(choros, "Trainer", shared, raising=False)
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    return {
        "__name__": "page",
        **{"choros": choros, "keras": keras, "make_model": make_model, "model": make_model()},
        **{"x": x, "y": x.sum(axis=1, keepdims=True), "xv": x, "yv": x.sum(axis=1, keepdims=True)},
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, names):
    for block in PAGES[page]:
        line = block.string[: block.start(2)].count("\n")
        exec(compile("\n" * line + block[2], str(ROOT / "docs" / page), "exec"), names)  # with the lines of the page


@pytest.mark.parametrize("needed", ["uproot", "datasets"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_data_of_another_library_train(needed, names):
    library = pytest.importorskip(needed)
    page = ROOT / "docs" / "how-to" / "data.md"
    (block,) = [match[2] for match in BLOCK.finditer(page.read_text()) if match[1] == f"needs {needed}"]
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    columns = {"pt": x[:, 0], "eta": x[:, 1], "label": x.sum(axis=1)}
    if needed == "uproot":
        with library.recreate("events.root") as file:
            file["events"] = columns
    else:
        pytest.importorskip("pyarrow")
        names["dataset"] = library.Dataset.from_dict({"x": x, "label": columns["label"]})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    names["trainer"] = choros.Trainer(model, workers=2)
    exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize(("needed", "module"), [("KerasTuner", "keras_tuner"), ("Optuna", "optuna")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_tuner_runs_the_fits_of_the_page(needed, module, names, capsys):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    page = ROOT / "docs" / "how-to" / "trackers-and-tuners.md"
    (block,) = [match[2] for match in BLOCK.finditer(page.read_text()) if match[1] == f"needs {needed}"]
    exec(compile(block, str(page), "exec"), names)
    assert re.search(r"\{'units': \d+\}", capsys.readouterr().out)


def test_a_block_that_does_not_run_is_found():
    not_run = "<!-- not run: needs a cluster -->\n```python\na\n```\n\n"
    text = f"{not_run}```python\nb\n```\n{not_run}"
    results = [("needs a cluster", "a\n"), (None, "b\n"), ("needs a cluster", "a\n")]
    assert [(match[1], match[2]) for match in BLOCK.finditer(text)] == results
    assert len(PAGES) > 4
