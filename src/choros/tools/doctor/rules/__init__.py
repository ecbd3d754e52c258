"""The rules. Each is a function from observations to findings. A new problem is one more function."""

from choros.tools.doctor.findings import Finding, Observations, together
from choros.tools.doctor.rules import agreement, cores, exits, limits, network, speed

RULES = (*exits.RULES, *agreement.RULES, *cores.RULES, *limits.RULES, *network.RULES, *speed.RULES)


def judge(seen: Observations) -> list[Finding]:
    """Return all findings, errors first. Equal findings of several ranks are merged.

    Args:
        seen: the observations of the job.

    Example:
        >>> judge(Observations(1, []))
        []
    """
    findings = [finding for rule in RULES for finding in rule(seen)]
    return sorted(together(findings, seen.ranks), key=lambda finding: finding.kind)
