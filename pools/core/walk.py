"""The walk over a pool's queue (docs/rules.md section 5): what could be granted, who could preempt, who is held back.

Pure looks at the state; what follows from them is done in `pool.py`. The pass has these steps:
  1. nominated requests, in order: granted as soon as what they wait for is free;
  2. the other waiters in the queue's order, one of each kind, as long as they are not held back:
     the first that can be granted is;
  3. only if none can be: the first of them that fits once others are stopped (section 6).
"""

from __future__ import annotations

from collections.abc import Iterator

from ray_pools.core import quota
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import Attempt, Kind
from ray_pools.core.victims import Asker, find_victims

# What a pool answers for one waiter.
ROOM = "room"
PREEMPT = "preempt"
NO = "no"


def open_kinds(state: PoolState, now: float) -> Iterator[tuple[Kind, str | None]]:
    """The kinds in the queue's order that are not held back, each with its cause.

    One that waits for capacity, and would fit beside what can't be preempted, holds back those behind it: in its
    share, all that are not in theirs; else all, in a strict pool or once it starves.
    """
    ledger, config = state.ledger, state.config
    if config is None or not state.is_open:
        return
    strict = config.queueing == "strict"
    starved_before = now - config.starvation_after_s
    pinned = any(ledger.pinned.values())
    capacity_cause = ledger.capacity_cause
    borrowers_held = False
    for kind in state.queue.ordered(ledger):
        if borrowers_held and not kind.share:
            return
        need = kind.need
        if need is None:
            continue
        if kind.policy_cause is not None:
            yield kind, kind.policy_cause
            continue
        cause = capacity_cause(need)
        yield kind, cause
        if cause is not None and not (pinned and not ledger.fits_beside_pinned(need)):
            if kind.share:
                borrowers_held = True
            elif strict or kind.oldest_at <= starved_before:
                return


def first(state: PoolState, now: float) -> tuple[Attempt | None, list[tuple[Kind, str]]]:
    """The first that can be granted; if there is none, all kinds that are not held back, in order."""
    if state.nominated and state.is_open:
        for attempt in _nominated_in_order(state):
            use = state.ledger.uses[attempt.requester]
            if state.ledger.nominated_cause(state.need(attempt), use, attempt.preemptible) is None:
                return attempt, []
    asking: list[tuple[Kind, str]] = []
    for kind, cause in open_kinds(state, now):
        if cause is None:
            return kind.head(), []
        asking.append((kind, cause))
    return None, asking


def first_preemption(
    state: PoolState, now: float, asking: list[tuple[Kind, str]]
) -> tuple[Attempt, list[Attempt]] | None:
    """The first of these, in order, that fits once others are stopped, and these others."""
    if not asking:
        return None
    lowest, borrowers = state.lowest_borrower()
    for kind, cause in asking:
        if not (kind.share or (borrowers and kind.priority > lowest)):
            continue  # a quick no: nobody borrows whom it could stop
        victims = victims_for(state, now, kind, cause)
        head = kind.head() if victims else None
        if head is not None:
            return head, victims
    return None


def victims_for(state: PoolState, now: float, kind: Kind, cause: str | None) -> list[Attempt]:
    """The victims that would make the kind's oldest waiter fit (section 6)."""
    takes_back = kind.share and not kind.preemptible  # from its requester's own work, at its limit too
    if kind.need is None or not (cause == quota.WAITING_CAPACITY or (takes_back and cause == quota.AT_LIMIT)):
        return []
    if not (takes_back or state.lowest_borrower()[1]):  # nobody borrows anything
        return []
    asker = Asker(kind.requester, kind.need, kind.preemptible, kind.share, kind.priority)
    min_runtime_s = state.config.min_runtime_s if state.config else 0.0
    return find_victims(state.ledger, state.holders, state.policies, asker, now, min_runtime_s)


def judge(
    state: PoolState, now: float, attempt: Attempt, *, promised: bool
) -> tuple[str, list[Attempt] | None]:
    """What the pool could do for one waiter right now: its answer, and for `preempt` the victims.

    `promised`: room was promised to it before, so that what came to stand before it since does not count.
    """
    if attempt.id in state.paused or not state.is_open:
        return NO, None
    mine = state.queue.kind(attempt)
    if promised and mine.need is not None:
        if state.ledger.cause(mine.need, mine.use, mine.preemptible) is None:
            return ROOM, None
    for kind, cause in open_kinds(state, now):
        if kind is not mine:
            continue
        if cause is None:
            return ROOM, None
        if _behind_its_own_kind(state, now, kind, attempt, cause):
            return NO, None
        victims = victims_for(state, now, kind, cause)
        return (PREEMPT, victims) if victims else (NO, None)
    return NO, None


def _behind_its_own_kind(state: PoolState, now: float, kind: Kind, attempt: Attempt, cause: str) -> bool:
    """An older waiter of the same kind holds it back."""
    config = state.config
    if config is None or kind.need is None or kind.share or cause not in quota.FOR_CAPACITY:
        return False
    holds_all = config.queueing == "strict" or kind.oldest_at <= now - config.starvation_after_s
    return holds_all and kind.head() is not attempt and state.ledger.fits_beside_pinned(kind.need)


def _nominated_in_order(state: PoolState) -> list[Attempt]:
    if len(state.nominated) == 1:
        return list(state.nominated.values())
    return state.sort(state.nominated.values())
