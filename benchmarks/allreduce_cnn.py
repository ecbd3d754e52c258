"""AllReduce on two workers, CIFAR-shaped CNN of 1.25 M values, batch 32 a worker, against independent plain Keras.

python benchmarks/allreduce_cnn.py --backend jax
"""

from common import arguments, compare, emit
from workloads import Workload


def main() -> None:
    options = arguments(__doc__)
    load = Workload("cnn", 32, 3 if options.quick else 20, options.optimizer)
    rounds, seconds = options.rounds or (1 if options.quick else 3), 1.0 if options.quick else 30.0
    emit("allreduce_cnn", options, 0.95, compare(load, {"allreduce": "allreduce"}, 2, rounds, seconds, options.as_run))


if __name__ == "__main__":
    main()
