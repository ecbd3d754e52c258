"""Give every parser of ``targets.py`` what nobody would send in good faith, by hypothesis.

    python drills/fuzz.py --inputs 1000000

Inputs are drawn at random, and good ones with some of their bytes changed, cut out, doubled or put numbers between that
matter. A crash, an error without a name, a second for one input and more than 2 GB of memory are failures; the input is
printed. Prints JSON: inputs, seconds, and how many were refused, by target.
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from targets import Target, targets

from choros.errors import ChorosError

MEMORY = 2 << 30  # bytes above what the process has when it begins
SLOW, HANGS = 1.0, 60.0  # seconds of the processor, and by the clock: others may use the machine
NUMBERS = (
    "0",
    "-1",
    "1e9",
    "99999999999999999999",
    "2147483648",
    "NaN",
    "",
    "\0",
    "[",
    "]",
    "(x",
    "{",
    "=",
    ":",
    ",",
    "..",
    "é",
)
RAW = (b"\0", b"\xff" * 4, b"\xff" * 8, b"\x7f" * 8, b"\x80", b"[", b"{", b'"', b"\n", b"," * 3, b"9" * 30)


@st.composite
def near(draw: Any, examples: tuple[Any, ...]) -> Any:
    """A good input, changed in up to six places."""
    result = draw(st.sampled_from(examples))
    text = isinstance(result, str)
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(result)))
        kind = draw(st.integers(0, 4))
        end = min(at + draw(st.integers(0, 12)), len(result))
        if kind == 0:
            result = result[:at] + result[end:]
        elif kind == 1:
            result = result[:at] + result[at:end] * 2 + result[end:]
        elif kind == 2:
            result = result[:at] + draw(st.sampled_from(NUMBERS if text else RAW)) + result[end:]
        elif kind == 3:
            result = result[:at] + draw(st.text(max_size=4) if text else st.binary(max_size=4)) + result[at:]
        else:
            result = result[:at]
    return result


def fuzz(name: str, target: Target, inputs: int, first: int) -> dict[str, Any]:
    """Give one parser so many inputs; returns what became of them."""
    text = isinstance(target.examples[0], str)
    anything = st.text(max_size=200) if text else st.binary(max_size=400)
    facts = {"inputs": 0, "refused": 0}

    def call(data: Any) -> tuple[float, float]:
        begun, clock = time.process_time(), time.perf_counter()
        try:
            target.call(data)
        except ChorosError:
            facts["refused"] += 1
        except SystemExit as ending:  # argparse has said why
            assert ending.code in (0, 2), ending.code
            facts["refused"] += 1
        return time.process_time() - begun, time.perf_counter() - clock

    @seed(first)
    @settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.one_of(anything, near(target.examples), near(target.examples)))
    def one(data: Any) -> None:
        facts["inputs"] += 1
        took, waited = call(data)
        if took > SLOW:  # once more: Python may have collected the garbage of a whole run meanwhile
            took, waited = call(data)
        assert took < SLOW, f"{took:.1f} s for {data!r}"
        assert waited < HANGS, f"{waited:.1f} s by the clock for {data!r}"

    begun = time.perf_counter()
    one()
    return facts | {"seconds": round(time.perf_counter() - begun, 1)}


def limit_memory() -> None:
    """Have the system refuse more than ``MEMORY`` above what is taken now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="for all parsers together")
    parser.add_argument("--only", nargs="*", default=[], help="names of parsers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = {name: target for name, target in targets().items() if not options.only or name in options.only}
    for target in chosen.values():  # what they import comes before the limit
        with contextlib.suppress(ChorosError):
            target.call(target.examples[0])
    limit_memory()
    shares = sum(target.share for target in chosen.values())
    results = {}
    for name, target in chosen.items():
        results[name] = fuzz(name, target, max(options.inputs * target.share // shares, 1), options.seed)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    total = sum(each["inputs"] for each in results.values())
    print(json.dumps({"inputs": total, "seed": options.seed, "failures": 0, "parsers": results}))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread of Arrow's that holds a buffer can abort the interpreter's own end: apache/arrow#34314
