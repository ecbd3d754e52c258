"""One worker under ``Trainer``, by several algorithms, against plain ``model.fit`` on the same core.

python benchmarks/one_worker.py --backend jax --algorithms allreduce aeasgd
"""

from common import arguments, compare, emit
from workloads import Workload

USUAL = ["allreduce", "localsgd", "aeasgd", "eamsgd"]


def main() -> None:
    options = arguments(__doc__, algorithms={"nargs": "+", "default": USUAL})
    load = Workload("mlp", 128, 10 if options.quick else 300, options.optimizer)
    rounds, seconds = options.rounds or (1 if options.quick else 2), 1.0 if options.quick else 15.0
    emit(
        "one_worker",
        options,
        0.97,
        compare(load, {name: name for name in options.algorithms}, 1, rounds, seconds, options.as_run),
    )


if __name__ == "__main__":
    main()
