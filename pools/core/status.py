"""What a pool is at, as plain values: for status tables, metrics and pages."""

from __future__ import annotations

from typing import Any

from ray_pools.core.explain import cause
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDING, HOLDING, NOMINATED


def pool_status(pool: Pool, queue_shown: int) -> dict[str, Any]:
    """What a pool is at, as plain values: totals, requesters, and the head of its queue with causes."""
    state = pool.state
    requesters: dict[str, dict[str, Any]] = {}
    for attempt in state.attempts.values():
        entry = requesters.setdefault(attempt.requester, {"grants": 0, "waiting": 0})
        entry["grants" if attempt.state in HOLDING else "waiting"] += 1
    for requester in sorted({*requesters, *state.policies}):
        requesters[requester] = _requester_status(state, requester, requesters.get(requester, {}))
    order = state.in_order()
    return {
        "name": pool.name,
        "capacity": state.capacity,
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


def _requester_status(state: PoolState, requester: str, counts: dict[str, Any]) -> dict[str, Any]:
    policy, use = state.policies.get(requester), state.ledger.uses[requester]
    keys = sorted(state.capacity)
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
    }
