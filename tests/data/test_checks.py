"""Data that do not fit together are refused in one sentence with its remedy."""

import numpy as np
import pytest

from choros.data.validation import check, split, unpack
from choros.errors import InvalidDataError

X, Y, W = np.zeros((6, 2)), np.zeros(6), np.ones(6)

GOOD = [
    ((X,), {}),
    ((X, Y), {"batch_size": 1}),
    ((X, Y, W), {"batch_size": np.int64(4)}),
    ((X, Y, W[:, None]), {}),
    ((X, Y[:, None], W), {}),
    ((X, np.zeros((6, 4, 3)), np.zeros((6, 4))), {}),
    ((X, {"a": Y, "b": Y}, {"a": W, "b": None}), {}),
    ((X, [Y, Y], W), {"steps": 3, "validation_split": 0.5}),
    (({"p": X, "q": [X, None]}, Y), {"validation_split": 0}),
]

BAD = [
    ((X, Y[:4]), {}, "x has 6 rows and y has 4: give arrays with the same number of rows"),
    (({"a": X, "b": X[:5]}, Y), {}, r"x\['a'\] has 6 rows and x\['b'\] has 5"),
    ((X, [Y, Y[:3]]), {}, r"x has 6 rows and y\[1\] has 3"),
    ((X, Y, W[:5]), {}, "x has 6 rows and sample_weight has 5"),
    ((X[:0], Y[:0]), {}, "x has no rows"),
    ((X, None, W), {}, "sample_weight was given without y"),
    ((X, Y, np.ones((6, 3))), {}, r"shape \(6, 3\) does not go with y of shape \(6,\)"),
    ((X, np.zeros((6, 4, 3)), np.ones((6, 5))), {}, r"\(6, 5\) does not go with y of shape \(6, 4, 3\)"),
    ((X, [Y, Y], np.ones((6, 2))), {}, "cannot be used for several outputs"),
    ((X, {"a": Y, "b": Y}, {"a": W}), {}, "nested differently from y"),
    ((X, Y, [W]), {}, "nested differently from y"),
    ((X, Y), {"batch_size": 0}, "batch_size=0: give a whole number"),
    ((X, Y), {"batch_size": 2.5}, "batch_size=2.5"),
    ((X, Y), {"batch_size": True}, "batch_size=True"),
    ((X, Y), {"batch_size": "8"}, "batch_size='8'"),
    ((X, Y), {"steps": 0}, "steps_per_epoch=0"),
    ((X, Y), {"validation_split": 1.0}, "validation_split=1.0: give a fraction"),
    ((X, Y), {"validation_split": -0.1}, "validation_split=-0.1"),
    ((X, Y), {"validation_split": float("nan")}, "validation_split=nan"),
    ((X, Y), {"validation_split": "half"}, "validation_split='half'"),
]


@pytest.mark.parametrize(("data", "settings"), GOOD)
def test_what_fits_passes(data, settings):
    assert check(*data, **settings) is None


@pytest.mark.parametrize(("data", "settings", "message"), BAD)
def test_what_does_not_fit_is_refused(data, settings, message):
    with pytest.raises(InvalidDataError, match=message) as caught:
        check(*data, **settings)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("rows", [2, 5, 10, 99, 1000])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.999])
def test_split_equals_keras_own(rows, fraction):
    from keras.src.trainers.data_adapters.array_slicing import train_validation_split

    x, y, w = {"a": np.arange(rows)}, np.arange(rows) * 2, np.arange(rows) * 3
    try:
        expected = train_validation_split((x, y, w), fraction)
    except ValueError:
        with pytest.raises(InvalidDataError, match="without any"):
            split(x, y, w, fraction)
        return
    for ours, other in zip(split(x, y, w, fraction), expected, strict=True):
        np.testing.assert_array_equal(ours[0]["a"], other[0]["a"])
        np.testing.assert_array_equal(ours[1], other[1])
        np.testing.assert_array_equal(ours[2], other[2])


def test_split_without_targets_and_with_a_bad_fraction():
    train, valid = split(X, None, None, 0.5)
    assert (len(train[0]), len(valid[0])) == (3, 3)
    assert train[1] is valid[2] is None
    with pytest.raises(InvalidDataError, match="validation_split=1"):
        split(X, Y, None, 1)


def test_unpack():
    assert unpack((1, 2)) == (1, 2, None)
    assert unpack([1, 2, 3]) == (1, 2, 3)
    assert unpack((1,)) == (1, None, None)
    for wrong in (X, {"x": X}, (), (1, 2, 3, 4)):
        with pytest.raises(InvalidDataError, match=r"give \(x, y\)"):
            unpack(wrong)
