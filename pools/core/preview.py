"""What would come of a change: the running state as a copy, the change made to it, and who is concerned (rules 9).

The copy is a `System`, so what it shows is what the same cores would do. Nothing that runs is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_pools.core import records as ev
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import SHORTER_LOG
from ray_pools.core.pool_state import PoolState
from ray_pools.core.requests import FINAL, REQUEST_FIELDS
from ray_pools.core.system import System
from ray_pools.errors import Refused

_TOKEN = 3 + REQUEST_FIELDS.index("token")


def copied(core: Coordinator) -> dict[str, Any]:
    """The time, and a coordinator's state as `CoordinatorState.load` takes it: of requests what lives, and what a pool
    may not have heard of; without anybody's token.
    """
    state = core.state
    live = [
        request
        for request in state.requests.values()
        if request.phase != FINAL
        or any(
            pool in state.pools and ((peer := state.peers.get(pool)) is None or peer.acked < directive.seq)
            for pool, directive in request.directives.items()
        )
    ]
    dumped = state.dump(live)
    for fields in dumped["requests"]:
        fields[_TOKEN] = b""
    return {"state": dumped, "now": core.now}


def world_of(coordinator: Mapping[str, Any], pools: Mapping[str, Mapping[str, Any]]) -> System:
    """The system of one moment: of what the coordinator answers to `copy`, and pools to `picture`.

    Raises:
        Refused: they are not of one moment (`shorter_log`): ask again.
    """
    state = CoordinatorState.load(coordinator["state"])
    states = {name: PoolState.load(said["state"]) for name, said in pools.items()}
    for name, pool in states.items():
        peer = state.peers.get(name)
        if pool.peer.heard > state.seq or (peer is not None and peer.heard > pool.seq):
            raise Refused(SHORTER_LOG, f"the states of coordinator and pool {name!r} are not of one moment")
    now = max(said["now"] for said in (coordinator, *pools.values()))
    return System.copy_of(state, states, now, {name: said["deadlines"] for name, said in pools.items()})


def preview(world: System, changes: Sequence[Sequence[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Makes the changes in the world, and says what came of it at once, before any grace is over.

    `granted`: id, requester, pool; `nominated`: the same, others are stopped for these; `preempted`: the same, and
    `for` whom; `rejected`: id, requester, causes; `moved`: id, requester, `from` and `to`, the pools that it waits in;
    `unnominated`: id, requester, pool.

    Raises:
        BadInput, Refused: the change is refused, as `changes.merge`; the world is as it was.
    """
    before = {id: _standing(world, id) for id in world.coordinator.state.waiting_or_holding}
    rows = {name: len(log) for name, log in world.logs.items()}
    world.change(changes)
    asker = _askers(world, rows)
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("granted", "nominated", "preempted", "rejected", "moved", "unnominated")
    }
    for id, (was, was_pools, was_named) in before.items():
        request = world.coordinator.state.requests[id]
        now, pools, named = _standing(world, id)
        who: dict[str, Any] = {"id": id, "requester": request.requester}
        if now == "rejected" and was != now:
            found["rejected"].append({**who, "causes": dict(request.causes)})
        elif was == "queued" and now in ("allocated", "preempting"):
            found["granted"].append({**who, "pool": pools[0]})
        elif was == "allocated" and now != was:
            found["preempted"].append({**who, "pool": was_pools[0], "for": asker.get(id, "")})
        elif now == "queued" and named and not was_named:
            found["nominated"].append({**who, "pool": pools[0]})
        elif now == "queued" and was_named and not named:
            found["unnominated"].append({**who, "pool": was_pools[0]})
        elif now == was == "queued" and set(pools) != set(was_pools):
            found["moved"].append({**who, "from": list(was_pools), "to": list(pools)})
    return found


def _standing(world: System, id: str) -> tuple[str, tuple[str, ...], bool]:
    """State, the pools that it holds or waits in, and whether it is nominated."""
    request = world.coordinator.state.requests[id]
    shown, named = request.shown, request.told == "nominated"
    holds = named or shown in ("allocated", "preempting")
    return shown, (request.owner,) if holds else request.pools, named and shown == "queued"


def _askers(world: System, rows: Mapping[str, int]) -> dict[str, str]:
    """Victim to whom it is stopped for, by what was logged since."""
    found: dict[str, str] = {}
    for name, log in world.logs.items():
        for _, body in log[rows.get(name, 0) :]:
            event = ev.unpack(body)
            if isinstance(event, ev.Nominated):
                found.update((victim, event.id) for victim, _ in event.victims)
    return found
