"""Who holds what: client processes as Ray knows them, and what happens when one is gone (docs/rules.md section 8).

Who a client is, is durable, by one event for each client process. Soft state that its renewals bring back would do
for a coordinator that restarts alone; but one that restarts *because* something went wrong (the node of the holder,
too) would have forgotten whom to look for, and only the lease would be left. Nothing here looks at Ray: somebody else
finds out that a process is gone (`ray_pools.actors.holders`) and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ray_pools.core import records as ev
from ray_pools.core.requests import FINAL, Request
from ray_pools.errors import BadInput
from ray_pools.limits import name_problem

if TYPE_CHECKING:
    from ray_pools.core.coordinator import Coordinator

# cluster, job, node, worker, actor: Ray's ids in hex; kind: driver or worker; pid: for people
HOLDER_KEYS = ("actor", "cluster", "job", "kind", "node", "pid", "worker")

EXITED = "its process ended"


def check_holder(said: object) -> dict[str, str]:
    """What a client says of its process; {} for one that says nothing. Keys of newer clients are left out.

    Raises:
        BadInput: it is no mapping of short texts.
    """
    if said is None:
        return {}
    if not isinstance(said, Mapping) or len(said) > 100:
        raise BadInput("holder", said, f"a mapping with {', '.join(HOLDER_KEYS)}, each a text")
    found = {}
    for key in HOLDER_KEYS:
        value = said.get(key, "")
        if value != "":
            problem = name_problem(value)
            if problem is not None:
                raise BadInput(f"holder.{key}", value, problem)
            found[key] = value
    return found


def seen(core: Coordinator, client: str, holder: dict[str, str]) -> None:
    """The client says who it is. It may be another process than before: one that left its Ray cluster and came back."""
    if holder and client in core.state.of_client and core.state.holders.get(client) != holder:
        core._emit(ev.HolderSeen(client, holder))


def adopt(core: Coordinator, request: Request, client: str) -> None:
    """The same submission came from another client, with the request's token: from now on that one holds it.

    A driver that was started anew goes on where it was. It hears of changes, and the end of the one before is not
    the end of the request.
    """
    if client and client != request.client and request.phase != FINAL:
        core._emit_for(request, ev.Adopted(request.id, client))


def leased(core: Coordinator, client: str) -> list[Request]:
    """The client's requests that end with it, by age. One without a lease is meant to outlive it."""
    requests = core.state.requests
    found = [requests[id] for id in core.state.live_of_client.get(client, ())]
    return sorted((r for r in found if r.lease_s > 0), key=lambda r: r.age)


def watched(core: Coordinator) -> list[tuple[str, dict[str, str]]]:
    """Clients that have something to lose, and who they are."""
    state, requests = core.state, core.state.requests
    return [
        (client, holder)
        for client, ids in state.live_of_client.items()
        if (holder := state.holders.get(client)) is not None and any(requests[id].lease_s > 0 for id in ids)
    ]


def gone(core: Coordinator, client: str, holder: Mapping[str, str], why: str) -> None:
    """The process `holder` is gone for sure: whatever it holds or waits for ends, as when its lease runs out.

    Without effect if the client has said meanwhile that it is another process.
    """
    if core.state.holders.get(client) == holder:
        end(core, client, leased(core, client), why)


def end(core: Coordinator, client: str, requests: Iterable[Request], why: str) -> None:
    """Leases that end before their time: one event says why, and each request goes the way of an expired one."""
    ending = [request for request in requests if request.phase != FINAL and not request.asked]
    if ending or client in core.state.holders:
        core._emit(ev.HolderGone(client, [request.id for request in ending], why))
    for request in ending:
        core._ask_end(request, "expire")


def words(holder: Mapping[str, Any]) -> str:
    """The process, for people."""
    kind = "an actor" if holder.get("actor") else "a driver" if holder.get("kind") == "driver" else "a worker"
    job, pid, node = (holder.get(key, "?") for key in ("job", "pid", "node"))
    return f"{kind} of Ray job {job}, process {pid} on node {short_node(node)}"


def short_node(node: str) -> str:
    """A node's id for people. Ids of a local cluster's nodes differ in their ends only; by the start Ray lists them."""
    return node if len(node) <= 16 else f"{node[:8]}..{node[-5:]}"
