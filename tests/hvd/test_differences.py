"""Ranks that differ in what they give: every rank is told, and the next call works."""

import pytest

SCRIPT = """
def told(call):
    try:
        return numbers(call()) if call is not None else None
    except Exception as error:
        return f"{type(error).__name__}: {error}"

x = np.ones(2, "float32")
# calls without a name count alike again after a difference
said["unnamed"] = told(lambda: hvd.allgather(x) if rank else hvd.allreduce(x))
said["after"] = [told(lambda: hvd.allreduce(x, op=hvd.Sum)), told(lambda: hvd.allgather(x))]
said["object"] = told(lambda: hvd.broadcast_object(3) if rank else hvd.allreduce(x))
said["after object"] = hvd.broadcast_object(rank + 5, 1)

# lists of unequal lengths
variable = keras.Variable(np.full(2, float(rank)))
said["lists"] = [
    told(lambda: hvd.grouped_allreduce([x] * (1 + rank), name="pair")[0]),
    told(lambda: hvd.grouped_allreduce([x] * rank, name="pair")),
    told(lambda: hvd.broadcast_variables([variable] * (1 + rank), 0)),
]
said["variable"] = numbers(variable)
said["after lists"] = told(lambda: hvd.allreduce(x, op=hvd.Sum, name="next"))

# what is bad on one rank alone
bad = [
    lambda: hvd.allreduce(np.array([object()]) if rank else x, name="bad"),
    lambda: hvd.allreduce(None if rank else x, name="bad"),
    lambda: hvd.allreduce(x, op=17 if rank else None, name="bad"),
    lambda: hvd.allreduce(x, prescale_factor="a" if rank else 1.0, name="bad"),
    lambda: hvd.allreduce(x, compression="fp16" if rank else hvd.Compression.none, name="bad"),
    lambda: hvd.broadcast(x, "0" if rank else 0, name="bad"),
    lambda: hvd.alltoall(x, splits="ab" if rank else None, name="bad"),
    lambda: hvd.alltoall(x, splits=[float("inf")] * size if rank else None, name="bad"),
    lambda: hvd.alltoall(np.ones(3), splits=[1.5, 0.5, 1.0] if rank else None, name="bad"),
    lambda: hvd.broadcast(x, object() if rank else 0, name="bad"),
    lambda: hvd.broadcast(x, np.zeros(2, int) if rank else 0, name="bad"),
    lambda: hvd.allreduce(x, name=object() if rank else "bad"),
    lambda: hvd.grouped_allreduce(5 if rank else [x], name="bad"),
    lambda: hvd.broadcast_object(1, **({"foo": 1} if rank else {}), name="bad"),
    lambda: hvd.allgather_object(1, **({"root": 1} if rank else {}), name="bad"),
    lambda: hvd.broadcast_variables(*([[variable], 0, None, False, 1] if rank else [[variable], 0])),
]
said["bad"] = [told(call) for call in bad]
said["after bad"] = told(lambda: hvd.allreduce(x, op=hvd.Sum, name="next"))

# words
said["factors"] = told(lambda: hvd.allreduce(x, name="loss", prescale_factor=1.0 + rank))
pair = hvd.add_process_set([0, size - 1])
if rank in pair.ranks:
    said["root"] = told(lambda: hvd.broadcast(x, 7, process_set=pair))
    said["from the last"] = told(lambda: hvd.broadcast(x * rank, size - 1, process_set=pair))
hvd.remove_process_set(pair)

accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
said["accumulating"] = told(lambda: hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2))

# what other libraries call a number, and what can be gone through once
said["numbers"] = [
    told(lambda: hvd.broadcast(x * rank, np.int64(1))), hvd.broadcast_object(rank, np.argmax([0, 0, 1])),
    told(lambda: hvd.allreduce(x, prescale_factor=np.float32(0.5), op=hvd.Sum)),
    told(lambda: hvd.grouped_allreduce(one for one in (x, x))[1]),
]
said["set"] = told(lambda: hvd.allreduce(x, process_set="x"))
said["gone"] = told(lambda: hvd.synchronize), told(lambda: hvd.grouped_allreduce_)

# a model that one rank alone has made before
if rank == 1:
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
keras.utils.set_random_seed(2)
late = keras.Sequential([keras.Input((2,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)])
late.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
said["late"] = told(lambda: late.fit(np.ones((4, 2)), np.ones(4), verbose=0) and 1.0)

# averages of whole numbers do not wrap
said["averages"] = [
    told(lambda: hvd.allreduce(np.array([200], "uint8"))), told(lambda: hvd.allreduce(np.array([2**31 - 1], "int32")))
]
"""


def test_every_rank_is_told_and_the_next_call_works(run, backend):
    if backend != "jax":
        pytest.skip("what is compared is the same on every backend: once is enough")
    every = run(3, SCRIPT)
    for rank, result in enumerate(every):
        assert result["unnamed"].startswith("RankMismatchError")
        assert result["object"].startswith("RankMismatchError")
        assert result["after"] == [[3, 3], [1] * 6]
        assert result["after object"] == 6
        assert all(text.startswith("RankMismatchError") and "rank 2: " in text for text in result["lists"]), result[
            "lists"
        ]
        assert "'pair.0 of 1'" in result["lists"][0]
        assert "'pair.0 of 3'" in result["lists"][0]
        assert result["variable"] == [rank, rank]
        assert result["after lists"] == result["after bad"] == [3, 3]
        assert all("Error" in text or "Differ" in text or "InvalidInputError" in text for text in result["bad"]), (
            result["bad"]
        )
        if rank == 0:
            assert all(text.startswith("RankMismatchError") and "rank 1: " in text for text in result["bad"]), result[
                "bad"
            ]
        assert result["numbers"] == [[1, 1], 2, [1.5, 1.5], [1, 1]]
        assert "give a hvd.ProcessSet" in result["set"]
        assert "has no synchronize: nothing is needed, as every collective returns" in result["gone"][0]
        assert "use hvd.allreduce" in result["gone"][1]
        assert result["late"] == 1
        assert "prescale 2.0" in result["factors"]
        assert "give one of them" in result["accumulating"]
        assert result["averages"] == [[200], [2**31 - 1]]
    for result in (every[0], every[2]):
        assert "from rank 7 cannot be done" in result["root"]
        assert "root 7 is none of the ranks [0, 2]" in result["root"]
        assert result["from the last"] == [2, 2]


SYNCED = """
layers = keras.layers
rng = np.random.default_rng(0)
x = rng.normal(size=(rows, 6)).astype("float32")
y = rng.integers(0, 3, rows)

def make(norm):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5), norm(), layers.Dense(3, "softmax")])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer = optimizer if norm is layers.BatchNormalization else hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model

model, plain = make(hvd.SyncBatchNormalization), make(layers.BatchNormalization)
try:
    model.fit(hvd.shard(x, y, per_rank_batch_size=8, shuffle=False), epochs=2, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=8 * size, epochs=2, shuffle=False, verbose=0)
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    said["apart"] = float(max(np.abs(a - b).max() for a, b in pairs))
except Exception as error:
    said["error"] = str(error)
said["after"] = numbers(hvd.allreduce(np.ones(1), op=hvd.Sum, name="after"))
"""


def test_normalisation_over_all_ranks_trains_as_one_process_does_where_batches_are_unequal(run):
    for rows in (21, 31):  # batches of 8 and 8 rows, then of 3 and 2, or of 8 and 7: one rank has a new shape alone
        for result in run(2, f"rows = {rows}" + SYNCED):
            assert result["apart"] < 2e-6, result


def test_normalisation_over_all_ranks_says_that_every_rank_needs_a_row(run):
    for result in run(2, "rows = 17" + SYNCED):
        assert "give every rank a row" in result["error"]
        assert result["after"] == [2]
