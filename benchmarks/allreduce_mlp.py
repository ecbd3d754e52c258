"""AllReduce on two workers, MLP 30-600-600-2, batch 128 a worker, against two independent plain-Keras processes.

python benchmarks/allreduce_mlp.py --backend jax
"""

from common import arguments, measure
from workloads import Workload


def main() -> None:
    options = arguments(__doc__)
    load = Workload("mlp", 128, 10 if options.quick else 300, options.optimizer)
    measure("allreduce_mlp", options, 0.85, load, {"allreduce": "allreduce"}, 2, 15.0)


if __name__ == "__main__":
    main()
