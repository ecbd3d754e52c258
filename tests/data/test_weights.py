"""Class weights are Keras' own."""

import numpy as np
import pytest

from choros.data import make_source
from choros.data.class_weights import class_weights
from choros.errors import InvalidDataError

TABLE = {0: 0.5, 2: 4.0, np.int64(3): 7}
Y = np.random.default_rng(0).integers(0, 6, 50)
ONE_HOT = np.eye(6, dtype="float32")[Y]
LABELS = [Y, Y.astype("float32"), Y[:, None], ONE_HOT, Y.astype("uint8"), Y + 0.3, Y[:, None] - 0.2, Y > 2]


@pytest.mark.parametrize("y", LABELS)
@pytest.mark.parametrize("table", [TABLE, {}, {0: 2, 1: 3.0}])
def test_equal_to_keras_own_function(y, table):
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    expected = class_weight_to_sample_weights(y, table)
    ours = class_weights(y, table)
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours, expected)


def test_classes_that_are_not_named_weigh_one():
    source = make_source(np.zeros(3), np.array([0, 9, 2]), class_weight=TABLE)
    assert source.sample_weight.tolist() == [0.5, 1.0, 4.0]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_class_and_sample_weights_are_multiplied(shape):
    weight = np.array([1.0, 2.0, 3.0]).reshape(shape)
    source = make_source(np.zeros(3), np.array([0, 9, 2]), weight, class_weight=TABLE)
    np.testing.assert_array_equal(source.sample_weight, np.float32([0.5, 2.0, 12.0]).reshape(shape))


@pytest.mark.parametrize(
    ("y", "table", "message"),
    [
        ({"a": Y}, TABLE, "single output"),
        ([Y, Y], TABLE, "single output"),
        (None, TABLE, "without y"),
        (Y, [1.0, 2.0], "is of type list: give a dict"),
        (Y, {"cat": 1.0}, "the key 'cat'"),
        (Y, {0: "heavy"}, "'heavy': give a finite number"),
        (Y, {0: float("nan")}, "nan: give a finite number"),
        (np.zeros((50, 4, 3)), TABLE, "one class for each row"),
    ],
)
def test_what_cannot_work_is_refused(y, table, message):
    with pytest.raises(InvalidDataError, match=message):
        make_source(np.zeros(50), y, class_weight=table)
