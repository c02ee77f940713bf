"""The named limits: nothing that a user can send is unbounded. Each is generous and has a clear error.

Also the one rule of what a name may be, since every name (pool, requester, request id, resource key) obeys it.
"""

from __future__ import annotations

from .errors import BadInput

NAME_MAX_CHARS = 200
"""Pool, requester, request id, resource key. Short enough to show, and to be part of an actor's name."""

KEYS_MAX = 64
"""Resource keys of one request, one pool, or one policy."""

AMOUNT_MAX = 2**53
"""One amount of one key: beyond it, a JSON reader would no longer see the exact integer."""

PRIORITY_ABS_MAX = 2**31
"""A policy's priority, either way."""

SECONDS_MAX = 10 * 365 * 86_400
"""Any duration that can be configured: ten years. Longer is a mistake of units."""

LEASE_MIN_S = 1
"""The shortest lease, unless it is 0 for none. A client renews several times within each: shorter ones would flood the
coordinator with renewals."""

RETRIES_MAX = 1_000_000
"""Retries of one request."""

BATCH_MAX = 10_000
"""Operations in one call to an actor."""

SUBMIT_MANY_MAX = 100_000
"""Requests in one `submit_many`, which sends them a thousand in a call."""

WAITING_PER_REQUESTER = 10_000
"""Requests of one requester that wait at a time, unless `limits.waiting_per_requester` says else."""

LIVE_REQUESTS = 200_000
"""Requests of all that wait or hold at a time, unless `limits.live_requests` says else."""

LIVE_REQUESTS_MAX = 10_000_000
"""The most that either of the two can be set to."""

OPTIONS_MAX_CHARS = 100_000
"""One request's options (bundles, strategy, placement), written out."""

BUNDLES_MAX = 1_000
"""Bundles of one request. Ray places a group in one step: thousands of bundles would hold up everyone else's."""

TOKEN_MAX_BYTES = 1_024
"""One request's token."""

TOKEN_MIN_BYTES = 8
"""A token that the client is given; those that it makes have 16."""

KEY_MIN_CHARS = 22
"""A key of a requester or of operators: 128 bits, written in letters and digits. `pools key new` makes 256."""

KEY_MAX_CHARS = 1_024
"""Likewise."""

REQUESTERS_MAX = 10_000
"""Requesters with a key."""

CHANGES_MAX = 200_000
"""Changes in one command that changes pools, policies, keys and limits."""

CLOCK_SKEW_MAX_S = 86_400
"""How far a client's clock may be ahead of the coordinator's: its submissions are refused beyond."""

POOLS_MAX = 1_000
"""Pools of one coordinator: each is an actor."""

POLICIES_MAX = 100_000
"""Policies of one coordinator, over all its pools."""

LABELS_MAX = 32
"""Node labels in one pool's placement."""

ANNOUNCEMENTS_MAX = 1_000
"""Announcements of capacity (`pools prewarm`) that are not over yet, and as many in one command."""

ANNOUNCED_MAX_S = 86_400
"""How long one may keep nodes up that nobody uses, in seconds. A longer time is announced again, or a pool's `warm`."""

MESSAGE_MAX_BYTES = 64 * 2**20
"""One call to an actor, packed."""

CONFIG_MAX_BYTES = 16 * 2**20
"""A configuration or scenario file."""

TRACE_MAX_ROWS = 5_000_000
"""Rows of one job trace."""

TRACE_LINE_MAX_CHARS = 100_000
"""One line of a job trace."""

NAME_EXPECTED = (
    f"a name of 1 to {NAME_MAX_CHARS} printable characters, no control characters, no space at an end"
)


def name_problem(value: object) -> str | None:
    """What would be right if `value` can't be a name, else None."""
    if not isinstance(value, str) or not 0 < len(value) <= NAME_MAX_CHARS:
        return NAME_EXPECTED
    # isprintable() refuses control, format and separator characters (but for the space) and lone surrogates,
    # so a name is safe in a terminal, in a log line and in UTF-8
    if not value.isprintable() or value != value.strip():
        return NAME_EXPECTED
    return None


def check_name(field: str, value: object, where: str = "") -> str:
    """The name itself; BadInput naming `field` if it can't be one."""
    problem = name_problem(value)
    if problem is not None:
        raise BadInput(field, value, problem, where)
    assert isinstance(value, str)
    return value


def integer_problem(value: object, low: int = 0, high: int = AMOUNT_MAX) -> str | None:
    """What would be right if `value` is no integer from `low` to `high` (a bool is none), else None."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        return f"an integer from {low} to {high}"
    return None


def check_integer(field: str, value: object, low: int = 0, high: int = AMOUNT_MAX, where: str = "") -> int:
    """The integer itself; BadInput naming `field` if it is none, or out of range."""
    problem = integer_problem(value, low, high)
    if problem is not None:
        raise BadInput(field, value, problem, where)
    assert isinstance(value, int)
    return value


def seconds_problem(value: object) -> str | None:
    """What would be right if `value` is no duration in seconds, else None. Refuses nan and infinities too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= SECONDS_MAX:
        return f"seconds, a number from 0 to {SECONDS_MAX}"
    return None


def lease_problem(value: object) -> str | None:
    """What would be right if `value` is no lease, else None."""
    problem = seconds_problem(value)
    if problem is None and isinstance(value, (int, float)) and 0 < value < LEASE_MIN_S:
        problem = f"{LEASE_MIN_S} s or more, or 0 for no lease"
    return problem


def check_seconds(field: str, value: object, where: str = "") -> float:
    """The duration as a float; BadInput naming `field` if it can't be one."""
    problem = seconds_problem(value)
    if problem is not None:
        raise BadInput(field, value, problem, where)
    assert isinstance(value, (int, float))
    return float(value)
