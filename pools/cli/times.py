"""Times that a user names: `30s`, `10m`, `2h`, `3d` ago, or a moment."""

from __future__ import annotations

import re
from datetime import datetime

from ray_pools.errors import BadInput

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_in(said: str) -> float | None:
    """`90s`, `15m`, `2h` or `1d` in seconds; a number alone is seconds. None for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smhd]?)", said.strip())
    return None if found is None else float(found[1]) * UNITS_S[found[2] or "s"]


def parse_duration(said: str, option: str) -> float:
    """As `seconds_in`. BadInput for what is none."""
    found = seconds_in(said)
    if found is None:
        raise BadInput(option, said, "a duration such as 90s, 15m or 2h")
    return found


def parse_since(said: str, now: float, option: str = "--since") -> float:
    """The core's time in seconds: so long before `now`, or an ISO 8601 moment (local unless it says otherwise), or
    `@SECONDS`. BadInput for what is none.
    """
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", said.strip())
    try:
        if ago is not None:
            return now - float(ago[1]) * UNITS_S[ago[2]]
        if said.startswith("@"):
            return float(said[1:])
        return datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    except ValueError:
        expected = "a time ago such as 90s, 10m, 2h or 3d, or a moment such as 2026-01-31T12:00"
        raise BadInput(option, said, expected) from None
