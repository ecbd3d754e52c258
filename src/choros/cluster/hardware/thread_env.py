"""The environment variables that set the number of threads of each framework. It reads them when it is imported.

Their effect was measured with 2 usable cores, and ``tests/machine/test_threads.py`` checks it:

=================  ==========================================================================================
PyTorch 2.13       ``OMP_NUM_THREADS`` (``MKL_NUM_THREADS`` lowers only ``torch.get_num_threads``)
JAX 0.10.2         ``NPROC``: XLA's pool on the CPU. Eigen's flag ``--xla_cpu_multi_thread_eigen=false`` changes
                   neither the threads nor the time of a bound rank. XLA aborts on an unknown flag, so
                   ``XLA_FLAGS`` keeps the user's value.
TensorFlow 2.21    ``TF_NUM_INTRAOP_THREADS`` and ``TF_NUM_INTEROP_THREADS``, also for its XLA pool; neither
                   ``OMP_NUM_THREADS`` nor ``NPROC``
numpy              ``OPENBLAS_NUM_THREADS`` (or ``MKL_``, ``VECLIB_MAXIMUM_THREADS`` by its build)
Intel's OpenMP     ``KMP_BLOCKTIME`` and ``KMP_AFFINITY``; in builds of frameworks for Intel's processors. The wheels
                   of PyPI for Linux have GNU's OpenMP or none, which ignore them.
=================  ==========================================================================================

No framework makes a pool larger than the affinity mask, so binding a rank before its imports has most of the effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from choros.errors import InvalidInputError

COUNTS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "NPROC",
)
NAMES = (*COUNTS, "KMP_BLOCKTIME", "KMP_AFFINITY")
# The thread of each core stays there, and threads fill the cores before the hyper-threads of a core.
_PINNED = "granularity=fine,compact,1,0"


def kept_variables(environ: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Return the variables of the user that a launcher leaves as they are, for the argument ``keep`` of ``variables``.

    Args:
        environ: the user's environment.
        threads: the number of threads that the user has given to the launcher, which then replaces all counts; or None.

    Example:
        >>> kept_variables({"NPROC": "4", "KMP_BLOCKTIME": "30"}, threads=2)
        {'KMP_BLOCKTIME': '30'}
    """
    return {name: value for name, value in environ.items() if threads is None or name not in COUNTS}


def variables(
    threads: int, *, keep: Mapping[str, str] | None = None, shared: bool = False, bound: bool = False
) -> dict[str, str]:
    """Return the variables that limit each thread pool of a process to ``threads`` threads.

    Args:
        threads: the number of threads of each pool. TensorFlow's pool of independent operations gets at most 2.
        keep: an environment that takes precedence: its names are not returned. Defaults to none.
        shared: whether several ranks share cores. GNU OpenMP's threads then sleep at barriers. Spinning would take the
            core from the rank that they wait for (5 times slower on PyTorch).
        bound: whether no other rank runs on this rank's cores. Intel's OpenMP then pins each thread to a core. Ranks
            that are not bound would all pin their threads to the same cores.

    Returns:
        Names and values for the environment of the process.

    Raises:
        InvalidInputError: ``threads`` is below 1.

    Example:
        >>> variables(1)["OMP_NUM_THREADS"], variables(8)["TF_NUM_INTEROP_THREADS"]
        ('1', '2')
        >>> "OMP_NUM_THREADS" in variables(1, keep={"OMP_NUM_THREADS": "3"})
        False
    """
    if threads < 1:
        raise InvalidInputError(f"threads must be 1 or more, got {threads}")
    limits: dict[str, str] = dict.fromkeys(COUNTS, str(threads))
    limits["TF_NUM_INTEROP_THREADS"] = str(min(2, threads))
    limits["KMP_BLOCKTIME"] = "0"  # milliseconds that a thread spins after a parallel region; the default is 200
    limits["KMP_AFFINITY"] = _PINNED if bound else "none"
    if shared and threads > 1:
        limits["OMP_WAIT_POLICY"] = "PASSIVE"
    return {name: value for name, value in limits.items() if name not in (keep or {})}
