"""``shard`` of what is read in order: files, streams, data sets; against one process."""

import subprocess
import sys

import numpy as np
import pytest

import choros
from choros.errors import InvalidInputError

SCRIPT = """
import pathlib
import choros

rng = np.random.default_rng(0)
x = rng.normal(size=(61, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
path = pathlib.Path(os.environ["SAID"]) / f"rows{rank}.csv"
lines = [",".join(map(repr, [*map(float, row), int(label)])) for row, label in zip(x, y, strict=True)]
path.write_text("a,b,c,d,label" + chr(10) + chr(10).join(lines) + chr(10))
batches = [(x[top : top + 12], y[top : top + 12]) for top in range(0, 61, 12)]


class Own(keras.utils.PyDataset):
    def __len__(self):
        return len(batches)

    def __getitem__(self, index):
        return batches[index]


class Again:
    def __iter__(self):
        return iter(batches)


class Loader(Again):
    def __len__(self):
        return len(batches)


kinds = {
    "files": lambda: {"x": choros.files(path, y="label")},
    "prefetch": lambda: {"x": choros.prefetch((x, y)), "shuffle": False},
    "own": lambda: {"x": Own()},
    "stream": lambda: {"x": Again(), "steps": 6},
    "once": lambda: {"x": iter(batches * 3), "steps": 6},
    "loader": lambda: {"x": Loader()},
    "ahead": lambda: {"x": choros.prefetch(iter(batches * 3)), "steps": 6},
}


def trained(optimizer, data):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(data, epochs=2, verbose=0, shuffle=False, steps_per_epoch=None if hasattr(data, "num_batches") else 6)
    return model.get_weights()


for kind, data in kinds.items():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    mine = trained(optimizer, hvd.shard(**data(), per_rank_batch_size=6, seed=3))
    alone = choros.Place()
    own = (batch for batch in batches * 3)  # what is no shard at all
    if kind in ("files", "prefetch", "own"):
        own = choros.shard(**data(), global_batch_size=6 * size, seed=3, place=alone)
    whole = trained(keras.optimizers.Adam(0.01), own)
    said[kind] = float(max(np.abs(a - b).max() for a, b in zip(mine, whole, strict=True)))
for kind in ("files", "own"):
    held = hvd.shard(**kinds[kind](), per_rank_batch_size=6, training=False)
    said[kind + " held"] = [len(part) for _, part in (held[i] for i in range(len(held)))]
held = hvd.shard(iter(batches * 3), per_rank_batch_size=6, training=False, steps=6)
said["again held"] = []
for _ in range(3):
    said["again held"].append(sorted(float(value) for i in range(len(held)) for value in held[i][0][:, 0]))
    held.on_epoch_end()
said["rows"] = sorted(map(float, x[:, 0]))
"""


def test_ranks_train_as_one_process_does(run):
    both = run(2, SCRIPT)
    for result in both:
        assert max(result[kind] for kind in ("files", "prefetch", "own", "stream", "once", "loader", "ahead")) < 1e-6, (
            result
        )
    for passes in zip(*(result["again held"] for result in both), strict=True):
        assert sorted(sum(passes, [])) == both[0]["rows"]  # noqa: RUF017
    for kind in ("files", "own"):
        assert sum(map(sum, (result[f"{kind} held"] for result in both))) == 61
        assert min(map(min, (result[f"{kind} held"] for result in both))) > 0


def test_a_batch_of_fewer_rows_than_ranks_leaves_the_last_ranks_without(tmp_path):
    (tmp_path / "a.csv").write_text("u,label\n" + "".join(f"{i},0\n" for i in range(7)))
    results = []
    for rank in range(3):
        data = choros.files(tmp_path / "a.csv", y="label")
        results.append(choros.shard(data, global_batch_size=6, shuffle=False, place=choros.Place(rank=rank, size=3)))
    assert [[len(batch[0]) for batch in (result[0], result[1])] for result in results] == [[2, 1], [2, 0], [2, 0]]
    assert results[2][1][0].shape == (0, 1)


def test_epochs_have_orders_of_their_own_and_first_batches_can_be_asked_for_again(tmp_path):
    (tmp_path / "a.csv").write_text("u,label\n" + "".join(f"{i},0\n" for i in range(40)))
    values = choros.shard(choros.files(tmp_path / "a.csv", y="label"), global_batch_size=8, seed=2)
    first = [values[i][0].ravel().tolist() for i in (0, 1, 0, 1, 2, 3, 4)]
    assert first[:2] == first[2:4]
    assert sorted(row for batch in first[2:] for row in batch) == list(range(40))
    values.on_epoch_end()
    second = [values[i][0].ravel().tolist() for i in range(5)]
    assert sorted(row for batch in second for row in batch) == list(range(40))
    assert second != first[2:]


def test_a_fit_begins_with_the_first_batch_and_goes_on_where_the_last_ended():
    """Keras looks at batches before it trains, and begins anew; arrays keep the order of (seed, epoch) too."""
    import keras

    def made():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p * y)  # adds up what it saw, weighed by y
        return model

    for value in (lambda data: data, choros.prefetch):
        stream = ((np.full((1, 1), 1.0), np.full((1, 1), 10.0**i)) for i in range(12))
        data, model = choros.shard(value(stream), steps=2, place=choros.Place()), made()
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        model.fit(data, epochs=1, shuffle=False, verbose=0)
        assert round(float(np.asarray(model.get_weights()[0]).item())) == 111111
    x = np.arange(6.0)[:, None]
    first, fitted = (choros.shard(x, 10.0**x, global_batch_size=6, seed=4, place=choros.Place()) for _ in range(2))
    made().fit(fitted, epochs=1, shuffle=False, verbose=0)
    first.on_epoch_end()
    np.testing.assert_array_equal(first[0][0], fitted[0][0])


def test_data_at_the_top_of_a_script_end_quietly(tmp_path):
    (tmp_path / "a.csv").write_text("u,label\n" + "".join(f"{i},0\n" for i in range(40)))
    script = f"""
import choros
data = choros.files({str(tmp_path / "a.csv")!r}, y="label")
half = choros.shard(data, global_batch_size=8)
half[0]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert "Exception" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: give a whole number, 2 or more as there are 2 ranks"),
        ({"global_batch_size": 1, "training": False}, "global_batch_size=1: give a whole number, 2 or more"),
        ({"global_batch_size": 2.5}, "global_batch_size=2.5: give a whole number"),
        ({"global_batch_size": None}, "global_batch_size=None: give a whole number"),
        ({"batch_size": 4}, r"choros.shard\(\) has no batch_size=: give global_batch_size= \(rows of all ranks"),
        ({"per_rank_batch_size": 4}, "has no per_rank_batch_size=: give global_batch_size="),
        ({"steps": -3}, "steps=-3: give a whole number, 1 or more"),
        ({"seed": -1}, "seed=-1: give a whole number, 0 or more"),
    ],
)
def test_numbers_that_make_no_sense(values, message):
    with pytest.raises(InvalidInputError, match=message):
        choros.shard(np.ones(8), place=choros.Place(rank=1, size=2), **values)


def test_keywords_that_do_not_exist():
    with pytest.raises(TypeError, match="unexpected keyword argument 'sead'"):
        choros.shard(np.ones(8), sead=1, place=choros.Place())
    with pytest.raises(TypeError, match="unexpected keyword argument 'place'"):
        choros.hvd.shard(np.ones(8), place=choros.Place())
    with pytest.raises(InvalidInputError, match=r"hvd.shard\(\) has no batch_size=: give per_rank_batch_size= "):
        choros.hvd.shard(np.ones(8), batch_size=4)


def test_validation_is_not_augmented():
    data = choros.prefetch(np.ones((10, 1)), 2, lambda x: x * 100)
    held = choros.shard(data, global_batch_size=4, training=False, place=choros.Place(rank=1, size=2))
    assert held[0][0].ravel().tolist() == [1, 1]


def test_what_cannot_be_divided():
    two = choros.Place(rank=1, size=2)
    with pytest.raises(InvalidInputError, match="give steps, the global batches"):
        choros.shard(iter([(np.ones(4),)]), place=two)
    with pytest.raises(InvalidInputError, match="steps is for data of unknown length"):
        choros.shard(np.ones(4), steps=3, place=two)
    with pytest.raises(InvalidInputError, match="Rank 1 of 2 would have no batch"):
        choros.shard(iter([(np.ones(4),)]), steps=1, training=False, place=two)
    data = choros.shard(iter([(np.ones(4),)] * 3), steps=3, place=two)
    with pytest.raises(InvalidInputError, match="Batch 2 was asked for after batch -1: give fit shuffle=False"):
        data[2]


def test_the_text_of_a_shard_has_its_rank_and_batches():
    shard = choros.shard(np.zeros((10, 2)), global_batch_size=4)
    assert repr(shard) == "<rows of rank 0 of 1 for training: 3 batches, global batches of 4>"
    assert "depth=3" in repr(choros.prefetch(np.zeros(4), depth=3))
