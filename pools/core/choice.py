"""Which pool takes an attempt, by what its pools answered (docs/rules.md section 7; docs/protocol.md, "Bids")."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ray_pools.core.walk import NO, PREEMPT, ROOM

if TYPE_CHECKING:
    from ray_pools.core.pool import Pool
    from ray_pools.core.queue import Attempt


def best_pool(
    pools: Sequence[str], answers: Mapping[str, tuple[str, bool]], silent: Collection[str]
) -> str | None:
    """The pool that takes the attempt, or None as long as the answers do not say.

    `pools` are in the request's own order; `answers` are (answer, in_share) of those that answered. A silent pool
    counts as a no.
      1. The best pool with room, once no better one is unknown: granting comes before preempting.
      2. Once none is unknown and none has room, a pool to preempt: first one in whose share the request stands, then
         the request's own order.
    """
    preempting: list[tuple[bool, int, str]] = []
    unknown = False
    for place, pool in enumerate(pools):
        answer, in_share = (NO, False) if pool in silent else answers.get(pool, ("", False))
        unknown |= not answer
        if answer == ROOM and not unknown:
            return pool
        if answer == PREEMPT:
            preempting.append((not in_share, place, pool))
    return min(preempting)[2] if preempting and not unknown else None


def decide_one(pools: Collection[Pool], choose: Callable[[str], None]) -> bool:
    """One decision of pools that are asked in turn: the first request in a walk that can be granted is granted, else
    the first that fits once others are stopped is nominated (sections 5 to 7). False if there is none.

    `choose` is called with the id of one that several pools may take, and has the best of them take it.
    """

    def start(pool: Pool, attempt: Attempt, victims: list[Attempt] | None) -> None:
        if attempt.owned:
            pool.start(attempt, victims)
        else:
            choose(attempt.id)

    for pool in pools:
        granted = pool.first_grant()
        if granted is not None:
            start(pool, granted, None)
            return True
    for pool in pools:
        nominated = pool.first_preemption()
        if nominated is not None:
            start(pool, *nominated)
            return True
    return False
