"""What the coordinator knows of each pool's demand, as the prewarmer asks for it."""

from __future__ import annotations

from typing import Any

from ray_pools.core import records as ev
from ray_pools.core.announcements import Announcement, not_used_yet
from ray_pools.core.config_rules import DRAINING, OPEN, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.prewarm import Ask, PoolView


def pool_views(state: CoordinatorState) -> list[PoolView]:
    """Per pool what is held, nominated and waiting, oldest first, and what is announced beyond that. A waiter counts in
    the pool that has taken it, else in the first of its own order: elsewhere it would bring up nodes that it will not
    use. Where nothing is granted (section 9), nobody waits for nodes.
    """
    announced: dict[str, list[Announcement]] = {}
    for each in state.announced.values():
        announced.setdefault(each.pool, []).append(each)
    served: dict[str, list[tuple[int, str, ev.Amounts]]] = {name: [] for name in announced}
    held: dict[str, list[Ask]] = {name: [] for name in state.pools}
    nominated: dict[str, list[Ask]] = {name: [] for name in state.pools}
    waiting: dict[str, list[Ask]] = {name: [] for name in state.pools}
    for request in state.waiting_or_holding.values():
        # it may have queued in a pool that is deleted by now, before another took it
        queues_in = [name for name in request.pools if name in state.pools]
        pool = request.owner or next((name for name in queues_in if state.pools[name].state == OPEN), "")
        if pool not in held or request.asked or (not request.told and state.pools[pool].state != OPEN):
            continue
        lists = nominated if request.told == "nominated" else held if request.told else waiting
        lists[pool].append((dict(request.positive), request.options))
        if pool in served:
            served[pool].append((request.age, request.requester, request.positive))
    ahead: dict[str, list[Ask]] = {
        name: [(amounts, {}) for amounts in not_used_yet(each, sorted(served[name]))]
        for name, each in announced.items()
        if state.pools[name].state == OPEN
    }
    return [
        PoolView(
            name,
            each.capacity,
            _placement(each),
            held[name],
            nominated[name],
            waiting[name],
            ahead.get(name, ()),
        )
        for name, each in state.pools.items()
    ]


def _placement(config: PoolConfig) -> dict[str, Any] | None:
    """A pool that is being emptied keeps no node warm."""
    if config.placement and config.state == DRAINING:
        return {**config.placement, "warm": {}}
    return config.placement
