"""Real logs: what was estimated of each request that waited, when it had just queued, and what then came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ray_pools.core.coordinator import Coordinator
from ray_pools.core.picture import coordinator_picture, pool_picture
from ray_pools.core.pool import Pool
from ray_pools.log_view import folded
from ray_pools.simulate.history import read_history
from ray_pools.simulate.outlook import estimates
from ray_pools.store import open_reader


class Waited(NamedTuple):
    """One request, from when the last of its pools had it until its first grant."""

    estimate_s: float
    wait_s: float

    @property
    def error_s(self) -> float:
        return abs(self.estimate_s - self.wait_s)


def state_at(store: str, log: str, moment: float) -> Any:
    """The state as it was at that time."""
    reader = open_reader(store, log)
    try:
        return folded(reader, log, moment)[0]
    finally:
        reader.close()


def estimated_waits(store: str, pools: Sequence[str], at_least_s: float) -> Iterable[Waited]:
    """Of each request that waited for so long; each must have declared how long it runs."""
    for past in read_history(store, pools).requests.values():
        grants, queued = past.grants, [a.queued_at for a in past.attempts.get(1, {}).values()]
        if not grants or grants[0].granted_at - max(queued) < at_least_s:
            continue
        now = max(queued)
        coordinator = coordinator_picture(Coordinator(state_at(store, "coordinator", now), 1, now))
        pictures = [pool_picture(Pool(name, state_at(store, f"pool:{name}", now), 1, now)) for name in pools]
        estimate_s = estimates(coordinator, pictures, [past.id])[past.id]
        assert estimate_s is not None, f"{past.id} said how long it would run"
        yield Waited(estimate_s, grants[0].granted_at - now)
