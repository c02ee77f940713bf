"""What would have been different: a rerun beside the log that it was made from, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .history import Past
from .report import spread_of
from .rerun import Again, Rerun

SAME_S = 1.0
"""Starts that are no further apart are the same: where several pools may run a request, live ones speak first."""


def differences(rerun: Rerun) -> dict[str, Any]:
    """Everything that is told of a rerun, as plain values."""
    was, now = rerun.history.decisions, rerun.decisions
    same = next(
        (n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a.what != b.what),
        min(len(was), len(now)),
    )
    every = list(rerun.requests.values())
    teams: dict[str, list[Again]] = {}
    for again in every:
        teams.setdefault(again.past.requester, []).append(again)
    changed = [_of(again, rerun.history.until) for again in every]
    return {
        "requests": len(every),
        "from_s": rerun.history.began_at,
        "to_s": rerun.history.until,
        "decisions": {
            "in_log": len(was),
            "simulated": len(now),
            "the_same_up_to": same,
            "identical": same == len(was) == len(now),
            "latest_by_s": round(
                max((abs(a.at - b.at) for a, b in zip(was[:same], now[:same], strict=True)), default=0.0), 6
            ),
        },
        "assumed_run_times": sum(again.assumed for again in every),
        "total": _sums(every, rerun.history.until),
        "teams": {team: _sums(of, rerun.history.until) for team, of in sorted(teams.items())},
        "changed": sorted(
            (each for each in changed if each is not None),
            key=lambda each: (-abs(each["wait_change_s"]), each["id"]),
        ),
        "configured_in_log": rerun.history.configured,
    }


def _first(past: Past) -> float | None:
    grants = past.grants
    return grants[0].granted_at if grants else None


def _wait_s(submitted_at: float, first_at: float | None, until: float) -> float:
    """Until its first grant; of one that had none, as far as the log goes."""
    return max((until if first_at is None else first_at) - submitted_at, 0.0)


def _of(again: Again, until: float) -> dict[str, Any] | None:
    """One request, if anything of it changed."""
    past = again.past
    first_was, first_now = _first(past), again.first_at if again.first_at >= 0 else None
    grants = past.grants
    called_was = sum(grant.called_at >= 0 for grant in grants)
    pool_was = grants[-1].pool if grants else ""
    state_was = _state(past)
    over_was = until if past.gave_up_at is None else past.gave_up_at
    over_now = again.ended_at if again.state == "cancelled" and first_now is None else until
    waits = _wait_s(past.submitted_at, first_was, over_was), _wait_s(past.submitted_at, first_now, over_now)
    if "rejected" in (state_was, again.state):
        waits = 0.0, 0.0
    moved = abs(waits[1] - waits[0]) > SAME_S
    if not (
        moved
        or called_was != again.preempted
        or pool_was != again.pool
        or (state_was == "rejected") != (again.state == "rejected")
    ):
        return None
    return {
        "id": past.id,
        "requester": past.requester,
        "amounts": dict(past.positive),
        "was": {"state": state_was, "pool": pool_was, "wait_s": round(waits[0], 3), "preempted": called_was},
        "now": {
            "state": again.state,
            "pool": again.pool,
            "wait_s": round(waits[1], 3),
            "preempted": again.preempted,
        },
        "wait_change_s": round(waits[1] - waits[0], 3),
        "assumed": again.assumed,
    }


def _state(past: Past) -> str:
    if past.state:
        return past.state
    return "running" if past.grants and past.grants[-1].over_at < 0 else "waiting"


def _sums(requests: Sequence[Again], until: float) -> dict[str, Any]:
    """Of one team, or of all: as the log has it, and as it would be now."""
    was = sorted(
        first - each.past.submitted_at for each in requests if (first := _first(each.past)) is not None
    )
    now = sorted(each.first_at - each.past.submitted_at for each in requests if each.first_at >= 0)
    return {
        "requests": len(requests),
        "was": {
            "granted": len(was),
            "wait_s": spread_of(was),
            "preempted": sum(sum(g.called_at >= 0 for g in each.past.grants) for each in requests),
            "rejected": sum(each.past.state == "rejected" for each in requests),
        },
        "now": {
            "granted": len(now),
            "wait_s": spread_of(now),
            "preempted": sum(each.preempted for each in requests),
            "rejected": sum(each.state == "rejected" for each in requests),
        },
    }
