"""AllReduce on two workers, MLP 30-600-600-2, batch 128 a worker, against two independent plain-Keras processes.

python benchmarks/allreduce_mlp.py --backend jax
"""

from common import arguments, compare, emit
from workloads import Workload


def main() -> None:
    options = arguments(__doc__)
    load = Workload("mlp", 128, 10 if options.quick else 300, options.optimizer)
    rounds, seconds = options.rounds or (1 if options.quick else 3), 1.0 if options.quick else 15.0
    emit("allreduce_mlp", options, 0.85, compare(load, {"allreduce": "allreduce"}, 2, rounds, seconds, options.as_run))


if __name__ == "__main__":
    main()
