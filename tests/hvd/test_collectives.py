"""Horovod's names on this backend's tensors, under ``choros run`` and under ``mpiexec``."""

import importlib.util
import pathlib

import pytest

import choros.hvd as hvd

LAUNCHERS = ("choros run", "mpiexec")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_tensors(run):
    """The result has the library, type, shape and device of the input, which is unchanged."""
    script = """
    x = keras.ops.convert_to_tensor(np.arange(6, dtype="float32").reshape(2, 3) + rank)
    before = numbers(x)
    for kind in ("float32", "float16", "bfloat16", "int32", "bool"):
        value = keras.ops.cast(x, kind)
        op = hvd.Max if kind == "bool" else hvd.Sum
        out = hvd.allreduce(value, op=op, name=kind)
        assert type(out) is type(value) and keras.backend.standardize_dtype(out.dtype) == kind, (type(out), out.dtype)
        said[kind] = numbers(out)
    said["mean"] = numbers(hvd.allreduce(x))
    said["half"] = numbers(hvd.allreduce(x, compression=hvd.Compression.fp16, average=False))
    said["group"] = [numbers(v) for v in hvd.grouped_allreduce([x, x + 1], op=hvd.Min, name="pair")]
    said["rows"] = numbers(hvd.allgather(x[: rank + 1]))
    said["root"] = numbers(hvd.broadcast(x, 1))
    said["scattered"] = numbers(hvd.reducescatter(x, op=hvd.Sum))
    received, counts = hvd.alltoall(x, splits=[1, 1] if rank == 0 else [0, 2])
    said["all"] = [numbers(received), numbers(counts)]
    said["scalar"] = float(hvd.allreduce(rank + 1.0))
    said["unchanged"] = numbers(x) == before
    variable = keras.Variable(np.full(3, rank, "float32"), name="v")
    hvd.broadcast_variables([variable], root_rank=1)
    said["variable"] = numbers(variable)
    said["of variable"] = numbers(hvd.allreduce(variable, op=hvd.Sum))
    hvd.barrier()
    """
    first, second = run(2, script)
    both = [[1, 3, 5], [7, 9, 11]]
    for result in (first, second):
        for kind in ("float32", "float16", "bfloat16", "int32", "half"):
            assert result[kind] == both
        assert result["bool"] == [[1, 1, 1], [1, 1, 1]]
        assert result["mean"] == [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]]
        assert result["group"] == [[[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]]]
        assert result["rows"] == [[0, 1, 2], [1, 2, 3], [4, 5, 6]]
        assert result["root"] == [[1, 2, 3], [4, 5, 6]]
        assert result["scalar"] == 1.5
        assert result["unchanged"] is True
        assert result["variable"] == [1, 1, 1]
        assert result["of variable"] == [2, 2, 2]
    assert (first["scattered"], second["scattered"]) == ([both[0]], [both[1]])
    assert first["all"] == [[[0, 1, 2]], [1, 0]]
    assert second["all"] == [[[3, 4, 5], [1, 2, 3], [4, 5, 6]], [1, 2]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_differences_objects_and_process_sets(run, launcher):
    script = """
    try:
        hvd.allreduce(np.zeros(2 + rank), name="uneven")
    except RankMismatchError as error:
        said["error"] = str(error)
    said["objects"] = hvd.allgather_object({"rank": rank, "epoch": 3})
    said["root"] = hvd.broadcast_object([rank, "text"], root_rank=2)
    pair = hvd.add_process_set([2, 0])
    said["set"] = [pair.process_set_id, pair.included(), pair.rank(), pair.size()]
    if pair.included():
        said["sum"] = numbers(hvd.allreduce(np.full(2, rank + 1.0), op=hvd.Sum, process_set=pair))
        said["from 2"] = numbers(hvd.broadcast(np.full(1, float(rank)), 2, process_set=pair))
    else:
        try:
            hvd.allreduce(np.zeros(1), process_set=pair)
        except ValueError as error:
            said["outside"] = str(error)
    for bad in ([0, 0], [0, 9], [0, 2]):
        try:
            hvd.add_process_set(bad)
        except ValueError as error:
            said[f"bad {bad}"] = str(error)
    said["removed"] = [hvd.remove_process_set(hvd.global_process_set), hvd.remove_process_set(pair)]
    said["again"] = hvd.add_process_set(hvd.ProcessSet([1])).process_set_id
    said["all"] = numbers(hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=hvd.global_process_set))
    said["last"] = hvd.join()
    comm = list(range(size))
    if hvd.mpi_enabled():
        from mpi4py import MPI as mpi
        comm = mpi.COMM_WORLD
    hvd.shutdown()
    said["initialized"] = hvd.is_initialized()
    try:
        hvd.init([0] if isinstance(comm, list) else mpi.COMM_SELF)
    except ValueError as error:
        said["part"] = str(error)
    hvd.init(comm)
    said["anew"] = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous()]
    said["by MPI"] = [hvd.mpi_enabled(), hvd.mpi_threads_supported(), type(hvd.context.context().group).__name__]
    said["sum anew"] = numbers(hvd.allreduce(np.ones(1), op=hvd.Sum))
    """
    results = run(3, script)
    for rank, result in enumerate(results):
        assert result["error"] == results[0]["error"]
        assert "'uneven'" in result["error"]
        assert "rank 2: allreduce 'uneven' of float64 (4,)" in result["error"]
        assert result["objects"] == [{"rank": r, "epoch": 3} for r in range(3)]
        assert result["root"] == [2, "text"]
        assert result["set"] == [1, rank != 1, {0: 0, 1: -1, 2: 1}[rank], 2]
        assert "each of them once" in result["bad [0, 0]"]
        assert "there are ranks 0 to 2 only" in result["bad [0, 9]"]
        assert "has these ranks already" in result["bad [0, 2]"]
        assert result["removed"] == [False, True]
        assert result["again"] == 1
        assert result["all"] == result["sum anew"] == [3]
        assert result["initialized"] is False
        assert "give a part of the ranks as a ProcessSet" in result["part"]
        assert result["anew"] == [rank, 3, result["anew"][2], 1, True]
        assert result["by MPI"] == (
            [True, True, "MpiGroup"] if launcher == "mpiexec" else [False, False, "SharedGroup"]
        )
    assert sorted(result["anew"][2] for result in results) == [
        0,
        1,
        2,
    ]  # Open MPI 5 deals them out in an order of its own
    assert results[0]["sum"] == results[2]["sum"] == [4, 4]
    assert results[0]["from 2"] == results[2]["from 2"] == [2]
    assert "Rank 1 is not in" in results[1]["outside"]


def test_one_rank_without_a_launcher():
    with pytest.raises(ValueError, match="call hvd.init"):
        hvd.rank()
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_rank()) == (0, 1, 1, 0)
        assert hvd.allreduce([2, 4], op=hvd.Product).tolist() == [2, 4]
        assert hvd.broadcast_object({"a": 1}) == {"a": 1}
        assert hvd.mpi_built() is (importlib.util.find_spec("mpi4py") is not None)
        assert hvd.mpi_enabled() is hvd.mpi_threads_supported() is False
        assert hvd.nccl_built() == 0
        with pytest.raises(ValueError, match="both given"):
            hvd.allreduce(1.0, average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="give hvd.Average"):
            hvd.allreduce(1.0, op=17)
    finally:
        hvd.shutdown()


def test_no_file_takes_the_name_of_a_function():
    """Importing ``choros.hvd.x`` puts the module in the place of ``hvd.x``."""
    files = {path.stem for path in pathlib.Path(hvd.__file__).parent.iterdir()}
    assert files & set(hvd.__all__) == {"callbacks", "elastic"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BroadcastGlobalVariablesHook", "broadcast_variables"),
        ("broadcast_", r"broadcast_variables\(\[variable\]"),
        ("size_op", r"hvd.size\(\)"),
        ("no_such_name", "has no attribute"),
    ],
)
def test_names_that_are_not_there(name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(hvd, name)
