"""What the coordinator knows of each pool's demand, as the prewarmer asks for it."""

from __future__ import annotations

from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.prewarm import Ask, PoolView


def pool_views(state: CoordinatorState) -> list[PoolView]:
    """Per pool what is held, nominated and waiting, oldest first. A waiter counts in the pool that has taken it, else
    in the first of its own order: elsewhere it would bring up nodes that it will not use.
    """
    held: dict[str, list[Ask]] = {name: [] for name in state.pools}
    nominated: dict[str, list[Ask]] = {name: [] for name in state.pools}
    waiting: dict[str, list[Ask]] = {name: [] for name in state.pools}
    for request in state.waiting_or_holding.values():
        pool = request.owner or (request.pools[0] if request.pools else "")
        if pool not in held or request.asked:
            continue
        lists = nominated if request.told == "nominated" else held if request.told else waiting
        lists[pool].append((dict(request.positive), request.options))
    return [
        PoolView(name, config.capacity, config.placement, held[name], nominated[name], waiting[name])
        for name, config in state.pools.items()
    ]
