"""One worker under ``Trainer``, by several algorithms, against plain ``model.fit`` on the same core.

python benchmarks/one_worker.py --backend jax --algorithms allreduce aeasgd
"""

from common import arguments, measure
from workloads import Workload

USUAL = ["allreduce", "localsgd", "aeasgd", "eamsgd"]


def main() -> None:
    options = arguments(__doc__, algorithms={"nargs": "+", "default": USUAL})
    load = Workload("mlp", 128, 10 if options.quick else 300, options.optimizer)
    measure("one_worker", options, 0.97, load, {name: name for name in options.algorithms}, 1, 15.0, rounds=2)


if __name__ == "__main__":
    main()
