"""Collectives between real processes: values as Horovod records them, differences named on every rank, joining."""

import numpy as np
import pytest

from choros.comm.collectives import AVERAGE, MAX, MIN, PRODUCT, SUM, Collectives
from choros.comm.shm.group import SharedGroup
from choros.comm.single_rank_group import SingleRankGroup

HEAD = """
from choros.comm.collectives import *
from choros.errors import RankMismatchError
group = SharedGroup(fd, rank, timeout=20)
c = Collectives(group)

def told(call):
    try:
        call()
    except RankMismatchError as error:
        say(error=str(error))
"""


@pytest.fixture
def run(ranks):
    """Run a script on ``size`` ranks; return what each said."""

    def start(size, script):
        with SharedGroup.create(size, 1 << 16) as segment:
            return ranks.start(HEAD + script, segment, size).finish()

    return start


@pytest.mark.parametrize("size", [2, 3])
def test_reductions(run, size):
    """Each operation, on types wide and narrow, with what numpy says of the ranks' values."""
    script = """
values = np.random.default_rng(rank).uniform(0.5, 2, (3, 5))
for op in (AVERAGE, SUM, MIN, MAX, PRODUCT):
    for kind in ("float32", "float64", "float16", "int32", "int64", "uint8", "complex64"):
        if kind == "complex64" and op in (MIN, MAX):
            continue
        mine = (values * 10).astype(kind)
        kept = mine.copy()
        got = c.allreduce(mine, op, name=kind)
        assert got.dtype == mine.dtype and got.shape == mine.shape and (mine == kept).all()
        many = c.allreduce(np.tile(mine, (300, 1)), op, name="more than travels with its words")
        assert (many == np.tile(got, (300, 1))).all() and many.dtype == got.dtype
        say(op=int(op), kind=kind, mine=kept.astype(complex).real.tolist(), got=got.astype(complex).real.tolist())
"""
    results = run(size, script)
    functions = {SUM: np.sum, AVERAGE: np.mean, MIN: np.min, MAX: np.max, PRODUCT: np.prod}
    for lines in zip(*results, strict=True):
        kind = np.dtype(lines[0]["kind"])
        actual = np.array([line["mine"] for line in lines])
        if kind.kind in "iu":
            with np.errstate(over="ignore"):
                want = functions[lines[0]["op"]](actual, axis=0).astype("int64").astype(kind)
        else:
            want = functions[lines[0]["op"]](actual, axis=0)
        tolerance = 2e-3 if kind == "float16" else 1e-5
        for line in lines:
            assert line["got"] == lines[0]["got"]  # the same bits everywhere
            np.testing.assert_allclose(line["got"], want, rtol=tolerance)


def test_values_that_horovod_records(run):
    """Scaling of whole numbers cuts towards zero; an uneven first dimension; the first ranks get the rows left over."""
    script = """
whole = np.array([1, 3, 5])
say(pre=c.allreduce(whole, SUM, prescale=0.5).tolist(), post=c.allreduce(whole, SUM, postscale=0.5).tolist())
say(rows=c.allgather(np.full((rank, 2), rank)).tolist())
say(scattered=c.reducescatter(np.arange(5.0), SUM).tolist())
say(root=c.broadcast(np.full(2, rank + 7), root=1).tolist())
received, counts = c.alltoall(np.arange(4) + 10 * rank, splits=[1, 3] if rank == 0 else [4, 0])
say(received=received.tolist(), counts=counts.tolist(), kind=str(counts.dtype))
say(even=c.alltoall(np.arange(4) + 10 * rank)[0].tolist())
half = np.array([65504.0], "float16")
say(half=[c.allreduce(half, op).astype(float).tolist() for op in (AVERAGE, SUM)])
truth = np.array([rank == 0, not rank]), np.array([rank == 0, True])
say(any=c.allreduce(truth[0] & [True, False], SUM).tolist(), all=c.allreduce(truth[1], MIN).tolist())
say(number=float(c.allreduce(np.array(rank + 1.0))), empty=c.allreduce(np.zeros((0, 3))).shape)
"""
    first, second = run(2, script)
    assert first[0] == second[0] == {"pre": [0, 2, 4], "post": [1, 3, 5]}
    assert first[1]["rows"] == second[1]["rows"] == [[1, 1]]
    assert (first[2]["scattered"], second[2]["scattered"]) == ([0, 2, 4], [6, 8])
    assert first[3]["root"] == second[3]["root"] == [8, 8]
    assert first[4] == {"received": [0, 10, 11, 12, 13], "counts": [1, 4], "kind": "int32"}
    assert second[4] == {"received": [1, 2, 3], "counts": [3, 0], "kind": "int32"}
    assert (first[5]["even"], second[5]["even"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert first[6]["half"] == [[65504.0], [float("inf")]]  # a mean does not overflow, a sum that is too large does
    assert first[7] == second[7] == {"any": [True, False], "all": [False, True]}
    assert first[8] == {"number": 1.5, "empty": [0, 3]}


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_adasum(run, kind):
    """Four ranks in a tree of two levels, by the paper's formula; orthogonal vectors add, equal ones average."""
    script = f"""
import ml_dtypes
kind = np.dtype(getattr(ml_dtypes, {kind!r}, {kind!r}))
vectors = np.random.default_rng(3).normal(size=(4, 6)).astype(kind)
got = c.allreduce(vectors[rank], ADASUM)
say(got=got.astype(float).tolist(), kind=got.dtype.name, vectors=vectors.astype(float).tolist())
np.testing.assert_allclose(c.allreduce(np.tile(vectors[rank], 500), ADASUM)[:6].astype(float), got.astype(float), 1e-2)
one = np.eye(4)[rank]
say(apart=c.allreduce(one, ADASUM).tolist(), alike=c.allreduce(np.ones(3), ADASUM).tolist())
"""
    results = run(4, script)

    def pair(a, b):
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    vectors = np.array(results[0][0]["vectors"])
    want = pair(pair(vectors[0], vectors[1]), pair(vectors[2], vectors[3]))
    for lines in results:
        assert lines[0]["kind"] == kind
        np.testing.assert_allclose(lines[0]["got"], want, rtol=1e-2 if kind == "bfloat16" else 1e-6)
        np.testing.assert_allclose(lines[1]["apart"], np.ones(4))
        np.testing.assert_allclose(lines[1]["alike"], np.ones(3))


def test_differences_are_named_on_every_rank_and_the_next_call_works(run):
    script = """
x = np.zeros(3, "float32")
told(lambda: c.allreduce(np.zeros(3 + rank, "float32"), name="shape"))
told(lambda: c.allreduce(x.astype("float64") if rank else x, name="dtype"))
told(lambda: c.allreduce(x, SUM if rank else MAX, name="op"))
told(lambda: c.broadcast(x, root=rank, name="root"))
told(lambda: c.broadcast(x, root=5, name="far"))
told(lambda: c.allreduce(x, name=f"grad_{rank}"))
told(lambda: c.allgather(np.zeros((2, 3 + rank)), name="columns"))
told(lambda: c.allgather(np.array(1.0), name="scalar"))
told(lambda: c.alltoall(np.zeros(2), splits=[1, 1 + rank], name="splits"))
told(lambda: c.barrier() if rank else c.allgather(x))
told(lambda: c.broadcast_object({"a": lambda: 1} if rank == 0 else None, name="object"))
told(lambda: c.allreduce(np.array(["text"]), name="text"))
say(next=c.allreduce(np.full(2, rank + 1.0), SUM).tolist())
"""
    first, second = run(2, script)
    assert first == second  # the same words everywhere
    messages = [
        ("allreduce 'shape' of float32 (3,)", "(4,)"),
        ("float32", "float64"),
        ("by Max", "by Sum"),
        ("from rank 0", "from rank 1"),
        ("'far'", "root 5 is none of 2 ranks"),
        ("'grad_0'", "'grad_1'"),
        ("(any, 3)", "(any, 4)"),
        ("'scalar'", "a single number has no rows"),
        ("rank 1: splits=[1, 2]", "2 rows"),
        ("allgather", "barrier"),
        ("rank 0: the object['a'] is a builtins.function", "cannot be sent to other ranks"),
        ("values of <U4 cannot be reduced",),
    ]
    assert len(first) == len(messages) + 1
    for line, parts in zip(first, messages, strict=False):
        for part in parts:
            assert part in line["error"]
    assert first[-1] == {"next": [3.0, 3.0]}


def test_joining(run):
    """Ranks with less data join; a mean still divides by all; the last to come is told to all."""
    script = """
for turn in range(rank + 1):
    say(mean=c.allreduce(np.array([4.0]), name=f"step {turn}").tolist(), rows=len(c.allgather(np.zeros((2, 3)))))
    assert (c.allreduce(np.full(900, 4.0)) == c.allreduce(np.array([4.0]))).all()
say(last=c.join())
say(after=c.allreduce(np.array([1.0]), SUM).tolist())
"""
    results = run(3, script)
    assert [line["mean"] for line in results[2][:3]] == [[4.0], [8 / 3], [4 / 3]]
    assert [line["rows"] for line in results[2][:3]] == [6, 4, 2]
    for lines in results:
        assert lines[-2:] == [{"last": 2}, {"after": [3.0]}]


def test_what_has_no_meaning_after_a_join_is_refused(run):
    script = """
if rank == 0:
    say(last=c.join())
else:
    told(lambda: c.allreduce(np.ones(2), MAX, name="most"))
    told(lambda: c.broadcast(np.ones(2), root=0, name="gone"))
    say(sum=c.allreduce(np.ones(2), SUM).tolist())
    say(last=c.join())
"""
    first, second = run(2, script)
    assert first == [{"last": 1}]
    assert "only sums and averages" in second[0]["error"]
    assert "has joined and has nothing to send" in second[1]["error"]
    assert second[2:] == [{"sum": [1.0, 1.0]}, {"last": 1}]


def test_objects(run):
    script = """
mine = {"epoch": rank, "shape": (2, 3), "name": "rank", "weights": np.full(3, rank, "float32"), 1: {b"raw"}}
root = c.broadcast_object(mine if rank == 1 else None, root=1)
say(epoch=root["epoch"], shape=root["shape"] == (2, 3), weights=root["weights"].tolist(), raw=root[1] == {b"raw"})
say(all=[one["epoch"] for one in c.allgather_object({"epoch": rank})], big=len(c.broadcast_object("x" * 200_000)))
"""
    for lines in run(2, script):
        assert lines[0] == {"epoch": 1, "shape": True, "weights": [1.0, 1.0, 1.0], "raw": True}
        assert lines[1] == {"all": [0, 1], "big": 200_000}


def test_one_rank():
    """One rank is a group like any other."""
    calls = Collectives(SingleRankGroup())
    x = np.arange(6.0).reshape(3, 2)
    for op in (AVERAGE, SUM, MIN, MAX, PRODUCT):
        np.testing.assert_array_equal(calls.allreduce(x, op), x)
    np.testing.assert_array_equal(calls.allgather(x), x)
    np.testing.assert_array_equal(calls.reducescatter(x), x)
    np.testing.assert_array_equal(calls.alltoall(x)[0], x)
    assert calls.join() == 0
    assert calls.allgather_object((1, None)) == [(1, None)]
