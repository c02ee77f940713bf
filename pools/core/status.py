"""What a pool is at, as plain values: for status tables and pages."""

from __future__ import annotations

from typing import Any

from ray_pools.core.explain import cause
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDING, HOLDING, NOMINATED, PREEMPTING, Attempt


def pool_status(pool: Pool, queue_shown: int) -> dict[str, Any]:
    """What a pool is at, as plain values: totals, requesters, and the head of its queue with causes."""
    state = pool.state
    requesters: dict[str, dict[str, Any]] = {}
    for attempt in state.attempts.values():
        entry = requesters.setdefault(attempt.requester, {"grants": 0, "waiting": 0, "amounts": {}})
        entry["grants" if attempt.state in HOLDING else "waiting"] += 1
        for kind in _kinds(attempt):
            amounts = entry["amounts"].setdefault(kind, {})
            for key, amount in attempt.amounts:
                amounts[key] = amounts.get(key, 0) + amount
    for requester in sorted({*requesters, *state.policies}):
        requesters[requester] = _requester_status(state, requester, requesters.get(requester, {}))
    order = state.in_order()
    return {
        "name": pool.name,
        "capacity": state.capacity,
        "state": state.config.state if state.config else "",
        "queueing": state.config.queueing if state.config else "",
        "held": state.usage(),
        "booked": {key: state.ledger.booked[key] for key in sorted(state.capacity)},
        "waiting": len(order),
        "nominated": sorted(state.nominated),
        "preempting": sorted(state.preempting),
        "ending": sorted(a.id for a in state.attempts.values() if a.state == ENDING),
        "placing": sorted(a.id for a in state.attempts.values() if a.state in HOLDING and a.placed is None),
        "requesters": {name: requesters[name] for name in sorted(requesters)},
        "queue": [
            {
                "id": a.id,
                "requester": a.requester,
                "amounts": dict(a.amounts),
                "cause": cause(pool, a),
                "nominated": a.state == NOMINATED,
                "submitted_at": a.submitted_at,
            }
            for a in order[:queue_shown]
        ],
    }


def grants(pool: Pool, shown: int) -> list[dict[str, Any]]:
    """Who holds capacity, the first granted first; at most so many, of them the newest."""
    holding = sorted(
        (a for a in pool.state.attempts.values() if a.state in HOLDING), key=lambda a: a.grant_number
    )
    return [_grant(attempt) for attempt in holding[max(len(holding) - shown, 0) :]]


def _grant(attempt: Attempt) -> dict[str, Any]:
    return {
        "id": attempt.id,
        "k": attempt.k,
        "requester": attempt.requester,
        "amounts": dict(attempt.amounts),
        "preemptible": attempt.preemptible,
        "state": attempt.state,
        "granted_at": attempt.granted_at,
        "placed": attempt.placed is not None,
    }


def _kinds(attempt: Attempt) -> tuple[str, ...]:
    """As what its amounts count: held by it, of these on their way out, or booked for it."""
    if attempt.state == NOMINATED:
        return ("nominated",)
    if attempt.state in (PREEMPTING, ENDING):
        return ("held", "leaving")
    return ("held",) if attempt.state in HOLDING else ()


def _requester_status(state: PoolState, requester: str, counts: dict[str, Any]) -> dict[str, Any]:
    policy, use = state.policies.get(requester), state.ledger.uses[requester]
    keys = sorted(state.capacity)
    of_kind = counts.get("amounts", {})
    return {
        "grants": counts.get("grants", 0),
        "waiting": counts.get("waiting", 0),
        "priority": policy.priority if policy else None,
        "reserved": dict(policy.reserved) if policy else {},
        "limit": dict(policy.limit) if policy else {},
        "booked": {key: use.booked[key] for key in keys},
        "borrowed": {
            key: max(0, use.booked[key] - (policy.reserved.get(key, 0) if policy else 0)) for key in keys
        },
        # held is what its grants hold, leaving the part of it that is being preempted or given back
        **{
            kind: {key: of_kind.get(kind, {}).get(key, 0) for key in keys}
            for kind in ("held", "leaving", "nominated")
        },
    }
