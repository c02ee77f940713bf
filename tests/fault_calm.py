"""The end of a simulated day (`fault_simulation`): nothing goes wrong any more, and all must come to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
from fault_processes import COORDINATOR, Call, Process, Violation
from property_worlds import disagreements, kept, still_kept, summed, unlike

from ray_pools.core import walk
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.pool_state import PoolState
from ray_pools.core.requests import FINAL

if TYPE_CHECKING:
    from fault_world import World

ROUNDS_MAX = 300


def settle(world: World) -> None:
    """Everything arrives, in order, and whoever has news says it, until nobody has any."""
    world.calm = True
    for pending in list(world.pending):
        world.ask(pending)
    for _ in range(ROUNDS_MAX):
        while world.air:
            world.arrive(world.air.pop(0))
            world.look()
        for who, process in list(world.processes.items()):
            if not process.alive:  # it was declared lost, and began anew
                world.start(who)
                world.processes[who].crash_at = ""
        processes = list(world.processes.values())
        for process in processes:
            for errand in list(process.errands):
                if process.alive:  # else they ended with it
                    process.do_errand(errand)
            process.turn()
            world.look()
        known = world.processes[COORDINATOR].core.state.pools
        for process in processes:
            if process.who == COORDINATOR or process.who in known:
                world.speak(process)
        if not world.air and not any(process.errands for process in processes):
            world.calm = False
            return
    raise Violation(f"messages without an end: {world.air[:3]}")


def calm_down(world: World) -> None:
    """The last faults, then none; whoever holds keeps it at first, and releases it later."""
    world.note("from here on nothing goes wrong")
    world.zombies.clear()
    for who, process in list(world.processes.items()):
        process.disk.fault = process.crash_at = ""
        if not process.alive:
            world.start(who)
            world.processes[who].crash_at = ""
    for who, process in list(world.processes.items()):
        if process.disk.lost and who in world.processes[COORDINATOR].core.state.pools:
            world.declare_lost(who)
    settle(world)
    agree(world)
    world.calm = True
    for _ in range(ROUNDS_MAX):
        unfinished = world.processes[COORDINATOR].core.state.waiting_or_holding
        if not unfinished:
            break
        holding = [id for id, request in unfinished.items() if request.shown != "queued"]
        for id in holding:
            if not any(p.id == id and p.op in ("release", "cancel") for p in world.pending):
                world.end("release", id)
        if not holding and not pass_time(world):
            raise Violation(f"they wait, and nobody holds: {sorted(unfinished)}")
        settle(world)
    settle(world)
    agree(world)
    nothing_is_left(world)
    same_from_the_log(world)


def pass_time(world: World) -> bool:
    """Until time alone brings something. False: it never does."""
    due = []
    for process in world.processes.values():
        at = process.core.next_event_at()
        if at is not None:
            due.append(max(0.0, at - process.now()))
    if due:
        world.machine.true += min(due) + 1e-3
        world.note("time passes")
    return bool(due)


def agree(world: World) -> None:
    """Both sides say the same of each request, every command is answered, and nobody could go on."""
    found: list[str] = [
        f"{p} was never answered"
        for p in world.pending
        if not (p.op in ("release", "cancel", "get") and _on_its_way(world, p.id))
    ]
    coordinator = world.processes[COORDINATOR].core
    pools: dict[str, Any] = {name: world.processes[name].core for name in coordinator.state.pools}
    found += disagreements(coordinator.state, {name: pool.state for name, pool in pools.items()})
    for name, pool in pools.items():
        different = unlike(kept(pool.state), summed(pool.state, pool.promised.values()))
        if different:
            found.append(f"the ledger of {name}, kept and summed: {different}")
        if pool.promised:
            found.append(f"{name} keeps room for {sorted(pool.promised)}")
        if pool.first_grant() is not None or pool.first_preemption() is not None:
            found.append(f"{name} could go on")
        if _could_start(world.disks[name].fold(PoolState()), pool.now):
            found.append(f"{name} could go on, had it started anew")
    for id in world.acknowledged:
        if id not in coordinator.state.requests and id not in world.auditor.forgotten:
            found.append(f"{id} was acknowledged, and is not there")
    if found:
        raise Violation("; ".join(found))


def _could_start(state: PoolState, now: float) -> bool:
    """Somebody could be granted or nominated, as the log alone tells it."""
    for attempt in [a for a in state.paused.values() if a.not_before <= now]:
        del state.paused[attempt.id]
        state.join_queue(attempt)
    first, asking = walk.first(state, now)
    return first is not None or walk.first_preemption(state, now, asking) is not None


def _on_its_way(world: World, id: str) -> bool:
    """A victim's end is answered when it has come; until then its holder may have its grace."""
    request = world.processes[COORDINATOR].core.state.requests.get(id)
    return request is not None and request.phase != FINAL and not request.asked


def nothing_is_left(world: World) -> None:
    """All is final: nobody keeps anything of it, and after the retention time the coordinator does neither."""
    found: list[str] = list(world.auditor.still_held())
    coordinator = world.processes[COORDINATOR]
    for name in coordinator.core.state.pools:
        found += still_kept(name, world.processes[name].core)
    if len(coordinator.core.leases):
        found.append(f"the coordinator keeps leases of {sorted(coordinator.core.leases)}")
    known = coordinator.core.state.pools
    found += [f"group {group} is there" for group in world.groups if group[0] in known]
    coordinator.inbox.append(Call("forget", (), ("", None)))
    coordinator.turn()
    if coordinator.core.state.requests:
        found.append(f"not forgotten: {sorted(coordinator.core.state.requests)}")
    settle(world)
    if found:
        raise Violation("; ".join(found))


def same_from_the_log(world: World) -> None:
    """The state that an actor has is that of its log, and of its snapshot and the rest of its log."""
    for who, process in world.processes.items():
        if process.replaced or not process.alive:
            continue
        for folded in _folds(process):
            if folded.digest() != process.core.state.digest():
                raise Violation(f"the log of {who} gives another state than {process.name} has")


def _folds(process: Process) -> list[Any]:
    cls: Any = CoordinatorState if process.who == COORDINATOR else PoolState
    disk = process.disk
    found = [disk.fold(cls())]
    if disk.snapshot is not None:
        found.append(disk.fold(cls.load(msgpack.unpackb(disk.snapshot[1], strict_map_key=False))))
    return found
