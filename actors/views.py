"""How the wire shows a request, and the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_pools.core import access
from ray_pools.core.bundles import selector_for
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.requests import FINAL, TAKEN, Request


def view_of(state: CoordinatorState, request: Request, now: float) -> dict[str, Any]:
    """A request as the wire shows it (docs/protocol.md, "Wire")."""
    shown = request.shown
    pool = state.pools.get(request.owner)
    grace_s = pool.grace_s if pool is not None else 0.0
    holds = shown in ("allocated", "preempting")
    return {
        "id": request.id,
        "requester": request.requester,
        "state": shown,
        "pool": request.owner if holds or request.phase == FINAL else "",
        "pools": [name for name in request.pools if name in state.pools],
        "k": request.k,
        "ready": request.told == "placed" and request.phase == TAKEN and not request.asked,
        "placement": request.detail if holds else {},
        "labels": selector_for(pool.placement) if holds and pool is not None else {},
        "nominated": request.told == "nominated" and shown == "queued",
        "preemptible": request.preemptible,
        "amounts": dict(request.amounts),
        "retries": request.retries,
        "age": request.age,
        "submitted_at": request.submitted_at,
        "told_at": request.told_at,
        "grace_s": grace_s,
        "grace_left_s": max(0.0, request.told_at + grace_s - now)
        if shown == "preempting" and not request.is_lost(request.owner)
        else (0.0 if shown == "preempting" else None),
        "causes": request.causes,
        "changed_seq": request.changed_seq,
        "lease_s": request.lease_s,
        "asked": request.asked,
        "by": request.by,
        "for_nobody": _for_nobody(request),
    }


def _for_nobody(request: Request) -> str:
    """Why the grant of this attempt was called back, where it was for no other request: "evict" or "lost"; else ""."""
    directive = request.directives.get(request.owner)
    if directive is None or directive.k != request.k or directive.what not in ("evict", "lost"):
        return ""
    return directive.what


def matching(state: CoordinatorState, op: Mapping[str, Any]) -> list[Request]:
    """The requests that the operation `list` asks for, the newest first."""
    requester, pool, states = op.get("requester"), op.get("pool"), op.get("states")
    since = float(op.get("since") or 0.0)
    found = [
        r
        for r in state.requests.values()
        if (requester is None or r.requester == requester)
        and (pool is None or r.owner == pool or (not r.owner and pool in r.pools))
        and (not states or r.shown in states)
        and max(r.submitted_at, r.told_at, r.finished_at) >= since
    ]
    found.sort(key=lambda r: -r.age)
    return found


def config_of(state: CoordinatorState) -> dict[str, Any]:
    """What changes have made of the configuration, as the wire shows it."""
    return {
        "version": state.version,
        "pools": [state.pools[name].to_wire() for name in sorted(state.pools)],
        "uids": dict(state.uids),
        "policies": [policy.to_wire() for name in sorted(state.pools) for policy in state.policies_of(name)],
        "requesters": {name: {"key_sha256": hashed} for name, hashed in sorted(state.requester_keys.items())},
        "operators": {"key_sha256": state.operator_key} if state.operator_key else {},
        "limits": {name: state.limit(name) for name in access.LIMITS},
    }
