"""Which pool takes an attempt, by what its pools answered (docs/rules.md section 7; docs/protocol.md, "Bids")."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ray_pools.core.walk import NO, PREEMPT, ROOM


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
