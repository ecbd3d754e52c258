"""Run every benchmark of the speed table and write it down: figures as JSON, the table as markdown.

python benchmarks/table.py                            # all backends: some twenty minutes on a machine at rest
python benchmarks/table.py --backends jax --quick     # a smoke run; its figures mean nothing and are not kept
python benchmarks/table.py --as-run                   # long turns, as a user runs it; its figures are kept apart
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPORTS = HERE / "reports"
IN_TURNS = ("one_worker", "allreduce_mlp", "allreduce_cnn", "aeasgd_mlp", "hvd")
TRAINING = ("one_worker", "allreduce_mlp", "allreduce_cnn", "aeasgd_mlp", "hvd", "allreduce_tensors")
ENGINE = ("allreduce_shm", "center_shm")


def run(name: str, *options: str) -> Any:
    """One benchmark in a process of its own; its JSON."""
    done = subprocess.run(
        [sys.executable, HERE / f"{name}.py", *options], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout[done.stdout.index("{\n") :])


def measure(backends: list[str], names: list[str], quick: bool, more: list[str]) -> dict[str, Any]:
    """Run what was asked for; {name: result} for the engine, {name: {backend: result}} for the rest."""
    results: dict[str, Any] = {}
    small = ["--sizes", "2560", "380000", "--rounds", "20"] if quick else []
    for name in names:
        if name in ENGINE:
            results[name] = run(name, *small)
            print(name, "measured", file=sys.stderr, flush=True)
            continue
        for backend in backends:
            flags = ["--quick"] if quick else []
            results.setdefault(name, {})[backend] = run(name, "--backend", backend, *flags, *more)
            print(name, backend, "measured", file=sys.stderr, flush=True)
    return results


def table(result: dict[str, Any]) -> str:
    """The speed table in markdown."""
    backends = [b for b in ("jax", "torch", "tensorflow") if any(b in result.get(name, {}) for name in TRAINING)]
    lines = ["| what | target | " + " | ".join(backends) + " |", "|---|---" + "|---" * len(backends) + "|"]

    def add_row(part: str, target: str, cells: list[str]) -> None:
        lines.append(f"| {part} | {target} | " + " | ".join(cells) + " |")

    def ratio(name: str, backend: str, algorithm: str) -> str:
        figures = result[name].get(backend, {}).get("algorithms", {}).get(algorithm)
        return "" if figures is None else f"{figures['ratio']:.2f}{'' if figures['reached'] else ' (missed)'}"

    for name, part, target in (
        ("one_worker", "1 worker, {}, against an independent process", ">= 0.97"),
        ("allreduce_mlp", "{}, MLP 30-600-600-2, batch 128, against independent processes", ">= 0.85"),
        ("allreduce_cnn", "{}, CNN of 1.25 M, batch 32, against independent processes", ">= 0.95"),
        ("aeasgd_mlp", "{} window 10, same MLP, against independent processes", ">= 0.95"),
    ):
        if name in result:
            kinds = next(iter(result[name].values()))["algorithms"]
            for kind in kinds:
                add_row(part.format(kind), target, [ratio(name, backend, kind) for backend in backends])
    if "hvd" in result:
        for kind, target in next(iter(result["hvd"].values()))["target"].items():
            part = f"hvd.DistributedOptimizer in fit, 2 ranks, the same {kind.upper()}, against independent processes"
            add_row(part, f">= {target}", [ratio("hvd", backend, kind) for backend in backends])
        for kind in ("numpy", "tensor"):
            cells = [f"{result['hvd'][b]['latency'][kind]['ms']:.3f}" if b in result["hvd"] else "" for b in backends]
            add_row(f"hvd.allreduce of 1 KB, 2 ranks, {kind}, ms", "< 0.1", cells)
    lines += engine(result, backends)
    return "\n".join(lines) + "\n"


def engine(values: dict[str, Any], backends: list[str]) -> list[str]:
    """The table's lines about shared memory, which have no backend, or only at its ends."""
    lines = []
    if "allreduce_shm" in values:
        for result in values["allreduce_shm"]["results"]:
            message = f"{result['memcpys']['sum_slots']} memcpys, {result['latency_over_floor_ms']} ms over the floor"
            limit = {25_000_000: "<= 1.2 memcpys", 380_000: "< 0.1 ms over the floor"}.get(result["count"], "")
            lines.append(f"| all-reduce of {result['count']:,} values in the segment | {limit} | {message} |")
    if "allreduce_tensors" in values:
        both = [values["allreduce_tensors"][backend]["memcpys"] for backend in backends]
        for key, kind in (("into_own_tensors", "tensors"), ("into_the_sum_as_tensors", "tensors that are the sum")):
            cells = " | ".join(str(item[key]) for item in both)
            lines.append(f"| the same from backend tensors to {kind}, memcpys | report | {cells} |")
    if "center_shm" in values:
        for result in values["center_shm"]["results"]:
            taken = result["memcpys"]
            message = f"{taken['elastic_1_client']} memcpys; two that contend {taken['elastic_2_clients']}"
            limit = "<= 3 memcpys" if result["count"] == 25_000_000 else ""
            lines.append(f"| exchange with the center, {result['count']:,} values | {limit} | {message} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["jax", "torch", "tensorflow"])
    parser.add_argument("--only", nargs="+", choices=[*TRAINING, *ENGINE], help="all by default")
    parser.add_argument("--as-run", action="store_true", help="turns of 10 seconds; only what takes turns")
    parser.add_argument("--rounds", type=int, default=0, help="0: as each benchmark likes")
    parser.add_argument("--quick", action="store_true", help="a smoke run; nothing is written")
    options = parser.parse_args()
    names = options.only or [*(IN_TURNS if options.as_run else (*TRAINING, *ENGINE))]
    more = [*(["--as-run"] if options.as_run else []), *(["--rounds", str(options.rounds)] if options.rounds else [])]
    actual = measure(options.backends, names, options.quick, more)
    where = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if not options.quick:
        apart = "_as_run" if options.as_run else ""
        path = REPORTS / f"speed{apart}.json"
        before = json.loads(path.read_text())["results"] if path.exists() else {}
        for name, result in actual.items():
            before[name] = {**before.get(name, {}), **result} if name in TRAINING else result
        actual = before
        path.write_text(json.dumps({"where": where, "results": actual}, indent=1) + "\n")
        (REPORTS / f"table{apart}.md").write_text(table(actual))
    print(json.dumps(actual))
    print(table(actual), file=sys.stderr)


if __name__ == "__main__":
    main()
