"""``shard`` of what is read in order: files, streams, data sets; against one process."""

import numpy as np
import pytest

import choros
from choros.errors import BadInput

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


kinds = {
    "files": lambda: {"x": choros.files(path, y="label")},
    "prefetch": lambda: {"x": choros.prefetch((x, y)), "shuffle": False},
    "own": lambda: {"x": Own()},
    "stream": lambda: {"x": Again(), "steps": 6},
    "once": lambda: {"x": iter(batches * 3), "steps": 6},
}


def trained(optimizer, data):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


for kind, data in kinds.items():
    mine = trained(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), hvd.shard(**data(), batch_size=6, seed=3))
    alone = choros.Place()
    whole = trained(keras.optimizers.Adam(0.01), choros.shard(**data(), batch_size=6 * size, seed=3, place=alone))
    said[kind] = float(max(np.abs(a - b).max() for a, b in zip(mine, whole, strict=True)))
for kind in ("files", "own"):
    held = hvd.shard(**kinds[kind](), batch_size=6, training=False)
    said[kind + " held"] = [len(part) for _, part in (held[i] for i in range(len(held)))]
"""


def test_ranks_train_as_one_process_does(run):
    both = run(2, SCRIPT)
    for said in both:
        assert max(said[kind] for kind in ("files", "prefetch", "own", "stream", "once")) < 1e-6, said
    for kind in ("files", "own"):
        assert sum(map(sum, (said[f"{kind} held"] for said in both))) == 61
        assert min(map(min, (said[f"{kind} held"] for said in both))) > 0


def test_a_batch_of_fewer_rows_than_ranks_leaves_the_last_ranks_without(tmp_path):
    (tmp_path / "a.csv").write_text("u,label\n" + "".join(f"{i},0\n" for i in range(7)))
    found = []
    for rank in range(3):
        data = choros.files(tmp_path / "a.csv", y="label")
        found.append(choros.shard(data, batch_size=6, shuffle=False, place=choros.Place(rank=rank, size=3)))
    assert [[len(batch[0]) for batch in (own[0], own[1])] for own in found] == [[2, 1], [2, 0], [2, 0]]
    assert found[2][1][0].shape == (0, 1)


def test_epochs_have_orders_of_their_own_and_first_batches_can_be_asked_for_again(tmp_path):
    (tmp_path / "a.csv").write_text("u,label\n" + "".join(f"{i},0\n" for i in range(40)))
    own = choros.shard(choros.files(tmp_path / "a.csv", y="label"), batch_size=8, seed=2)
    first = [own[i][0].ravel().tolist() for i in (0, 1, 0, 1, 2, 3, 4)]
    assert first[:2] == first[2:4]
    assert sorted(row for batch in first[2:] for row in batch) == list(range(40))
    own.on_epoch_end()
    second = [own[i][0].ravel().tolist() for i in range(5)]
    assert sorted(row for batch in second for row in batch) == list(range(40))
    assert second != first[2:]


def test_what_cannot_be_divided():
    two = choros.Place(rank=1, size=2)
    with pytest.raises(BadInput, match="give steps, the global batches"):
        choros.shard(iter([(np.ones(4),)]), place=two)
    with pytest.raises(BadInput, match="steps is for data that do not tell"):
        choros.shard(np.ones(4), steps=3, place=two)
    with pytest.raises(BadInput, match="Rank 1 of 2 would have no batch"):
        choros.shard(iter([(np.ones(4),)]), steps=1, training=False, place=two)
    data = choros.shard(iter([(np.ones(4),)] * 3), steps=3, place=two)
    with pytest.raises(BadInput, match="Batch 2 was asked for after batch -1: give fit shuffle=False"):
        data[2]
