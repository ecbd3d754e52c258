"""AEASGD with a window of 10 on two workers, MLP 30-600-600-2, batch 128, against two independent plain processes.

python benchmarks/aeasgd_mlp.py --backend jax
"""

from common import arguments, compare, emit
from workloads import Workload


def main() -> None:
    options = arguments(__doc__)
    import choros

    load = Workload("mlp", 128, 10 if options.quick else 300, options.optimizer)
    rounds, seconds = options.rounds or (1 if options.quick else 3), 1.0 if options.quick else 15.0
    emit(
        "aeasgd_mlp",
        options,
        0.95,
        compare(load, {"aeasgd": choros.AEASGD(window=10)}, 2, rounds, seconds, options.as_run),
    )


if __name__ == "__main__":
    main()
