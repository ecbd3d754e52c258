"""The rules: each is a function from everything that was seen to findings. A new fault is one more function."""

from choros.tools.doctor.findings import Finding, Observations, together
from choros.tools.doctor.rules import agreement, cores, exits, limits, network, speed

RULES = (*exits.RULES, *agreement.RULES, *cores.RULES, *limits.RULES, *network.RULES, *speed.RULES)


def judge(seen: Observations) -> list[Finding]:
    """Everything that is wrong, errors first, each once with all its ranks.

    Args:
        seen: what is known of the job.

    Example:
        >>> judge(Observations(1, []))
        []
    """
    found = [finding for rule in RULES for finding in rule(seen)]
    return sorted(together(found, seen.ranks), key=lambda finding: finding.kind)
