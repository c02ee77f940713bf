"""The coordinator's part in prewarming: when the wish is worked out and sent, announcements, and what status says.

docs/rules.md has no word on it: it decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray_pools import wire
from ray_pools.actors.autoscaler import RayAutoscaler
from ray_pools.actors.cluster_watch import ClusterWatch, Pools, RayTables
from ray_pools.actors.prewarm import Prewarmer
from ray_pools.core import access, announcements, commands, prewarm
from ray_pools.core.bundles import COUNTED, mapping_of, selector_for
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.demand import pool_views
from ray_pools.core.feasible import NodeType
from ray_pools.core.metrics import Samples
from ray_pools.errors import BadInput
from ray_pools.limits import ANNOUNCEMENTS_MAX

# The wish is worked out at once after a change, and then not again for so long.
EVERY_S = 0.2

# Ray's own actor forgets a wish that is not renewed for so many periods.
_EXPIRE_PERIODS, _EXPIRE_MIN_S = 6, 60.0


class Wishes:
    """See the module's docstring. `core` gives the coordinator's core, which a failed turn replaces."""

    def __init__(
        self,
        core: Callable[[], Coordinator],
        namespace: str,
        options: Mapping[str, Any],
        times: Mapping[str, float],
    ) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._worked_out_at = -EVERY_S
        self.prewarmer: Prewarmer | None = None
        self.watch: ClusterWatch | None = None
        self._measured = 0
        if options.get("prewarm", True):
            period_s = times.get("period_s", 10.0)
            ray = RayAutoscaler(f"ray-pools:{namespace}", max(_EXPIRE_MIN_S, _EXPIRE_PERIODS * period_s))
            self.prewarmer = Prewarmer(ray, period_s, times.get("linger_s", 0.0))
            self.watch = ClusterWatch(
                RayTables(ray.starting, partial(_node_types, ray)),
                wire.group_prefix(namespace),
                lambda: placing_pools(self._state),
                lambda: counting_jobs(self._state),
                float(options.get("watch_s", 3.0)),
            )
        self.soon()

    @property
    def _state(self) -> CoordinatorState:
        return self._core().state

    def soon(self) -> None:
        """Something may be wanted that was not, or no more."""
        if self.prewarmer is not None and self._timer is None:
            after_s = self._worked_out_at + EVERY_S - self._loop.time()
            self._timer = self._loop.call_later(max(after_s, 0.0), self._work_out)

    def go_by(self, times: Mapping[str, float]) -> None:
        """Other times from here on."""
        if self.prewarmer is not None:
            self.prewarmer.go_by(**times)

    def _work_out(self) -> None:
        self._timer, self._worked_out_at = None, self._loop.time()
        if self.prewarmer is not None:
            self.prewarmer.update(prewarm.target(pool_views(self._state)))

    def end(self) -> None:
        """The pools are taken down: whatever was asked of the autoscaler is taken back."""
        if self.prewarmer is not None:
            self.prewarmer.clear()
            self.prewarmer.close()
            self.prewarmer = None
        if self.watch is not None:
            self.watch.close(0.0)
            self.watch = None

    # --- operations

    def announce(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """Capacity that will be needed: of a requester, by its key; of nobody in particular, by an operator."""
        state, core = self._state, self._core()
        wanted = announcements.asked(op.get("announcements"))
        if any(not each.requester for each in wanted):
            access.check_operator(state.operator_key, op)
        for requester in {each.requester for each in wanted if each.requester}:
            access.check_requester(state.requester_keys, requester, op.get("key"))
        made = announcements.announce(core, wanted, commands.caller(op))
        return {"announcements": [each.view(core.now) for each in made]}

    def unannounce(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """They end before their time: by who could announce them, or by an operator."""
        ids = commands.ids(op)
        if not 0 < len(ids) <= ANNOUNCEMENTS_MAX:
            raise BadInput("ids", f"{len(ids)} of them", f"1 to {ANNOUNCEMENTS_MAX} ids of announcements")

        def may(each: announcements.Announcement) -> None:
            hashed = self._state.requester_keys.get(each.requester)
            if not each.requester or (hashed is not None and not access.is_key(op.get("key"), hashed)):
                access.check_operator(self._state.operator_key, op)

        core = self._core()
        made = announcements.take_back(core, ids, commands.caller(op), may)
        return {"announcements": [each.view(core.now) for each in made]}

    # --- status

    def status(self) -> dict[str, Any]:
        """What is wanted of the autoscaler, what is there, what is announced, and who uses GPUs without a slot."""
        now = self._core().now
        announced = [each.view(now) for each in self._state.announced.values()]
        found: dict[str, Any] = {
            "prewarm": self.prewarmer.status() if self.prewarmer is not None else None,
            "announced": announced,
        }
        if self.watch is not None and self.prewarmer is not None:
            seen = self.watch.status()
            wanted = found["prewarm"]["nodes_wanted"]
            found["nodes"] = {
                pool: {"wanted": None if wanted is None else wanted.get(pool, 0), **there}
                for pool, there in seen.get("nodes", {}).items()
            }
            found["outside"] = {"jobs": seen.get("outside", []), "trouble": seen.get("trouble", "")}
        return found

    def measure(self, samples: Samples) -> None:
        """What was cut, overwritten, and is used without a slot. Called in another thread."""
        prewarmer, watch = self.prewarmer, self.watch
        if prewarmer is None or watch is None:
            return
        said = prewarmer.status()
        for pool, cut in said["cut"].items():
            samples.gauge("pools_prewarm_cut", cut["gpus"], pool)
        if more := said["overwritten"] - self._measured:
            samples.count("pools_prewarm_overwritten", by=more)
            self._measured = said["overwritten"]
        outside = sum(each["gpus"] for each in watch.status().get("outside", ()))
        samples.gauge("pools_outside_gpus", outside)


def placing_pools(state: CoordinatorState) -> Pools:
    """Pools whose grants are placement groups, and what their nodes are known by: labels, and what is metered there.

    Called in another thread than the state's, as is `counting_jobs`: a copy of what goes on changing.
    """
    found = {}
    for name, config in sorted(state.pools.items()):
        if config.placement is None:
            continue
        mapping = mapping_of(config.placement)
        metered = {mapping[key][0] for key in config.capacity if key in mapping and config.capacity[key]}
        own = metered - {"CPU", "memory"} or metered
        found[name] = selector_for(config.placement), frozenset(own)
    return found


def counting_jobs(state: CoordinatorState) -> frozenset[str]:
    """Ray jobs that hold a grant which only counts: what they use on nodes is theirs to use."""
    found = set()
    for request in list(state.waiting_or_holding.values()):
        if request.told not in ("", "nominated"):
            pool = state.pools.get(request.owner)
            counts = request.options.get("placement") == COUNTED or (
                pool is not None and pool.placement is None
            )
            job = state.holders.get(request.client, {}).get("job") if counts else None
            if job:
                found.add(job)
    return frozenset(found)


def _node_types(ray: RayAutoscaler) -> Sequence[NodeType]:
    cluster = ray.cluster()
    return cluster.types if cluster is not None else ()
