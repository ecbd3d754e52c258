"""Law 1 on shrunk models of keras.io's families: what plain fit does, or a refusal by name."""

import os

import keras
import pytest
from tests.zoo import models  # noqa: F401 - they enter themselves
from tests.zoo.__main__ import PAGE, page
from tests.zoo.table import BACKENDS, BATCH, TABLE

import choros

BACKEND = os.environ["KERAS_BACKEND"]


HALF = os.environ.get("ZOO_HALF")  # "0" or "1": of the long models, only every second one


def cells():
    for number, entry in enumerate(TABLE.values()):
        left_out = HALF is not None and not entry.fast and number % 2 != int(HALF)
        if entry.expected[BACKEND] != "-" and not left_out:
            yield pytest.param(entry, id=entry.name, marks=() if entry.fast else pytest.mark.long)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method")
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.filterwarnings("ignore:The metric 'n_loss' .Mean.")  # a mean of batches' means
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize("entry", list(cells()))
def test_it_is_plain_keras_or_refused_by_name(entry, pools, capsys):
    keras.utils.set_random_seed(4)
    model, x, y, weight = entry.make()
    options = {"class_weight": {0: 1.0, 1: 3.0}} if entry.name == "class-weights" else {}
    if entry.expected[BACKEND] == "library":
        with pytest.raises(RuntimeError, match="must be contiguous"):
            model.fit(x[:1], y[:1], verbose=0)
        return
    report = choros.check(
        model, x, y, weight, batch_size=BATCH, rows=10**6, resume=False, pool=pools(3), seed=3, **options
    )
    runs = {each.run: each for each in report.comparisons}
    if entry.expected[BACKEND] == "refused":
        for run in ("2 workers", "3 workers"):
            assert runs[run].verdict == "refused", str(report)
            assert runs[run].error == "InexactLossError", str(report)
        assert (runs["1 worker"].verdict, runs["1 worker"].error) == ("equal", ""), str(report)
    else:
        assert report.verdict == entry.expected[BACKEND], str(report)
        assert runs["1 worker"].verdict in ("equal", entry.expected[BACKEND]), str(report)


def test_the_zoo_is_large_and_little_of_it_is_refused():
    assert len(TABLE) >= 40
    for backend in BACKENDS:
        assert sum(entry.expected[backend] == "refused" for entry in TABLE.values()) <= len(TABLE) * 5 // 40
        assert sum(entry.fast for entry in TABLE.values()) >= 10


def test_the_page_is_what_the_table_says():
    assert PAGE.read_text() == page(), "write the page again: python -m tests.zoo"
