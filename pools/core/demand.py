"""What the coordinator knows of each pool's demand, as the prewarmer asks for it."""

from __future__ import annotations

from typing import Any

from ray_pools.core.config_rules import DRAINING, OPEN, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.prewarm import Ask, PoolView


def pool_views(state: CoordinatorState) -> list[PoolView]:
    """Per pool what is held, nominated and waiting, oldest first. A waiter counts in the pool that has taken it, else
    in the first of its own order: elsewhere it would bring up nodes that it will not use. Where nothing is granted
    (section 9), nobody waits for nodes.
    """
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
    return [
        PoolView(name, config.capacity, _placement(config), held[name], nominated[name], waiting[name])
        for name, config in state.pools.items()
    ]


def _placement(config: PoolConfig) -> dict[str, Any] | None:
    """A pool that is being emptied keeps no node warm."""
    if config.placement and config.state == DRAINING:
        return {**config.placement, "warm": {}}
    return config.placement
