"""What a configuration says of times: clients' leases, and the wish for nodes. None of it decides in the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..limits import lease_problem, seconds_problem
from .config_rules import Problem

TIMINGS: dict[str, dict[str, float]] = {
    "lease": {"default_s": 60.0, "renew_s": 10.0},
    "prewarm": {"period_s": 10.0, "linger_s": 30.0},
}
"""Section of the configuration -> its seconds, and what each is unless it is set."""


def check_timings(sections: Mapping[str, Mapping[Any, Any]]) -> list[Problem]:
    """Every broken rule of the sections `lease` and `prewarm`; takes any values. What is not set is as by default."""
    problems: list[Problem] = []
    for section, values in sections.items():
        known = TIMINGS[section]
        for name, value in values.items():
            check = lease_problem if (section, name) == ("lease", "default_s") else seconds_problem
            wrong = f"one of {', '.join(known)}" if name not in known else check(value)
            if wrong:
                problems.append(Problem((section, str(name)), value, wrong))
    if problems:
        return problems
    lease = {**TIMINGS["lease"], **sections.get("lease", {})}
    if not 0 < lease["renew_s"] <= lease["default_s"] / 2:
        expected = f"more than 0 and at most half of lease.default_s ({lease['default_s']:g})"
        problems.append(Problem(("lease", "renew_s"), lease["renew_s"], expected))
    period_s = sections.get("prewarm", {}).get("period_s")
    if period_s is not None and period_s <= 0:
        problems.append(Problem(("prewarm", "period_s"), period_s, "more than 0"))
    return problems
