"""What `pools doctor` asks of a Ray cluster: versions, the autoscaler, each node's own import, the actors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_pools.actors.autoscaler import RayAutoscaler, autoscaler_of_ray
from ray_pools.actors.deploy import _PREFIX, ask, running_actors
from ray_pools.core.config_rules import PoolConfig
from ray_pools.core.unplaceable import unplaceable
from ray_pools.errors import PoolsError, shown

NODE_TIMEOUT_S = 30.0
_ACTOR_TIMEOUT_S = 10.0


def ray_facts() -> dict[str, Any]:
    """{"version", "autoscaler"}: v1, v2, none or unknown."""
    try:
        autoscaler = autoscaler_of_ray()
    except Exception as problem:  # noqa: BLE001 - whatever Ray raises: it is what there is to say
        autoscaler = f"unknown ({shown(str(problem), 120)})"
    return {"version": ray.__version__, "autoscaler": autoscaler}


def misplaced(pools: Iterable[PoolConfig]) -> dict[str, str]:
    """Pool to why its placement fits no node, where the nodes and their types are known from here."""
    if not ray.is_initialized():  # to ask would start a cluster
        return {}
    try:
        cluster = RayAutoscaler("ray-pools-doctor").cluster()
    except Exception:  # noqa: BLE001 - whatever Ray or the file raises: then they are not known
        return {}
    if cluster is None:
        return {}
    return {pool.name: why for pool in pools if (why := unplaceable(pool, cluster))}


def placement_warnings(pools: Iterable[PoolConfig]) -> list[str]:
    """The same, a sentence for each."""
    found = misplaced(pools).items()
    return [f"what pool {pool} grants can't be placed: {why}" for pool, why in found]


def actors(namespace: str) -> dict[str, dict[str, Any]]:
    """Name -> its ping with `skew_s` (its core's time against the wall clock here), or {"unreachable": why}."""
    found: dict[str, dict[str, Any]] = {}
    for name in running_actors(namespace):
        started = time.time()
        try:
            said = ask(ray.get_actor(name, namespace=namespace), {"op": "ping"}, _ACTOR_TIMEOUT_S)
        except (PoolsError, ValueError) as problem:
            found[name.removeprefix(_PREFIX)] = {"unreachable": str(problem)}
            continue
        middle = (started + time.time()) / 2
        skew = said["now"] - middle if "now" in said else None
        found[name.removeprefix(_PREFIX)] = {**said, "skew_s": skew, "took_s": time.time() - started}
    return found


def nodes() -> list[dict[str, Any]]:
    """Each alive node: {"node", "address", "head", and what it says or "problem"}. A task on each, side by side."""

    def look() -> dict[str, Any]:
        import platform
        import sys
        import time

        import ray

        import ray_pools

        return {
            "version": ray_pools.__version__,
            "ray": ray.__version__,
            "python": platform.python_version(),
            "executable": sys.executable,
            "now": time.time(),
        }

    task = ray.remote(look)
    asked: list[tuple[dict[str, Any], Any]] = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        said = {
            "node": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "head": "node:__internal_head__" in node["Resources"],
        }
        on_it = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append((said, task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_it).remote()))
    ends_at = time.monotonic() + NODE_TIMEOUT_S
    for said, reference in asked:
        try:
            said.update(ray.get(reference, timeout=max(ends_at - time.monotonic(), 0.1)))
        except ray.exceptions.GetTimeoutError:
            ray.cancel(reference, force=True)
            said["problem"] = f"no answer within {NODE_TIMEOUT_S:g} s"
        except ray.exceptions.RayError as problem:
            lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
            said["problem"] = lines[-1][:300] if lines else type(problem).__name__
    return [said for said, _ in asked]
