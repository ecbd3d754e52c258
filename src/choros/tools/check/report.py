"""The result of ``choros.check``: one comparison for each run, with differences by variable and metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_LISTED = 20  # most differences that are printed for each run
PASSED = ("equal", "inexact", "trained")
MEANING = {
    "equal": "all weights and metrics agree within the tolerance",
    "inexact": "cannot be equal by bits; agrees within the spread of runs of one process",
    "trained": "trained to finite numbers; equality with one process is not promised",
    "differs": "differs from one process",
    "refused": "refused before a worker started",
    "failed": "a worker failed",
}


@dataclass(frozen=True)
class Difference:
    """The largest difference of one variable or metric from the reference.

    Attributes:
        kind: str. "weight", "optimizer" or "metric".
        name: str. The variable's path, or the metric's name.
        largest: float. Largest difference, divided by 1 + the size of the reference; infinite if only one value is
            finite.
        tolerance: float. Largest difference that passes; 0 or more.
        where: str. The element with the largest difference, such as "[3, 0]", or "epoch 2" for a metric.
        expected, found: float. The two values of this element.
    """

    kind: str
    name: str
    largest: float
    tolerance: float
    where: str
    expected: float
    found: float

    @property
    def passed(self) -> bool:
        """True if the difference is within the tolerance."""
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """One run with workers, compared with its reference.

    Attributes:
        run: str. "1 worker", "3 workers", "2 workers, resumed".
        reference: str. The reference of the comparison: "plain fit" or "2 workers".
        verdict: str. "equal", "inexact", "trained", "differs", "refused" or "failed".
        differences: tuple of Difference. One for each variable and metric; empty if the run failed or was refused. If
            equality is not required, only values that are not finite.
        error: str. Class of the error that ended the run, or "".
        message: str. The text of the error, with rank, host and remedy; or the reason for an inexact verdict.
        seconds: float. Wall-clock time of the run.
    """

    run: str
    reference: str
    verdict: str
    differences: tuple[Difference, ...] = ()
    error: str = ""
    message: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if the verdict is "equal", "inexact" or "trained"."""
        return self.verdict in PASSED

    @property
    def worst(self) -> Difference | None:
        """The difference that is largest relative to its tolerance, or None."""
        return max(self.differences, key=_excess, default=None)


@dataclass(frozen=True)
class CheckReport:
    """The result of ``choros.check``.

    Attributes:
        model, backend, algorithm: str. Names.
        rows, batch_size, epochs: int. Number of rows, size of a global batch, number of epochs. ``batch_size`` is 0 if
            the data set determines the batches.
        comparisons: tuple of Comparison. One for each run.
        notes: tuple of str. Limits of the check, such as random layers that were switched off.
        seconds: float. Wall-clock time of the whole check.
    """

    model: str
    backend: str
    algorithm: str
    rows: int
    batch_size: int
    epochs: int
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if all comparisons passed."""
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def verdict(self) -> str:
        """The worst verdict of all comparisons; "equal" if there are none."""
        order = ("failed", "differs", "refused", "inexact", "trained", "equal")
        return min((comparison.verdict for comparison in self.comparisons), key=order.index, default="equal")

    @property
    def exit_code(self) -> int:
        """0 if all passed; 3 if runs were refused and all others passed; else 1."""
        if self.passed:
            return 0
        return 3 if all(comparison.passed or comparison.verdict == "refused" for comparison in self.comparisons) else 1

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in JSON types, with ``verdict`` and ``passed``."""
        return {**asdict(self), "verdict": self.verdict, "passed": self.passed}

    def table(self, variables: bool = False) -> str:
        """Return the report as text for a terminal.

        Args:
            variables: True to list all variables and metrics of each run; False for those that differ. Defaults to
                False.
        """
        batches = f"global batches of {self.batch_size}" if self.batch_size else "batches of the data set"
        rows = f"{self.rows} row{'s' * (self.rows != 1)}, " if self.rows else ""
        epochs = f"{self.epochs} epoch{'s' * (self.epochs != 1)}"
        lines = [
            f"{self.model} on {self.backend}, {self.algorithm}: {rows}{epochs}, {batches}",
            "",
            f"{'run':<20} {'compared with':<14} {'verdict':<8} {'largest':>9} {'tolerance':>9}  where",
        ]
        for comparison in self.comparisons:
            worst = comparison.worst
            figures = f"{'-':>9} {'-':>9}  {comparison.error}"
            if worst is not None:
                figures = f"{worst.largest:>9.1e} {worst.tolerance:>9.1e}  {worst.kind} {worst.name} {worst.where}"
            lines.append(f"{comparison.run:<20} {comparison.reference:<14} {comparison.verdict:<8} {figures}".rstrip())
        for comparison in self.comparisons:
            wrong = sum(not difference.passed for difference in comparison.differences)
            if comparison.differences and (variables or not comparison.passed):
                lines += [
                    "",
                    f"{comparison.run}: {_agreement(comparison.differences)} agree with {comparison.reference}",
                ]
                listed = sorted(comparison.differences, key=_excess, reverse=True)
                lines += [_line(difference) for difference in (listed if variables else listed[: min(wrong, _LISTED)])]
        messages: dict[str, list[str]] = {}  # runs by message, as a refusal may have the same text in each run
        for comparison in self.comparisons:
            if comparison.message:
                message = f"{comparison.error + ': ' if comparison.error else ''}{comparison.message}"
                messages.setdefault(message, []).append(comparison.run)
        for message, runs in messages.items():
            lines += ["", f"{', '.join(runs)}: {message}"]
        lines += ["", *(f"Note: {note}" for note in self.notes)]
        lines.append(f"Verdict: {self.verdict} ({MEANING[self.verdict]}), in {self.seconds:.0f} s")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        runs = f"{len(self.comparisons)} run{'s' * (len(self.comparisons) != 1)}"
        return f"<CheckReport of {self.model} on {self.backend}, {self.algorithm}: {self.verdict}, {runs}>"


def _agreement(differences: Sequence[Difference]) -> str:
    """Return the numbers of equal variables and metrics by kind: "4 of 4 weights, 9 of 9 optimizer variables"."""
    parts = []
    for kind, name in (("weight", "weights"), ("optimizer", "optimizer variables"), ("metric", "metrics")):
        of_kind = [difference.passed for difference in differences if difference.kind == kind]
        if of_kind:
            parts.append(f"{sum(of_kind)} of {len(of_kind)} {name}")
    return ", ".join(parts)


def _line(difference: Difference) -> str:
    d = difference
    sizes = f"{d.largest:>9.1e} {d.tolerance:>9.1e}"
    return f"  {d.kind:<9} {d.name:<52} {sizes}  {d.where:<12} {d.expected:.7g} became {d.found:.7g}"


def _excess(difference: Difference) -> float:
    if difference.largest != difference.largest:
        return float("inf")
    return difference.largest / difference.tolerance if difference.tolerance else difference.largest * 1e30
