"""Why a request waits: the cause in one word (docs/rules.md sections 4 and 5), for every caller alike."""

from __future__ import annotations

from ray_pools.core import quota
from ray_pools.core.pool import Pool
from ray_pools.core.queue import NOMINATED, QUEUED, Attempt


def cause(pool: Pool, attempt: Attempt) -> str | None:
    """The cause of a waiter: its own, or `behind_head` when it could be granted and is held back.

    None: nothing stands in its way, and the next walk will show it.
    """
    state = pool.state
    if attempt.id in state.paused:
        return quota.PAUSED
    if attempt.requester not in state.policies:
        return quota.NO_POLICY
    use, need = state.ledger.uses[attempt.requester], state.need(attempt)
    if attempt.state == NOMINATED:
        return state.ledger.nominated_cause(need, use, attempt.preemptible)
    if attempt.state != QUEUED or attempt.id in pool.promised:
        return None
    own = state.ledger.cause(need, use, attempt.preemptible)
    if own is None and pool.judge(attempt)[0] == "no":
        return quota.BEHIND_HEAD
    return own
