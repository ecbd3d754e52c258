"""AllReduce on two workers, CIFAR-shaped CNN of 1.25 M values, batch 32 a worker, against independent plain Keras.

python benchmarks/allreduce_cnn.py --backend jax
"""

from common import arguments, measure
from workloads import Workload


def main() -> None:
    options = arguments(__doc__)
    load = Workload("cnn", 32, 3 if options.quick else 20, options.optimizer)
    measure("allreduce_cnn", options, 0.95, load, {"allreduce": "allreduce"}, 2, 30.0)


if __name__ == "__main__":
    main()
