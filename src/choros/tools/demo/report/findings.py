"""The findings of a comparison in plain sentences. A winner is named only where printed intervals are apart."""

from __future__ import annotations

import math

from choros.tools.demo.report.results import PLAIN, Report, Result
from choros.tools.demo.report.table import decimal, mean_gain, span_text

_QUIET = 0.1  # the share of the cores below which other programs matter less than the spread of the seeds


def findings(report: Report) -> list[str]:
    """Return sentences about speed, time with start-up, and accuracy; none without measurements."""
    measured = [r for r in report.ranked() if r.runs]
    # Each member of an Ensemble sees only a part of the rows, so its seconds are not comparable.
    compared = [r for r in measured if r.algorithm not in (PLAIN, "Ensemble")]
    sentences = [_load(report)] if measured else []
    if measured and not report.steady:
        sentences.append(
            "The only epoch includes compiling, so no speeds are given: train two epochs or more to compare them."
        )
    if report.plain is not None and compared:
        sentences += _speed(report, report.plain, compared) if report.steady else []
        sentences += _startup(report, report.plain, compared)
    if len(measured) > 1:
        sentences += [_fastest(report), _accuracy(report, measured)]
    elif measured:
        sentences.append(
            f"{measured[0].algorithm} reached an accuracy of {decimal(measured[0].mean('accuracy'), 3)}; there is "
            "nothing to compare it with."
        )
    return [sentence for sentence in sentences if sentence]


def _load(report: Report) -> str:
    """Return a warning if other programs used the cores, which changes each figure; else ""."""
    used, cores = report.setting.other_load, report.setting.cores
    if used < _QUIET * cores or not cores:
        return ""
    return (
        f"Other programs used about {used:.1f} of {cores} cores meanwhile, so the figures mean little: repeat this on "
        "a quiet machine."
    )


def _speed(report: Report, plain: Result, compared: list[Result]) -> list[str]:
    """Return the speed-ups against plain ``fit``, the gains first, then what is not faster."""
    target = f"{100 * report.setting.target:g} % accuracy"
    plain_times = report.targets(plain)
    if not all(map(math.isfinite, plain_times)):
        return [f"Plain fit did not reach {target} from every seed: train more epochs to compare the speed."]
    seconds = decimal(sum(plain_times) / len(plain_times), 1)
    faster, slower, unclear, missed = list[str](), list[str](), list[str](), list[str]()
    lead = ""
    for result in compared:
        gain, (low, high) = mean_gain(report, result), report.gain_interval(result)
        low, high = round(low, 2), round(high, 2)  # as printed: "1.00 to 1.77" is no gain
        if not math.isfinite(gain):
            missed.append(result.algorithm)
            continue
        span = f", 95 % interval {span_text((low, high))}" if math.isfinite(high) else ""
        text = f"{result.algorithm} ({gain:.2f} x{span})"
        if low > 1 and not lead:
            times = report.targets(result)
            lead = (
                f"{result.algorithm} trained to {target} {gain:.2f} times as fast as plain model.fit on all cores "
                f"({decimal(sum(times) / len(times), 1)} s against {seconds} s{span.replace(', 95 %', '; 95 %')})."
            )
        elif low > 1:
            faster.append(text)
        elif high < 1:
            slower.append(text)
        else:
            unclear.append(text)
    sentences = [lead or f"No algorithm was measurably faster to {target} than plain model.fit ({seconds} s)."]
    if faster:
        sentences.append(f"Also faster than plain fit: {'; '.join(faster)}.")
    if slower:
        sentences.append(f"Slower than plain fit: {'; '.join(slower)}.")
    if unclear:
        reason = "one seed gives no interval" if report.setting.seeds < 2 else "the intervals contain 1"
        sentences.append(f"No difference from plain fit beyond chance ({reason}): {'; '.join(unclear)}.")
    if missed:
        sentences.append(f"Did not reach {target} from every seed: {', '.join(missed)}.")
    return sentences


def _startup(report: Report, plain: Result, compared: list[Result]) -> list[str]:
    """Return the time to the result with start-up, of plain ``fit`` and of the best algorithm."""
    reached = [r for r in compared if math.isfinite(report.gain_with_startup(r))]
    if not reached:
        return []
    best = min(reached, key=report.result_seconds)
    mine, other = report.result_seconds(best), report.result_seconds(plain)
    return [
        f"With start-up (processes, imports, compiling; measured once) the target is reached after {decimal(mine, 1)} "
        f"s by {best.algorithm} and after {decimal(other, 1)} s by plain fit."
    ]


def _fastest(report: Report) -> str:
    if not report.steady:
        return ""
    if report.fastest:
        return f"{report.fastest} was the fastest: its interval lies below all others."
    return "No single fastest is named: the 95 % intervals of the seconds overlap, or there are none."


def _accuracy(report: Report, measured: list[Result]) -> str:
    means = [r.mean("accuracy") for r in measured if math.isfinite(r.mean("accuracy"))]
    if not means:
        return ""
    if report.best:
        return f"{report.best} is the most accurate: its 95 % interval lies above all others."
    low, high = report.accuracy_interval(measured[0])
    half = f" (95 % intervals of about ±{50 * (high - low):.1f} points)" if math.isfinite(high - low) else ""
    return (
        f"In the final accuracy no difference beyond chance shows: all lie between {min(means):.3f} and "
        f"{max(means):.3f}{half}."
    )
