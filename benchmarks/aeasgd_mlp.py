"""AEASGD with a window of 10 on two workers, MLP 30-600-600-2, batch 128, against two independent plain processes.

python benchmarks/aeasgd_mlp.py --backend jax
"""

from common import arguments, measure
from workloads import Workload


def main() -> None:
    options = arguments(__doc__)
    import choros

    load = Workload("mlp", 128, 10 if options.quick else 300, options.optimizer)
    measure("aeasgd_mlp", options, 0.95, load, {"aeasgd": choros.AEASGD(window=10)}, 2, 15.0)


if __name__ == "__main__":
    main()
