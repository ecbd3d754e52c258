"""The demo's data: what the readers give, and what each broken file is told."""

import dataclasses
import gzip
import pathlib
import sys

import numpy as np
import pytest

from choros.errors import InvalidDataError
from choros.tools.demo.datasets.common import standardise, stratified
from choros.tools.demo.datasets.digits import load_digits
from choros.tools.demo.datasets.higgs import FEATURES, load_higgs

COLUMNS = ["EventId", *FEATURES, "Weight", "Label", "KaggleSet", "KaggleWeight"]
REAL = pathlib.Path(__file__).parents[2].parent / "shared" / "data" / "atlas_higgs.csv.gz"


def _rows(n=20):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(n, 30)).round(3)
    values[::4, 0] = -999.0
    return [[str(i), *map(str, values[i]), "0.5", "sb"[i % 2], "t", "0.1"] for i in range(n)], values


def _text(rows, columns=COLUMNS):
    return "\n".join(",".join(row) for row in [columns, *rows]) + "\n"


def _write(tmp_path, text, name="higgs.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def _all_equal(a, b):
    for field in dataclasses.fields(a):
        first, other = getattr(a, field.name), getattr(b, field.name)
        assert np.array_equal(first, other), field.name


def test_features_are_standardised_on_the_training_part_and_missing_is_the_mean(tmp_path):
    rows, values = _rows()
    data = load_higgs(_write(tmp_path, _text(rows)))
    assert (data.name, data.classes, data.features) == ("higgs", 2, FEATURES)
    assert (data.x_train.dtype, data.y_train.dtype) == (np.float32, np.int32)
    assert (data.x_train.shape, data.x_test.shape) == ((14, 30), (6, 30))
    y = np.array([1, 0] * 10)
    train, test = stratified(y, 0.7, 0)
    assert data.y_train.tolist() == y[train].tolist()
    assert data.y_test.tolist() == y[test].tolist()
    values[values == -999.0] = np.nan
    mean, deviation = np.nanmean(values[train], 0), np.nanstd(values[train], 0)
    for part, x in ((train, data.x_train), (test, data.x_test)):
        np.testing.assert_allclose(x, np.nan_to_num((values[part] - mean) / deviation), atol=1e-6)
    assert (data.x_train[np.isnan(values[train])] == 0).all()


def test_the_split_is_fixed_and_its_seed_changes_it(tmp_path):
    path = _write(tmp_path, _text(_rows()[0]))
    _all_equal(load_higgs(path), load_higgs(path))
    assert not np.array_equal(load_higgs(path).x_train, load_higgs(path, seed=1).x_train)


def test_gzip_other_orders_of_columns_quotes_and_blank_lines_change_nothing(tmp_path):
    rows, _ = _rows()
    plain = load_higgs(_write(tmp_path, _text(rows)))
    zipped = tmp_path / "higgs.data"  # told by content, not by name
    zipped.write_bytes(gzip.compress(_text(rows).encode()))
    _all_equal(plain, load_higgs(zipped))
    turned = _write(tmp_path, _text([row[::-1] for row in rows], COLUMNS[::-1]), "turned.csv")
    _all_equal(plain, load_higgs(str(turned)))
    quoted = [[f'"{value}"' for value in row] for row in rows]
    windows = "\ufeff" + _text(quoted).replace("\n", "\r\n\r\n")
    _all_equal(plain, load_higgs(_write(tmp_path, windows, "windows.csv")))
    fewer = [[row[0], *row[1:31], row[32]] for row in rows]
    _all_equal(plain, load_higgs(_write(tmp_path, _text(fewer, [*COLUMNS[:31], "Label"]), "kaggle.csv")))


def _changed(row, column, value):
    rows, _ = _rows()
    rows[row][COLUMNS.index(column)] = value
    return _text(rows)


BROKEN = {
    "empty": ("", "is empty"),
    "header only": (_text([]), "has a header and no rows"),
    "no header": (
        _text(_rows()[0]).split("\n", 1)[1],
        r"lacks the columns DER_mass_MMC, .* and 23 more; it has 35: 0,",
    ),
    "one column less": (
        _text([], [c for c in COLUMNS if c != "PRI_met"]),
        r"lacks the column PRI_met; it has 34: EventId, DER_mass_MMC, .* and 26 more\. Give the CSV",
    ),
    "no label": (_text([], COLUMNS[:31]), "lacks the column Label"),
    "text": (_changed(6, "PRI_met", "high"), r"row 7 \(line 8\), column PRI_met: 'high' is not a number"),
    "nothing": (_changed(0, "DER_mass_vis", ""), r"row 1 \(line 2\), column DER_mass_vis: '' is not a number"),
    "nan": (_changed(3, "DER_pt_h", "nan"), r"row 4 \(line 5\), column DER_pt_h: 'nan' is not a number"),
    "infinite": (_changed(3, "DER_pt_h", "1e99"), r"row 4 \(line 5\), column DER_pt_h: '1e99' is not a number"),
    "label": (_changed(19, "Label", "x"), r"row 20 \(line 21\), column Label: 'x' is neither s nor b"),
    "no label there": (_changed(2, "Label", ""), r"row 3 \(line 4\), column Label: '' is neither s nor b"),
    "cut": (_text(_rows()[0])[:-100], r"row 20 \(line 21\) has \d+ columns and the header 35: is the file truncated"),
    "one label": (_text([row for row in _rows()[0] if "s" in row]), "of one label only"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_broken_file_is_told_where(tmp_path, text, message, zipped):
    path = tmp_path / "higgs.csv"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    with pytest.raises(InvalidDataError, match=message) as caught:
        load_higgs(path)
    assert "higgs.csv" in str(caught.value)


def test_files_that_are_no_csv(tmp_path):
    with pytest.raises(InvalidDataError, match=r"none.csv does not exist: give the path"):
        load_higgs(tmp_path / "none.csv")
    with pytest.raises(InvalidDataError, match="is a folder"):
        load_higgs(tmp_path)
    binary = tmp_path / "x.npz"
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(InvalidDataError, match="is not text"):
        load_higgs(binary)
    complete = gzip.compress(_text(_rows(2000)[0]).encode())
    for length in (5, 2000, len(complete) // 2, len(complete) - 4):
        cut = tmp_path / "cut.csv.gz"
        cut.write_bytes(complete[:length])
        with pytest.raises(
            InvalidDataError, match=r"cut.csv.gz is a truncated or damaged gzip file .*: fetch it again"
        ):
            load_higgs(cut)
    damaged = bytearray(complete)
    damaged[len(complete) // 2] ^= 255
    cut.write_bytes(damaged)
    with pytest.raises(
        InvalidDataError, match=r"truncated or damaged|is not a number|is not text|columns and the header"
    ):
        load_higgs(cut)


@pytest.mark.skipif(not REAL.exists(), reason="the ATLAS sample (shared/data beside the repository) is not here")
def test_the_real_sample():
    data = load_higgs(REAL)
    assert (data.x_train.shape, data.x_test.shape) == ((6998, 30), (3000, 30))
    assert data.y_train.sum() == data.y_train.size - data.y_train.sum() == 3499
    assert np.isfinite(data.x_train).all()
    np.testing.assert_allclose(data.x_train.mean(0, dtype="f8"), 0, atol=1e-5)
    assert (data.x_train.std(0, dtype="f8") <= 1 + 1e-5).all()
    assert abs(data.x_test.mean()) < 0.05


def test_digits():
    data = load_digits()
    assert (data.name, data.classes, len(data.features)) == ("digits", 10, 64)
    assert len(data.y_train) + len(data.y_test) == 1797
    assert data.x_train.dtype == np.float32
    share = np.bincount(data.y_train) / (np.bincount(data.y_train) + np.bincount(data.y_test))
    assert abs(share - 0.7).max() < 0.004
    deviations = data.x_train.std(0, dtype="f8")
    assert (np.isclose(deviations, 1, atol=1e-4) | (deviations == 0)).all()
    _all_equal(data, load_digits())


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InvalidDataError, match=r"pip install 'choros\[demo\]'"):
        load_digits()


def test_standardise_constant_and_missing_columns():
    train = np.array([[5.0, np.nan, 0.1], [5.0, np.nan, 0.1], [np.nan, np.nan, 0.1]])
    test = np.array([[7.0, 2.0, np.nan]])
    standardise(train, test)
    assert train.tolist() == [[0.0] * 3] * 3
    assert test.tolist() == [[0.0] * 3]


def test_stratified():
    y = np.array([0] * 10 + [1] * 3 + [2])
    train, test = stratified(y, 0.7, 4)
    assert sorted([*train, *test]) == list(range(14))
    assert np.bincount(y[train]).tolist() == [7, 2, 1]
