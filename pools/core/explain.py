"""Why a request waits, was refused, or may lose what it holds: one word, the numbers, and a sentence.

The same functions serve live status, `pools log` and failing scenarios. The causes: docs/rules.md sections 3 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_pools.core import quota, walk
from ray_pools.core.config_rules import PolicyConfig
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import HOLDING, NOMINATED, PREEMPTING, QUEUED, Attempt
from ray_pools.core.records import Amounts


def cause(pool: Pool, attempt: Attempt) -> str | None:
    """The cause of a waiter: its own, or `behind_head` when it could be granted and is held back.

    None: nothing stands in its way, and the next walk will show it.
    """
    state = pool.state
    if attempt.id in state.paused:
        return quota.PAUSED
    if attempt.requester not in state.policies:
        return quota.NO_POLICY
    if not state.is_open and state.config is not None:
        return state.config.state
    use, need = state.ledger.uses[attempt.requester], state.need(attempt)
    if attempt.state == NOMINATED:
        return state.ledger.nominated_cause(need, use, attempt.preemptible)
    if attempt.state != QUEUED or attempt.id in pool.promised:
        return None
    own = state.ledger.cause(need, use, attempt.preemptible)
    if own is None and pool.judge(attempt)[0] == walk.NO:
        return quota.BEHIND_HEAD
    return own


def why(pool: Pool, attempt: Attempt) -> dict[str, Any]:
    """Everything that a pool can say of an attempt: state, cause, position, share, numbers, and `text` for a person."""
    state = pool.state
    said: dict[str, Any] = {"pool": pool.name, "state": attempt.state, "cause": None, "position": None}
    policy = state.policies.get(attempt.requester)
    said["priority"] = policy.priority if policy else None
    if attempt.state in HOLDING:
        return {**said, **_grant(pool, attempt)}
    order = [each.id for each in state.in_order()]
    said["position"], said["waiting"] = order.index(attempt.id) + 1, len(order)
    said["in_share"] = state.in_share(attempt)
    said["cause"] = found = cause(pool, attempt)
    text, numbers = _waiting(pool, attempt, found)
    return {**said, "text": text, "numbers": numbers}


# --- what waits


def _waiting(pool: Pool, attempt: Attempt, found: str | None) -> tuple[str, dict[str, Any]]:
    state = pool.state
    requester = attempt.requester
    if found is None:
        return f"it can be granted in {pool.name}: this is being decided", {}
    if found == quota.NO_POLICY:
        return f"requester {requester} has no policy on {pool.name} any more", {}
    if found == quota.PAUSED:
        left_s = max(0.0, attempt.not_before - pool.now)
        return f"{pool.name} could not place it, and tries again in {left_s:.0f} s", {"left_s": left_s}
    if found in (quota.CORDONED, quota.DRAINING):
        return _grants_nothing(pool.name, found), {}
    if found == quota.AT_LIMIT:
        return _at_limit(state, attempt)
    if found == quota.RESERVED_IN_USE:
        return _reserved_in_use(state, attempt)
    if found == quota.BEHIND_HEAD:
        return _behind(pool, attempt)
    if found == quota.AWAITING_PREEMPTION:
        return _awaiting(pool, attempt)
    return _waiting_capacity(pool, attempt)


def _grants_nothing(pool: str, found: str) -> str:
    if found == quota.CORDONED:
        return f"an operator has cordoned {pool}: it grants nothing, and waiters keep their places"
    return f"{pool} is being emptied, and takes no requests"


def _at_limit(state: PoolState, attempt: Attempt) -> tuple[str, dict[str, Any]]:
    claimed = state.ledger.uses[attempt.requester].claimed
    for key, amount, _, limit_room, _ in state.need(attempt):
        beside = claimed[key] - (amount if attempt.state == NOMINATED else 0)
        if beside > limit_room:
            limit = limit_room + amount
            text = f"{attempt.requester} has {beside} of its limit of {limit} {key}, and it asks for {amount} more"
            return text, {"key": key, "asked": amount, "used": beside, "limit": limit}
    return f"{attempt.requester} is at its limit", {}


def _reserved_in_use(state: PoolState, attempt: Attempt) -> tuple[str, dict[str, Any]]:
    pinned = state.ledger.uses[attempt.requester].pinned
    for key, amount, _, _, share_room in state.need(attempt):
        beside = pinned[key] - (amount if attempt.state == NOMINATED else 0)
        if beside > share_room:
            reserved = share_room + amount
            text = (
                f"it is not preemptible, and non-preemptible work of {attempt.requester} has {beside} of its"
                f" {reserved} reserved {key}; it asks for {amount} more"
            )
            return text, {"key": key, "asked": amount, "used": beside, "reserved": reserved}
    return f"the reserved share of {attempt.requester} is in use", {}


def _behind(pool: Pool, attempt: Attempt) -> tuple[str, dict[str, Any]]:
    head = _holder_back(pool, attempt)
    if head is None:
        return "it could be granted, but another waits before it", {}
    own = cause(pool, head)
    short = pool.state.ledger.short_of_capacity(pool.state.need(head))
    more = f" for {_amounts(short)} more" if short else ""
    policy = pool.state.policies[head.requester]
    share = pool.state.ledger.in_share(
        pool.state.need(head), pool.state.ledger.uses[head.requester], head.preemptible
    )
    kind = "in its share" if share else f"of priority {policy.priority}"
    text = f"it could be granted, but {head.id} of {head.requester}, {kind}, waits before it{more}"
    return text, {"behind": head.id, "its_cause": own, "its_shortage": short}


def _holder_back(pool: Pool, attempt: Attempt) -> Attempt | None:
    """The first waiter that holds this one back: the last one that the walk still looked at and that waits."""
    mine = pool.state.queue.kind(attempt)
    found: Attempt | None = None
    for kind, its_cause in walk.open_kinds(pool.state, pool.now):
        holds = its_cause in quota.FOR_CAPACITY and kind.need is not None
        if kind is not mine and holds and pool.state.ledger.fits_beside_pinned(kind.need or ()):
            if kind.share:
                return kind.head()
            found = kind.head()
    return found


def _awaiting(pool: Pool, attempt: Attempt) -> tuple[str, dict[str, Any]]:
    state = pool.state
    stopping = sorted(state.preempting)
    ending = sorted(a.id for a in state.attempts.values() if a.state == "ending")
    left_s = max((pool.deadlines.get(id, pool.now) - pool.now for id in stopping), default=0.0)
    short = {
        key: state.ledger.held[key] - room
        for key, _, room, _, _ in state.need(attempt)
        if state.ledger.held[key] > room
    }
    if stopping:
        text = f"{_amounts(short)} are held by work that is stopping ({_listed(stopping)}), {left_s:.0f} s at most"
    else:
        text = f"{_amounts(short)} are being given back ({_listed(ending)})"
    return text, {"short": short, "stopping": stopping, "ending": ending, "left_s": left_s}


def _waiting_capacity(pool: Pool, attempt: Attempt) -> tuple[str, dict[str, Any]]:
    state = pool.state
    short = state.ledger.short_of_capacity(state.need(attempt))
    key = next(iter(short), "")
    borrowed = {
        requester: over
        for requester in sorted(state.holders)
        if requester != attempt.requester and (over := _over(state, requester, key)) > 0
    }
    policy = state.policies.get(attempt.requester)
    reserved = policy.reserved.get(key, 0) if policy else 0
    use = state.ledger.uses[attempt.requester]
    mine = use.booked[key] if attempt.preemptible else use.pinned[key]
    text = f"{_amounts(short)} more needed in {pool.name}; "
    if borrowed:
        text += "; ".join(f"{amount} are borrowed by {requester}" for requester, amount in borrowed.items())
        text += f", none can be {_why_not(pool, attempt, policy, key, borrowed, mine, reserved)}"
    else:
        text += "nobody borrows any"
    numbers = {"short": short, "borrowed": borrowed, "used": mine, "reserved": reserved}
    return text, numbers


def _why_not(
    pool: Pool,
    attempt: Attempt,
    policy: PolicyConfig | None,
    key: str,
    borrowed: Mapping[str, int],
    mine: int,
    reserved: int,
) -> str:
    state = pool.state
    if state.ledger.in_share(state.need(attempt), state.ledger.uses[attempt.requester], attempt.preemptible):
        min_runtime_s = state.config.min_runtime_s if state.config else 0.0
        young = min_runtime_s > 0 and any(
            grants.first_after(pool.now - min_runtime_s) is not None
            for requester, grants in state.holders.items()
            if requester in borrowed
        )
        return (
            f"reclaimed yet: it has not run for {min_runtime_s:g} s"
            if young
            else "reclaimed: it is not enough"
        )
    lower = [r for r in borrowed if policy and (p := state.policies.get(r)) and p.priority < policy.priority]
    you = f"you have {mine} of your {reserved} reserved" if reserved else f"you have no reserved {key}"
    if lower:
        return f"preempted: what {_listed(lower)} borrowed is not enough or too young, and {you}"
    return f"reclaimed: {you}"


def _over(state: PoolState, requester: str, key: str) -> int:
    policy = state.policies.get(requester)
    return state.ledger.uses[requester].booked[key] - (policy.reserved.get(key, 0) if policy else 0)


# --- what is held


def _grant(pool: Pool, attempt: Attempt) -> dict[str, Any]:
    """Whether a grant is in its share or borrowed, by how much, and who could take it."""
    state = pool.state
    borrowed = borrowed_part(state, attempt)
    takers = _takers(state, attempt, borrowed)
    if attempt.state == PREEMPTING:
        left_s = max(0.0, pool.deadlines.get(attempt.id, pool.now) - pool.now)
        text = f"it is being preempted, and has {left_s:.0f} s to stop"
        return {"in_share": not borrowed, "borrowed": borrowed, "takers": [], "left_s": left_s, "text": text}
    if not attempt.preemptible:
        text = f"it is in the share of {attempt.requester}, and nobody can take it"
    elif not borrowed:
        text = f"it is in the share of {attempt.requester}: only its own non-preemptible work could take it"
    elif takers:
        text = f"{_amounts(borrowed)} of it are borrowed; {_listed(takers)} could take it"
    else:
        text = f"{_amounts(borrowed)} of it are borrowed; nobody could take it now"
    return {"in_share": not borrowed, "borrowed": borrowed, "takers": takers, "text": text}


def borrowed_part(state: PoolState, attempt: Attempt) -> dict[str, int]:
    """Per metered key how much of a grant lies above its requester's share; the newest lies highest (section 4).

    Non-preemptible work fills the share first, so none of it is ever borrowed.
    """
    if not attempt.preemptible:
        return {}
    policy, use = state.policies.get(attempt.requester), state.ledger.uses[attempt.requester]
    grants = state.holders.get(attempt.requester)
    newer = (
        []
        if grants is None
        else [g for g in grants.newest_first(state.clock) if g.grant_number > attempt.grant_number]
    )
    found: dict[str, int] = {}
    for key, amount in attempt.amounts:
        if key in state.capacity:
            above = use.booked[key] - (policy.reserved.get(key, 0) if policy else 0)
            above -= sum(dict(g.amounts).get(key, 0) for g in newer)
            if above > 0:
                found[key] = min(amount, above)
    return found


def _takers(state: PoolState, attempt: Attempt, borrowed: Mapping[str, int]) -> list[str]:
    """Requesters that could stop it: with headroom in a key that it borrows, or with a higher priority."""
    if not borrowed or not attempt.preemptible:
        return []
    mine = state.policies.get(attempt.requester)
    found = []
    for requester, policy in sorted(state.policies.items()):
        if requester == attempt.requester:
            continue
        booked = state.ledger.uses[requester].booked
        reclaims = any(policy.reserved.get(key, 0) > booked[key] for key in borrowed)
        if reclaims or mine is None or policy.priority > mine.priority:
            found.append(requester)
    return found


# --- what was refused


def admission_text(
    found: str,
    requester: str,
    pool: str,
    amounts: Amounts,
    preemptible: bool,
    capacity: Mapping[str, int],
    policy: PolicyConfig | None,
) -> str:
    """Why a pool does not admit a request, as a sentence with the numbers (docs/rules.md section 3)."""
    if policy is None:
        return f"requester {requester} has no policy on {pool}"
    if found == quota.DRAINING:
        return _grants_nothing(pool, found)
    for key, amount in amounts:
        if quota.admission_cause(((key, amount),), preemptible, capacity, policy) == found:
            if found == "no_capacity_for_key":
                return f"it asks for {amount} {key}, which {pool} does not list"
            if found == "exceeds_capacity":
                return f"it asks for {amount} {key}; {pool} has {capacity[key]} in all"
            if found == "exceeds_limit":
                return (
                    f"it asks for {amount} {key}; the limit of {requester} on {pool} is {policy.limit[key]}"
                )
            reserved = policy.reserved.get(key, 0)
            return f"it is not preemptible and asks for {amount} {key}; {requester} has {reserved} reserved on {pool}"
    return found


def _amounts(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} {key}" for key, amount in amounts.items()) or "nothing"


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
