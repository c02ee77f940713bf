"""Bringing the pools of a configuration up in a Ray cluster, and taking them down.

The actors are detached: they outlive the command that makes them and keep its environment. So that command goes to an
empty directory first: Ray puts the working directory of an actor's creator on the actor's path, where a user's own
modules would be found before anybody else's.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util import list_named_actors

from ray_pools import wire
from ray_pools.actors.coordinator import CoordinatorActor
from ray_pools.actors.pool import PoolActor
from ray_pools.actors.ray_groups import RayGroups
from ray_pools.config_difference import access_difference, difference, store_note, timings_difference
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.counting import counted
from ray_pools.errors import PoolsError, Refused, Unreachable
from ray_pools.keys import operator_fields

_PREFIX = "ray-pools:"
# An async actor that holds as many calls as it has concurrency answers no more: far above all long polls.
_MAX_CONCURRENCY = 100_000
_START_TIMEOUT_S = 60.0

Progress = Callable[[str], None]


@contextmanager
def empty_directory() -> Iterator[None]:
    """The process stands in an empty directory while actors are made."""
    try:
        before: str | None = os.getcwd()
    except FileNotFoundError:
        before = None
    with tempfile.TemporaryDirectory(prefix="ray-pools-") as path:
        os.chdir(path)
        try:
            yield
        finally:
            os.chdir(before or "/")


def _pinned(actor_class: Any, name: str, namespace: str) -> Any:
    """Made once: on the head, without a CPU of its own, restarted for ever."""
    return ray.remote(actor_class).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=_MAX_CONCURRENCY,
    )


def ask(handle: Any, op: Mapping[str, Any], timeout_s: float = _START_TIMEOUT_S) -> Any:
    """One operation at an actor. Raises what the operation raised, or Unreachable."""
    try:
        response = ray.get(handle.call.remote(wire.encode_request([op])), timeout=timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        # an actor that could not start says why in the last lines of Ray's report
        ours = re.findall(r"^\S*ray_pools\.(?:errors|store)[\w.]*: (.+)$", str(error), re.MULTILINE)
        if ours:
            raise PoolsError(f"an actor of the pools can't start: {ours[-1][:300]}") from None
        raise Unreachable(
            f"an actor of the pools does not answer: {str(error).splitlines()[0][:300]}"
        ) from None
    return wire.value_of(wire.decode_response(response, 1)[0])


def up(
    pools: Mapping[str, PoolConfig],
    policies: list[PolicyConfig],
    *,
    namespace: str,
    store: str,
    options: Mapping[str, Any],
    access: Mapping[str, Any] | None = None,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Make what is missing of coordinator and pools, and bring them to this configuration, all of it or nothing.

    Call inside `empty_directory`, connected to the cluster. Safe to repeat. access: keys and limits, as of
    `Config.access`; None leaves them as they are. options: what actors are made with; of these only the times reach
    a coordinator that runs (lease_default_s, lease_renew_s, prewarm_period_s, prewarm_linger_s).

    Raises:
        BadInput: the configuration breaks a rule; nothing has changed.
        Refused: a pool that runs is not in the configuration; operators have a key, and it is not in the environment.
    """
    coordinator = _pinned(CoordinatorActor, wire.coordinator_actor_name(), namespace).remote(
        store, namespace, dict(options)
    )
    before = ask(coordinator, {"op": "config"})
    progress(f"coordinator is up in namespace {namespace!r}")
    if other := store_note(before, store):
        progress(f"warning: {other}")
    changes = [
        *difference(before, pools, policies),
        *access_difference(before, access),
        *timings_difference(before, options),
    ]
    handles = {
        name: _pinned(PoolActor, wire.pool_actor_name(name), namespace).remote(
            store, namespace, name, dict(options)
        )
        for name in pools
    }
    for name, handle in handles.items():
        ask(handle, {"op": "ping"})
        progress(f"pool {name!r} is up: {_amounts(pools[name].capacity)}")
    if changes:
        ask(coordinator, {"op": "change", "changes": changes, **operator_fields()})
    return {
        "changes": len(changes),
        "pools": sorted(pools),
        "address": str(ray.get_runtime_context().gcs_address),
    }


def add_pools(running: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Make the actors of pools that a running coordinator does not know yet (`running`: its configuration); until it
    does, they do nothing. Call inside `empty_directory`, connected to the cluster. Returns those that were not there.
    """
    namespace = running["namespace"]
    there = set(running_actors(namespace))
    made = [name for name in names if wire.pool_actor_name(name) not in there]
    handles = [
        _pinned(PoolActor, wire.pool_actor_name(name), namespace).remote(
            running["store"], namespace, name, running["options"]
        )
        for name in made
    ]
    try:
        for handle in handles:
            ask(handle, {"op": "ping"})
    except BaseException:
        end_pools(namespace, made)
        raise
    return made


def end_pools(namespace: str, names: Iterable[str]) -> None:
    """End the actors of pools that the coordinator does not know (any more). Their logs stay."""
    for name in names:
        with suppress(ValueError):  # it is not there
            ray.kill(ray.get_actor(wire.pool_actor_name(name), namespace=namespace))


def running_actors(namespace: str) -> list[str]:
    """The names of the pools' actors in a namespace."""
    found = list_named_actors(all_namespaces=True)
    return sorted(
        entry["name"]
        for entry in found
        if entry["namespace"] == namespace and entry["name"].startswith(_PREFIX)
    )


def down(namespace: str, *, force: bool = False, progress: Progress = lambda text: None) -> list[str]:
    """Take coordinator and pools down; their logs stay, and `up` goes on from them.

    Raises:
        Refused: grants are held, and `force` is not set.
        Unreachable: no pools run in the namespace.
    """
    names = running_actors(namespace)
    if not names:
        raise Unreachable(f"no pools run in namespace {namespace!r}")
    held: dict[str, int] = {}
    handles = {name: ray.get_actor(name, namespace=namespace) for name in names}
    for name, handle in handles.items():
        if name.startswith(_PREFIX + "pool:"):
            try:
                status = ask(handle, {"op": "status"}, 20.0)
            except PoolsError:
                if not force:
                    raise
                continue
            held[status["name"]] = sum(entry["grants"] for entry in status["requesters"].values())
    if any(held.values()) and not force:
        running = ", ".join(f"{count} in {pool}" for pool, count in held.items() if count)
        raise Refused("held", f"grants are held ({running}): wait for them, or use --force to stop them")
    coordinator = handles.get(wire.coordinator_actor_name())
    if coordinator is not None:
        try:
            ask(coordinator, {"op": "drain", **operator_fields()}, 20.0)
        except PoolsError:
            if not force:
                raise
    for name, handle in handles.items():
        ray.kill(handle)
        progress(f"stopped {name.removeprefix(_PREFIX)}")
    if force:
        removed = remove_groups(namespace)
        if removed:
            progress(f"removed the placement groups of {counted(removed, 'grant')}")
    return names


def remove_groups(namespace: str) -> int:
    """Remove every placement group of the namespace's pools, and with it what runs inside."""
    groups = RayGroups()
    found = groups.list(wire.group_prefix(namespace))
    for hex in found.values():
        groups.remove(hex)
    return len(found)


def _amounts(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} {key}" for key, amount in amounts.items()) or "nothing metered"
