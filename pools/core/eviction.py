"""Emptying a pool (docs/rules.md section 9): its grants are called back for nobody, since an operator wants it empty.

Whoever holds is told to stop, as a victim is, and has the pool's grace; with retries left it queues in other pools. The
pool is draining, or it would only be filled again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_pools.core import records as ev
from ray_pools.core.config_rules import DRAINING
from ray_pools.core.requests import TAKEN
from ray_pools.errors import Refused

if TYPE_CHECKING:
    from ray_pools.core.coordinator import Coordinator


def evict(core: Coordinator, pool: str, by: str = "") -> int:
    """Calls back every grant of a draining pool, those that are never preempted for others included. Returns how many
    are told now; with those that were told before nothing happens.

    Raises:
        Refused: no such pool (`unknown_pool`), or it still takes requests (`not_draining`).
    """
    config = core.state.pools.get(pool)
    if config is None:
        raise Refused("unknown_pool", f"there is no pool {pool!r}", {"pool": pool})
    if config.state != DRAINING:
        raise Refused("not_draining", f"pool {pool!r} is {config.state}: only what is draining is emptied")
    told = []
    for request in core.state.waiting_or_holding.values():
        if request.phase != TAKEN or request.owner != pool or request.told not in ("granted", "placed"):
            continue
        directive = request.directives.get(pool)
        known = directive is not None and directive.k == request.k and directive.what in ("evict", "lost")
        if not (request.asked or known):
            told.append(request)
    if told:
        core.commanded("evict", by, "", pool)
    for request in sorted(told, key=lambda each: each.age):
        core._emit_for(request, ev.Asked(request.id, request.k, "evict"))
    return len(told)
